"""Outcomes: the answer of a receiver for one envelope. `Sender.send` returns one for each envelope of the batch.

Stored, Duplicate    it is in the peer's database: the sender deletes its row
Rejected             it never will be: the sender dead-letters it with the peer's reason
Busy                 not now: the sender slows down; not a failure
Failed               the peer could not store it: the sender keeps it and tries again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from durable.redaction import shown

__all__ = ["BUSY", "DUPLICATE", "STORED", "Busy", "Duplicate", "Failed", "Outcome", "Rejected", "Stored"]

LONGEST_REASON: Final = 1_000
"""Characters of a reason that are passed on."""


class Stored(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """Committed in the receiver's database for the first time."""


class Duplicate(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """The receiver had it already; or, with `other_body`, another message under the same id, and kept this as a dead
    letter. Both are the end of it for the sender."""

    other_body: bool = False


class Rejected(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """The receiver will never take it."""

    reason: str


class Busy(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """The receiver has no room now."""


class Failed(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """The receiver could not store it, and may be able to later."""

    reason: str


Outcome = Stored | Duplicate | Rejected | Busy | Failed

STORED = Stored()
DUPLICATE = Duplicate()
OTHER_BODY = Duplicate(other_body=True)
BUSY = Busy()


def all_settled(outcomes: Sequence[Outcome]) -> bool:
    """Did the receiver take or refuse each of them? Then what comes behind may be sent, without overtaking anything."""
    return not any(isinstance(outcome, Busy | Failed) for outcome in outcomes)


def merged(received: Sequence[Outcome], rejected: Mapping[int, Outcome]) -> list[Outcome]:
    """Merge the receiver's outcomes with those of envelopes that it was not given, by their positions."""
    outcomes = list(received)
    for position, verdict in sorted(rejected.items()):  # ascending: each insertion is in its final place
        outcomes.insert(position, verdict)
    return outcomes


_WITHOUT_REASON: Final = frozenset({Stored, Duplicate, Busy})


def tidy(outcomes: list[Outcome], characters: int = LONGEST_REASON) -> list[Outcome]:
    """The outcomes, with reasons that are short enough to travel and that Postgres can store."""
    if _WITHOUT_REASON.issuperset(map(type, outcomes)):
        return outcomes
    return [
        type(outcome)(printable(outcome.reason, characters)) if isinstance(outcome, Rejected | Failed) else outcome
        for outcome in outcomes
    ]


def printable(reason: str, characters: int = LONGEST_REASON) -> str:
    """Return one line that may be sent, stored and logged, without secrets."""
    return shown(reason, min(characters, LONGEST_REASON))
