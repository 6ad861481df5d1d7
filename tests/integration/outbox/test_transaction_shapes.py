"""Every shape of a transaction: the messages that are stored and handed to agents are those of the committed rows.

A state machine begins, ends and mixes transactions of sessions and of connections. Each piece of work inserts a row of
business data and sends a message of the same number with each bus. What others see of both must agree after every step.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, ClassVar, Final, Literal, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from durable import message
from durable.clock import SystemClock
from durable.embedded import Embedded
from durable.envelope import ANY_NODE, Envelope, NodeId
from durable.errors import DurableError
from durable.messages.routing import Routes
from durable.outbox.envelope_factory import EnvelopeFactory
from durable.outbox.outbox import Outbox
from durable.outbox.transactions import Ending
from durable.outbox.unit_of_work import enlist
from durable.settings import load_settings
from durable.storage.outbox import Sent
from tests.support.servers import EMBEDDED, own_postgres
from tests.support.tables import Tables, shared_tables

NODE = NodeId(7)
BILLING = "tcp://127.0.0.1:2302"
SERVICES = ("shop", "audit")

Driver = Literal["sync", "asyncpg", "psycopg"]
Binding = Literal[
    "engine", "autocommit", "two-phase", "conditional_savepoint", "create_savepoint", "rollback_only", "control_fully"
]
NUMBERS = itertools.count(1)


@message("shapes.placed")
class Placed(msgspec.Struct):
    number: int


class Agents:
    """In place of the agents: counts the room that was reserved, and remembers what was handed over."""

    def __init__(self) -> None:
        self.reserved = 0
        self.handed: set[int] = set()
        self._endings: list[tuple[Ending, Sequence[Sent]]] = []

    def reserve(self, envelopes: Sequence[Envelope]) -> list[NodeId]:
        self.reserved += len(envelopes)
        return [NODE] * len(envelopes)

    def committed(self, sent: Sequence[Sent]) -> None:
        self._give_back(sent)
        self.handed |= set(map(number_of, sent))

    def committing(self, ending: Ending, sent: Sequence[Sent]) -> None:
        self._give_back(sent)
        self._endings.append((ending, sent))

    def abandoned(self, sent: Sequence[Sent]) -> None:
        self._give_back(sent)

    def look(self) -> None:
        """Take over what was committed by a transaction that has ended meanwhile."""
        for ending, sent in self._endings:
            if ending.is_over and not ending.has_failed:
                self.handed |= set(map(number_of, sent))
        self._endings = [each for each in self._endings if not each[0].is_over]

    def _give_back(self, sent: Sequence[Sent]) -> None:
        self.reserved -= sum(each.owner != ANY_NODE for each in sent)


def number_of(sent: Sent) -> int:
    return int(msgspec.json.decode(sent.envelope.body)["number"])


class Shape(NamedTuple):
    driver: Driver
    binding: Binding
    outer_savepoint: bool
    listens: bool


REFUSED: Final = ("SELECT 1 / 0", "ROLLBACK TO gone", "RELEASE gone", "RELEASE SAVEPOINT gone", "SAVEPOINT 1")


class SqlText:
    """Savepoint of which SQLAlchemy knows nothing."""

    def __init__(self, session: Session, name: str) -> None:
        self._session = session
        self._name = name
        session.execute(text(f"SAVEPOINT {name}"))

    def commit(self) -> None:
        self._session.execute(text(f"release {self._name}"))

    def rollback(self) -> None:
        self._session.execute(text(f"Rollback to savepoint {self._name}"))


class Shapes(RuleBasedStateMachine):
    """Transactions of one session, and of the connection that it may have joined.

    Where the shape listens, each commit of the session, and each release of its savepoints, adds work of its own.
    """

    tables: ClassVar[Tables]
    engines: ClassVar[dict[str, Engine | AsyncEngine]]
    shapes: ClassVar[st.SearchStrategy[Shape]]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.first = next(NUMBERS)
        self.savepoints: list[Any] = []
        self.outer_savepoints: list[Any] = []
        self.agents = {service: Agents() for service in SERVICES}
        self.stack = ExitStack()
        self.outer: Connection | None = None
        self.committed: set[int] = set()
        self.is_detached = False
        """Was the connection's transaction ended under the session? The session does not commit what follows on it: in
        autocommit it is stored all the same, no COMMIT tells of it, and recovery finds it."""
        self.working: set[int] = set()

    @initialize(data=st.data())
    def open(self, data: st.DataObject) -> None:
        self.open_as(data.draw(self.shapes))

    def open_as(self, shape: Shape) -> None:
        self.shape = shape
        self.engine = self.engines[self.shape.driver]
        if self.shape.binding == "autocommit":
            self.engine = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        joins = self.shape.binding not in ("engine", "autocommit", "two-phase")
        bind: Any = self._connect() if joins else self.engine
        options: dict[str, Any] = {"twophase": self.shape.binding == "two-phase"}
        if joins:
            options["join_transaction_mode"] = self.shape.binding
        self.async_session: AsyncSession | None = None
        if isinstance(self.engine, AsyncEngine):
            self.async_session = AsyncSession(bind, **options)
            self.session = self.async_session.sync_session
        else:
            self.session = Session(bind, **options)
        self.outboxes = {service: self._enlist(service) for service in SERVICES}
        if self.shape.listens:
            event.listen(self.session, "before_commit", lambda _: self._work(data_first=True))
        if joins:
            self._begin_outer()

    def _connect(self) -> Any:
        if isinstance(self.engine, AsyncEngine):
            connection: Any = AsyncConnection(self.engine)
            self.runner.run(connection.start())
            self.outer = connection.sync_connection
        else:
            connection = self.outer = self.engine.connect()
        return connection

    def _begin_outer(self) -> None:
        assert self.outer is not None
        self.perform(self.outer.begin)
        if self.shape.outer_savepoint:
            self.perform(self.outer.begin_nested)

    def _enlist(self, service: str) -> Outbox:
        routes = Routes()
        routes.route("shapes.placed", BILLING)
        envelope_factory = EnvelopeFactory(service, routes, load_settings(), SystemClock())
        return enlist(self.session, "durable", envelope_factory, self.agents[service])

    def perform(self, work: Callable[[], Any]) -> Any:
        """Do this where I/O may be done: at once, or in the greenlet of the session's own loop."""
        if self.async_session is None:
            return work()

        async def run() -> Any:
            assert self.async_session is not None
            return await self.async_session.run_sync(lambda _: work())

        return self.runner.run(run())

    def attempt(self, work: Callable[[], Any]) -> Any:
        """What is refused is undone, as an application undoes it; neither side may be there then."""
        try:
            return self.perform(work)
        except (SQLAlchemyError, DurableError):
            self.savepoints.clear()
            self.outer_savepoints.clear()
            self.working.clear()
            for undo in (self.session.rollback, self.session.close):  # its savepoint may be gone
                with suppress(SQLAlchemyError):
                    self.perform(undo)
            if self.outer is not None:
                self.perform(self.outer.rollback)
            return None

    # ------------------------------------------------------------------ work

    @rule(data_first=st.booleans())
    def work(self, data_first: bool) -> None:
        self.attempt(lambda: self._work(data_first))

    def _work(self, data_first: bool) -> None:
        number = next(NUMBERS)
        self.working.add(number)

        def insert() -> None:
            self.session.execute(text("INSERT INTO orders VALUES (:number)"), {"number": number})

        def send() -> None:
            for outbox in self.outboxes.values():
                outbox.send(Placed(number))

        for step in (insert, send) if data_first else (send, insert):
            step()

    # ------------------------------------------------------------------ savepoints

    @property
    def has_savepoints(self) -> bool:
        return self.shape.binding != "autocommit"

    @precondition(lambda self: self.has_savepoints)
    @rule()
    def begin_nested(self) -> None:
        self._note(self.attempt(self.session.begin_nested))

    @precondition(lambda self: self.has_savepoints and self.session.in_transaction())
    @rule()
    def begin_nested_by_the_connection(self) -> None:
        self._note(self.attempt(lambda: self.session.connection().begin_nested()))

    @precondition(lambda self: self.has_savepoints and self.session.in_transaction())
    @rule(name=st.sampled_from("ab"))
    def begin_nested_as_sql_text(self, name: str) -> None:
        self._note(self.attempt(lambda: SqlText(self.session, name)))

    @precondition(lambda self: self.has_savepoints and self.session.in_transaction())
    @rule(statement=st.sampled_from(REFUSED), as_text=st.booleans())
    def roll_back_a_refused_statement(self, statement: str, as_text: bool) -> None:
        def refused() -> None:
            savepoint = SqlText(self.session, "a") if as_text else self.session.begin_nested()
            with pytest.raises(DBAPIError):
                self.session.execute(text(statement))
            savepoint.rollback()
            if as_text:
                savepoint.commit()

        self.attempt(refused)

    def _note(self, savepoint: Any) -> None:
        if savepoint is not None:
            self.savepoints.append(savepoint)

    @precondition(lambda self: self.savepoints)
    @rule()
    def release(self) -> None:
        self.attempt(self.savepoints.pop().commit)

    @precondition(lambda self: self.savepoints)
    @rule()
    def roll_back_to(self) -> None:
        self.attempt(self.savepoints.pop().rollback)

    @precondition(lambda self: len(self.savepoints) > 1)
    @rule()
    def roll_back_to_an_outer_one(self) -> None:
        savepoint = self.savepoints[-2]
        del self.savepoints[-2:]
        self.attempt(savepoint.rollback)

    # ------------------------------------------------------------------ ends

    @rule()
    def commit_by_the_session(self) -> None:
        self._commit(self.session.commit)

    @precondition(lambda self: self.session.in_transaction())
    @rule()
    def commit_by_the_transaction(self) -> None:
        transaction = self.session.get_transaction()
        assert transaction is not None
        self._commit(transaction.commit)

    @precondition(lambda self: not self.session.in_transaction())
    @rule(leaves_open=st.booleans())
    def commit_by_a_context_manager(self, leaves_open: bool) -> None:
        def block() -> None:
            with self.session.begin():
                if leaves_open and self.has_savepoints:
                    self.session.begin_nested()
                self._work(data_first=False)

        self._commit(block)

    @precondition(lambda self: self.session.in_transaction() and self.shape.binding != "two-phase")
    @rule()
    def commit_by_the_connection(self) -> None:
        self._commit(lambda: self.session.connection().commit())
        self.is_detached = self.shape.binding == "autocommit"

    def _commit(self, commit: Callable[[], None]) -> None:
        self.savepoints.clear()

        def whole() -> None:
            commit()
            self.committed |= self.working

        self.attempt(whole)
        self.working.clear()

    @rule()
    def roll_back(self) -> None:
        self._end(self.session.rollback)

    @rule()
    def close(self) -> None:
        self._end(self.session.close)

    @precondition(lambda self: self.session.in_transaction())
    @rule()
    def roll_back_by_the_connection(self) -> None:
        self._end(lambda: self.session.connection().rollback())
        self.is_detached = self.shape.binding == "autocommit"

    def _end(self, end: Callable[[], None]) -> None:
        self.savepoints.clear()
        self.working.clear()
        self.attempt(end)

    # ------------------------------------------------------------------ the transaction around the session's

    @precondition(lambda self: self.outer is not None and self.outer.in_transaction())
    @rule()
    def commit_the_outer_one(self) -> None:
        assert self.outer is not None
        self.outer_savepoints.clear()
        self._commit(self.outer.commit)

    @precondition(lambda self: self.outer is not None and self.outer.in_transaction())
    @rule()
    def roll_back_the_outer_one(self) -> None:
        assert self.outer is not None
        self.outer_savepoints.clear()
        self._end(self.outer.rollback)

    @precondition(lambda self: self.outer is not None and self.outer.in_transaction())
    @rule()
    def begin_an_outer_savepoint(self) -> None:
        assert self.outer is not None
        savepoint = self.attempt(self.outer.begin_nested)
        if savepoint is not None:
            self.outer_savepoints.append(savepoint)

    @precondition(lambda self: self.outer_savepoints)
    @rule()
    def release_the_outer_savepoint(self) -> None:
        self.attempt(self.outer_savepoints.pop().commit)

    @precondition(lambda self: self.outer_savepoints)
    @rule()
    def roll_back_to_the_outer_savepoint(self) -> None:
        self.attempt(self.outer_savepoints.pop().rollback)

    @precondition(lambda self: self.outer is not None)
    @rule(
        ends=st.lists(st.sampled_from(["commit", "rollback", "close"]), min_size=2, max_size=3),
        in_savepoint=st.booleans(),
        data_first=st.booleans(),
    )
    def work_in_several_transactions(self, ends: list[str], in_savepoint: bool, data_first: bool) -> None:
        """One after another, all of them in one transaction of the connection, which commits."""
        assert self.outer is not None
        for number, end in enumerate(ends, start=1):
            if in_savepoint and number == len(ends) and self.outer.in_transaction():
                self.begin_an_outer_savepoint()
            self.work(data_first)
            if end == "commit":
                self.commit_by_the_session()
            else:
                self._end(getattr(self.session, end))
        if self.outer.in_transaction():
            self.commit_the_outer_one()

    @precondition(lambda self: self.outer is not None and not self.outer.in_transaction())
    @rule()
    def begin_an_outer_one(self) -> None:
        self._begin_outer()

    # ------------------------------------------------------------------ what others see

    @invariant()
    def messages_are_those_of_the_committed_rows(self) -> None:
        rows = set(self.tables.rows("SELECT number FROM orders WHERE number >= %s", self.first))
        for service, agents in self.agents.items():
            agents.look()
            stored = self._stored(service)
            assert agents.handed <= stored, "handed over before its commit"
            if self.shape.binding == "autocommit":
                assert self.committed <= stored <= rows
            else:
                assert stored == rows
            if not self.session.in_transaction() and (self.outer is None or not self.outer.in_transaction()):
                assert self.is_detached or agents.handed == stored
                assert agents.reserved == 0

    def _stored(self, service: str) -> set[int]:
        bodies = self.tables.rows(
            "SELECT convert_from(body, 'UTF8')::json->>'number' FROM durable.outgoing_envelopes WHERE source = %s",
            service,
        )
        return {number for number in map(int, bodies) if number >= self.first}

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.attempt(self.session.close)
            if self.outer is not None:
                self.perform(self.outer.close)
            if isinstance(self.engine, AsyncEngine):
                self.runner.run(self.engine.dispose())
        self.runner.close()


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    """On a server that can prepare transactions."""
    with ExitStack() as stack:
        server = servers(EMBEDDED)
        tables = stack.enter_context(shared_tables(server))
        if tables.one("SHOW max_prepared_transactions") == "0":
            tables = stack.enter_context(shared_tables(stack.enter_context(own_postgres(EMBEDDED))))
        tables.execute("CREATE TABLE orders (number integer PRIMARY KEY)")
        yield tables


