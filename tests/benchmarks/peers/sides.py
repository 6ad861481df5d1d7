"""The sides of the contest: durable, and what its peers promise, in the words of their own documentation."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from durable.errors import InvalidSetting

ROOT: Final = Path(__file__).parents[3]
REQUIREMENTS: Final = ROOT / "requirements" / "peers"
ENVIRONMENTS: Final = ROOT / "build" / "peers"
OURS: Final = "durable"
FLOOR: Final = "asyncpg"
"""LISTEN, NOTIFY and four statements, in the environment of the tests."""

ENLIST: Final = "enlist"
HANDLE: Final = "handle"
LATENCY: Final = "latency"


@dataclass(frozen=True, slots=True)
class Side:
    """One way to do the work: the program of a peer in one of its variants."""

    name: str
    peer: str
    """The name of its requirement file and of its environment; OURS and FLOOR run in the environment of the tests."""
    works: tuple[str, ...]
    """What the contest of peers measures of it."""
    variant: str = ""
    needs_broker: bool = False
    is_one_process: bool = False
    """The process that enlists also handles."""

    @property
    def module(self) -> str:
        return f"tests.benchmarks.peers.on_{self.peer.replace('-', '_')}"


SIDES: Final = (
    Side(OURS, OURS, (ENLIST, HANDLE, LATENCY), "default"),
    Side("durable, max_batch=1", OURS, (HANDLE,), "alone"),
    Side("durable, max_batch=100", OURS, (HANDLE,), "groups"),
    Side("durable, lists of 100", OURS, (HANDLE,), "lists"),
    Side("durable, in one process", OURS, (LATENCY,), "here", is_one_process=True),
    Side("durable, to another service over TCP", OURS, (LATENCY,), "tcp"),
    Side("pgqueuer", "pgqueuer", (ENLIST, HANDLE, LATENCY)),
    Side("procrastinate", "procrastinate", (ENLIST, HANDLE, LATENCY)),
    Side("faststream-outbox", "faststream-outbox", (ENLIST, HANDLE, LATENCY)),
    Side("oban", "oban", (ENLIST, HANDLE, LATENCY)),
    Side("dbos", "dbos", (ENLIST, HANDLE), "plain"),
    Side("dbos, datasource", "dbos", (HANDLE,), "datasource"),
    Side("celery", "celery", (ENLIST, HANDLE, LATENCY), needs_broker=True),
)
PEERS: Final = tuple(dict.fromkeys(side.peer for side in SIDES if side.peer != OURS))


def sides_without(left_out: list[str]) -> list[Side]:
    """All sides but those of these peers.

    Raises InvalidSetting for a name that is no peer.
    """
    for name in left_out:
        if name not in PEERS:
            raise InvalidSetting(f"--without {name}: no such peer; the peers are {', '.join(PEERS)}")
    return [side for side in SIDES if side.peer not in left_out]


def python_of(peer: str, environments: Path = ENVIRONMENTS, requirements: Path = REQUIREMENTS) -> Path:
    """The Python that runs the programs of this peer.

    Raises InvalidSetting when its environment is missing, or was made from other requirements.
    """
    if peer in (OURS, FLOOR):
        return Path(sys.executable)
    made = environments / peer / "requirements.txt"
    if not made.exists() or made.read_text() != (requirements / f"{peer}.txt").read_text():
        state = "old" if made.exists() else "missing"
        raise InvalidSetting(
            f"the environment of {peer} is {state}: {environments / peer}; run scripts/peers.sh {peer},"
            f" or leave it out with --without {peer}"
        )
    return environments / peer / "bin" / "python"
