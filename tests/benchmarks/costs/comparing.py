"""Costs of a message, the file that keeps them, and which of them have changed. No I/O but that file's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

from durable.errors import InvalidSetting

RENEWAL: Final = "python -m tests.benchmarks.costs --renew"


@dataclass(frozen=True, slots=True)
class MessageCost:
    """Cost of one message of one kind of work, on all sides of it."""

    name: str
    statements: float
    commits: float
    round_trips: float
    """Statements, and each BEGIN, COMMIT and ROLLBACK that goes to the server."""
    wal_bytes: float


class Tolerance(NamedTuple):
    """Change that is no change: a share of the quantity, and so much beside it."""

    share: float
    beside: float = 0.0


TOLERANCES: Final[Mapping[str, Tolerance]] = {
    "statements": Tolerance(0.02, 0.02),
    "commits": Tolerance(0.02, 0.02),
    "round_trips": Tolerance(0.02, 0.02),
    "wal_bytes": Tolerance(0.05),
}


class Change(NamedTuple):
    """Quantity of a work that has changed by more than its tolerance."""

    work: str
    quantity: str
    before: float
    now: float

    @property
    def has_grown(self) -> bool:
        return self.now > self.before


def changes(before: Sequence[MessageCost], now: Sequence[MessageCost]) -> list[Change]:
    """Compare what was measured now with what it was. Raises InvalidSetting for a work that was never measured."""
    known = {cost.name: cost for cost in before}
    found: list[Change] = []
    for cost in now:
        if cost.name not in known:
            raise InvalidSetting(f"{cost.name!r} is not in the file of costs; run: {RENEWAL}")
        for quantity, (share, beside) in TOLERANCES.items():
            was, is_now = (float(getattr(each, quantity)) for each in (known[cost.name], cost))
            if abs(is_now - was) > share * was + beside:
                found.append(Change(cost.name, quantity, was, is_now))
    return found


def least(first: Sequence[MessageCost], second: Sequence[MessageCost]) -> list[MessageCost]:
    """Take the lesser of each quantity of the same works, measured twice."""
    return [
        MessageCost(one.name, *(min(getattr(one, quantity), getattr(two, quantity)) for quantity in TOLERANCES))
        for one, two in zip(first, second, strict=True)
    ]


def read(path: Path) -> list[MessageCost]:
    """Read the costs that are kept. Raises InvalidSetting when the file is missing, or none of costs."""
    try:
        kept = json.loads(path.read_text())
        return [MessageCost(name, **quantities) for name, quantities in kept.items()]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InvalidSetting(f"{path.name}: no costs can be read ({error}); run: {RENEWAL}") from error


def write(path: Path, costs: Sequence[MessageCost]) -> None:
    """Keep these costs, in place of those of the same works."""
    kept = {cost.name: cost for cost in (*(read(path) if path.exists() else ()), *costs)}
    path.write_text(json.dumps({name: _rounded(cost) for name, cost in kept.items()}, indent=2) + "\n")


def _rounded(cost: MessageCost) -> dict[str, float]:
    quantities = asdict(cost)
    del quantities["name"]
    return {name: round(value) if name == "wal_bytes" else round(value, 3) for name, value in quantities.items()}
