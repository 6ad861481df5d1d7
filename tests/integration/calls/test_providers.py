"""Providers in the registry of one database: who is listed, and who is called, by nodes on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import psycopg
import pytest
from msgspec import Meta
from sqlalchemy import NullPool, create_engine

from durable import Bus, message
from durable.calls import service
from durable.calls.singletons import Singletons
from durable.calls.stored_listings import listings_of, loads_of, methods_of
from durable.envelope import NodeId
from durable.errors import IncompatibleService, InvalidSetting, NoProvider, Overloaded, ProviderGone, ProviderSuperseded
from durable.recovery import offering
from durable.recovery.registering import Registering
from durable.recovery.singleton_locks import SingletonLocks
from durable.settings import load_settings
from durable.storage import registry
from durable.storage.database import Database, lock_engine_url
from durable.testing import eventually
from durable.transports.frames import Listing, Offer, Signature
from durable.transports.tcp.transport import TcpListener
from tests.failure.workbench import QUICK
from tests.support.calling import Inventory, Reservation, Stock
from tests.support.providing import Named, Who

SOON: dict[str, Any] = {**QUICK, "call_timeout": 5}


@service("inventory", version="2.0")
class Later(Protocol):
    async def reserve(self, sku: str) -> str: ...


Start = Callable[..., Awaitable[Bus]]


@pytest.fixture
async def start(database_url: str) -> AsyncIterator[Start]:
    """`await start("stock", unix="path")` returns a bus that runs on the test's database."""
    async with AsyncExitStack() as stack:

        async def start(name: str = "shop", *listen: str, offer: Callable[[Bus], object] = repr, **own: Any) -> Bus:
            bus = Bus(name, database_url, **{**SOON, **own})
            for uri in listen:
                bus.listen(uri)
            offer(bus)
            await stack.enter_async_context(bus)
            return bus

        yield start


def named(name: str, **options: Any) -> Callable[[Bus], object]:
    return lambda bus: bus.offer(Who, Named(name), **options)


TCP = "tcp://127.0.0.1:0"


async def nodes_of(bus: Bus, cls: Any) -> list[int]:
    return [each.node for each in await bus.providers(cls)]


async def sees(bus: Bus, cls: Any, count: int) -> None:
    """Wait until so many providers are known to the bus."""

    async def does() -> bool:
        return len(await bus.providers(cls)) == count

    await eventually(does, what=f"{count} providers")


def rows(database_url: str, sql: str) -> list[Any]:
    with psycopg.connect(database_url, autocommit=True) as conn:
        cursor = conn.execute(sql.encode())
        return cursor.fetchall() if cursor.description else []


# ---------------------------------------------------------------- who is listed


async def test_provider_is_listed_with_its_node_address_and_version(start: Start) -> None:
    stock = await start("shop", TCP, offer=lambda bus: bus.offer(Inventory, Stock()))
    caller = await start("shop")
    await sees(caller, Inventory, 1)
    (provider,) = await caller.providers(Inventory)
    assert (provider.application, provider.node) == ("shop", stock.runtime.node_id)
    assert (provider.version, provider.load, provider.epoch, provider.is_singleton) == ("1.2", 0, 0, False)
    assert stock.runtime.node is not None
    assert provider.address == stock.runtime.node.listeners[0].address
    pinned = caller.caller(Inventory, at=provider)
    assert await pinned.reserve("A-1") == Reservation("A-1", 1)


async def test_offers_while_the_bus_runs_are_told_to_other_nodes(start: Start) -> None:
    stock, caller = await start("shop", TCP), await start("shop")
    inventory = caller.caller(Inventory)
    with pytest.raises(NoProvider, match="not offered by any provider"):
        await inventory.reserve("A-1")
    stock.offer(Inventory, Stock())
    await eventually(lambda: caller.runtime.calls.registry.listings())
    assert await inventory.reserve("A-1") == Reservation("A-1", 1)
    stock.withdraw(Inventory)
    await eventually(lambda: not caller.runtime.calls.registry.listings())
    with pytest.raises(NoProvider):
        await inventory.reserve("A-1")


