"""Messages sent by other tasks, by other threads, and by processes that only send."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from uuid import UUID

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.orm import Session, SessionTransaction

from durable import Bus, NoUnitOfWork
from tests.integration.outbox.unit_of_work.sessions import BILLING, Flavour, Placed, sent_numbers
from tests.support.tables import Tables


class TestOtherTasks:
    """A send is stored, or raises, whenever another task calls it."""

    @pytest.fixture
    def bus(self, tables: Tables) -> Bus:
        bus = Bus("shop", tables.url, mode="send-only")
        bus.route(Placed, to=BILLING)
        return bus

    @pytest.mark.parametrize("ends", ["commits", "leaves the block"])
    async def test_messages_sent_while_the_unit_of_work_commits_are_stored_or_refused(
        self, bus: Bus, tables: Tables, ends: str
    ) -> None:
        accepted: list[UUID] = []

        async def keep_sending(send: Callable[[object], UUID], over: asyncio.Event) -> None:
            for number in itertools.count():
                with suppress(NoUnitOfWork):
                    accepted.append(send(Placed(number)))
                if over.is_set():
                    return
                await asyncio.sleep(0)

        async with bus, asyncio.TaskGroup() as tasks:
            for _ in range(20):
                over = asyncio.Event()
                async with bus.unit_of_work() as uow:
                    await uow.session.execute(text("SELECT 1"))
                    senders = [tasks.create_task(keep_sending(send, over)) for send in (bus.send, uow.send)]
                    await asyncio.sleep(0)
                    if ends == "commits":
                        await uow.session.commit()
                over.set()
                await asyncio.wait(senders)
        stored = tables.rows("SELECT id FROM durable.outgoing_envelopes")
        assert len(accepted) > 40
        assert set(accepted) == set(stored)

    @pytest.mark.parametrize("moment", ["after_commit", "after_transaction_end"])
    async def test_listener_of_the_end_of_a_unit_of_work_cannot_send(
        self, bus: Bus, tables: Tables, moment: str
    ) -> None:
        refused = list[str]()

        def send(ended: Session, transaction: SessionTransaction | None = None) -> None:
            for by in (bus.send, uow.send):
                with pytest.raises(NoUnitOfWork):
                    by(Placed(2))
                refused.append(moment)

        async with bus, bus.unit_of_work() as uow:
            uow.send(Placed(1))
            event.listen(uow.session.sync_session, moment, send, once=True)
        assert refused == [moment, moment]
        assert tables.count("outgoing_envelopes") == 1

    async def test_task_outliving_a_unit_of_work_cannot_send(self, bus: Bus, tables: Tables) -> None:
        over = asyncio.Event()

        async def outlive() -> None:
            await over.wait()
            with pytest.raises(NoUnitOfWork, match="the unit of work in which this task was started is over"):
                bus.send(Placed(1))

        async with bus, asyncio.TaskGroup() as tasks:
            async with bus.unit_of_work():
                tasks.create_task(outlive())
            async with bus.runtime.sessions.open() as session:
                with bus.enlist(session):
                    tasks.create_task(outlive())
                over.set()
                await asyncio.sleep(0)
                await session.commit()
        assert tables.count("outgoing_envelopes") == 0


class TestSendOnly:
    @pytest.fixture(params=["", "+asyncpg", "+psycopg"])
    def bus(self, request: pytest.FixtureRequest, tables: Tables) -> Bus:
        bus = Bus("shop", tables.url.replace("postgresql:", f"postgresql{request.param}:"), mode="send-only")
        bus.route(Placed, to=BILLING)
        return bus

    async def test_send_only_process_stores_rows_without_an_owner(self, bus: Bus, tables: Tables) -> None:
        async with bus:
            async with bus.unit_of_work() as uow:
                await uow.session.execute(text("INSERT INTO orders VALUES (1)"))
                bus.send(Placed(1))
            with bus.runtime.sessions.open_sync() as session, bus.enlist(session):
                bus.send(Placed(2))
                session.commit()
            assert bus.runtime.node is None
        assert tables.rows("SELECT owner_id FROM durable.outgoing_envelopes") == [0, 0]
        assert tables.count("nodes") == 0

    async def test_stopped_bus_stores_rows_without_an_owner(self, bus: Bus, tables: Tables) -> None:
        async with bus.unit_of_work():
            bus.send(Placed(1))
        assert tables.rows("SELECT owner_id FROM durable.outgoing_envelopes") == [0]
        await bus.runtime.stop()


class TestThreads:
    async def test_session_of_another_thread_hands_over_to_the_agents(self, tables: Tables) -> None:
        engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))
        flavour = Flavour(engine)

        def place(number: int) -> None:
            with Session(engine) as session:
                flavour.enlist(session).send(Placed(number))
                session.commit()

        threads = [threading.Thread(target=place, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        engine.dispose()
        assert sorted(sent_numbers(tables)) == [0, 1, 2, 3]
        assert threading.get_ident() not in flavour.agents.threads
