"""What the old code has left behind, in every combination of features, is handled by a node with the newer code alone.

The old code declared its handler as the new one does; between its rows lie some that a node with the new code stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import product
from typing import Any

import msgspec
import pytest
from sqlalchemy import text

from durable import Bus, CircuitBreaker, Retry, message, upcaster
from durable.cli import views
from durable.console import reading
from durable.envelope import ANY_NODE, Envelope
from durable.grammar import several
from durable.observability import health
from durable.settings import Settings
from durable.storage import inbox, status
from durable.storage.circuits import CircuitKind
from durable.storage.gauges import Side
from durable.storage.inbox import Arrival
from tests.failure.leftovers import SCHEMA, envelope, transaction
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK
from tests.support.tables import Tables

OLD, NEW = "pairs.moved", "pairs.moved.v2"
COUNT = 8


@message("pairs.moved")
class MovedV1(msgspec.Struct):
    number: int


@message("pairs.moved", version=2)
class Moved(msgspec.Struct):
    number: int
    by: str


@message("pairs.look")
class Look(msgspec.Struct):
    number: int


@message("pairs.booking")
class Booking(msgspec.Struct):
    number: int


@message("pairs.ordering")
class Ordering(msgspec.Struct):
    number: int


@upcaster(Booking, to=Ordering)
def to_ordering(old: Booking) -> Ordering:
    return Ordering(old.number)


@upcaster(MovedV1, to=Moved)
def to_moved(old: MovedV1) -> Moved:
    return Moved(old.number, "nobody")


def left_behind(tables: Tables, new: Bus, sent: Sequence[Envelope], **declared: Any) -> None:
    """Rows as nodes with the old code, whose handler is declared so, and with the new one have stored them."""
    old = Bus("shop", tables.url)

    @old.handles(MovedV1, **declared)
    async def handle(moved: MovedV1) -> None: ...

    by_type = {OLD: old.application.routes.places, NEW: new.application.routes.places}
    with transaction(tables.url) as conn:
        arrivals = [Arrival("shop", each, ANY_NODE, by_type[each.message_type].incoming(each)) for each in sent]
        inbox.store(conn, SCHEMA, arrivals)


def made(number: int, key: str | None) -> Envelope:
    """In turn of the old version and of the new one, in turn of two tenants."""
    is_old = number % 3 != 2
    body = {"number": number} if is_old else {"number": number, "by": "somebody"}
    return msgspec.structs.replace(
        envelope(number),
        message_type=OLD if is_old else NEW,
        partition_key=key,
        body=msgspec.json.encode(body),
        headers={"tenant": "ab"[number % 2]},
    )


class Handled:
    """A node with the new code, and what it has handled, in its order."""

    def __init__(self, tables: Tables, **declared: Any) -> None:
        self.bus = Bus("shop", tables.url, **QUICK)
        self.numbers: list[int] = []

        if "max_batch" in declared:

            @self.bus.handles(Moved, **declared)
            async def handle_group(moved: list[Moved]) -> None:
                self.numbers += [each.number for each in moved]

        else:

            @self.bus.handles(Moved, **declared)
            async def handle(moved: Moved) -> None:
                self.numbers.append(moved.number)

    def is_done(self, *, in_order: bool) -> bool:
        return (self.numbers if in_order else sorted(self.numbers)) == list(range(COUNT))


STOPS = {
    "running": [],
    "paused": [("handler", NEW, False)],
    "old version paused": [("handler", OLD, False)],
    "tried": [("handler", NEW, True)],
    "parked": [("key", "k", False)],
}
COMBINATIONS = [
    pytest.param(stop, key, group, ordered, fair, id=f"{stop}-{key}-group{group}-{ordered=}-{fair=}")
    for stop, key, group, ordered, fair in product(STOPS, ("k", None), (1, 5), (False, True), (False, True))
    if (stop != "parked" or (key and not ordered)) and not (ordered and fair)
]


@pytest.mark.parametrize(("stop", "key", "group", "ordered", "fair"), COMBINATIONS)
async def test_old_and_new_versions_are_all_handled_in_the_promised_order(
    tables: Tables, stop: str, key: str | None, group: int, ordered: bool, fair: bool
) -> None:
    declared: dict[str, Any] = {"ordered": True} if ordered else {}
    declared |= {"fair_by": "tenant"} if fair else {}
    for kind, name, probing in STOPS[stop]:
        tables.execute(
            "INSERT INTO durable.circuits (kind, key, reason, actor, until, probing) VALUES (%s, %s, 'why', 'who',"
            " CASE WHEN %s THEN now() END, %s)",
            kind,
            name,
            probing,
            probing,
        )
    breaker = CircuitBreaker(failure_rate=0.5, at_least=2, open_for=0.05, longest=0.1)
    new = Handled(
        tables, **declared, **({"max_batch": group} if group > 1 else {}), concurrency=3, circuit_breaker=breaker
    )
    left_behind(tables, new.bus, [made(number, key) for number in range(COUNT)], **declared)
    async with new.bus:
        if stop == "tried":
            await eventually(lambda: tables.count("circuits") == 0, within=20)
        elif stop != "running":
            await eventually(lambda: tables.one("SELECT count(*) FROM durable.incoming_envelopes") > 0)
            await tables.change("DELETE FROM durable.circuits")
        await eventually(lambda: new.is_done(in_order=bool(key) or ordered), within=30)
        await eventually(lambda: tables.count("incoming_envelopes") == 0)
    assert tables.count("dead_letters") == 0


async def test_ordered_handler_has_one_ordering_key_for_every_version(
    tables: Tables,
) -> None:
    """Rows that the old code has placed behind its handler, and rows that the new code has, form one order."""
    new = Handled(tables, ordered=True)
    left_behind(tables, new.bus, [made(number, None) for number in range(4)], ordered=True)
    assert len(set(tables.rows("SELECT ordering_key FROM durable.incoming_envelopes"))) == 1


async def test_an_ordered_handler_is_parked_as_a_whole_by_a_dead_letter_of_an_old_version(tables: Tables) -> None:
    new = Handled(tables, ordered=True, on_dead_letter="park")
    new.bus.configure(check_pending=0)
    bad = msgspec.structs.replace(made(0, None), body=b"not json")
    left_behind(tables, new.bus, [bad, made(1, None)], ordered=True)
    async with new.bus:
        await eventually(lambda: tables.rows("SELECT kind, key FROM durable.circuits") == [("handler", OLD)])
        assert await new.bus.resume(Moved)
        await eventually(lambda: new.numbers == [1])


@pytest.mark.parametrize(("parking", "bad", "behind"), [("old", 0, 2), ("new", 0, 1), ("new", 2, 1)])
async def test_ordered_handler_is_parked_for_nodes_of_both_releases(
    tables: Tables, parking: str, bad: int, behind: int
) -> None:
    """The other node joins when the letter is there, and has a handler for the version that comes next."""
    declared: dict[str, Any] = {"ordered": True, "on_dead_letter": "park", "retry": Retry(immediate=0, delays=())}
    old, new = (Bus("shop", tables.url, **QUICK, check_pending=0) for _ in range(2))
    handled, looked = list[int](), list[int]()

    def handle(number: int) -> None:
        if number == bad:
            raise ValueError("refused")
        handled.append(number)

    @old.handles(MovedV1, **declared)
    async def handle_old(moved: MovedV1) -> None:
        handle(moved.number)

    @new.handles(Moved, **declared)
    async def handle_new(moved: Moved) -> None:
        handle(moved.number)

    first, second = (old, new) if parking == "old" else (new, old)

    @second.handles(Look)
    async def look(look: Look) -> None:
        looked.append(look.number)

    numbers = [bad, behind, *(number for number in range(COUNT) if number not in (bad, behind))]
    left_behind(tables, new, [made(number, None) for number in numbers], **declared)
    async with first:
        await eventually(lambda: tables.count("dead_letters") == 1)
        async with second:
            for number in range(3):
                async with second.unit_of_work():
                    second.send(Look(number))
                await eventually(lambda: len(looked) == number + 1)  # noqa: B023
            assert handled == []
            assert await second.resume(MovedV1 if second is old else Moved)
            await eventually(lambda: handled == numbers[1:])


@pytest.mark.parametrize("resumed", [Booking, Ordering])
@pytest.mark.parametrize("waits", [["pairs.booking"], ["pairs.ordering"], ["pairs.booking", "pairs.ordering"]])
@pytest.mark.parametrize("parking", [Booking, Ordering])
async def test_park_of_a_renamed_handler_is_told_and_ended_under_both_names(
    tables: Tables, parking: type[Any], waits: list[str], resumed: type[Any]
) -> None:
    """The handler parks in one release; what waits behind it has the name of this release, of the other, or of both."""
    declared: dict[str, Any] = {"ordered": True, "on_dead_letter": "park", "retry": Retry(immediate=0, delays=())}
    first, second = (Bus("shop", tables.url, **QUICK, check_pending=0) for _ in range(2))
    handled = list[int]()

    async def handle(order: Any) -> None:
        if order.number == 0:
            raise ValueError("refused")
        handled.append(order.number)

    for bus, cls in ((first, parking), (second, Ordering)):
        handle.__annotations__ = {"order": cls, "return": None}
        bus.handles(cls, **declared)(handle)
    async with first:
        async with first.unit_of_work():
            first.send(parking(0))
        await eventually(lambda: tables.count("circuits") == 1)
    async with second:
        with transaction(tables.url) as conn:
            sent = [
                msgspec.structs.replace(envelope(number), message_type=name, body=b'{"number": %d}' % number)
                for number, name in enumerate(waits, start=1)
            ]
            places = second.application.routes.places
            inbox.store(conn, SCHEMA, [Arrival("shop", each, ANY_NODE, places.incoming(each)) for each in sent])
            conn.execute(text("UPDATE durable.circuits SET since = since - interval '1 hour'"))
            conn.execute(text("UPDATE durable.incoming_envelopes SET sent_at = sent_at - interval '1 hour'"))
        with transaction(tables.url) as conn:
            snapshot = status.read(conn, SCHEMA)
        assert [row["waiting"] for row in views.circuit_rows(snapshot).rows] == [len(waits)]
        gauges = snapshot.gauges
        settings = Settings(health_lag=timedelta(seconds=1))
        [problem] = health.problems(gauges, [], health.unowned_waits(gauges), settings)
        assert f"{several(len(waits), 'messages', 'wait')} behind it" in problem
        lanes = reading._lanes(gauges, Side.INCOMING, CircuitKind.HANDLER, ["pairs.ordering"])
        assert {*waits, "pairs.ordering"} <= {lane.name for lane in lanes if lane.circuits}
        assert handled == []
        assert await second.resume(resumed)
        assert not await second.resume(resumed)
        await eventually(lambda: handled == list(range(1, len(waits) + 1)))


async def test_neither_version_takes_all_the_room_of_a_fair_handler(tables: Tables) -> None:
    """With room for a few only, a version that comes last by name has its turn before the other is through."""
    new = Handled(tables, fair_by="tenant", concurrency=1)
    left_behind(tables, new.bus, [*(made(number * 6, None) for number in range(60)), made(2, None)], fair_by="tenant")
    new.bus.configure(batch_size=5, buffer_size=5)
    async with new.bus:
        await eventually(lambda: 2 in new.numbers, within=30)
        await eventually(lambda: len(new.numbers) == 61, within=60)
    assert new.numbers.index(2) < 40