async def test_node_takes_its_offers_along_when_stopped(start: Start, database_url: str) -> None:
    caller = await start("shop")
    stock = Bus("shop", database_url, **SOON)
    stock.listen(TCP)
    stock.offer(Inventory, Stock())
    async with stock:
        await sees(caller, Inventory, 1)
    assert rows(database_url, "SELECT * FROM durable.offers") == []
    await eventually(lambda: not caller.runtime.calls.registry.listings())


async def test_changes_gather_when_an_offer_comes_and_goes_all_the_time(start: Start, database_url: str) -> None:
    stock, caller = await start("shop", TCP), await start("shop")
    await caller.providers(Inventory)
    told: list[int] = []
    caller.runtime.calls.registry.watch(lambda: told.append(1))
    count = "SELECT n_tup_ins + n_tup_upd + n_tup_del FROM pg_stat_user_tables WHERE relname = 'offers'"
    for _ in range(100):
        stock.offer(Inventory, Stock())
        await asyncio.sleep(0.01)
        stock.withdraw(Inventory)
    stock.offer(Inventory, Stock())
    await sees(caller, Inventory, 1)
    assert len(told) < 60
    await eventually(lambda: rows(database_url, count)[0][0] > 0)
    assert rows(database_url, count)[0][0] < 100


async def test_offers_of_elapsed_leases_are_not_listed_and_are_swept(start: Start, database_url: str) -> None:
    stock = await start("shop", TCP, offer=named("one"))
    caller = await start("shop")
    await sees(caller, Who, 1)
    copied = (
        "service, 'elsewhere', NULL, application, node + 100, machine, version, digest, signatures, addresses, since"
    )
    rows(
        database_url,
        f"INSERT INTO durable.offers SELECT {copied}, load, is_singleton, epoch, now() - interval '1 s' "
        "FROM durable.offers",
    )
    assert await nodes_of(caller, Who) == [stock.runtime.node_id]
    await eventually(lambda: len(rows(database_url, "SELECT 1 FROM durable.offers")) == 1)


async def test_provider_stays_known_for_a_lease_when_losing_its_node_in_an_outage(
    start: Start, database_url: str
) -> None:
    """Nodes come back one after another, and meanwhile the rows of those that were lost go."""
    slow = {"heartbeat_interval": 20, "heartbeat_stale": 60}
    stock = await start("shop", TCP, offer=named("one"), **slow)
    caller = await start("shop", **slow)
    await sees(caller, Who, 1)
    node = stock.runtime.node_id
    await caller.runtime.calls.registering.join(caller.runtime.node_id)  # as after an outage
    rows(database_url, f"DELETE FROM durable.offers WHERE node_id = {node}")
    assert await nodes_of(caller, Who) == [node]
    assert await caller.caller(Who).name() == "one"


async def test_load_is_told_with_the_heartbeat(start: Start) -> None:
    one = Named("one")
    stock = await start("shop", TCP, offer=lambda bus: bus.offer(Who, one))
    caller = await start("shop")
    await sees(caller, Who, 1)
    (provider,) = await caller.providers(Who)
    busy = [asyncio.create_task(caller.caller(Who, at=provider).wait()) for _ in range(7)]

    async def is_told() -> bool:
        return (await caller.providers(Who))[0].load == 7

    await eventually(is_told)
    one.go.set()
    assert await asyncio.gather(*busy) == ["one"] * 7
    assert stock.runtime.application.offers.load == 0


# ---------------------------------------------------------------- rows that cannot be stored, or read

Line = Annotated[str, Meta(pattern=r"^[^\u0000-\u001f]*$")]


@service("lines", version="1.0")
class Lines(Protocol):
    async def put(self, line: Line, by: str = r"\u0000") -> int: ...


class Putting:
    async def put(self, line: str, by: str) -> int:
        return len(line)


