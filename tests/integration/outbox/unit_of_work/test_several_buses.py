"""Several buses in one session: the messages of each are in the transaction, or the savepoint, of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import Session

from durable import Bus
from durable.outbox.outbox import Outbox
from tests.integration.outbox.unit_of_work.sessions import BILLING, Placed, insert
from tests.support.tables import Tables

SERVICES = {"two services": ("shop", "bills"), "one service twice": ("shop", "shop")}
STEPS = (
    *("send 0", "send 1", "send to both", "enlist 0", "enlist 1"),
    *("savepoint", "release", "roll back to savepoint", "flush", "commit", "rollback", "close"),
)
_SENT = """
SELECT source, (convert_from(body, 'UTF8')::json->>'number')::integer FROM durable.outgoing_envelopes ORDER BY 2, 1
"""
Services = Sequence[str]


class Gone(Exception):
    pass


def buses_of(tables: Tables, services: Services, engine: AsyncEngine | None = None) -> list[Bus]:
    buses = [Bus(service, tables.url, engine=engine, mode="send-only") for service in services]
    for bus in buses:
        bus.route(Placed, to=BILLING)
    return buses


class Play:
    """Steps in a session; each row has the messages that were sent beside it."""

    def __init__(self, session: Any, enlist: Callable[[int], Outbox]) -> None:
        self._session: Session = session
        self._enlist = enlist
        self._outboxes = [enlist(number) for number in range(2)]
        self._savepoints: list[Any] = []
        self._number = 0
        self.senders: dict[int, tuple[int, ...]] = {}

    def __call__(self, step: str) -> None:
        match step:
            case "send 0" | "send 1":
                self._send(int(step[-1]))
            case "send to both":
                self._send(0, 1)
            case "enlist 0" | "enlist 1":
                self._outboxes[int(step[-1])] = self._enlist(int(step[-1]))
            case "savepoint":
                self._savepoints.append(self._session.begin_nested())
            case "release" | "roll back to savepoint":
                self._end_savepoint(step)
            case "flush":
                self._session.flush()
            case _:
                self._savepoints.clear()
                getattr(self._session, step)()

    def _send(self, *buses: int) -> None:
        self._number += 1
        self.senders[self._number] = buses
        for bus in buses:
            self._outboxes[bus].send(Placed(self._number))
        insert(self._session, self._number)

    def _end_savepoint(self, step: str) -> None:
        if self._savepoints:
            savepoint = self._savepoints.pop()
            savepoint.commit() if step == "release" else savepoint.rollback()


def plays(session: Any, buses: Sequence[Bus], steps: Sequence[str], of: Any = None) -> dict[int, tuple[int, ...]]:
    with ExitStack() as blocks:
        play = Play(session, lambda number: blocks.enter_context(buses[number].enlist(of or session)))
        for step in steps:
            play(step)
        return play.senders


def is_with_its_rows(tables: Tables, services: Services, senders: dict[int, tuple[int, ...]]) -> None:
    rows = tables.rows("SELECT number FROM orders ORDER BY number")
    assert tables.rows(_SENT) == sorted(
        ((services[bus], number) for number in rows for bus in senders[number]), key=lambda sent: (sent[1], sent[0])
    )


@pytest.fixture
def engine(tables: Tables) -> Iterator[Engine]:
    engine = create_engine(tables.url.replace("postgresql:", "postgresql+psycopg:"))
    yield engine
    engine.dispose()


def emptied(tables: Tables) -> None:
    tables.execute("DELETE FROM durable.outgoing_envelopes; TRUNCATE orders, lines")


_SOME = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
_STEPS = st.lists(st.sampled_from(STEPS), min_size=2, max_size=14)


@pytest.mark.parametrize("services", SERVICES.values(), ids=SERVICES)
@_SOME
@given(steps=_STEPS)
def test_messages_of_each_bus_are_in_the_transaction_of_a_session(
    tables: Tables, engine: Engine, services: Services, steps: list[str]
) -> None:
    emptied(tables)
    with Session(engine) as session:
        senders = plays(session, buses_of(tables, services), steps)
    is_with_its_rows(tables, services, senders)


@pytest.mark.parametrize("services", SERVICES.values(), ids=SERVICES)
@pytest.mark.parametrize("mode", ["conditional_savepoint", "create_savepoint", "rollback_only"])
@pytest.mark.parametrize("commits", [True, False], ids=["committed", "rolled back"])
@_SOME
@given(steps=_STEPS)
def test_messages_of_each_bus_are_in_the_transaction_of_a_joined_connection(
    tables: Tables, engine: Engine, services: Services, mode: Any, commits: bool, steps: list[str]
) -> None:
    emptied(tables)
    with engine.connect() as outer:
        transaction = outer.begin()
        with Session(outer, join_transaction_mode=mode) as session:
            senders = plays(session, buses_of(tables, services), steps)
        if transaction.is_active and commits:
            transaction.commit()
    is_with_its_rows(tables, services, senders)


@pytest.mark.parametrize("services", SERVICES.values(), ids=SERVICES)
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("commits", [True, False], ids=["committed", "rolled back"])
@_SOME
@given(steps=st.lists(st.sampled_from([each for each in STEPS if each != "close"]), min_size=2, max_size=14))
async def test_messages_of_each_bus_are_in_the_transaction_of_a_unit_of_work(
    tables: Tables, services: Services, driver: str, commits: bool, steps: list[str]
) -> None:
    emptied(tables)
    engine = create_async_engine(tables.url.replace("postgresql:", f"postgresql+{driver}:"))
    buses = buses_of(tables, services, engine=engine)
    senders: dict[int, tuple[int, ...]] = {}

    async def work() -> None:
        nonlocal senders
        async with buses[0].unit_of_work() as uow:
            senders = await uow.session.run_sync(plays, buses, steps, uow.session)
            if not commits:
                raise Gone

    with nullcontext() if commits else pytest.raises(Gone):
        await work()
    await engine.dispose()
    is_with_its_rows(tables, services, senders)
