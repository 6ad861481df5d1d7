"""What is no failure of a handler, what is one although it is no exception, and what ends an agent."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import msgspec
import pytest
from sqlalchemy import Connection, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

from durable import CircuitBreaker, Context, Depends, Incoming, Middleware, PutBack, Reject, Retry, RetryAfter, message
from durable.application.middleware import HandleNext, MiddlewareStack
from durable.clock import SystemClock
from durable.embedded import Embedded
from durable.envelope import LeasedEnvelope
from durable.errors import StorageUnavailable
from durable.storage import inbox
from durable.telemetry import Event
from durable.testing import eventually
from tests.support.one_handler import Billed, Placed, Shop, envelope, shop_tables
from tests.support.roles import runtime_role
from tests.support.tables import Tables

LONG = 30.0  # seconds that no test waits for in vain


class Panic(BaseException):
    """What an extension raises that is no Exception."""


class Busy(Exception):
    retry_after = 3600


@message("faults.hostile")
class Hostile(msgspec.Struct):
    """Its validator ends the process that decodes it, or tries to."""

    number: int

    def __post_init__(self) -> None:
        if self.number == 1:
            raise SystemExit(4)


def _renamed(table: str) -> tuple[str, str]:
    return f"ALTER TABLE durable.{table} RENAME TO renamed", f"ALTER TABLE durable.renamed RENAME TO {table}"


def _revoked(right: str, table: str) -> tuple[str, str]:
    return f"REVOKE {right} ON durable.{table} FROM {{role}}", f"GRANT {right} ON durable.{table} TO {{role}}"


FAULTS = {
    "no history": _renamed("envelope_history"),
    "no outbox": _renamed("outgoing_envelopes"),
    "no inbox": _renamed("incoming_envelopes"),
    "another column": (
        "ALTER TABLE durable.outgoing_envelopes RENAME fair_key TO renamed",
        "ALTER TABLE durable.outgoing_envelopes RENAME renamed TO fair_key",
    ),
    "no right to the inbox": _revoked("DELETE", "incoming_envelopes"),
    "no right to the history": _revoked("INSERT", "envelope_history"),
    "no right to the outbox": _revoked("INSERT", "outgoing_envelopes"),
}
"""Statements that break durable's tables, and mend them."""


CODE = {
    "a table": "INSERT INTO public.audit VALUES (1)",
    "a column": "INSERT INTO public.effects (elsewhere) VALUES (1)",
    "an error of its own": "RAISE EXCEPTION 'you may not book after closing time' USING ERRCODE = '42501'",
}
"""What a trigger of the application does that the database refuses."""


@contextmanager
def refusing_once(tables: Tables, table: str, code: str) -> Iterator[None]:
    """Let the first transaction that inserts into this table meet this code at its COMMIT."""
    tables.execute("CREATE SEQUENCE commits")
    tables.execute(
        "CREATE FUNCTION refuse_once() RETURNS trigger LANGUAGE plpgsql AS $$ "
        f"BEGIN IF nextval('public.commits') = 1 THEN {code}; END IF; RETURN NULL; END $$"
    )
    tables.execute(
        f"CREATE CONSTRAINT TRIGGER refuse_once AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION refuse_once()"
    )
    yield
    tables.execute("DROP FUNCTION refuse_once CASCADE")
    tables.execute("DROP SEQUENCE commits")


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shop_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def tables(database: Tables) -> Tables:
    database.clear()
    database.execute("TRUNCATE effects, once")
    have_resources(database)
    return database


@pytest.fixture
async def shop(tables: Tables) -> AsyncIterator[Shop]:
    shop = Shop(tables, SystemClock())
    yield shop
    await shop.close()


async def kill_connections(tables: Tables) -> None:
    """End every connection of the node."""
    await tables.change(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )


@contextmanager
def full_once(tables: Tables, table: str) -> Iterator[None]:
    """Let the first transaction that inserts into this table fail at its COMMIT, as for want of room."""
    tables.execute("CREATE SEQUENCE commits")
    tables.execute(
        """CREATE FUNCTION fail_once() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF nextval('public.commits') = 1 THEN
                RAISE EXCEPTION 'the disk is full' USING ERRCODE = '53100', DETAIL = 'business data';
            END IF;
            RETURN NULL;
        END $$"""
    )
    tables.execute(
        f"CREATE CONSTRAINT TRIGGER fail_once AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION fail_once()"
    )
    yield
    tables.execute("DROP FUNCTION fail_once CASCADE")
    tables.execute("DROP SEQUENCE commits")


