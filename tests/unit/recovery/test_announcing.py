"""Looks at the announcements of several peers, with a database that fails for one of them, or is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from sqlalchemy.exc import ProgrammingError

from durable.errors import StorageUnavailable
from durable.recovery.announcing import Announcing
from durable.settings import load_settings
from durable.storage import registry as storage
from durable.storage.database import Database
from tests.support.hubs import listing

REFUSED = ProgrammingError("INSERT", None, Exception("permission denied"))


class Choosy:
    """A database that fails in transactions of one kind for the source "bad", and notes those that are done."""

    def __init__(self, fails: Callable[..., Any], error: Exception) -> None:
        self.fails, self.error = fails, error
        self.done: list[tuple[str, str]] = []
        self.told = asyncio.Event()

    async def transaction(self, work: Callable[..., Any], *given: Any, **_: Any) -> Any:
        source = given[0] if given and isinstance(given[0], str) else ""
        if work is self.fails and source == "bad":
            raise self.error
        self.done.append((work.__name__, source))
        if work is storage.tell:
            self.told.set()
        return {} if work is storage.refused else 1


def announcing(database: Choosy) -> Announcing:
    made = Announcing(lambda: cast(Database, database), load_settings())
    for source in ("bad", "good"):
        made.put(source, [listing("who")])
    return made


@pytest.mark.parametrize("fails", [storage.write, storage.renew], ids=lambda work: work.__name__)
async def test_fault_with_one_source_stops_no_other_source_of_the_look(fails: Callable[..., Any]) -> None:
    database = Choosy(fails, REFUSED)
    made = announcing(database)
    with pytest.raises(ProgrammingError):
        await made._look()
    assert {("write", "good"), ("tell", ""), ("renew", "good")} <= set(database.done)


async def test_failed_source_is_written_again_with_the_next_look() -> None:
    database = Choosy(storage.write, REFUSED)
    made = announcing(database)
    with pytest.raises(ProgrammingError):
        await made._look()
    database.fails = repr
    await made._look()
    assert database.done[-2:] == [("write", "bad"), ("tell", "")]


async def test_outage_ends_the_look_at_once() -> None:
    database = Choosy(storage.write, StorageUnavailable("away"))
    with pytest.raises(StorageUnavailable):
        await announcing(database)._look()
    assert database.done == []


async def test_fault_with_one_source_stops_no_removal_of_another_at_the_end() -> None:
    database = Choosy(storage.remove, REFUSED)
    made = announcing(database)
    running = asyncio.create_task(made.run(), name="announcements")
    await database.told.wait()
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert ("remove", "good") in database.done
    assert database.done[-1] == ("tell", "")