def lines_and_who(bus: Bus) -> None:
    bus.offer(Lines, Putting())
    bus.offer(Who, Named("one"))


async def test_service_with_escapes_in_its_signature_is_listed_and_called(start: Start) -> None:
    await start("shop", TCP, offer=lines_and_who)
    caller = await start("shop")
    await sees(caller, Lines, 1)
    assert await caller.caller(Lines).put("x") == 1
    assert await caller.caller(Who).name() == "one"


async def test_offer_refused_by_the_database_stops_no_other(
    start: Start, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows(database_url, "ALTER TABLE durable.offers ADD CHECK (service <> 'lines')")
    stock = await start("shop", TCP, offer=lines_and_who)
    caller = await start("shop", TCP, offer=lambda bus: bus.offer(Inventory, Stock()))
    await sees(caller, Who, 1)
    assert await caller.caller(Who).name() == "one"
    await sees(stock, Inventory, 1)
    assert await nodes_of(caller, Lines) == []
    written = "SELECT n_tup_ins FROM pg_stat_user_tables WHERE relname = 'offers'"
    assert rows(database_url, written)[0][0] < 20
    assert len([each for each in caplog.records if "offer of lines" in each.getMessage()]) == 1


@pytest.mark.parametrize("bad", ["since = '0044-03-15 BC'", "signatures = '[[1]]', digest = 'x'"])
async def test_unreadable_row_stops_the_reading_of_no_other(start: Start, database_url: str, bad: str) -> None:
    await start("shop", TCP, offer=lines_and_who)
    await eventually(lambda: len(rows(database_url, "SELECT 1 FROM durable.offers")) == 2)
    rows(database_url, f"UPDATE durable.offers SET {bad} WHERE service = 'lines'")
    caller = await start("shop")
    await sees(caller, Who, 1)
    assert await caller.caller(Who).name() == "one"
    assert await nodes_of(caller, Lines) == []


async def test_reading_goes_on_when_nothing_can_be_written(start: Start, database_url: str) -> None:
    await start("shop", TCP, offer=named("one"))
    await eventually(lambda: rows(database_url, "SELECT 1 FROM durable.offers"))
    rows(database_url, "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''no''; END'")
    rows(database_url, "CREATE TRIGGER refuse BEFORE INSERT ON durable.offers EXECUTE FUNCTION refuse()")
    caller = await start("shop", TCP, offer=lambda bus: bus.offer(Inventory, Stock()))
    registry = caller.runtime.calls.registry
    registry.use()
    await eventually(lambda: "who" in {each.offer.service for each in registry.listings()})


async def test_announcement_of_any_text_is_stored(database_url: str) -> None:
    settings = load_settings(database_url=database_url)
    database, since = Database(settings), datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))
    texts = ["\0", r"\u0000", "\\\0", "\ud800", "ok"]
    listings = [
        Listing(Offer(f"s{number} {text}", text, [Signature(text, b"", text)]), text, 1, [text], since, machine=text)
        for number, text in enumerate(texts)
    ]
    assert await offering.write(database, "x", listings, lease=timedelta(minutes=1)) == len(texts)
    offers, methods = await database.transaction(registry.read, ())
    assert len(listings_of(offers, methods_of(methods))) == len(texts)
    assert await database.transaction(registry.renew, "x", loads_of(listings), lease=timedelta(minutes=1)) == len(texts)
    await database.close()


# ---------------------------------------------------------------- who is called


async def test_nearest_provider_is_called(start: Start, tmp_path: Path) -> None:
    await start("shop", TCP, offer=named("far"))
    caller = await start("shop")
    who = caller.caller(Who)
    await sees(caller, Who, 1)
    assert await who.name() == "far"
    await start("shop", f"unix://{tmp_path}/near", offer=named("near"))
    await sees(caller, Who, 2)
    assert {await who.name() for _ in range(5)} == {"near"}
    caller.offer(Who, Named("here"))
    assert {await who.name() for _ in range(5)} == {"here"}
    caller.withdraw(Who)
    assert {await who.name() for _ in range(5)} == {"near"}