SHORTAGES = ["53000", "53100", "53200", "53300", "53400"]
"""Insufficient resources, disk full, out of memory, too many connections, configuration limit exceeded."""


def fall_short(tables: Tables, table: str, code: str, *, where: str = "true", deferred: bool = False) -> None:
    """Let the database lack resources for such rows, from now on."""
    tables.execute(
        f"""CREATE FUNCTION fall_short() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE EXCEPTION 'no resources' USING ERRCODE = '{code}'; END $$"""
    )
    kind = "CONSTRAINT TRIGGER" if deferred else "TRIGGER"
    when = "DEFERRABLE INITIALLY DEFERRED" if deferred else ""
    tables.execute(
        f"CREATE {kind} fall_short AFTER INSERT ON {table} {when} FOR EACH ROW WHEN ({where}) "
        "EXECUTE FUNCTION fall_short()"
    )


def have_resources(tables: Tables) -> None:
    tables.execute("DROP FUNCTION IF EXISTS fall_short CASCADE")


class TestBeingCancelled:
    @pytest.mark.parametrize("group", [1, 3])
    @pytest.mark.parametrize("ticks", [0, 1, 2, 3, 5, 8, 13, 40])
    async def test_agent_ends_when_cancelled_while_its_connections_die(
        self, shop: Shop, ticks: int, group: int
    ) -> None:
        begun = asyncio.Event()

        async def handle(order: Placed, session: AsyncSession) -> None:
            await shop.write(session, order.number)
            begun.set()
            await asyncio.sleep(0.01 * (ticks % 2))
            await session.execute(text("SELECT pg_sleep(20)")) if ticks % 3 else await asyncio.Event().wait()

        shop.handles(handle, max_batch=group, retry=Retry(immediate=1_000_000))
        running = asyncio.create_task(shop.agent.run())
        await shop.receive(*range(5))
        await begun.wait()
        await kill_connections(shop.tables)
        for _ in range(ticks):
            await asyncio.sleep(0)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=LONG)
        assert done
        assert (shop.effects(), shop.tables.count("dead_letters")) == ([], 0)

    async def test_retried_transaction_ends_when_cancelled_on_a_dead_connection(self, shop: Shop) -> None:
        begun = asyncio.Event()

        def wait_on_a_dead_connection(conn: Connection, schema: str) -> None:
            pid = conn.execute(text("SELECT pg_backend_pid()")).scalar_one()
            shop.tables.execute("SELECT pg_terminate_backend(%s, 20000)", pid)
            begun.set()
            await_only(asyncio.Event().wait())

        insisting = asyncio.create_task(shop.database.transaction_with_retry(wait_on_a_dead_connection))
        await begun.wait()
        insisting.cancel()
        done, _ = await asyncio.wait([insisting], timeout=LONG)
        assert done
        assert insisting.cancelled()

    async def test_worker_survives_a_handler_cancelling_its_own_task(self, shop: Shop) -> None:
        async def handle(order: Placed, session: AsyncSession) -> None:
            await shop.write(session, order.number)
            if order.number in (1, 2) and (task := asyncio.current_task()):
                task.cancel()
            if order.number == 2:
                await asyncio.sleep(1)

        shop.handles(handle)
        async with shop.open():
            await shop.receive(1, 2, 3)
            await shop.settled()
        assert 3 in shop.effects()
        assert 2 not in shop.effects()
        assert shop.inbox() == []