@pytest.fixture
def engines(database: Tables) -> Iterator[dict[str, Engine | AsyncEngine]]:
    def url(driver: str) -> str:
        return database.url.replace("postgresql://", f"postgresql+{driver}://")

    sync = create_engine(url("psycopg"))
    yield {
        "sync": sync,
        "asyncpg": create_async_engine(url("asyncpg")),
        "psycopg": create_async_engine(url("psycopg")),
    }
    sync.dispose()


def begun(database: Tables, engines: dict[str, Engine | AsyncEngine]) -> Shapes:
    """A machine whose rules a test calls by hand, on empty tables."""
    Shapes.tables, Shapes.engines = database, engines
    database.clear()
    database.execute("TRUNCATE orders")
    return Shapes()


@pytest.mark.parametrize("driver", ["sync", "asyncpg"])
@pytest.mark.parametrize("mode", ["conditional_savepoint", "create_savepoint", "control_fully"])
def test_message_is_stored_again_when_a_later_savepoint_took_its_row_along(
    database: Tables, engines: dict[str, Engine | AsyncEngine], driver: Driver, mode: Binding
) -> None:
    """The commit that leaves a savepoint open stores nothing yet; the next one does, within the outer savepoint."""
    shapes = begun(database, engines)
    shapes.open_as(Shape(driver, mode, outer_savepoint=False, listens=False))
    try:
        shapes.commit_by_a_context_manager(leaves_open=True)
        shapes.begin_an_outer_savepoint()
        shapes.commit_by_the_session()
        shapes.roll_back_to_the_outer_savepoint()
        shapes.commit_the_outer_one()
        shapes.messages_are_those_of_the_committed_rows()
        assert database.one("SELECT count(*) FROM orders") == 1
        assert database.count("outgoing_envelopes") == len(SERVICES)
    finally:
        shapes.teardown()


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")  # of a transaction that its connection has ended
@pytest.mark.parametrize("outer", ["commit", "rollback"])
@pytest.mark.parametrize("driver", ["sync", "asyncpg"])
@pytest.mark.parametrize("mode", ["conditional_savepoint", "create_savepoint", "rollback_only", "control_fully"])
def test_message_is_rolled_back_with_a_savepoint_of_the_next_transaction_of_its_connection(
    database: Tables, engines: dict[str, Engine | AsyncEngine], driver: Driver, mode: Binding, outer: str
) -> None:
    """A savepoint of the session begins with its first statement: here after the message, in another transaction."""
    shapes = begun(database, engines)
    shapes.open_as(Shape(driver, mode, outer_savepoint=False, listens=False))
    try:
        shapes.work(data_first=False)
        shapes.begin_nested()
        if outer == "commit":
            shapes.commit_the_outer_one()
        else:
            shapes.roll_back_the_outer_one()
        shapes.work_in_several_transactions(ends=["rollback", "commit"], in_savepoint=False, data_first=False)
        shapes.messages_are_those_of_the_committed_rows()
    finally:
        shapes.teardown()


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")  # of transactions that others have ended
@pytest.mark.parametrize(
    ("bindings", "drivers"),
    [
        (("engine",), ("sync", "asyncpg", "psycopg")),
        (("autocommit",), ("sync", "asyncpg", "psycopg")),
        (("two-phase",), ("sync",)),
        (("conditional_savepoint", "create_savepoint"), ("sync", "asyncpg")),
        (("rollback_only", "control_fully"), ("sync", "asyncpg")),
    ],
    ids=["engine", "autocommit", "two-phase", "joined by savepoints", "joined without"],
)
def test_messages_stored_and_handed_over_are_those_of_the_committed_rows(
    database: Tables,
    engines: dict[str, Engine | AsyncEngine],
    bindings: tuple[Binding, ...],
    drivers: tuple[Driver, ...],
) -> None:
    Shapes.tables, Shapes.engines = database, engines
    Shapes.shapes = st.builds(Shape, st.sampled_from(drivers), st.sampled_from(bindings), st.booleans(), st.booleans())
    database.clear()
    database.execute("TRUNCATE orders")
    run_state_machine_as_test(
        Shapes,
        settings=settings(
            max_examples=40,
            stateful_step_count=15,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
