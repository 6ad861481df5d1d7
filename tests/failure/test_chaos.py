"""Handlers and senders that fail, dawdle and kill their process by chance: what was committed is handled, and once."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

import pytest

from tests.failure.app import Work
from tests.failure.services import Pair

WORK = Work(transactions=9, orders_each=5, rolled_back=(4,))
SEEDS = {"before": (0, 25), "after": (9, 26)}
"""With a chance of 0.2: the first crash is before its handler has done anything, or after all but the commit; and it
comes after a few messages that were handled well."""


@pytest.mark.parametrize("when", ["before", "after"])
async def test_crashing_handlers_leave_one_effect_of_each_message(pair: Pair, when: str) -> None:
    orders = pair.start(pair.orders, work=WORK)
    for seed in SEEDS[when]:
        unlucky = replace(pair.billing, chaos={"crash": 0.2, "only": "handle", "seed": seed})
        status = await asyncio.to_thread(pair.start(unlucky).exit_status, within=20)
        assert status == -signal.SIGKILL
        assert not pair.books().violations(at_rest=False)
    pair.start(pair.billing)
    await pair.settle([WORK])
    assert len(pair.books().effects) == 40
    assert orders.is_running()
    pair.stop()


async def test_failing_and_slow_handlers_leave_one_effect_of_each_message(pair: Pair) -> None:
    """Or none, of those that became dead letters."""
    troubled = {"fail": 0.3, "delay": 0.5, "longest_delay": 0.02, "only": "handle", "seed": 1}
    pair.start(replace(pair.billing, chaos=troubled))
    pair.start(pair.orders, work=WORK)
    await pair.settle([WORK])
    books = pair.books()
    assert len(books.effects) + len(books.dead) == 40
    assert len(books.effects) > 30
    pair.stop()


async def test_crashing_sender_sends_whole_transactions_or_nothing_of_them(pair: Pair) -> None:
    pair.start(pair.billing)
    unlucky = replace(pair.orders, chaos={"crash": 0.05, "only": "send", "seed": 3})  # at the 13th message
    crashed = pair.start(unlucky, work=WORK)
    assert await asyncio.to_thread(crashed.exit_status, within=20) == -signal.SIGKILL
    rest = Work(transactions=1, first_order=101, rolled_back=())
    pair.start(pair.orders, work=rest)
    await pair.settle([rest], may_be_missing=WORK)
    sent = set(pair.books().sent.values()) - rest.committed()
    whole = [set(WORK.orders(number)) for number in range(WORK.transactions) if sent & set(WORK.orders(number))]
    assert sent == set().union(*whole)
    assert 0 < len(sent) < 40
    pair.stop()