async def test_least_busy_provider_is_called(start: Start) -> None:
    one, other = Named("one"), Named("other")
    await start("shop", TCP, offer=lambda bus: bus.offer(Who, one))
    await start("shop", TCP, offer=lambda bus: bus.offer(Who, other))
    caller = await start("shop")
    await sees(caller, Who, 2)
    who = caller.caller(Who)
    waiting = [asyncio.create_task(who.wait()) for _ in range(20)]
    await eventually(lambda: one.began + other.began == 20)
    assert (one.began, other.began) == (10, 10)
    one.go.set()
    other.go.set()
    await asyncio.gather(*waiting)


async def test_overloaded_provider_is_passed_over(start: Start) -> None:
    one, other = Named("one"), Named("other")
    small = {"call_concurrency": 1, "call_backlog": 0}
    await start("shop", TCP, offer=lambda bus: bus.offer(Who, one), **small)
    await start("shop", TCP, offer=lambda bus: bus.offer(Who, other), **small)
    caller = await start("shop")
    await sees(caller, Who, 2)
    pinned = [caller.caller(Who, at=each) for each in await caller.providers(Who)]
    busy = asyncio.create_task(pinned[0].wait())
    await eventually(lambda: one.began + other.began == 1)
    who = caller.caller(Who)
    free = "other" if one.began else "one"
    assert {await who.name() for _ in range(6)} == {free}
    second = asyncio.create_task(pinned[1].wait())
    await eventually(lambda: one.began + other.began == 2)
    with pytest.raises(Overloaded):
        await who.name()
    one.go.set()
    other.go.set()
    assert {await busy, await second} == {"one", "other"}


async def test_compatible_provider_is_called_beside_one_of_another_version(start: Start) -> None:
    class Newer:
        async def reserve(self, sku: str) -> str:
            return sku

    await start("shop", TCP, offer=lambda bus: bus.offer(Later, Newer()))
    caller = await start("shop")
    inventory = caller.caller(Inventory)
    await sees(caller, Inventory, 1)
    with pytest.raises(IncompatibleService, match=r"1\.2: node \d+ of shop offers 2\.0: another first number"):
        await inventory.reserve("A-1")
    await start("shop", TCP, offer=lambda bus: bus.offer(Inventory, Stock()))
    await sees(caller, Inventory, 2)
    assert {(await inventory.reserve("A-1")).sku for _ in range(4)} == {"A-1"}
    assert await caller.caller(Later).reserve("A-2") == "A-2"


async def test_send_only_process_finds_providers_by_polling(start: Start) -> None:
    caller = await start("shop", mode="send-only")
    who = caller.caller(Who)
    with pytest.raises(NoProvider):
        await who.name()
    await start("shop", TCP, offer=named("one"))
    await eventually(lambda: caller.runtime.calls.registry.listings())
    assert await who.name() == "one"
    assert caller.runtime.node is None


async def test_provider_of_another_service_cannot_be_pinned(start: Start) -> None:
    bus = await start("shop", TCP, offer=named("one"))
    (provider,) = await bus.providers(Who)
    with pytest.raises(InvalidSetting, match="is no provider of inventory"):
        bus.caller(Inventory, at=provider)


# ---------------------------------------------------------------- singletons


async def test_singleton_runs_on_one_node_and_moves_when_stopped(start: Start, database_url: str) -> None:
    first = Bus("shop", database_url, **SOON)
    first.listen(TCP)
    first.offer(Who, Named("first"), singleton=True)
    caller = await start("shop")
    who = caller.caller(Who)
    async with first:
        assert await who.name() == "first"
        await start("shop", TCP, offer=named("second", singleton=True))
        await sees(caller, Who, 2)
        providers = await caller.providers(Who)
        assert [each.epoch for each in providers] == [1, 0]
        assert {await who.name() for _ in range(5)} == {"first"}
        with pytest.raises(ProviderSuperseded, match="not held here"):
            await caller.caller(Who, at=providers[1]).name()
    assert await who.name() == "second"
    await sees(caller, Who, 1)  # the row of the first is gone a moment later
    assert [each.epoch for each in await caller.providers(Who)] == [2]
    assert rows(database_url, "SELECT name, epoch FROM durable.services") == [("who", 2)]


