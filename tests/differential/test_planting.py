"""Differences that are planted into the bus in memory are found, and shrunk to few steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import msgspec
import pytest

from durable.testing.circuits import MemoryCircuits
from durable.testing.history import MemoryHistory
from durable.testing.ids import KnownIds
from durable.testing.mailbox import Mailbox
from durable.testing.operators import MemoryOperators
from tests.differential.hunting import compare
from tests.differential.running import difference, run
from tests.differential.shrinking import shrink
from tests.differential.workload import Workload, drawn
from tests.differential.worlds import InMemory

MOST_SEEDS: Final = 60
SHRUNK: Final = ("deadlines forgotten", "attempts uncounted")
"""Plants whose workloads are shrunk here: that takes long for the others."""


def without_order(self: Mailbox, row: Any) -> None:
    self.incoming[row.key] = row


def uncounted(self: Mailbox, node: Any, lease: Any, tried: Any = None, *, delay: timedelta) -> bool:
    row = self.incoming[lease.envelope.id, lease.endpoint]
    row.epoch += 1
    row.due = self.clock.now() + delay
    return True


PLANTS: Final[dict[str, tuple[type, str, Callable[..., Any]]]] = {
    "deadlines forgotten": (Mailbox, "expire_late", lambda self, burials: 0),
    "order forgotten": (Mailbox, "queue", without_order),
    "duplicates stored": (KnownIds, "is_free", lambda self, key, envelope: True),
    "attempts uncounted": (Mailbox, "retry_later", uncounted),
    "pauses forgotten": (MemoryCircuits, "pause", lambda self, kind, key, **_: None),
    "cancelled messages kept": (MemoryOperators, "cancel_message", lambda self, message, **_: False),
    "business keys never freed": (KnownIds, "give_up", lambda self, key: None),
    "answers forgotten": (MemoryHistory, "keep", lambda self, arrived: set()),
    "replays lost": (MemoryOperators, "replay", lambda self, letter: None),
}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "durable")


@pytest.mark.parametrize("plant", PLANTS)
async def test_planted_difference_is_found_and_shrunk(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def differs(workload: Workload) -> bool:
        whole = await run(workload, InMemory())
        with monkeypatch.context() as patch:
            patch.setattr(*PLANTS[plant])
            return bool(difference(whole, await run(workload, InMemory())))

    for seed in range(MOST_SEEDS):
        if await differs(drawn(seed)):
            if plant in SHRUNK:
                smallest = await shrink(drawn(seed), differs)
                assert len(smallest.steps) <= 3
                assert await differs(smallest)
            return
    pytest.fail(f"{MOST_SEEDS} workloads have not found it")


async def test_workload_comes_to_the_same_twice_in_memory() -> None:
    for seed in range(5):
        assert await compare(drawn(seed), InMemory) == []


def test_workload_is_read_back_from_its_text() -> None:
    for seed in range(20):
        workload = drawn(seed)
        assert msgspec.json.decode(msgspec.json.encode(workload), type=Workload) == workload
        assert drawn(seed) == workload
