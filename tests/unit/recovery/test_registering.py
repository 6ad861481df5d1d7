"""The registry of a process that stops, or that withdraws an offer, with a database that fails meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from sqlalchemy.exc import ProgrammingError

from durable.calls.registry import Registry
from durable.envelope import NodeId
from durable.errors import InvalidMessage, StorageUnavailable
from durable.recovery.registering import Registering
from durable.settings import load_settings
from durable.storage import registry as storage
from durable.storage.database import Database
from durable.transports.frames import Listing
from tests.support.hubs import listing


class Failing:
    """A database whose transactions do what the test says, after their commit."""

    def __init__(self) -> None:
        self.offers: list[str] = []
        self.after: dict[Callable[..., Any], Callable[[], Any]] = {}

    async def transaction(self, work: Callable[..., Any], *given: Any, **_: Any) -> Any:
        if work is storage.write:
            self.offers = [row.service for row in given[1]]
        if work is storage.remove:
            self.offers = []
        if (after := self.after.get(work)) is not None:
            await after()
        return ([], {}) if work is storage.read else None


def registering(database: Failing, own: Callable[[], Sequence[Listing]]) -> Registering:
    return Registering(lambda: cast(Database, database), Registry(list), own, load_settings())


async def unavailable() -> None:
    raise StorageUnavailable("the connection broke off")


@pytest.mark.parametrize(
    "error", [ProgrammingError("DELETE", None, Exception("permission denied")), InvalidMessage("refused")], ids=repr
)
async def test_node_leaves_when_the_database_refuses_to_remove_its_offers(error: Exception) -> None:
    async def refuse() -> None:
        raise error

    database = Failing()
    made = registering(database, lambda: [listing("who")])
    await made.join(NodeId(1))
    assert database.offers == ["who"]
    database.after[storage.remove] = refuse
    await made.leave()


async def test_first_write_cancelled_after_its_commit_is_taken_back() -> None:
    committed = asyncio.Event()

    async def no_reply() -> None:
        committed.set()
        await asyncio.Event().wait()

    database = Failing()
    database.after[storage.write] = no_reply
    made = registering(database, lambda: [listing("who")])
    joining = asyncio.create_task(made.join(NodeId(1)), name="join")
    await committed.wait()
    assert database.offers == ["who"]
    joining.cancel()
    await asyncio.wait([joining])
    await made.leave()
    assert database.offers == []


async def test_withdrawn_offer_is_removed_when_the_reply_to_its_write_was_lost() -> None:
    database, own = Failing(), [listing("who")]
    database.after[storage.write] = unavailable
    made = registering(database, lambda: own)
    await made.join(NodeId(1))
    assert database.offers == ["who"]
    own.clear()
    database.after.clear()
    await made._look()
    assert database.offers == []


async def test_node_without_offers_asks_the_database_for_nothing() -> None:
    database = Failing()
    for work in (storage.write, storage.remove, storage.read, storage.tell, storage.renew):
        database.after[work] = unavailable
    made = registering(database, list)
    await made.join(NodeId(1))
    await made.leave()
    assert not made._was_away


async def test_registry_writes_nothing_when_its_node_has_left() -> None:
    database = Failing()
    read = asyncio.Event()

    async def tell() -> None:
        read.set()

    made = registering(database, lambda: [listing("who")])
    await made.join(NodeId(1))
    await made.leave()
    made._registry.use()
    database.after[storage.read] = tell
    reading = asyncio.create_task(made.run(asyncio.Event()), name="read")
    await asyncio.wait_for(read.wait(), 5)
    reading.cancel()
    assert database.offers == []
