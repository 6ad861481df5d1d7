"""Announcements of connected peers in the database: their leases, and how busy they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta

import pytest

from durable.embedded import Embedded
from durable.errors import StorageUnavailable
from durable.recovery import offering
from durable.recovery.announcing import Announcing
from durable.settings import load_settings
from durable.storage.database import Database
from durable.testing import eventually
from durable.transports.frames import Listing
from tests.support.hubs import listing
from tests.support.tables import Tables, shared_tables

LEASE = timedelta(seconds=2)


@pytest.fixture
def tables(server: Embedded) -> Iterator[Tables]:
    with shared_tables(server) as made:
        yield made


@pytest.fixture
async def announcing(tables: Tables) -> AsyncIterator[Announcing]:
    settings = load_settings(database_url=tables.url, heartbeat_stale=LEASE, heartbeat_interval=LEASE / 5)
    database = Database(settings)
    made = Announcing(lambda: database, settings)
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()
    await asyncio.wait([running])
    await database.close()


async def test_lease_of_a_quiet_peer_is_lengthened_while_others_announce(
    announcing: Announcing, tables: Tables
) -> None:
    announcing.put("quiet", [listing("quiet")])
    elapsed = "SELECT count(*) FROM durable.offers WHERE source = 'quiet' AND leased_until < now()"
    for number in range(30):
        await asyncio.sleep(LEASE.total_seconds() / 15)
        announcing.put(f"other {number % 4}", [listing("other", node=number + 1)])
        assert tables.one(elapsed) == 0
    assert tables.one("SELECT count(*) FROM durable.offers WHERE source = 'quiet'") == 1


async def test_load_is_told_with_the_lease_and_without_a_notification(
    announcing: Announcing, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[object]()
    monkeypatch.setattr("durable.recovery.announcing.storage.tell", lambda *given: told.append(given))
    announcing.put("busy", [listing("busy")])
    load = "SELECT load FROM durable.offers WHERE source = 'busy'"
    await eventually(lambda: tables.rows(load) == [0] and len(told) == 1)
    announcing.put("busy", [listing("busy", load=5)])
    await eventually(lambda: tables.one(load) == 5)
    assert len(told) == 1


async def test_round_ends_although_a_peer_announces_something_else_during_each_write(
    announcing: Announcing, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = offering.write

    async def meanwhile(database: Database, source: str, listings: Sequence[Listing], *, lease: timedelta) -> int:
        if source == "restless":
            announcing.put(source, [listing("restless", node=listings[0].node + 1)])
        return await write(database, source, listings, lease=lease)

    monkeypatch.setattr("durable.recovery.announcing.offering.write", meanwhile)
    told = list[object]()
    monkeypatch.setattr("durable.recovery.announcing.storage.tell", lambda *given: told.append(given))
    announcing.put("restless", [listing("restless")])
    announcing.put("other", [listing("other")])
    leased = "SELECT min(leased_until) FROM durable.offers WHERE source = 'other'"
    await eventually(lambda: tables.one(leased) is not None and told)
    since = tables.one(leased)
    await eventually(lambda: tables.one(leased) > since)


async def test_nodes_are_told_of_a_drop_although_the_first_notification_failed(
    announcing: Announcing, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = "SELECT count(*) = 0 FROM durable.offers WHERE source = 'short'"
    announcing.put("short", [listing("short")])
    await eventually(lambda: not tables.one(gone))
    told = list[bool]()

    def tell(*_: object) -> None:
        told.append(tables.one(gone))
        if told.count(True) == 1:
            raise StorageUnavailable("the connection was cut")

    monkeypatch.setattr("durable.recovery.announcing.storage.tell", tell)
    announcing.drop("short")
    await eventually(lambda: told.count(True) == 2)
