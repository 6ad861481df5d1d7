"""Messages are in the database when the business data is, and are not when it is not: for every kind of session."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from functools import partial
from itertools import takewhile
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from durable import Bus, InvalidMessage, NoUnitOfWork, WiringError, message
from durable.clock import SystemClock
from durable.embedded import Embedded
from durable.envelope import ANY_NODE, Envelope, NodeId
from durable.messages.routing import Routes
from durable.outbox.envelope_factory import EnvelopeFactory
from durable.outbox.outbox import Outbox
from durable.outbox.transactions import Ending
from durable.outbox.unit_of_work import enlist
from durable.settings import load_settings
from durable.storage import migrator
from durable.storage.database import channel
from durable.storage.outbox import Sent
from durable.testing import eventually
from tests.conftest import fresh_databases
from tests.support.servers import EMBEDDED, own_postgres
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

    def __init__(self) -> None:
        self.endings: list[tuple[Ending, Sequence[Sent]]] = []
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

    def committing(self, ending: Ending, sent: Sequence[Sent]) -> None:
        self.endings.append((ending, sent))

    def told(self) -> list[UUID]:
        """The ids of what they may take for committed."""
        good = [sent for ending, sent in self.endings if ending.is_over and not ending.has_failed]
        return self.committed_ids + [each.envelope.id for sent in good for each in sent]

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
        self._envelope_factory = EnvelopeFactory("shop", routes, load_settings(), SystemClock())
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
        return enlist(session, "durable", self._envelope_factory, self.agents)

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


def by_the_session(session: Session) -> None:
    session.commit()


def by_its_transaction(session: Session) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    transaction.commit()


def by_a_context_manager(session: Session) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    with transaction:
        pass


def by_the_connection(session: Session) -> None:
    session.connection().commit()


COMMITS = [by_the_session, by_its_transaction, by_a_context_manager, by_the_connection]


async def in_a_unit_of_work(bus: Bus) -> None:
    async with bus.unit_of_work():
        bus.send(Noted(1))


async def in_a_thread(bus: Bus) -> None:
    def send() -> None:
        with bus.runtime.sessions.open_sync() as session, bus.enlist(session):
            bus.send(Noted(1))
            session.commit()

    await asyncio.to_thread(send)


async def by_an_outer_transaction(bus: Bus) -> None:
    async with bus.runtime.sessions.engine.begin() as connection, AsyncSession(connection) as session:
        with bus.enlist(session):
            bus.send(Noted(1))
            await session.commit()


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

    async def test_session_closed_without_a_commit_stores_neither_rows_nor_messages(
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

    async def test_each_commit_stores_the_messages_sent_since_the_last(self, flavour: Flavour, tables: Tables) -> None:
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

    async def test_commit_stores_any_number_of_messages_by_one_statement(
        self, flavour: Flavour, tables: Tables
    ) -> None:
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

    async def test_message_sent_by_a_commit_listener_is_stored_by_this_commit(
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

    async def test_message_sent_during_the_flush_of_a_commit_is_stored_by_this_commit(
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
                with pytest.raises(NoUnitOfWork, match="COMMIT is under way") as error:
                    outbox.send(Placed(2))
                refused.append(error.value)

            outbox.send(Placed(1))
            session.commit()
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1]
        assert len(refused) == 1

    @pytest.mark.parametrize("is_nested", [True, False], ids=["savepoint", "transaction"])
    async def test_message_sent_by_a_rollback_listener_is_refused_and_later_ones_are_stored(
        self, flavour: Flavour, tables: Tables, is_nested: bool
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            @event.listens_for(session, "after_rollback", once=True)
            def after_rollback(_: Session) -> None:
                with pytest.raises(NoUnitOfWork, match="was rolled back"):
                    outbox.send(Placed(1))
                refused.append(1)

            insert(session, 1)
            if is_nested:
                session.begin_nested().rollback()
            else:
                session.rollback()
            outbox.send(Placed(2))
            session.commit()

        refused: list[int] = []
        await flavour.run(work)
        assert sent_numbers(tables) == [2]
        assert refused == [1]

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

    async def test_outer_savepoint_rolled_back_discards_messages_of_released_inner_ones(
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

    async def test_statement_failing_in_a_savepoint_discards_its_messages(
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

    async def test_commit_with_an_open_savepoint_stores_everything(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.send(Placed(1))
            session.begin_nested()
            outbox.send(Placed(2))
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1, 2]
        assert len(flavour.inserts) == 1

    async def test_closed_savepoint_was_rolled_back(self, flavour: Flavour, tables: Tables) -> None:
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
    async def test_commit_refused_by_the_database_stores_neither_and_returns_the_room(
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

    async def test_failed_flush_stores_nothing(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            outbox.send(Placed(1))
            with pytest.raises(DBAPIError):
                insert(session, 1)
            session.rollback()
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == []

    async def test_refused_message_leaves_the_session_unchanged(self, flavour: Flavour, tables: Tables) -> None:
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


class TestShapes:
    """Whoever commits, and whatever is open then: tests/integration/outbox/test_transaction_shapes.py mixes them."""

    @pytest.mark.parametrize("commit", COMMITS, ids=lambda commit: commit.__name__)
    @pytest.mark.parametrize("has_data", [True, False], ids=["with data", "messages alone"])
    async def test_a_commit_with_a_savepoint_open_stores_everything(
        self, flavour: Flavour, tables: Tables, commit: Callable[[Session], None], has_data: bool
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            session.begin()
            if has_data:
                insert(session, 1)
            outbox.send(Placed(1))
            session.begin_nested()
            outbox.send(Placed(2))
            commit(session)
            session.close()

        await flavour.run(work)
        assert sent_numbers(tables) == [1, 2]
        assert tables.rows("SELECT number FROM orders") == [1] * has_data
        assert len(flavour.inserts) == 1

    @pytest.mark.parametrize("commit", COMMITS, ids=lambda commit: commit.__name__)
    @pytest.mark.parametrize("has_data", [True, False], ids=["with data", "without"])
    @pytest.mark.parametrize("is_nested", [True, False], ids=["in a savepoint", "in none"])
    async def test_a_handlers_commit_is_refused_in_any_shape(
        self, flavour: Flavour, tables: Tables, commit: Callable[[Session], None], has_data: bool, is_nested: bool
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.commit_allowed = False
            session.begin()
            if has_data:
                insert(session, 1)
                outbox.send(Placed(1))
            if is_nested:
                session.begin_nested()
            with pytest.raises(WiringError, match="a handler must not commit"):
                commit(session)
            session.close()

        await flavour.run(work)
        assert (tables.rows("SELECT number FROM orders"), sent_numbers(tables)) == ([], [])
        assert flavour.agents.room == 1_000

    async def test_connection_with_a_refused_commit_returns_to_the_pool_without_a_transaction(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            outbox.commit_allowed = False
            with pytest.raises(WiringError):
                session.connection().commit()
            session.close()

        def others(session: Session, outbox: Outbox) -> None:
            insert(session, 2)
            session.commit()

        await flavour.run(work)
        await flavour.run(others)
        assert tables.rows("SELECT number FROM orders") == [2]

    async def test_a_savepoint_of_the_connection_rolled_back_forgets_its_messages(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.send(Placed(1))
            insert(session, 1)
            savepoint = session.connection().begin_nested()
            outbox.send(Placed(2))
            insert(session, 2)
            with session.connection().begin_nested():
                outbox.send(Placed(3))
                insert(session, 3)
            savepoint.rollback()
            outbox.send(Placed(4))
            insert(session, 4)
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == tables.rows("SELECT number FROM orders ORDER BY 1") == [1, 4]

    async def test_session_enlisted_within_a_transaction_is_followed(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            session.info.clear()  # as if it had not been enlisted yet
            insert(session, 1)
            savepoint = session.begin_nested()
            insert(session, 2)
            late = flavour.enlist(session)
            late.send(Placed(2))
            savepoint.rollback()
            late.send(Placed(1))
            session.connection().commit()

        await flavour.run(work)
        assert sent_numbers(tables) == tables.rows("SELECT number FROM orders") == [1]


class TestJoinedTransactions:
    """A session that has joined the transaction of its connection commits nothing."""

    @pytest.fixture
    def outer(self, tables: Tables) -> Iterator[Connection]:
        engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))
        with engine.connect() as connection:
            yield connection
        engine.dispose()

    @pytest.mark.parametrize("mode", ["conditional_savepoint", "create_savepoint", "rollback_only"])
    @pytest.mark.parametrize("commits", [True, False], ids=["committed", "rolled back"])
    async def test_messages_are_handed_over_by_the_outer_commit_alone(
        self, tables: Tables, outer: Connection, mode: Any, commits: bool
    ) -> None:
        flavour = Flavour(outer.engine)
        transaction = outer.begin()
        with Session(outer, join_transaction_mode=mode) as session:
            insert(session, 1)
            sent = flavour.enlist(session).send(Placed(1))
            session.commit()
        stored = "SELECT count(*) FROM durable.outgoing_envelopes WHERE owner_id = 0"
        assert outer.execute(text(stored)).scalar_one() == 1  # by the session's commit, for those who look from inside
        assert flavour.agents.committed_ids == []
        if commits:
            transaction.commit()
        else:
            transaction.rollback()
        assert flavour.agents.told() == ([sent] if commits else [])
        assert sent_numbers(tables) == tables.rows("SELECT number FROM orders") == [1] * commits

    async def test_outer_commit_refused_by_the_database_hands_over_nothing(
        self, tables: Tables, outer: Connection
    ) -> None:
        flavour = Flavour(outer.engine)
        transaction = outer.begin()
        with Session(outer) as session:
            session.execute(text("INSERT INTO lines (number) VALUES (1)"))  # refused by its COMMIT
            flavour.enlist(session).send(Placed(1))
            session.commit()
        with pytest.raises(DBAPIError):
            transaction.commit()
        assert flavour.agents.told() == []
        assert sent_numbers(tables) == []

    async def test_outer_savepoint_rolled_back_discards_messages_stored_by_the_session(
        self, tables: Tables, outer: Connection
    ) -> None:
        flavour = Flavour(outer.engine)
        with outer.begin():
            with Session(outer) as session:
                flavour.enlist(session).send(Placed(1))
                insert(session, 1)
                session.commit()
            savepoint = outer.begin_nested()
            with Session(outer) as session:
                flavour.enlist(session).send(Placed(2))
                insert(session, 2)
                session.commit()
            savepoint.rollback()
        assert sent_numbers(tables) == tables.rows("SELECT number FROM orders") == [1]
        assert len(flavour.agents.told()) == 1

    @pytest.mark.parametrize("mode", ["create_savepoint", "rollback_only"])
    async def test_rollback_of_the_session_keeps_the_messages_of_its_earlier_commit(
        self, tables: Tables, outer: Connection, mode: Any
    ) -> None:
        flavour = Flavour(outer.engine)
        with outer.begin(), Session(outer, join_transaction_mode=mode) as session:
            outbox, late = flavour.enlist(session), [Placed(2)]
            event.listen(session, "before_commit", lambda _: outbox.send(late.pop()) if late else None)
            outbox.send(Placed(1))
            for number in (1, 2):
                insert(session, number)
            session.commit()  # stores the first; the listener has sent the second after that
            savepoint = outer.begin_nested()
            outbox.send(Placed(3))
            insert(session, 3)
            session.rollback()
            savepoint.close()
        assert sorted(sent_numbers(tables)) == tables.rows("SELECT number FROM orders") == [1, 2]
        assert len(flavour.agents.told()) == 2

    async def test_savepoint_rolled_back_keeps_the_messages_of_a_closed_session(
        self, tables: Tables, outer: Connection
    ) -> None:
        flavour = Flavour(outer.engine)
        with outer.begin(), Session(outer, join_transaction_mode="rollback_only") as session:
            outbox = flavour.enlist(session)
            insert(session, 1)
            outbox.send(Placed(1))
            session.close()  # the transaction goes on, with the row
            savepoint = outer.begin_nested()
            insert(session, 2)
            outbox.send(Placed(2))
            session.close()
            savepoint.rollback()
        assert sent_numbers(tables) == tables.rows("SELECT number FROM orders") == [1]

    async def test_savepoint_rolled_back_keeps_messages_sent_before_the_session_joined(
        self, tables: Tables, outer: Connection
    ) -> None:
        flavour = Flavour(outer.engine)
        with outer.begin(), Session(outer, join_transaction_mode="create_savepoint") as session:
            outbox = flavour.enlist(session)
            insert(session, 1)
            outbox.send(Placed(1))
            session.commit()
            savepoint = outer.begin_nested()
            outbox.send(Placed(2))
            savepoint.rollback()  # the session has no part in it yet
            insert(session, 2)
            session.commit()
        assert sent_numbers(tables) == tables.rows("SELECT number FROM orders") == [1, 2]

    @pytest.mark.filterwarnings("ignore:transaction already deassociated:sqlalchemy.exc.SAWarning")
    @pytest.mark.parametrize("ends_by", ["commit", "rollback"])
    @pytest.mark.parametrize("leaves_by", ["rollback", "close"])
    async def test_kept_rows_keep_their_messages_when_the_session_has_ended_the_joined_transaction(
        self, tables: Tables, outer: Connection, ends_by: str, leaves_by: str
    ) -> None:
        flavour = Flavour(outer.engine)
        outer.begin()
        with Session(outer) as session:
            outbox = flavour.enlist(session)
            insert(session, 1)
            outbox.send(Placed(1))
            getattr(session.connection(), ends_by)()
            insert(session, 2)  # begins another transaction of the connection, which the session cannot end
            outbox.send(Placed(2))
            getattr(session, leaves_by)()
        outer.commit()
        expected = [1, 2] if ends_by == "commit" else [2]
        assert sent_numbers(tables) == tables.rows("SELECT number FROM orders") == expected
        assert len(flavour.agents.told()) == len(expected)

    async def test_refused_commit_returns_the_room_when_the_session_is_closed(
        self, tables: Tables, outer: Connection
    ) -> None:
        flavour = Flavour(outer.engine)
        session = Session(outer)  # begins the transaction itself
        outbox, late = flavour.enlist(session), [Placed(2)]
        event.listen(session, "before_commit", lambda _: outbox.send(late.pop()) if late else None)
        session.execute(text("INSERT INTO lines (number) VALUES (1)"))  # refused by its COMMIT
        outbox.send(Placed(1))
        with pytest.raises(DBAPIError):
            session.commit()
        session.close()
        assert flavour.agents.room == 1_000
        assert flavour.agents.told() == []
        assert sent_numbers(tables) == []


class TestTwoBuses:
    async def test_each_bus_stores_its_messages_in_its_own_schema(self, flavour: Flavour, tables: Tables) -> None:
        url = tables.url.replace("postgresql://", "postgresql+psycopg://")
        await asyncio.to_thread(migrator.upgrade, url, "audit")
        buses = [Bus("shop", tables.url), Bus("audit", tables.url, db_schema="audit")]
        for bus in buses:
            bus.route(Placed, to=BILLING)

        def work(session: Session, _: Outbox) -> None:
            insert(session, 1)
            for bus in buses:
                with bus.enlist(session):
                    bus.send(Placed(1))
            session.commit()

        await flavour.run(work)
        for bus in buses:
            await bus.runtime.stop()
        assert tables.rows("SELECT source FROM durable.outgoing_envelopes") == ["shop"]
        assert tables.rows("SELECT source FROM audit.outgoing_envelopes") == ["audit"]
        tables.execute("DROP SCHEMA audit CASCADE")


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


_SENDS_AND_ENDS = """
import sys
from durable.agents import waking
from tests.integration.outbox.test_unit_of_work import BILLING, Bus, Placed
waking._STAYING = 600  # its thread ends with the process all the same
bus = Bus("shop", sys.argv[1])
bus.route(Placed, to=BILLING)
with bus.runtime.sessions.open_sync() as session, bus.enlist(session):
    bus.send(Placed(1))
    session.commit()