@pytest.mark.parametrize("caller", ["here", "elsewhere"])
@pytest.mark.parametrize("is_singleton", [True, False], ids=["singleton", "plain"])
async def test_stop_finishes_calls_within_its_drain(
    start: Start, database_url: str, caller: str, is_singleton: bool
) -> None:
    one = Named("one")
    stock = Bus("shop", database_url, **SOON)
    stock.listen(TCP)
    stock.offer(Who, one, singleton=is_singleton)
    async with stock:
        calling = stock if caller == "here" else await start("shop")
        calls = [asyncio.create_task(calling.caller(Who, wait={"timeout": 20}).wait()) for _ in range(3)]
        await eventually(lambda: one.began == 3)
        asyncio.get_running_loop().call_later(1, one.go.set)
    assert await asyncio.gather(*calls) == ["one"] * 3


async def test_stop_cuts_the_calls_of_a_singleton_after_its_drain(database_url: str) -> None:
    one = Named("one")
    settings: dict[str, Any] = SOON | {"drain_timeout": 0.5}
    stock = Bus("shop", database_url, **settings)
    stock.offer(Who, one, singleton=True)
    async with asyncio.timeout(30), stock:
        call = asyncio.create_task(stock.caller(Who, wait={"timeout": 60}).wait())
        await eventually(lambda: one.began == 1)
    with pytest.raises(ProviderGone):
        await call


async def test_call_of_an_older_epoch_is_refused(start: Start) -> None:
    stock = await start("shop", TCP, offer=named("one", singleton=True))
    caller = await start("shop")
    assert await caller.caller(Who).name() == "one"
    (old,) = await caller.providers(Who)
    stock.withdraw(Who)
    await eventually(lambda: not caller.runtime.calls.registry.listings())
    stock.offer(Who, Named("again"), singleton=True)
    await sees(caller, Who, 1)
    assert await caller.caller(Who).name() == "again"
    with pytest.raises(ProviderSuperseded, match="is held in epoch 2 here, not in 1"):
        await caller.caller(Who, at=old).name()


async def test_withdrawn_singleton_is_kept_until_its_calls_are_finished(start: Start) -> None:
    one = Named("one")
    first = await start("shop", TCP, offer=lambda bus: bus.offer(Who, one, singleton=True))
    caller = await start("shop")
    who = caller.caller(Who)
    running = asyncio.create_task(who.wait())
    await eventually(lambda: one.began == 1)
    await start("shop", TCP, offer=named("other", singleton=True))
    first.withdraw(Who)
    await sees(caller, Who, 1)
    with pytest.raises((ProviderSuperseded, NoProvider)):
        await caller.caller(Who, name={"timeout": 0.5}).name()
    one.go.set()
    assert await running == "one"
    assert await who.name() == "other"


async def test_withdrawn_singleton_is_kept_when_offered_as_a_plain_service(start: Start) -> None:
    """The calls under way belong to the singleton: no other node may begin beside them."""
    one, other = Named("one"), Named("other")
    first = await start("shop", TCP, offer=lambda bus: bus.offer(Who, one, singleton=True))
    caller = await start("shop")
    running = asyncio.create_task(caller.caller(Who).wait())
    await eventually(lambda: one.began == 1)
    second = await start("shop", TCP, offer=lambda bus: bus.offer(Who, other, singleton=True))
    for again in (False, True, False):
        first.withdraw(Who)
        first.offer(Who, Named("again"), singleton=again)
    assert first.runtime.application.offers.singletons.wanted == {"who": "1.0"}
    held = second.runtime.application.offers.singletons
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):  # several looks at the lock
            await eventually(lambda: held.known_epoch("who"))
    one.go.set()
    assert await running == "one"
    await eventually(lambda: held.epoch_of("who"))
    assert first.runtime.application.offers.singletons.wanted == {}


