"""Messages are in the database when the business data is, and are not when it is not: for every kind of session."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import takewhile
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from durable import Bus, InvalidMessage, message
from durable.clock import SystemClock
from durable.composing import Composer
from durable.embedded import Embedded
from durable.envelope import ANY_NODE, Envelope, NodeId
from durable.routing import Routes
from durable.settings import load_settings
from durable.storage.database import channel
from durable.storage.outbox import Sent
from durable.unit_of_work import Outbox, enlist
from tests.support.tables import Tables, shared_tables

NODE = NodeId(7)
BILLING = "tcp://127.0.0.1:2302"
MAIL = "tcp://127.0.0.1:2303"

Work = Callable[[Session, Outbox], None]


@message("uow.placed")
class Placed(msgspec.Struct):
    number: int


@message("uow.noted")
class Noted(msgspec.Struct):
    number: int


class Base(DeclarativeBase):
    pass


class Line(Base):
    __tablename__ = "lines"
    line: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int | None]


class Agents:
    """In place of the agents: room for so many envelopes, and what they were told."""

    claims_ordered = False

    def __init__(self) -> None:
        self.room = 1_000
        self.committed_ids: list[UUID] = []
        self.abandoned_ids: list[UUID] = []
        self.threads: set[int] = set()

    def reserve(self, envelopes: Sequence[Envelope]) -> list[NodeId]:
        granted = [NODE if number < self.room else ANY_NODE for number in range(len(envelopes))]
        self.room -= granted.count(NODE)
        return granted

    def committed(self, sent: Sequence[Sent]) -> None:
        self.threads.add(threading.get_ident())
        self.committed_ids += [envelope.id for envelope, _, _, _ in sent]

    def abandoned(self, sent: Sequence[Sent]) -> None:
        self.abandoned_ids += [envelope.id for envelope, _, _, _ in sent]
        self.room += sum(owner == NODE for _, _, owner, _ in sent)


class Flavour:
    """A kind of session: the same work is done by each of them."""

    def __init__(self, engine: AsyncEngine | Engine) -> None:
        self.engine = engine
        self.agents = Agents()
        self.inserts: list[str] = []
        self.connections = 0
        routes = Routes()
        routes.route("uow.placed", BILLING)
        routes.subscribe("uow.noted", BILLING)
        routes.subscribe("uow.noted", MAIL)
        routes.handled_here("uow.noted")
        self._composer = Composer("shop", routes, load_settings(), SystemClock())
        sync_engine = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        event.listen(sync_engine, "before_cursor_execute", self._watch)
        event.listen(sync_engine, "checkout", self._count)

    async def run(self, work: Work) -> None:
        """Do this work in a session of this kind, which is closed at the end."""
        if isinstance(self.engine, AsyncEngine):
            async with AsyncSession(self.engine) as session:
                await session.run_sync(work, self.enlist(session))
        else:
            with Session(self.engine) as session:
                work(session, self.enlist(session))

    def enlist(self, session: Session | AsyncSession) -> Outbox:
        return enlist(session, "durable", self._composer, self.agents)

    def _watch(self, _conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "_envelopes" in statement:
            self.inserts.append(statement)

    def _count(self, *_: Any) -> None:
        self.connections += 1


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        tables.execute("CREATE TABLE orders (number integer PRIMARY KEY)")
        tables.execute(
            "CREATE TABLE lines (line serial PRIMARY KEY, "
            "number integer REFERENCES orders DEFERRABLE INITIALLY DEFERRED)"
        )
        yield tables


@pytest.fixture
def tables(database: Tables) -> Tables:
    database.clear()
    database.execute("TRUNCATE orders, lines")
    return database


@pytest.fixture(params=["asyncpg", "psycopg", "sync"])
async def flavour(request: pytest.FixtureRequest, tables: Tables) -> AsyncIterator[Flavour]:
    if request.param == "sync":
        sync_engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))
        yield Flavour(sync_engine)
        sync_engine.dispose()
        return
    engine = create_async_engine(tables.url.replace("postgresql://", f"postgresql+{request.param}://"))
    yield Flavour(engine)
    await engine.dispose()


def sent_numbers(tables: Tables) -> list[int]:
    bodies = tables.rows(
        "SELECT convert_from(body, 'UTF8')::json->>'number' FROM durable.outgoing_envelopes ORDER BY seq"
    )
    return [int(number) for number in bodies]


def insert(session: Session, number: int) -> None:
    session.execute(text("INSERT INTO orders VALUES (:number)"), {"number": number})


class TestCommits:
    async def test_the_message_is_stored_with_the_business_data(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            sent = outbox.send(Placed(1), headers={"tenant": "blue"}, key="order-1")
            assert tables.count("outgoing_envelopes") == 0
            session.commit()
            assert flavour.agents.committed_ids == [sent]

        await flavour.run(work)
        assert tables.rows("SELECT number FROM orders") == [1]
        row = tables.one(
            "SELECT destination, message_type, source, partition_key, ordering_key, headers, owner_id, epoch "
            "FROM durable.outgoing_envelopes"
        )
        assert row == (BILLING, "uow.placed", "shop", "order-1", "order-1", {"tenant": "blue"}, ANY_NODE, 0)

    async def test_a_rollback_stores_neither(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            outbox.send(Placed(1))
            session.rollback()
            session.commit()

        await flavour.run(work)
        assert (tables.rows("SELECT number FROM orders"), sent_numbers(tables)) == ([], [])
        assert flavour.agents.committed_ids == []

    async def test_a_session_that_is_closed_without_a_commit_stores_neither(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            outbox.send(Placed(1))
            session.close()
            session.commit()

        await flavour.run(work)
        assert (tables.rows("SELECT number FROM orders"), sent_numbers(tables)) == ([], [])

    async def test_a_message_without_any_other_data_is_rolled_back_and_committed_too(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.send(Placed(1))
            session.rollback()
            outbox.send(Placed(2))
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [2]

    async def test_every_commit_of_the_session_stores_what_was_sent_since_the_last(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            for number in range(4):
                stored = len(flavour.inserts)
                outbox.send(Placed(number))
                assert len(flavour.inserts) == stored
                if number == 2:
                    session.rollback()
                else:
                    session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [0, 1, 3]
        assert len(flavour.agents.committed_ids) == 3

    async def test_a_commit_is_one_statement_whatever_was_sent(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            for number in range(50):
                outbox.send(Placed(number))
                outbox.publish(Noted(number))
            session.commit()
            assert len(flavour.inserts) == 1
            session.commit()
            insert(session, 1)
            session.commit()
            assert len(flavour.inserts) == 1

        await flavour.run(work)
        assert (tables.count("outgoing_envelopes"), tables.count("incoming_envelopes")) == (150, 50)

    async def test_sending_takes_no_connection_and_flushes_nothing(self, flavour: Flavour) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.send(Placed(1))
            outbox.publish(Noted(1))
            assert (flavour.connections, flavour.inserts) == (0, [])

        await flavour.run(work)

    async def test_what_a_listener_of_the_commit_sends_is_stored_by_this_commit(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            @event.listens_for(session, "before_commit", once=True)
            def before_commit(_: Session) -> None:
                outbox.send(Placed(2))

            outbox.send(Placed(1))
            session.commit()
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1, 2]
        assert len(flavour.agents.committed_ids) == 2

    async def test_what_is_sent_while_objects_are_flushed_by_the_commit_is_stored_by_it(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            @event.listens_for(session, "after_flush", once=True)
            def after_flush(*_: object) -> None:
                outbox.send(Placed(2))

            outbox.send(Placed(1))
            session.add(Line(number=None))
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1, 2]
        assert len(flavour.inserts) == 1

    async def test_a_message_sent_after_the_commit_is_refused_and_not_lost(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        refused: list[BaseException] = []

        def work(session: Session, outbox: Outbox) -> None:
            @event.listens_for(session, "after_commit", once=True)
            def after_commit(_: Session) -> None:
                with pytest.raises(InvalidRequestError, match="'committed' state") as error:
                    outbox.send(Placed(2))
                refused.append(error.value)

            outbox.send(Placed(1))
            session.commit()
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1]
        assert len(refused) == 1

    async def test_a_local_message_goes_into_the_inbox_and_its_id_is_remembered(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.publish(Noted(1))
            session.commit()

        await flavour.run(work)
        assert tables.rows("SELECT destination FROM durable.outgoing_envelopes ORDER BY 1") == [BILLING, MAIL]
        assert tables.one("SELECT endpoint, owner_id FROM durable.incoming_envelopes") == ("local", NODE)

    async def test_a_unit_of_work_of_the_same_session_is_the_same_outbox(self, flavour: Flavour) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            assert flavour.enlist(session) is outbox

        await flavour.run(work)


class TestSavepoints:
    async def test_a_savepoint_rolled_back_forgets_its_messages_and_no_others(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.send(Placed(1))
            savepoint = session.begin_nested()
            outbox.send(Placed(2))
            savepoint.rollback()
            outbox.send(Placed(3))
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1, 3]

    async def test_a_savepoint_released_keeps_its_messages(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            with session.begin_nested():
                outbox.send(Placed(1))
            outbox.send(Placed(2))
            assert flavour.inserts == []  # it is no commit
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1, 2]

    async def test_an_outer_savepoint_rolled_back_forgets_what_an_inner_one_released(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.send(Placed(1))
            outer = session.begin_nested()
            outbox.send(Placed(2))
            with session.begin_nested():
                outbox.send(Placed(3))
            inner = session.begin_nested()
            outbox.send(Placed(4))
            outer.rollback()
            assert not inner.is_active
            outbox.send(Placed(5))
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1, 5]

    async def test_a_statement_that_fails_in_a_savepoint_takes_its_messages_with_it(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            outbox.send(Placed(1))
            with suppress(DBAPIError), session.begin_nested():
                outbox.send(Placed(2))
                insert(session, 1)
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1]

    async def test_a_commit_with_a_savepoint_open_releases_it_and_stores_everything(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.send(Placed(1))
            session.begin_nested()
            outbox.send(Placed(2))
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1, 2]
        assert len(flavour.inserts) == 1

    async def test_a_savepoint_that_is_closed_was_rolled_back(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            outbox.send(Placed(1))
            savepoint = session.begin_nested()
            insert(session, 2)
            outbox.send(Placed(2))
            savepoint.close()
            session.commit()

        await flavour.run(work)
        assert (tables.rows("SELECT number FROM orders"), sent_numbers(tables)) == ([1], [1])

    async def test_a_session_may_be_enlisted_inside_a_savepoint(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            session.info.clear()  # as if it had not been enlisted yet
            savepoint = session.begin_nested()
            late = flavour.enlist(session)
            late.send(Placed(1))
            savepoint.rollback()
            late.send(Placed(2))
            with session.begin_nested():
                late.send(Placed(3))
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [2, 3]


class TestFailures:
    async def test_a_commit_that_the_database_refuses_stores_neither_and_gives_the_room_back(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            session.execute(text("INSERT INTO lines (number) VALUES (1)"))  # refused by its COMMIT
            sent = outbox.send(Placed(1))
            with pytest.raises(DBAPIError):
                session.commit()
            session.rollback()
            assert (flavour.agents.committed_ids, flavour.agents.abandoned_ids) == ([], [sent])
            outbox.send(Placed(2))
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [2]
        assert flavour.agents.room == 999

    async def test_a_flush_that_fails_stores_nothing(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            outbox.send(Placed(1))
            with pytest.raises(DBAPIError):
                insert(session, 1)
            session.rollback()
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == []

    async def test_a_refused_message_leaves_the_session_as_it_was(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            with pytest.raises(InvalidMessage):
                outbox.send(Placed(1), key="\0")
            session.commit()

        await flavour.run(work)
        assert (tables.rows("SELECT number FROM orders"), sent_numbers(tables)) == ([1], [])


class TestRoom:
    async def test_a_row_is_owned_when_there_is_room_and_left_to_any_node_when_there_is_none(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        flavour.agents.room = 2

        def work(session: Session, outbox: Outbox) -> None:
            for number in range(5):
                outbox.send(Placed(number))
            session.commit()

        await flavour.run(work)
        assert tables.rows("SELECT owner_id FROM durable.outgoing_envelopes ORDER BY seq") == [7, 7, 0, 0, 0]

    async def test_room_is_reserved_by_the_commit_and_not_before(self, flavour: Flavour) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.send(Placed(1))
            assert flavour.agents.room == 1_000
            session.rollback()
            assert (flavour.agents.room, flavour.agents.abandoned_ids) == (1_000, [])

        await flavour.run(work)


class TestWaking:
    @pytest.fixture
    def listening(self, tables: Tables) -> Iterator[Callable[[], int]]:
        """How many wake-ups were committed since it was asked last."""
        with psycopg.connect(tables.url, autocommit=True) as conn:
            conn.execute(f'LISTEN "{channel("durable")}"'.encode())

            def count() -> int:
                tables.execute("SELECT pg_notify(%s, 'the last')", channel("durable"))
                return len(list(takewhile(lambda wake: wake.payload != "the last", conn.notifies(timeout=10))))

            yield count

    @pytest.mark.parametrize(
        ("room", "delay", "wakes"),
        [(1_000, None, False), (1, None, True), (0, None, True), (0, timedelta(hours=1), False)],
    )
    async def test_nodes_are_woken_for_what_has_no_owner_and_is_due(
        self, flavour: Flavour, listening: Callable[[], int], room: int, delay: timedelta | None, wakes: bool
    ) -> None:
        flavour.agents.room = room
        options: Any = {} if delay is None else {"delay": delay}

        def work(session: Session, outbox: Outbox) -> None:
            for number in range(10):
                outbox.send(Placed(number), **options)
            assert listening() == 0
            session.commit()
            assert listening() == wakes

        await flavour.run(work)


class TestSendOnly:
    @pytest.fixture(params=["", "+asyncpg", "+psycopg"])
    def bus(self, request: pytest.FixtureRequest, tables: Tables) -> Bus:
        bus = Bus("shop", tables.url.replace("postgresql:", f"postgresql{request.param}:"), mode="send-only")
        bus.route(Placed, to=BILLING)
        return bus

    async def test_a_process_that_only_sends_stores_rows_for_any_node(self, bus: Bus, tables: Tables) -> None:
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

    async def test_a_bus_that_does_not_run_sends_too(self, bus: Bus, tables: Tables) -> None:
        async with bus.unit_of_work():
            bus.send(Placed(1))
        assert tables.rows("SELECT owner_id FROM durable.outgoing_envelopes") == [0]
        await bus.runtime.stop()


class TestThreads:
    async def test_a_session_of_another_thread_tells_the_agents_from_there(self, tables: Tables) -> None:
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