"""
_FORKS_AND_SENDS = """
import os, sys, threading, time
from tests.integration.outbox.test_unit_of_work import BILLING, Bus, Placed
bus = Bus("shop", sys.argv[1])
bus.route(Placed, to=BILLING)
def send(number):
    with bus.runtime.sessions.open_sync() as session, bus.enlist(session):
        bus.send(Placed(number))
        session.commit()
send(1)
time.sleep(0.5)  # its thread has told, and waits for more
assert any(thread.name == "durable wakes nodes" for thread in threading.enumerate())
bus.runtime.sessions.sync_engine.dispose()
if (child := os.fork()) == 0:
    send(2)
    time.sleep(0.5)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


class TestWaking:
    @pytest.fixture
    def listening(self, tables: Tables) -> Iterator[Callable[[], int]]:
        """How many wake-ups were committed since it was asked last."""
        with psycopg.connect(tables.url, autocommit=True) as conn:
            conn.execute(f'LISTEN "{channel("durable")}"'.encode())

            def count() -> int:
                tables.execute("SELECT pg_notify(%s, 'the last')", channel("durable"))
                return len(list(takewhile(lambda wake: wake.payload != "the last", conn.notifies(timeout=20))))

            yield count

    @pytest.fixture
    def bus(self, tables: Tables) -> Bus:
        bus = Bus("shop", tables.url, mode="send-only", poll_interval=timedelta(minutes=10))
        bus.route(Placed, to=BILLING)
        return bus

    @pytest.mark.parametrize(("delay", "wakes"), [(None, 1), (timedelta(minutes=5), 1), (timedelta(hours=1), 0)])
    async def test_nodes_are_woken_once_for_messages_due_before_their_next_poll(
        self, bus: Bus, listening: Callable[[], int], delay: timedelta | None, wakes: int
    ) -> None:
        options: Any = {} if delay is None else {"delay": delay}
        async with bus:
            for number in range(20):  # the loop does nothing else meanwhile
                with bus.runtime.sessions.open_sync() as session, bus.enlist(session):
                    bus.send(Placed(number), **options)
                    session.commit()
            assert listening() == 0
        assert listening() == wakes

    async def test_commits_of_a_process_without_a_node_share_a_connection(
        self, tables: Tables, listening: Callable[[], int]
    ) -> None:
        bus = Bus("shop", tables.url)
        bus.route(Placed, to=BILLING)
        waking = (
            "SELECT pid FROM pg_stat_activity"
            " WHERE datname = current_database() AND query LIKE %s AND backend_start > CAST(%s AS timestamptz)"
        )
        since, woke, backends = tables.one("SELECT clock_timestamp()"), 0, set[int]()
        for number in range(5):
            async with bus.unit_of_work():
                bus.send(Placed(number))
            await asyncio.sleep(0.3)  # longer than commits are gathered
            woke += listening()
            backends |= set(tables.rows(waking, "SELECT pg_notify(CAST(%", since))
        assert woke == 5
        assert len(backends) == 1
        await bus.runtime.stop()
        await eventually(lambda: not backends & set(tables.rows("SELECT pid FROM pg_stat_activity")))

    def test_process_ends_soon_after_its_last_commit_and_has_woken_the_nodes(
        self, tables: Tables, listening: Callable[[], int]
    ) -> None:
        subprocess.run([sys.executable, "-c", _SENDS_AND_ENDS, tables.url], check=True, timeout=60)
        assert listening() == 1

    def test_fork_of_a_sender_wakes_the_nodes(self, tables: Tables, listening: Callable[[], int]) -> None:
        subprocess.run([sys.executable, "-c", _FORKS_AND_SENDS, tables.url], check=True, timeout=60)
        assert listening() == 2

    async def test_transaction_leaving_its_rows_to_any_node_can_be_prepared(
        self, tables: Tables, listening: Callable[[], int], two_phase: str
    ) -> None:
        """PREPARE TRANSACTION is refused after a NOTIFY: it takes no lock of the queue of notifications."""
        bus = Bus("shop", two_phase)
        bus.route(Placed, to=BILLING)
        engine = create_engine(two_phase.replace("postgresql://", "postgresql+psycopg://"))
        with Session(engine, twophase=True) as session, bus.enlist(session):
            bus.send(Placed(1))
            session.prepare()
            with psycopg.connect(two_phase) as conn:
                assert conn.execute("SELECT count(*) FROM pg_prepared_xacts").fetchone() == (1,)
                locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'object' AND classid = 'pg_database'::regclass"
                assert conn.execute(locks).fetchone() == (0,)
            with pytest.raises(NoUnitOfWork):
                bus.send(Placed(2))
            session.commit()
        engine.dispose()
        with psycopg.connect(two_phase) as conn:
            assert conn.execute("SELECT owner_id FROM durable.outgoing_envelopes").fetchall() == [(0,)]

    @pytest.fixture
    def two_phase(self, server: Embedded, make_database: Callable[[str], str]) -> Iterator[str]:
        """A database on a server that can prepare transactions."""
        url = make_database("prepared")
        with psycopg.connect(url) as conn:
            (most,) = conn.execute("SHOW max_prepared_transactions").fetchone() or ("0",)
        if most != "0":
            yield url
            return
        with own_postgres(EMBEDDED) as own, fresh_databases(own) as make:
            yield make("prepared")

    @pytest.mark.parametrize(
        "send",
        [in_a_unit_of_work, in_a_thread, by_an_outer_transaction],
        ids=lambda send: send.__name__,
    )
    @pytest.mark.parametrize("runs", [True, False], ids=["send-only", "not running"])
    async def test_another_node_is_woken_before_its_next_poll(
        self, tables: Tables, send: Callable[[Bus], Awaitable[None]], runs: bool
    ) -> None:
        handled: list[Noted] = []
        async with AsyncExitStack() as stack:
            node = Bus("shop", tables.url, poll_interval=timedelta(minutes=10))

            @node.handles(Noted)
            async def handle(note: Noted) -> None:
                handled.append(note)

            def has_handled(count: int) -> bool:
                return len(handled) == count

            await stack.enter_async_context(node)
            sender = Bus("shop", tables.url, mode="send-only")
            sender.handles(Noted)(handle)
            if runs:
                await stack.enter_async_context(sender)
            for count in range(1, 6):  # the node may have found the first by itself, when it started
                await send(sender)
                await eventually(partial(has_handled, count), within=30, what="handled")
            if not runs:
                await sender.runtime.stop()


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
