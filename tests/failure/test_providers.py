"""Providers that are killed, paused and stopped: who is called then, and that no two hold a singleton."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url

from durable import Bus
from durable.errors import CallFailed, NoProvider, ProviderGone, ProviderSuperseded
from durable.testing import eventually
from tests.failure.workbench import QUICK
from tests.support.providing import Providing, Who, providing_beside
from tests.support.proxy import ChaosProxy
from tests.support.servers import address_of

LEASE = 3 * QUICK["heartbeat_interval"].total_seconds()


@pytest.fixture
async def caller(database_url: str) -> AsyncIterator[Bus]:
    async with Bus("shop", database_url, **QUICK, call_timeout=20) as bus:
        yield bus


@pytest.fixture
async def patient(database_url: str) -> AsyncIterator[Bus]:
    """A caller that strikes off no node which is silent for a while."""
    async with Bus("shop", database_url, **dict[str, Any](QUICK, heartbeat_stale=60), call_timeout=20) as bus:
        yield bus


def listed(bus: Bus) -> list[str]:
    return [address for listing in bus.runtime.calls.registry.listings() for address in listing.addresses]


async def sees(bus: Bus, *providers: Providing) -> None:
    await bus.providers(Who)
    wanted = sorted(each.address for each in providers)
    await eventually(lambda: sorted(listed(bus)) == wanted, what="these providers")


def rows(database_url: str, sql: str) -> list[Any]:
    with psycopg.connect(database_url) as conn:
        return conn.execute(sql.encode()).fetchall()


async def name_of(who: Who) -> str:
    """Call, and again when the connection ends meanwhile: what may have been run is never repeated by itself."""
    while True:
        try:
            return await who.name()
        except ProviderGone:
            continue


async def test_calls_go_on_when_one_of_two_providers_is_killed(database_url: str, caller: Bus) -> None:
    who = caller.caller(Who)
    async with providing_beside(database_url, "one") as one, providing_beside(database_url, "other") as other:
        await sees(caller, one, other)
        assert {await who.name() for _ in range(4)} == {"one", "other"}
        waiting = [asyncio.create_task(who.wait()) for _ in range(10)]
        await asyncio.sleep(0.1)
        one.kill()
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert {await name_of(who) for _ in range(20)} == {"other"}
        await sees(caller, other)
        assert len(rows(database_url, "SELECT 1 FROM durable.offers")) == 1
        for each in waiting:
            each.cancel()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert sum(isinstance(each, ProviderGone) for each in ended) == 5


async def test_singleton_moves_when_its_node_is_killed(database_url: str, caller: Bus) -> None:
    who = caller.caller(Who)
    async with providing_beside(database_url, "first", "singleton") as first:
        assert await who.name() == "first"
        async with providing_beside(database_url, "second", "singleton"):
            assert await who.name() == "first"
            first.kill()
            began = time.monotonic()
            assert await name_of(who) == "second"
            assert time.monotonic() - began > LEASE / 2  # the first one could have been paused
            assert rows(database_url, "SELECT epoch FROM durable.services") == [(2,)]


async def test_singleton_moves_at_once_when_its_node_stops_in_good_order(database_url: str, patient: Bus) -> None:
    slow = ("singleton", "heartbeat_interval=4", "heartbeat_stale=60")
    who = patient.caller(Who)
    async with (
        providing_beside(database_url, "first", *slow) as first,
        providing_beside(database_url, "second", *slow),
    ):
        assert await who.name() == "first"
        assert first.process.stdin is not None
        first.process.stdin.close()
        await asyncio.to_thread(first.process.wait, 20)
        began = time.monotonic()
        assert await name_of(who) == "second"
        assert time.monotonic() - began < 2.5  # and the lease is 3 s


async def test_paused_holder_runs_no_call_when_another_one_has_taken_over(database_url: str, caller: Bus) -> None:
    who = caller.caller(Who)
    async with providing_beside(database_url, "first", "singleton") as first:
        pinned = caller.caller(Who, at=first.address)
        assert await who.name() == await pinned.name() == "first"
        async with providing_beside(database_url, "second", "singleton") as second:
            first.pause()
            late = [asyncio.create_task(pinned.name()) for _ in range(20)]  # in its socket when it wakes
            await sees(caller, second)
            assert await who.name() == "second"
            first.go_on()
            answers = await asyncio.gather(*late, return_exceptions=True)
            assert {type(each) for each in answers} <= {ProviderSuperseded, ProviderGone, NoProvider}, answers
            assert any(isinstance(each, ProviderSuperseded) for each in answers)
            assert {await who.name() for _ in range(10)} == {"second"}
            assert rows(database_url, "SELECT epoch FROM durable.services") == [(2,)]


async def test_paused_holder_refuses_until_its_lock_is_seen_again(database_url: str, patient: Bus) -> None:
    """Its thread may see the lock before its loop reads the calls: then they are answered, as they may be."""
    answers = list[object]()
    async with providing_beside(database_url, "first", "singleton", "heartbeat_stale=60") as first:
        pinned = patient.caller(Who, at=first.address)
        who = patient.caller(Who)
        assert await who.name() == await pinned.name() == "first"
        while not any(isinstance(each, ProviderSuperseded) for each in answers):
            assert len(answers) < 200, answers
            first.pause()
            late = [asyncio.create_task(pinned.name()) for _ in range(20)]
            await asyncio.sleep(LEASE + 0.3)
            first.go_on()
            answers += await asyncio.gather(*late, return_exceptions=True)
        assert await who.name() == "first"
        assert rows(database_url, "SELECT epoch FROM durable.services") == [(1,)]


async def test_no_two_hold_a_singleton_while_connections_are_cut(database_url: str, caller: Bus) -> None:
    who = caller.caller(Who)
    async with (
        providing_beside(database_url, "a", "singleton") as a,
        providing_beside(database_url, "b", "singleton") as b,
    ):
        pinned = [caller.caller(Who, at=each.address, name={"timeout": 1}) for each in (a, b)]
        assert await who.name() in "ab"
        stop = asyncio.Event()
        both: list[list[Any]] = []

        async def watch() -> None:
            """Ask both at once: two that answer would hold it together."""
            while not stop.is_set():
                answers = await asyncio.gather(*(each.name() for each in pinned), return_exceptions=True)
                assert all(isinstance(each, str | CallFailed) for each in answers), answers
                if all(isinstance(each, str) for each in answers):
                    both.append(answers)

        watching = asyncio.create_task(watch())
        async with asyncio.timeout(120):
            while rows(database_url, "SELECT epoch > 3 FROM durable.services") != [(True,)]:
                await asyncio.to_thread(
                    rows,
                    database_url,
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE application_name LIKE 'durable % node' AND datname = current_database()",
                )
                assert await name_of(who) in "ab"
        stop.set()
        await watching
        assert both == []


async def test_providers_stay_known_for_a_lease_when_the_database_is_back(database_url: str) -> None:
    async with ChaosProxy(address_of(database_url)) as proxy:
        port = int(proxy.uri.rpartition(":")[2])
        behind = make_url(database_url).set(drivername="postgresql+psycopg", host="127.0.0.1", port=port, query={})
        url = behind.render_as_string(hide_password=False)
        async with (
            Bus("shop", url, **QUICK, call_timeout=20, mode="send-only") as caller,
            providing_beside(database_url, "one", "heartbeat_stale=2") as one,
        ):
            await sees(caller, one)
            registering = caller.runtime.calls.registering
            proxy.cut()
            proxy.refuse()
            await eventually(lambda: registering._was_away)
            one.pause()  # as its row is when the database was away for all
            elapsed = "SELECT 1 FROM durable.offers WHERE leased_until > now()"
            await eventually(lambda: not rows(database_url, elapsed))
            proxy.restore()
            await eventually(lambda: not registering._was_away)
            assert listed(caller) == [one.address]
            one.go_on()
            assert await caller.caller(Who).name() == "one"
            await eventually(lambda: rows(database_url, elapsed))
            assert listed(caller) == [one.address]
            one.kill()
            await eventually(lambda: listed(caller) == [])