def test_lock_of_a_singleton_is_given_up_only_when_its_calls_have_ended(database_url: str) -> None:
    """Otherwise the next holder would begin at once, beside the call that goes on."""
    settings, singletons = load_settings(database_url=database_url), Singletons()
    singletons.open()
    singletons.want({"who": "1.0"})
    locks, node = SingletonLocks(singletons, settings), NodeId(7)
    engine = create_engine(lock_engine_url(settings), poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as conn:
        locks.look(conn, node)
        assert singletons.known_epoch("who") == 1
        singletons.close()
        for is_idle, holder in ((False, 7), (True, None)):
            singletons.is_idle = is_idle
            locks.leave(conn)
            assert rows(database_url, "SELECT holder FROM durable.services") == [(holder,)]
    engine.dispose()


async def test_offers_on_their_way_are_taken_back_before_the_listeners_close(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written, but not yet known to be written, when the node stops."""
    is_written, found = asyncio.Event(), list[Any]()
    write, close = offering.write, TcpListener.close

    async def slowly(*given: Any, **named: Any) -> int:
        count = await write(*given, **named)
        if is_offered:
            is_written.set()
            await asyncio.sleep(0.3)
        return count

    async def look(self: TcpListener) -> None:
        found.append(rows(database_url, "SELECT service FROM durable.offers"))
        await close(self)

    is_offered = False
    bus = Bus("shop", database_url, **SOON)
    bus.listen(TCP)
    monkeypatch.setattr(offering, "write", slowly)
    monkeypatch.setattr(TcpListener, "close", look)
    async with bus:
        is_offered = True
        bus.offer(Who, Named("one"))
        await is_written.wait()
    assert found[0] == []


@message("providers.asked")
class Asked(msgspec.Struct):
    number: int


@pytest.mark.parametrize("fault", ["slow", "refused"])
async def test_handlers_are_drained_when_the_registry_cannot_be_left_in_good_order(
    database_url: str, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Leaving takes longer than all drains together, or its tables are of another version."""
    began, left, leave = asyncio.Event(), asyncio.Event(), Registering.leave
    handled = list[int]()

    async def slowly(self: Registering) -> None:
        await asyncio.sleep(2.2 if fault == "slow" else 0)
        await leave(self)
        left.set()

    monkeypatch.setattr(Registering, "leave", slowly)
    bus = Bus("shop", database_url, **dict[str, Any](SOON, drain_timeout=0.5))
    bus.listen(TCP)
    bus.offer(Who, Named("one"))

    @bus.handles(Asked)
    async def handle(asked: Asked) -> None:
        began.set()
        await left.wait()
        handled.append(asked.number)

    async with bus:
        await eventually(lambda: rows(database_url, "SELECT 1 FROM durable.offers"))
        async with bus.unit_of_work() as uow:
            uow.send(Asked(1))
        await began.wait()
        if fault == "refused":
            rows(database_url, "ALTER TABLE durable.offers RENAME TO newer")
    assert handled == [1]
    assert rows(database_url, "SELECT 1 FROM durable.incoming_envelopes") == []


async def test_singleton_is_given_up_when_its_node_stops(database_url: str) -> None:
    """The next holder begins at once, and not after a lease."""
    bus = Bus("shop", database_url, **SOON)
    bus.listen(TCP)
    bus.offer(Who, Named("one"), singleton=True)
    async with bus:
        await eventually(lambda: bus.runtime.application.offers.singletons.epoch_of("who"))
        assert rows(database_url, "SELECT holder FROM durable.services") != [(None,)]
    assert rows(database_url, "SELECT holder FROM durable.services") == [(None,)]