class TestNoAttempt:
    """Failures of what is around a handler cost its message nothing."""

    async def test_a_wait_for_a_connection_is_no_attempt(self, tables: Tables) -> None:
        shop, attempts = Shop(tables, SystemClock(), pool_size=1), list[int]()

        async def handle(order: Placed, session: AsyncSession, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            await shop.write(session, order.number)

        shop.handles(handle, timeout=timedelta(seconds=1), max_batch=2)
        async with shop.open():
            async with shop.sessions.open() as other:
                await other.connection()
                await shop.receive(1, 2)
                await shop.settled()
                assert (attempts, [row[2] for row in shop.inbox()]) == ([], [0, 0])
            await shop.all_settled()
        assert (attempts, sorted(shop.effects()), shop.tables.count("dead_letters")) == ([1, 1], [1, 2], 0)
        await shop.close()

    async def test_handler_in_autocommit_is_refused(self, tables: Tables) -> None:
        shop, attempts = Shop(tables, SystemClock()), list[int]()
        url = tables.url.replace("postgresql://", "postgresql+asyncpg://")
        engine = shop.sessions.given = create_async_engine(url, isolation_level="AUTOCOMMIT")

        async def handle(order: Placed, session: AsyncSession, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            await shop.write(session, order.number)

        shop.handles(handle)
        async with shop.open():
            await shop.receive(1)
            await shop.all_settled()
        assert (attempts, shop.effects()) == ([], [])
        assert shop.tables.rows("SELECT exception_type FROM durable.dead_letters") == ["durable.errors.WiringError"]
        await shop.close()
        await engine.dispose()

    async def test_wait_of_a_suspect_is_no_attempt(self, tables: Tables) -> None:
        shop, attempts = Shop(tables, SystemClock(), pool_size=1), list[int]()

        async def handle(order: Placed, session: AsyncSession, ctx: Context) -> None:
            attempts.append(ctx.attempt)

        shop.handles(handle, timeout=timedelta(seconds=1))
        async with shop.open():
            async with shop.sessions.open() as other:
                await other.connection()
                await shop.receive(1, interruptions=2)
                await shop.settled()
                assert [row[:3] for row in shop.inbox()] == [(0, 1, 0)]
            await shop.tables.change("UPDATE durable.incoming_envelopes SET execution_time = NULL")
            await shop.all_settled()
        assert (attempts, shop.tables.count("dead_letters")) == ([1], 0)
        await shop.close()

    async def test_a_wait_for_a_connection_to_complete_with_is_no_attempt(self, tables: Tables) -> None:
        shop, attempts = Shop(tables, SystemClock(), pool_size=1), list[int]()
        shop.sessions.engine.pool._timeout = 0.1  # type: ignore[attr-defined]

        async def handle(order: Placed, ctx: Context) -> None:
            attempts.append(ctx.attempt)

        shop.handles(handle)
        async with shop.open():
            async with shop.sessions.open() as other:
                await other.connection()
                await shop.receive(1)
                await shop.settled()
                assert [row[2] for row in shop.inbox()] == [0]
            await shop.all_settled()
        assert (set(attempts), shop.tables.count("dead_letters")) == ({1}, 0)
        await shop.close()

    async def test_a_wait_for_a_thread_is_no_attempt(self, shop: Shop) -> None:
        attempts, let_go = list[tuple[int, int]](), threading.Event()

        def handle(order: Placed, ctx: Context) -> None:
            attempts.append((order.number, ctx.attempt))
            if order.number == 1:
                let_go.wait(LONG)

        shop.handles(handle, timeout=timedelta(milliseconds=500))
        async with shop.open():
            await shop.receive(1, 2, 3)
            await shop.settled()
            assert attempts == [(1, 1)]
            assert [row[2] for row in shop.inbox()] == [0, 0]
            let_go.set()
            await shop.all_settled()
        assert sorted(attempts) == [(1, 1), (2, 1), (3, 1)]
        assert shop.tables.rows("SELECT exception_type FROM durable.dead_letters") == ["TimeoutError"]

    @pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
    @pytest.mark.parametrize("where", ["handler", "completion"])
    async def test_loss_of_the_database_is_no_attempt(self, shop: Shop, where: str, is_async: bool) -> None:
        attempts = list[int]()

        def act(session: Session, order: Placed, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            session.execute(text("INSERT INTO effects (number) VALUES (1)"))
            if len(attempts) == 1:
                pid = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
                shop.tables.execute("SELECT pg_terminate_backend(%s, 20000)", pid)
                if where == "handler":
                    session.execute(text("SELECT 1"))

        async def handle(order: Placed, session: AsyncSession, ctx: Context) -> None:
            await session.run_sync(act, order, ctx)

        def handle_sync(order: Placed, session: Session, ctx: Context) -> None:
            act(session, order, ctx)

        shop.handles(handle if is_async else handle_sync)
        async with shop.open():
            await shop.receive(1)
            await shop.settled()
        assert (attempts, shop.effects(), shop.inbox()) == ([1, 1], [1], [])
        assert shop.tables.count("dead_letters") == 0

    @pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
    @pytest.mark.parametrize("ends", ["sends", "closes and sends", "returns nothing", "says so"])
    async def test_loss_of_the_database_is_no_attempt_when_the_handler_swallows_the_error(
        self, shop: Shop, ends: str, is_async: bool
    ) -> None:
        attempts = list[int]()

        def act(session: Session, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            session.execute(text("INSERT INTO effects (number) VALUES (1)"))
            if len(attempts) > 1:
                return
            pid = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
            shop.tables.execute("SELECT pg_terminate_backend(%s, 20000)", pid)
            with suppress(DBAPIError):
                session.execute(text("SELECT 1"))
            if ends == "closes and sends":
                session.close()
            if ends == "says so":
                session.execute(text("SELECT 1"))  # PendingRollbackError
            if ends != "returns nothing":
                ctx.send(Billed(2))

        async def handle(order: Placed, session: AsyncSession, ctx: Context) -> None:
            await session.run_sync(act, ctx)

        def handle_sync(order: Placed, session: Session, ctx: Context) -> None:
            act(session, ctx)

        shop.handles(handle if is_async else handle_sync)
        async with shop.open():
            await shop.receive(1)
            await shop.settled()
        assert (attempts, shop.effects(), shop.inbox()) == ([1, 1], [1], [])
        assert shop.tables.count("dead_letters") == 0

    @pytest.mark.parametrize("where", ["effects", "durable.envelope_history"])
    async def test_outage_at_the_end_of_an_attempt_is_logged_with_its_cause(
        self, shop: Shop, caplog: pytest.LogCaptureFixture, where: str
    ) -> None:
        async def handle(order: Placed, session: AsyncSession) -> None:
            await shop.write(session, order.number)

        shop.handles(handle)
        with full_once(shop.tables, where):
            async with shop.open():
                await shop.receive(1)
                await shop.settled()
        assert (shop.effects(), shop.inbox(), shop.tables.count("dead_letters")) == ([1], [], 0)
        assert "again: the database cannot be used: the disk is full\n" in caplog.text
        assert "business data" not in caplog.text

    @pytest.mark.parametrize("fault", FAULTS)
    @pytest.mark.parametrize("group", [1, 3])
    async def test_missing_table_or_right_of_durable_counts_as_no_attempt(
        self, tables: Tables, group: int, fault: str
    ) -> None:
        """However long it lasts: the third attempt in a row that meets it would count."""
        attempts: list[int] = []
        breaks, mends = FAULTS[fault]
        with runtime_role(tables.url) as url:
            role = make_url(url).username
            tables.execute(f"GRANT ALL ON effects TO {role}; GRANT ALL ON SEQUENCE effects_effect_seq TO {role}")
            shop = Shop(tables, SystemClock(), database_url=url)

            async def handle(order: Placed, session: AsyncSession, ctx: Context) -> None:
                attempts.append(order.number)
                if len(attempts) == 1:
                    tables.execute(breaks.format(role=role))
                    asyncio.get_running_loop().call_later(2, tables.execute, mends.format(role=role))
                await shop.write(session, order.number)
                ctx.send(order, to="tcp://127.0.0.1:1")

            shop.handles(handle, retry=Retry(immediate=0, delays=[]), max_batch=group)
            async with shop.open():
                await shop.receive(1, 2)
                await shop.settled()
            await shop.close()
        assert (sorted(shop.effects()), shop.inbox(), shop.tables.count("dead_letters")) == ([1, 2], [], 0)
        assert shop.counters[Event.ATTEMPT_FAILED] == 0
        assert len(attempts) <= 6

    @pytest.mark.parametrize("group", [1, 3])
    @pytest.mark.parametrize("code", SHORTAGES)
    @pytest.mark.parametrize(
        ("table", "deferred"),
        [("durable.envelope_history", False), ("durable.outgoing_envelopes", False), ("effects", True)],
    )
    async def test_shortage_at_the_end_of_an_attempt_counts_as_no_attempt(
        self, shop: Shop, caplog: pytest.LogCaptureFixture, table: str, deferred: bool, code: str, group: int
    ) -> None:
        """However long it lasts: the third attempt in a row that meets it would count."""
        attempts = list[int]()

        async def handle(order: Placed, session: AsyncSession, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            await shop.write(session, order.number)
            ctx.send(Billed(order.number))

        shop.handles(handle, max_batch=group, concurrency=2)
        fall_short(shop.tables, table, code, deferred=deferred)
        async with shop.open():
            await shop.receive(1, 2, 3)
            await asyncio.sleep(1.5)
            await asyncio.to_thread(have_resources, shop.tables)  # its lock waits for an attempt in this loop
            await shop.settled()
        assert (sorted(shop.effects()), shop.inbox(), shop.tables.count("dead_letters")) == ([1, 2, 3], [], 0)
        assert (shop.counters[Event.ATTEMPT_FAILED], set(attempts)) == (0, {1})
        assert len(attempts) <= 24
        told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert 1 <= sum("the database cannot be used: no resources" in each for each in told) <= 2
        assert len(told) == sum("no resources" in each for each in told)
        assert shop.tables.one("SELECT count(*) FROM durable.envelope_history WHERE source = 'durable'") == 0

    @pytest.mark.parametrize("group", [1, 3])
    @pytest.mark.parametrize("code", [code for code in SHORTAGES if code != "53400"])
    @pytest.mark.parametrize("told", ["as it is", "in other words", "in its place", "in a task group"])
    async def test_shortage_for_a_statement_of_a_handler_counts_as_no_attempt(
        self, shop: Shop, code: str, group: int, told: str
    ) -> None:
        attempts = list[int]()

        async def handle(order: Placed, session: AsyncSession, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            try:
                async with asyncio.TaskGroup() if told == "in a task group" else nullcontext():
                    await shop.write(session, order.number)
            except DBAPIError as error:
                if told == "as it is":
                    raise
                raise LookupError("not written") from (None if told == "in its place" else error)

        shop.handles(handle, max_batch=group, concurrency=2)
        fall_short(shop.tables, "effects", code)
        async with shop.open():
            await shop.receive(1, 2, 3)
            await eventually(lambda: len(attempts) > 6, what="further attempts")
            await asyncio.to_thread(have_resources, shop.tables)  # its lock waits for an attempt in this loop
            await shop.settled()
        assert (sorted(shop.effects()), shop.inbox(), shop.tables.count("dead_letters")) == ([1, 2, 3], [], 0)
        assert (shop.counters[Event.ATTEMPT_FAILED], set(attempts)) == (0, {1})

    async def test_statement_beyond_a_limit_of_the_configuration_counts_as_an_attempt(self, shop: Shop) -> None:
        """Such as temp_file_limit: another message may be far below it."""

        async def handle(order: Placed, session: AsyncSession) -> None:
            await shop.write(session, order.number)

        shop.handles(handle)
        fall_short(shop.tables, "effects", "53400", where="NEW.number = 1")
        async with shop.open():
            await shop.receive(1, 2)
            await shop.settled()
        assert (shop.effects(), shop.tables.count("dead_letters")) == ([2], 1)

    async def test_message_waits_for_room_for_its_history(self, shop: Shop) -> None:
        attempts = list[int]()

        async def handle(order: Placed, ctx: Context) -> None:
            attempts.append(ctx.attempt)

        shop.handles(handle)
        fall_short(shop.tables, "durable.envelope_history", "53100")
        async with shop.open():
            await shop.receive(1)
            await asyncio.sleep(1.5)
            await asyncio.to_thread(have_resources, shop.tables)  # its lock waits for an attempt in this loop
            await shop.settled()
        assert attempts == [1, 1]

    @pytest.mark.parametrize("table", ["durable.outgoing_envelopes", "effects"])
    async def test_shortage_of_one_message_alone_counts_after_a_while(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch, table: str
    ) -> None:
        """A trigger of the application may use such a number for a row that it does not want."""
        monkeypatch.setattr("durable.agents.patience.LONGEST", 0.5)
        attempts = list[int]()

        async def handle(order: Placed, session: AsyncSession, ctx: Context) -> None:
            if order.number == 1:
                attempts.append(ctx.attempt)
                ctx.send(Billed(1))
            await shop.write(session, order.number)

        shop.handles(handle, retry=Retry(immediate=1, delays=[]))
        unwanted = "NEW.number = 1" if table == "effects" else "NEW.message_type = 'handling.billed'"
        fall_short(shop.tables, table, "53400", where=unwanted, deferred=True)
        async with shop.open():
            await shop.receive(1, 2)
            await shop.settled()
        assert (shop.effects(), shop.inbox()) == ([2], [])
        assert attempts == [1, 1, 1, 1, 2]

    @pytest.mark.parametrize("code", CODE)
    @pytest.mark.parametrize("where", ["effects", "durable.envelope_history"])
    async def test_fault_of_a_trigger_of_the_application_counts_as_an_attempt_and_keeps_its_error(
        self, shop: Shop, caplog: pytest.LogCaptureFixture, where: str, code: str
    ) -> None:
        attempts: list[int] = []

        async def handle(order: Placed, session: AsyncSession) -> None:
            attempts.append(order.number)
            await shop.write(session, order.number)

        shop.handles(handle, retry=Retry(immediate=0, delays=[]))
        with refusing_once(shop.tables, where, CODE[code]):
            async with shop.open():
                await shop.receive(1)
                await shop.settled()
        assert (attempts, shop.effects(), shop.counters[Event.ATTEMPT_FAILED]) == ([1], [], 1)
        assert [letter[1] for letter in shop.tables.dead_letters()] == ["sqlalchemy.exc.ProgrammingError"]
        assert "durable-agent migrate" not in caplog.text

    @pytest.mark.parametrize("ends", ["raises", "raises in its place", "raises a group", "swallows it"])
    async def test_lost_connection_is_logged_with_its_cause_and_without_the_words_of_the_handler(
        self, shop: Shop, caplog: pytest.LogCaptureFixture, ends: str
    ) -> None:
        attempts = list[int]()

        async def handle(order: Placed, session: AsyncSession, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            await shop.write(session, order.number)
            if len(attempts) > 1:
                return
            pid = (await session.execute(text("SELECT pg_backend_pid()"))).scalar_one()
            await shop.tables.change("SELECT pg_terminate_backend(%s, 20000)", pid)
            try:
                await session.execute(text("SELECT 1"))
            except DBAPIError as error:
                if ends == "raises":
                    raise RuntimeError("business data") from error
                if ends == "raises in its place":
                    raise RuntimeError("business data") from None
                if ends == "raises a group":
                    raise ExceptionGroup("business data", [LookupError("more of it"), error]) from None

        shop.handles(handle)
        async with shop.open():
            await shop.receive(1)
            await shop.settled()
        assert (attempts, shop.effects(), shop.inbox()) == ([1, 1], [1], [])
        [told] = re.findall("again: the database cannot be used: (.*)", caplog.text)
        assert re.search("connection (was|is) closed|terminating connection|connection broke off", told)
        assert "business data" not in caplog.text

    @pytest.mark.parametrize(
        ("errors", "attempts", "kind", "reason"),
        [
            ([KeyError("k")], 1, "KeyError", "'k'"),
            ([Reject("never")], 1, "durable.errors.Reject", "never"),
            ([ValueError("v"), Reject("never")], 1, "durable.errors.Reject", "never"),
            (
                [ValueError("v"), KeyError("k")],
                1,
                "ExceptionGroup",
                "several (2 sub-exceptions): ValueError: v; KeyError: 'k'",
            ),
            ([ValueError("v")], 2, "ValueError", "v"),
        ],
    )
    async def test_rules_and_letters_know_the_error_in_a_group(
        self, shop: Shop, errors: list[Exception], attempts: int, kind: str, reason: str
    ) -> None:
        made = list[int]()

        async def handle(order: Placed) -> None:
            made.append(order.number)
            raise ExceptionGroup("several", errors)

        shop.handles(handle, retry=Retry(immediate=1, delays=[]), by_error={LookupError: Retry.never()})
        async with shop.open():
            await shop.receive(1)
            await shop.settled()
        [letter] = shop.tables.dead_letters()
        assert (len(made), letter[1], letter[2]) == (attempts, kind, reason)

    async def test_handler_breaking_its_connection_each_time_ends_as_a_dead_letter(self, shop: Shop) -> None:
        attempts = list[int]()

        async def handle(order: Placed, session: AsyncSession, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            pid = (await session.execute(text("SELECT pg_backend_pid()"))).scalar_one()
            await shop.tables.change("SELECT pg_terminate_backend(%s, 20000)", pid)
            await shop.write(session, order.number)

        shop.handles(handle, retry=Retry(immediate=1, delays=[]))
        async with shop.open():
            await shop.receive(1)
            await shop.settled()
        assert (attempts, shop.inbox(), shop.tables.count("dead_letters")) == ([1, 1, 1, 2, 2, 2], [], 1)


def panicking() -> int:
    raise Panic("in a provider")


def panicking_at_its_end() -> Iterator[int]:
    yield 1
    raise SystemExit(5)


async def test_retry_is_claimed_when_due_although_the_reply_of_its_commit_was_lost(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    transaction, has_lost = shop.database.transaction, False

    async def without_reply(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal has_lost
        result = await transaction(work, *args, **kwargs)
        if work is inbox.retry_later and not has_lost:
            has_lost = True
            raise StorageUnavailable("the reply of COMMIT is lost")
        return result

    async def handle(order: Placed) -> None:
        raise LookupError

    monkeypatch.setattr(shop.database, "transaction", without_reply)
    shop.handles(handle, retry=Retry(immediate=0, delays=[0.05]))
    async with shop.open():
        await shop.receive(1)
        await eventually(lambda: shop.asked_for_work == 1)
    assert has_lost


class PanickingMiddleware(Middleware):
    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        if incoming.messages == (Placed(1),):
            raise Panic("in a middleware")
        return await call_next(incoming)


class TestBaseExceptions:
    async def test_panicking_provider_is_a_failed_attempt(self, shop: Shop) -> None:
        async def handle(order: Placed, number: Annotated[int, Depends(panicking)]) -> None: ...

        await self.fails(shop, handle, {}, f"{__name__}.Panic", number=1)

    @pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
    async def test_provider_exiting_at_its_end_is_a_failed_attempt(self, shop: Shop, is_async: bool) -> None:
        async def handle(order: Placed, number: Annotated[int, Depends(panicking_at_its_end)]) -> None: ...

        def handle_sync(order: Placed, number: Annotated[int, Depends(panicking_at_its_end)]) -> None: ...

        await self.fails(shop, handle if is_async else handle_sync, {}, "SystemExit", number=1)

    async def test_panicking_middleware_is_a_failed_attempt(self, shop: Shop) -> None:
        async def handle(order: Placed) -> None: ...

        onion = MiddlewareStack()
        onion.use(PanickingMiddleware(), "core")
        await self.fails(shop, handle, {"onion": onion}, f"{__name__}.Panic", number=1)

    async def test_message_with_an_exiting_validator_is_a_dead_letter(self, shop: Shop) -> None:
        async def handle(order: Hostile) -> None: ...

        await self.fails(shop, handle, {"cls": Hostile}, "durable.errors.InvalidMessage", number=1)

    async def fails(
        self, shop: Shop, function: Callable[..., Any], how: dict[str, Any], kind: str, number: int
    ) -> None:
        """The message fails, and the agent goes on."""
        shop.handles(function, **how)
        async with shop.open():
            await shop.receive(number, 2)
            await shop.settled()
        kinds = shop.tables.rows("SELECT exception_type FROM durable.dead_letters ORDER BY letter_id")
        assert kinds[0] == kind
        assert shop.inbox() == []
        assert len(kinds) + shop.counters[Event.HANDLED] == 2


class TestStoppingAGroup:
    """A group that failed is run one by one for as long as its handler is to run."""

    async def test_opened_breaker_stops_the_rest_of_a_group(self, shop: Shop) -> None:
        calls = list[int]()

        async def handle(order: Placed) -> None:
            calls.append(order.number)
            raise ConnectionError("the peer is down")

        breaker = CircuitBreaker(failure_rate=0.5, at_least=3, open_for=3600)
        shop.handles(handle, max_batch=50, retry=Retry(immediate=2, delays=[]), circuit_breaker=breaker)
        async with shop.open():
            await shop.receive(*range(50))
            await eventually(lambda: len(shop.inbox()) == 47 and not shop.agent.held(), within=LONG)
        assert len(calls) == 10
        assert [row[:3] for row in shop.inbox()] == [(0, 1, 0)] * 47
        assert shop.tables.count("dead_letters") == 3

    async def test_error_asking_for_a_pause_stops_the_rest_of_a_group(self, shop: Shop) -> None:
        calls = list[int]()

        async def handle(order: Placed) -> None:
            calls.append(order.number)
            raise Busy

        shop.handles(handle, max_batch=50, by_error={Busy: RetryAfter()})
        async with shop.open():
            await shop.receive(*range(50))
            await eventually(lambda: {row[0] for row in shop.inbox()} == {0}, within=LONG)
        assert calls == [0, 0]
        assert [row[:3] for row in shop.inbox()] == [(0, 1, 0)] * 50

    @pytest.mark.parametrize("how", ["operator", "key", "context", "version", "stop"])
    async def test_a_pause_stops_the_rest_of_a_group(self, shop: Shop, how: str) -> None:
        calls = list[int]()

        async def handle(order: Placed, ctx: Context) -> None:
            calls.append(order.number)
            if len(calls) == 1:
                raise LookupError
            if how == "operator":
                shop.agent.observe_circuit(True)
            elif how == "key":
                shop.agent.observe_parked({"a"})
            elif how == "context":
                ctx.circuit.open()
            elif how == "version":
                shop.agent.observe_circuits({"handling.older": False}, shop.agent.circuit.generation.number)
            elif how == "stop":
                shop.agent.stop()

        shop.handles(handle, max_batch=5)
        changes: dict[str, Any] = {"key": {"partition_key": "a"}, "version": {"message_type": "handling.older"}}
        async with shop.open():
            await shop.receive_all([envelope(number, **changes.get(how, {})) for number in range(5)])
            await eventually(lambda: {row[0] for row in shop.inbox()} == {0}, within=LONG)
        assert calls == [0, 0]
        assert [row[:3] for row in shop.inbox()] == [(0, 1, 0)] * 4

    @pytest.mark.parametrize("fails", [True, False], ids=["after a failure", "within the transaction"])
    async def test_a_message_of_a_group_does_not_begin_after_its_deadline(self, shop: Shop, fails: bool) -> None:
        calls = list[int]()
        deadline = datetime.now(UTC) + timedelta(seconds=1)

        async def handle(order: Placed) -> None:
            calls.append(order.number)
            if fails and len(calls) == 1:
                raise LookupError
            await asyncio.sleep((deadline - datetime.now(UTC)).total_seconds() + 0.05)

        shop.handles(handle, max_batch=3)
        async with shop.open():
            await shop.receive_all([envelope(0), *(envelope(number, deliver_by=deadline) for number in (1, 2))])
            await shop.settled()
        assert set(calls) == {0}
        assert sorted(shop.tables.rows("SELECT outcome FROM durable.envelope_history")) == [
            "expired",
            "expired",
            "handled",
        ]

    async def test_a_message_does_not_run_again_at_once_when_its_handler_is_stopped(self, shop: Shop) -> None:
        calls = list[int]()

        async def handle(order: Placed) -> None:
            calls.append(order.number)
            shop.agent.observe_circuit(True)
            raise LookupError

        shop.handles(handle, retry=Retry(immediate=5))
        async with shop.open():
            await shop.receive(1)
            await eventually(lambda: [row[:3] for row in shop.inbox()] == [(0, 1, 1)], within=LONG)
        assert calls == [1]


async def test_list_handler_sends_the_same_ids_in_each_attempt(shop: Shop) -> None:
    ids: list[list[Any]] = []

    async def handle(orders: list[Placed], session: AsyncSession) -> list[Billed]:
        outbox = shop.sessions.outbox(session)
        ids.append([outbox.send(Billed(each.number)) for each in orders])
        if len(ids) == 1:
            raise LookupError
        return [Billed(100)]

    shop.handles(handle, retry=Retry(immediate=1, delays=[]), max_batch=100)
    async with shop.open():
        await shop.receive(1)
        await shop.settled()
    assert ids[0] == ids[1]
    assert shop.sent() == [1, 100]


async def test_message_put_back_waits_last_in_the_share_of_its_new_headers(shop: Shop) -> None:
    places: list[int] = []

    async def handle(order: Placed) -> None:
        places.append(shop.tables.one("SELECT seq FROM durable.incoming_envelopes"))
        raise PutBack(headers={"tenant": "blue"})

    shop.handles(handle, fair_by="tenant")
    async with shop.open():
        (lease,) = await shop.receive(1, headers={"tenant": "red", "by": "me"})
        await shop.settled()
    [(headers, fair_key, epoch, attempts)] = shop.tables.rows(
        "SELECT headers, fair_key, epoch, attempts FROM durable.incoming_envelopes"
    )
    assert (headers, fair_key, epoch, attempts) == ({"tenant": "blue", "by": "me"}, "blue", 1, 1)
    assert shop.tables.rows("SELECT number, exception_type FROM durable.failed_attempts") == [
        (1, "durable.errors.PutBack")
    ]
    assert lease.envelope.headers == {"tenant": "red", "by": "me"}
    assert shop.tables.one("SELECT seq FROM durable.incoming_envelopes") > places[0]


async def test_message_taken_away_is_not_put_back(shop: Shop) -> None:
    leases: list[LeasedEnvelope] = []

    async def handle(order: Placed) -> None:
        shop.take_away(leases[0])
        raise PutBack(headers={"tenant": "blue"})

    shop.handles(handle)
    leases += await shop.receive(1)
    async with shop.open():
        await shop.settled()
    assert shop.inbox() == [(0, 1, 0, None)]
    assert shop.tables.rows("SELECT headers FROM durable.incoming_envelopes") == [{}]
