"""A commit wakes the nodes for which it left messages."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from durable import Bus, NoUnitOfWork
from durable.agents import waking
from durable.embedded import Embedded
from durable.storage.database import channel
from durable.testing import eventually
from tests.conftest import fresh_databases
from tests.integration.outbox.unit_of_work.sessions import (
    BILLING,
    Noted,
    Placed,
    by_an_outer_transaction,
    in_a_thread,
    in_a_unit_of_work,
)
from tests.support.servers import EMBEDDED, own_postgres
from tests.support.tables import Tables

_SENDS_AND_ENDS = """
import sys
from durable.agents import waking
from durable import Bus
from tests.integration.outbox.unit_of_work.sessions import BILLING, Placed
waking._STAYING = 600  # its thread ends with the process all the same
bus = Bus("shop", sys.argv[1])
bus.route(Placed, to=BILLING)
with bus.runtime.sessions.open_sync() as session, bus.enlist(session):
    bus.send(Placed(1))
    session.commit()
"""


_SENDS_IN_A_DAEMON = f"""{_SENDS_AND_ENDS.partition("with bus")[0]}
import atexit, threading
def send():
    with bus.runtime.sessions.open_sync() as session, bus.enlist(session):
        bus.send(Placed(1))
        session.commit()
if sys.argv[2] == "daemon":
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    sender.join()
else:
    atexit.register(send)
"""

_FORKS_AND_SENDS = """
import os, sys, threading, time
from durable import Bus
from tests.integration.outbox.unit_of_work.sessions import BILLING, Placed
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


_ENLISTS = """
import asyncio, os, sys, threading, time
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool
from durable import Bus
from tests.integration.outbox.unit_of_work.sessions import BILLING, Placed
bus = Bus("shop", sys.argv[1])
bus.route(Placed, to=BILLING)
engine = create_engine(sys.argv[1].replace("postgresql:", "postgresql+psycopg:"), poolclass=NullPool)
def send(number):
    with Session(engine) as session, bus.enlist(session):
        bus.send(Placed(number))
        session.commit()
def end():  # its thread tells the nodes, and ends
    for thread in threading.enumerate():
        if thread.name == "durable wakes nodes":
            thread.join()
    os._exit(0)
send(1)  # nothing has loaded the drivers of the bus
"""

_FORKS_AT_ONCE = f"""{_ENLISTS}
time.sleep(float(sys.argv[2]))
async def send_in_a_loop():
    async with bus.unit_of_work():
        bus.send(Placed(2))
if (child := os.fork()) == 0:
    asyncio.run(send_in_a_loop())
    end()
assert os.waitpid(child, 0)[1] == 0
"""

_FORKS_AMID_A_COMMIT = f"""{_ENLISTS}
held, forked = threading.Event(), threading.Event()
def hold():  # as a commit does, for a moment
    with bus.runtime._waker._lock:
        held.set()
        forked.wait()
threading.Thread(target=hold).start()
held.wait()
if (child := os.fork()) == 0:
    send(2)
    end()
forked.set()
assert os.waitpid(child, 0)[1] == 0
"""


class TestWaking:
    @pytest.fixture
    def listening(self, tables: Tables) -> Iterator[Callable[[], int]]:
        """How many wake-ups were committed since it was asked last."""
        with psycopg.connect(tables.url, autocommit=True) as conn:
            conn.execute(f'LISTEN "{channel("durable")}"'.encode())
            heard: list[str] = []
            conn.add_notify_handler(lambda wake: heard.append(wake.payload))

            def count() -> int:
                tables.execute("SELECT pg_notify(%s, 'the last')", channel("durable"))
                while "the last" not in heard:
                    conn.execute("SELECT pg_sleep(0.001)")
                wakes = len(heard) - 1
                heard.clear()
                return wakes

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
        since, backends = tables.one("SELECT clock_timestamp()"), set[int]()
        for number in range(5):
            async with bus.unit_of_work():
                bus.send(Placed(number))
            assert await eventually(listening) == 1
            backends |= set(tables.rows(waking, "SELECT pg_notify(CAST(%", since))
        assert len(backends) == 1
        await bus.runtime.stop()
        await eventually(lambda: not backends & set(tables.rows("SELECT pid FROM pg_stat_activity")))

    async def test_nodes_are_woken_over_a_new_connection_when_the_last_one_was_ended(
        self,
        tables: Tables,
        listening: Callable[[], int],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(waking, "_STAYING", 60.0)
        bus = Bus("shop", tables.url)
        bus.route(Placed, to=BILLING)
        notifying = "starts_with(query, 'SELECT pg_notify(CAST(') AND datname = current_database()"
        for number in range(3):
            async with bus.unit_of_work():
                bus.send(Placed(number))
            assert await eventually(listening) == 1
            ended = tables.rows(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {notifying}")
            assert ended == [True]
            await eventually(lambda: not tables.rows(f"SELECT pid FROM pg_stat_activity WHERE {notifying}"))
        await bus.runtime.stop()
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    def test_process_ends_soon_after_its_last_commit_and_has_woken_the_nodes(
        self, tables: Tables, listening: Callable[[], int]
    ) -> None:
        subprocess.run([sys.executable, "-c", _SENDS_AND_ENDS, tables.url], check=True, timeout=60)
        assert listening() == 1

    @pytest.mark.parametrize("sender", ["daemon", "atexit"])
    def test_process_wakes_the_nodes_before_its_end_when_a_daemon_or_its_exit_commits(
        self, tables: Tables, listening: Callable[[], int], sender: str
    ) -> None:
        subprocess.run([sys.executable, "-c", _SENDS_IN_A_DAEMON, tables.url, sender], check=True, timeout=60)
        assert listening() == 1

    def test_fork_of_a_sender_wakes_the_nodes(self, tables: Tables, listening: Callable[[], int]) -> None:
        subprocess.run([sys.executable, "-c", _FORKS_AND_SENDS, tables.url], check=True, timeout=60)
        assert listening() == 2

    @pytest.mark.parametrize("pause", [0, 0.02, 0.1])
    def test_fork_soon_after_the_first_commit_sends_and_wakes(
        self, tables: Tables, listening: Callable[[], int], pause: float
    ) -> None:
        subprocess.run([sys.executable, "-c", _FORKS_AT_ONCE, tables.url, str(pause)], check=True, timeout=60)
        assert listening() == 2

    def test_fork_amid_a_commit_of_a_thread_sends(self, tables: Tables, listening: Callable[[], int]) -> None:
        subprocess.run([sys.executable, "-c", _FORKS_AMID_A_COMMIT, tables.url], check=True, timeout=60)
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
