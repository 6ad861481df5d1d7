"""A process dies at a crash point; started again, everything that was committed is handled, and once.

Each case says what must be in the database of the dead process before it is started again, so that a failpoint that
has moved to another place is noticed; and what the other side, which lives, has heard of it by then. Of half a batch a
direct receiver gets nothing, and the receiver behind a broker what was published. Of what was not answered a direct
sender has deleted nothing; a broker took everything from the sender long before, and has all of it still.

All of it over each transport between processes. Memory is none of them: its two ends are one process, which has no
other side that lives on, and what is left of it when it dies is what C5 and C8 leave.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest

from durable.envelope import ANY_NODE
from tests.contract.links import through_proxy
from tests.failure import leftovers
from tests.failure.app import Work
from tests.failure.books import Books, count_old_ids
from tests.failure.leftovers import DEAD
from tests.failure.services import Pair, Way, pair_of_services
from tests.failure.waiting import eventually
from tests.support.proxy import UP, ChaosProxy
from tests.support.servers import AnyBroker, Names

ROOT = Path(__file__).parents[2]

BEFORE = Work()
AFTER = Work(transactions=1, first_order=101, rolled_back=())
LEFT_BEHIND = Work(transactions=1, first_order=201, rolled_back=())
ONE_FAILS_ONCE = Work(transactions=1, rolled_back=(), behaviours={1: "fails once"})
ONE_FAILS = Work(transactions=1, rolled_back=(), behaviours={1: "fails"})
DELAYED = Work(transactions=1, rolled_back=(), delay=0.2)
NOTHING = Work(transactions=0, rolled_back=())


@dataclass
class Crash:
    """Which service dies where, with which work under way, and what it leaves in its database."""

    failpoint: str
    service: Literal["orders", "billing"]
    what: str
    leaves: Callable[[Books], bool]
    work: Work = BEFORE
    prepare: Callable[[Pair], Work] = lambda pair: NOTHING
    reaches: Sequence[str] | None = None
    """Over which transports the receiver gets something of what the dead sender had in hand; None: this is no sender,
    or it does not matter."""
    answered: bool = True
    """May what was received have been answered, or acknowledged to the broker, before the receiver died?"""


def committed(count: int) -> Callable[[Books], bool]:
    return lambda books: len(books.sent) == count


def owned_outgoing(books: Books) -> bool:
    return bool(books.waiting("outgoing", owned=True)) and not books.finished("outgoing", "sent")


def some_sent(books: Books) -> bool:
    return bool(books.finished("outgoing", "sent"))


def nothing_received(books: Books) -> bool:
    return not books.waiting("incoming") and not books.effects


def received_unhandled(books: Books) -> bool:
    return bool(books.waiting("incoming", owned=True)) and not books.effects


def received(books: Books) -> bool:
    return bool(books.waiting("incoming") or books.effects)


def some_handled(books: Books) -> bool:
    return bool(books.effects)


def owned_still(books: Books) -> bool:
    return any(not row.scheduled for row in books.waiting("incoming", owned=True)) and not books.dead


def put_off(books: Books) -> bool:
    return [row.owner_id for row in books.waiting("incoming") if row.scheduled] == [ANY_NODE]


def dead_lettered(books: Books) -> bool:
    return len(books.dead) == 1 and not books.waiting("incoming")


def promoted(side: str) -> Callable[[Books], bool]:
    return lambda books: [row.scheduled for row in books.waiting(side)].count(False) > 0


def struck_off(side: str, *, released: bool) -> Callable[[Books], bool]:
    """The dead node is no node any more, and its rows are released, or still its own."""

    def check(books: Books) -> bool:
        rows = books.waiting(side)
        return bool(rows) and DEAD not in books.nodes and all((row.owner_id == ANY_NODE) == released for row in rows)

    return check


def dead_sender(pair: Pair) -> Work:
    node = leftovers.dead_node(pair.orders.database)
    leftovers.unsent_orders(pair.orders.database, LEFT_BEHIND.orders(0), pair.way.uri, node)
    return LEFT_BEHIND


def dead_handler(pair: Pair) -> Work:
    envelopes = [leftovers.envelope(order_id) for order_id in LEFT_BEHIND.orders(0)]
    node = leftovers.dead_node(pair.billing.database)
    leftovers.received_orders(pair.orders.database, pair.billing.database, envelopes, node)
    return LEFT_BEHIND


TRANSPORTS = ("tcp", "http", "rabbitmq")

CRASHES = [
    Crash("C1:7", "orders", "after send, before the flush", committed(5)),
    Crash("C2:2", "orders", "flushed, before COMMIT", committed(5)),
    Crash("C3:2", "orders", "COMMIT sent, reply lost", committed(10)),
    Crash("C4:2", "orders", "committed, not yet in memory", committed(10)),
    Crash("C5", "orders", "claimed, unsent", owned_outgoing, reaches=()),
    Crash("C6", "orders", "half of it sent", owned_outgoing, reaches=("rabbitmq",)),
    Crash("C7", "orders", "sent, nothing heard", owned_outgoing, reaches=TRANSPORTS),
    Crash("C8", "billing", "received, before the inbox commit", nothing_received, answered=False),
    Crash("C9", "billing", "inbox COMMIT ambiguous", received_unhandled, answered=False),
    Crash("C10", "billing", "committed, before the ack", received, answered=False),
    Crash("C11", "orders", "ack in flight, the sender dies", owned_outgoing, reaches=TRANSPORTS),
    Crash("C12", "orders", "acked, before the delete", owned_outgoing, reaches=TRANSPORTS),
    Crash("C13", "orders", "delete COMMIT ambiguous", some_sent),
    Crash("C14", "billing", "inbox row, before a worker", received_unhandled),
    Crash("C15", "billing", "mid-handler", received_unhandled),
    Crash("C16", "billing", "handler done, before COMMIT", received_unhandled),
    Crash("C17", "billing", "that COMMIT ambiguous", some_handled),
    Crash("C18:3", "billing", "handled, before anybody hears of it", some_handled),
    Crash("C19", "billing", "before a message is put off", owned_still, ONE_FAILS_ONCE),
    Crash("C19:2", "billing", "after it was put off", put_off, ONE_FAILS_ONCE),
    Crash("C19:5", "billing", "before the dead-letter move", owned_still, ONE_FAILS),
    Crash("C19:6", "billing", "after the dead-letter move", dead_lettered, ONE_FAILS),
    Crash("C20", "orders", "mid-promotion, outgoing", promoted("outgoing"), DELAYED),
    Crash("C20", "billing", "mid-promotion, incoming", promoted("incoming"), ONE_FAILS_ONCE),
    Crash("C21", "orders", "mid-sweep, outgoing", struck_off("outgoing", released=True), NOTHING, dead_sender),
    Crash(
        "C21",
        "billing",
        "mid-sweep, incoming unreleased",
        struck_off("incoming", released=False),
        NOTHING,
        dead_handler,
    ),
    Crash("C21:2", "billing", "mid-sweep, incoming", struck_off("incoming", released=True), NOTHING, dead_handler),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("crash", CRASHES, ids=lambda crash: f"{crash.failpoint} {crash.service} {crash.what}")
async def test_dying_process_loses_no_message_and_repeats_no_effect(pair: Pair, crash: Crash, transport: str) -> None:
    left_behind = crash.prepare(pair)
    dies, lives = (pair.orders, pair.billing) if crash.service == "orders" else (pair.billing, pair.orders)
    pair.start(lives, work=crash.work if lives is pair.orders else None)
    if crash.reaches and transport == "rabbitmq":  # the broker returns what it has no queue for
        await eventually(pair.way.has_consumer)
    victim = pair.start(dies, failpoint=crash.failpoint, work=crash.work if dies is pair.orders else None)

    victim.crashes_at_its_failpoint()
    books = pair.books()
    assert crash.leaves(books), f"the process did not die {crash.what}: {books}"
    if crash.reaches is not None:
        await something_is_received(pair, expected=transport in crash.reaches)
    if not crash.answered:
        await nothing_was_answered(pair, crash.work)
    pair.start(dies, work=AFTER if dies is pair.orders else None)

    if dies is pair.orders:
        await pair.settle([left_behind, AFTER], may_be_missing=crash.work)
    else:
        await pair.settle([left_behind, crash.work])
    await eventually(lambda: nothing_is_queued(pair))  # what was sent again may come behind the last effect
    pair.stop()
    assert await nothing_is_queued(pair), "the broker has something that was never acknowledged"


async def nothing_is_queued(pair: Pair) -> bool:
    return await pair.way.queued() == 0


async def something_is_received(pair: Pair, *, expected: bool) -> None:
    if expected:
        await eventually(lambda: received(pair.books()))
    else:
        assert nothing_received(pair.books())


async def nothing_was_answered(pair: Pair, work: Work) -> None:
    """The sender has deleted nothing; or the broker, which takes everything from the sender, has all of it still."""
    if pair.way.queue:
        await eventually(lambda: all_are_queued(pair, work))
    else:
        assert not pair.books().finished("outgoing", "sent")


async def all_are_queued(pair: Pair, work: Work) -> bool:
    return await pair.way.queued() == len(work.committed())


async def test_delivery_handled_before_its_acknowledgement_is_a_duplicate_when_redelivered(
    make_database: Callable[[str], str], tmp_path: Path, broker: AnyBroker, queue_name: Names
) -> None:
    """C18 as far as it goes: all acknowledgements are on their way when the process dies, and never arrive."""
    queue = queue_name("billing")
    way = Way(f"rabbitmq://default/queue/{queue}", {"AMQP_URL": broker.url}, broker.url, queue)
    async with ChaosProxy(broker.url) as proxy:
        behind_the_proxy = {"AMQP_URL": through_proxy(proxy, broker.url)}
        with pair_of_services(make_database("orders"), make_database("billing"), tmp_path, way) as pair:
            victim = pair.start(replace(pair.billing, settings=behind_the_proxy), failpoint="C18:3")
            await eventually(way.has_consumer)
            proxy.hold(UP)
            pair.start(pair.orders, work=BEFORE)
            await asyncio.to_thread(victim.crashes_at_its_failpoint)
            proxy.cut()

            assert some_handled(pair.books())
            await eventually(lambda: all_are_queued(pair, BEFORE))
            pair.start(pair.billing)

            await pair.settle([BEFORE])
            pair.stop()
            assert await way.queued() == 0


def test_every_crash_point_has_its_places_in_the_code_a_case_and_a_line_in_the_guarantees() -> None:
    points = {f"C{number}" for number in range(1, 23)}
    elsewhere = {"C22"}  # test_schedule_crashes.py

    assert places_in_code().keys() == points
    assert {crash.failpoint.partition(":")[0] for crash in CRASHES} == points - elsewhere
    assert documented_places() == places_in_code()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_has_crash_points_of_sender_and_listener(transport: str) -> None:
    on_the_way = {
        point
        for point, places in places_in_code().items()
        if any(place.startswith(f"transports/{transport}/") for place in places)
    }
    assert on_the_way == {"C6", "C7", "C10", "C11"}


def places_in_code() -> dict[str, set[str]]:
    """The modules of each failpoint."""
    places: dict[str, set[str]] = {}
    for folder, prefix in (("durable", ""), ("recovery", "recovery/"), ("transports", "transports/")):
        for path in (ROOT / folder).rglob("*.py"):  # does not follow the symlinks of durable/
            for point in re.findall(r'failpoint\("(C\d+)"\)', path.read_text()):
                places.setdefault(point, set()).add(prefix + str(path.relative_to(ROOT / folder).with_suffix("")))
    return places


def documented_places() -> dict[str, set[str]]:
    """The same as docs/guarantees.md has it: `| C1 | what | where | and then |`."""
    page = (ROOT / "docs" / "guarantees.md").read_text()
    lines = re.findall(r"^\| (C\d+) \|[^|]*\|([^|]*)\|", page, re.MULTILINE)
    return {point: set(re.findall(r"`([^`]+)`", where)) for point, where in lines}


async def test_interrupted_purge_continues_at_the_next_start(pair: Pair) -> None:
    leftovers.old_ids(pair.billing.database, 12_000)

    pair.start(pair.billing, failpoint="C21").crashes_at_its_failpoint()
    assert count_old_ids(pair.billing.database) == 2_000
    pair.start(pair.billing)
    pair.start(pair.orders, work=AFTER)

    await eventually(lambda: count_old_ids(pair.billing.database) == 0)
    await pair.settle([AFTER])
    pair.stop()
