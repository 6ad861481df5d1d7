"""A process dies at a crash point; started again, everything that was committed is handled, and once."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.failure.app import Work
from tests.failure.services import Pair

BEFORE = Work()
AFTER = Work(transactions=1, first_order=101, rolled_back=())


class Crash(NamedTuple):
    """Which service dies where, with which work under way."""

    failpoint: str
    service: str
    what: str
    work: Work = BEFORE


CRASHES = [
    Crash("C1:7", "orders", "after send, before the flush"),
    Crash("C2:2", "orders", "flushed, before COMMIT"),
    Crash("C3:2", "orders", "COMMIT sent, reply lost"),
    Crash("C4:2", "orders", "committed, not yet in memory"),
    Crash("C5:2", "orders", "claimed, unsent"),
    Crash("C6", "orders", "half a frame sent"),
    Crash("C7:2", "orders", "sent, not received"),
    Crash("C8:2", "billing", "received, before the inbox commit"),
    Crash("C9:2", "billing", "inbox COMMIT ambiguous"),
    Crash("C10", "billing", "committed, before the ack"),
    Crash("C11:2", "orders", "ack in flight, the sender dies"),
    Crash("C12", "orders", "acked, before the delete"),
    Crash("C13", "orders", "delete COMMIT ambiguous"),
    Crash("C14:3", "billing", "inbox row, before a worker"),
    Crash("C15:3", "billing", "mid-handler"),
    Crash("C16:3", "billing", "handler done, before COMMIT"),
    Crash("C17:3", "billing", "that COMMIT ambiguous"),
    Crash("C18:3", "billing", "handled, before anybody hears of it"),
]


@pytest.mark.parametrize("crash", CRASHES, ids=lambda crash: f"{crash.failpoint} {crash.what}")
async def test_nothing_is_lost_or_done_twice_when_a_process_dies(pair: Pair, crash: Crash) -> None:
    services = {"orders": pair.orders, "billing": pair.billing}
    points = {name: crash.failpoint if name == crash.service else "" for name in services}
    billing = pair.start(pair.billing, failpoint=points["billing"])
    orders = pair.start(pair.orders, failpoint=points["orders"], work=crash.work)

    victim = orders if crash.service == "orders" else billing
    victim.crashes_at_its_failpoint()
    pair.start(services[crash.service], work=AFTER if crash.service == "orders" else None)

    if crash.service == "orders":
        await pair.settle([AFTER], may_be_missing=crash.work)
    else:
        await pair.settle([crash.work])
    pair.stop()
