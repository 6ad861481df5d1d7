"""Memberships that are lost again and again, and agents that do not end: a node is always a node again, or the process
ends with an exit code and one line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from sqlalchemy import make_url, text
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable import Bus, Incoming, Middleware, Retry, message
from durable.application.middleware import HandleNext
from durable.embedded import Embedded
from durable.envelope import ANY_NODE, Envelope, NodeId
from durable.errors import StorageUnavailable, WiringError
from durable.node import Node
from durable.outcomes import STORED, Outcome
from durable.process.last_resort import EXIT_NO_MEMBER, EXIT_STUCK
from durable.recovery.former_memberships import Memberships
from durable.recovery.ordered_claims import OrderedClaims
from durable.recovery.registering import Registering
from durable.storage import migrator
from durable.storage.ordering import Lane
from durable.transports.memory import MemoryTransport
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK
from tests.support.root import ROOT
from tests.support.servers import EMBEDDED, own_postgres

NEVER = timedelta(minutes=5)
PATIENT: dict[str, Any] = {
    **QUICK,
    "drain_timeout": timedelta(seconds=1),
    "sweep_interval": NEVER,
    "forgotten_after": NEVER,
    "dormant_grace": NEVER,
    "heartbeat_stale": NEVER,
}
"""Nobody takes anything over, unless the node itself gives it back."""


@message("memberships.done")
class Done(msgspec.Struct):
    number: int


def cut_everything(database: str) -> None:
    """End every connection to this database, as an immediate restart does."""
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def cut_membership(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name LIKE 'durable % node' AND datname = current_database()"
        )


def waiting(database: str) -> int:
    with psycopg.connect(database) as conn:
        row = conn.execute("SELECT count(*) FROM durable.incoming_envelopes").fetchone()
    assert row is not None
    return int(row[0])


async def send(bus: Bus, *numbers: int) -> None:
    async with bus.unit_of_work() as uow:
        for number in numbers:
            uow.send(Done(number))


def sending(bus: Bus, *numbers: int) -> Callable[[], Awaitable[bool]]:
    """Send these again when their transaction has met a connection that was cut."""

    async def is_sent() -> bool:
        try:
            await send(bus, *numbers)
        except (DBAPIError, StorageUnavailable):
            return False
        return True

    return is_sent


def has_seen(seen: set[int], count: int) -> Callable[[], bool]:
    return lambda: len(seen) >= count


def another_node(bus: Bus, before: int) -> Callable[[], bool]:
    return lambda: bus.runtime.node_id not in (before, ANY_NODE)


# ---------------------------------------------------------------- lost, and a node again


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_node_joins_again_each_time_when_connections_die_under_busy_handlers(
    database_url: str, driver: str
) -> None:
    url = database_url.replace("postgresql://", f"postgresql+{driver}://")
    bus = Bus("shop", url, **QUICK, pool_size=20)
    seen: set[int] = set()

    @bus.handles(Done, concurrency=16)
    async def handle(done: Done, session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))
        await asyncio.sleep(0.02)
        await session.execute(text("SELECT pg_sleep(0.02)"))
        seen.add(done.number)

    async with bus:
        for round_number in range(12):
            before = bus.runtime.node_id
            await eventually(sending(bus, *range(round_number * 40, round_number * 40 + 40)))
            await eventually(has_seen(seen, round_number * 40 + 1))
            await asyncio.to_thread(cut_everything, database_url)
            await eventually(another_node(bus, before), within=20)
        await eventually(lambda: len(seen) == 480, within=30)
        await eventually(lambda: waiting(database_url) == 0, within=30)


async def test_node_joins_again_when_the_rollback_of_a_cancelled_handler_fails(database_url: str) -> None:
    bus = Bus("shop", database_url, **PATIENT)
    begun = asyncio.Event()
    attempts = 0

    @bus.handles(Done, concurrency=1)
    async def handle(done: Done) -> None:
        nonlocal attempts
        attempts += 1
        if attempts > 1:
            return
        begun.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            raise ConnectionResetError("the connection was lost in a clean-up") from None

    async with bus:
        before = bus.runtime.node_id
        await send(bus, 1)
        await begun.wait()
        await asyncio.to_thread(cut_membership, database_url)
        await eventually(another_node(bus, before), within=20)
        await eventually(lambda: waiting(database_url) == 0, within=20)


async def test_node_joins_again_when_a_handler_refuses_to_end(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    bus = Bus("shop", database_url, **PATIENT)
    free = asyncio.Event()
    begun = asyncio.Event()

    @bus.handles(Done, concurrency=1)
    async def handle(done: Done) -> None:
        begun.set()
        while not free.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await free.wait()

    async with bus:
        before = bus.runtime.node_id
        await send(bus, 1)
        await begun.wait()
        await asyncio.to_thread(cut_membership, database_url)
        await eventually(another_node(bus, before), within=30)
        assert [r.levelname for r in caplog.records if "tasks left behind" in r.message] == ["CRITICAL"]
        assert any("does not end" in problem for problem in (await bus.runtime.monitor.read()).problems)
        free.set()
        await eventually(lambda: waiting(database_url) == 0, within=20)


async def test_handler_has_time_to_end_with_its_membership_however_short_a_drain_is(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As closing a connection to a database without answers takes."""
    bus = Bus("shop", database_url, **dict[str, Any](PATIENT, drain_timeout=0.2))
    begun = asyncio.Event()

    @bus.handles(Done, concurrency=1)
    async def handle(done: Done) -> None:
        if not begun.is_set():
            begun.set()
            try:
                await asyncio.sleep(600)
            finally:
                await asyncio.sleep(1.5)

    async with bus:
        before = bus.runtime.node_id
        await send(bus, 1)
        await begun.wait()
        await asyncio.to_thread(cut_membership, database_url)
        await eventually(another_node(bus, before), within=20)
        await eventually(lambda: waiting(database_url) == 0, within=20)
    assert not [record for record in caplog.records if "left behind" in record.message]


async def test_rows_of_the_former_membership_are_handled_at_once(database_url: str) -> None:
    bus = Bus("shop", database_url, **PATIENT)
    handled: list[int] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    @bus.handles(Done, concurrency=1)
    async def handle(done: Done) -> None:
        begun.set()
        await go_on.wait()
        handled.append(done.number)

    async with bus:
        before = bus.runtime.node_id
        await send(bus, *range(100))
        await begun.wait()
        await asyncio.to_thread(cut_membership, database_url)
        await eventually(another_node(bus, before), within=20)
        go_on.set()
        await eventually(lambda: sorted(handled) == list(range(100)), within=20)
        with psycopg.connect(database_url) as conn:
            assert conn.execute("SELECT node_id FROM durable.nodes").fetchall() == [(bus.runtime.node_id,)]
            assert conn.execute("SELECT max(attempts) FROM durable.envelope_history").fetchone() == (0,)


async def test_node_joins_again_and_stops_when_all_threads_of_the_loop_hang(database_url: str) -> None:
    """Handlers may have filled its default executor by asyncio.to_thread(), with a peer that says nothing."""
    bus, peer_answers = Bus("memberships", database_url, **PATIENT), threading.Event()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(20):
            async with bus:
                first = bus.runtime.node_id
                threads = [loop.run_in_executor(None, peer_answers.wait) for _ in range(64)]
                cut_membership(database_url)
                await eventually(another_node(bus, first), within=20)
        assert not any(thread.done() for thread in threads)
    finally:
        peer_answers.set()


async def test_pools_are_emptied_when_membership_is_lost(database_url: str) -> None:
    bus = Bus("shop", database_url, **QUICK)
    seen: list[int] = []

    @bus.handles(Done)
    async def handle(done: Done, session: AsyncSession) -> None:
        seen.append((await session.execute(text("SELECT pg_backend_pid()"))).scalar_one())

    async with bus:
        before = bus.runtime.node_id
        await send(bus, 1)
        await eventually(lambda: len(seen) == 1, within=20)
        await asyncio.to_thread(cut_membership, database_url)
        await eventually(another_node(bus, before), within=20)
        await send(bus, 2)
        await eventually(lambda: len(seen) == 2, within=20)
        assert seen[1] != seen[0]


# ---------------------------------------------------------------- an agent that stands


class Standing(MemoryTransport):
    """Its peer never answers the first batch, and nothing bounds that."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.is_first = True

    def sender(self, destination: str) -> Any:
        outer, sender = self, super().sender(destination)

        class Sender:
            async def __aenter__(self) -> Any:
                await sender.__aenter__()
                return self

            async def __aexit__(self, *error: Any) -> None:
                await sender.__aexit__(*error)

            async def ping(self) -> None:
                await sender.ping()

            async def send(self, batch: Sequence[Envelope]) -> list[Outcome]:
                if outer.is_first:
                    outer.is_first = False
                    await asyncio.Event().wait()
                return [STORED] * len(batch)

        return Sender()


async def test_standing_claims_of_recovery_are_reported(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a node does begins with its claims."""

    async def stand(*_: object) -> bool:
        await asyncio.Event().wait()
        raise AssertionError

    bus = Bus("standing", database_url, **QUICK, step_timeout=1)
    async with bus:
        monkeypatch.setattr("durable.recovery.agent.claim_incoming", stand)
        reported = "recovery: claim incoming work has stood for"
        await eventually(lambda: reported in "".join(bus.runtime.life.problems()))
        before = bus.runtime.life.node
        monkeypatch.undo()
        await eventually(lambda: bus.runtime.life.node not in (None, before))


async def test_node_outlasts_the_rest_after_a_slow_look_for_ordered_work(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, next_lanes = list[float](), OrderedClaims._next_lanes

    async def slowly(self: OrderedClaims) -> Sequence[Lane]:
        looks.append(time.monotonic())
        await asyncio.sleep(0.7)
        return await next_lanes(self)

    bus = Bus("resting", database_url, **QUICK, step_timeout=2)
    bus.handles(Done)(_stand)
    async with bus:
        await bus.pause(Done)
        async with bus.unit_of_work():
            bus.send(Done(1), key="k")
        node = bus.runtime.life.node
        monkeypatch.setattr(OrderedClaims, "_next_lanes", slowly)
        await eventually(lambda: len(looks) == 3)
        assert looks[2] - looks[1] > 2
        assert bus.runtime.life.node is node


async def _stand(message: Done) -> None:
    await asyncio.Event().wait()


async def test_cancelled_start_leaves_no_node(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the node takes to leave."""
    close_listeners, is_ending = Node._close_listeners, asyncio.Event()

    async def slowly(self: Node, patience: float) -> Sequence[asyncio.Task[None]]:
        is_ending.set()
        await asyncio.sleep(1.5)
        return await close_listeners(self, patience)

    async def stand(self: Node) -> None:
        starting.cancel()
        await asyncio.Event().wait()

    monkeypatch.setattr(Node, "_close_listeners", slowly)
    monkeypatch.setattr(Node, "_tell_of_other_services", stand)
    bus = Bus("cancelled", database_url, **QUICK)
    starting = asyncio.create_task(bus.__aenter__())
    await asyncio.wait([starting])
    assert starting.cancelled()
    assert is_ending.is_set()
    assert_left(database_url)


async def test_cancelled_start_leaves_no_node_when_its_rows_cannot_be_released(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise TimeoutError

    async def stand(self: Registering, node: NodeId) -> None:
        starting.cancel()
        await asyncio.Event().wait()

    monkeypatch.setattr("durable.node.leases.release_all", refuse)
    monkeypatch.setattr(Registering, "join", stand)
    starting = asyncio.create_task(Bus("cancelled", database_url, **QUICK).__aenter__())
    await asyncio.wait([starting])
    assert starting.cancelled()
    assert_left(database_url)


async def test_node_leaves_when_the_database_refuses_to_release_its_rows(
    database_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a right is missing."""

    def refuse(*_: object) -> None:
        raise ProgrammingError("UPDATE", {}, Exception("permission denied"))

    async with Bus("shop", database_url, **QUICK):
        monkeypatch.setattr("durable.node.leases.release_all", refuse)
    assert_left(database_url)
    assert "leaves its rows to the others: ProgrammingError" in caplog.text
    assert "the node failed" not in caplog.text


def assert_left(database_url: str) -> None:
    with psycopg.connect(database_url) as conn:
        assert conn.execute("SELECT count(*) FROM durable.nodes").fetchone() == (0,)
    assert "durable node" not in {thread.name for thread in threading.enumerate()}


async def test_bus_is_started_by_one_of_two_tasks(database_url: str) -> None:
    bus = Bus("twice", database_url, **QUICK)
    started = await asyncio.gather(bus.__aenter__(), bus.__aenter__(), return_exceptions=True)
    assert [type(each) for each in started if isinstance(each, Exception)] == [WiringError]
    with psycopg.connect(database_url) as conn:
        assert conn.execute("SELECT count(*) FROM durable.nodes").fetchone() == (1,)
    await bus.__aexit__(None, None, None)


async def test_agent_standing_still_is_reported_and_its_node_joins_again(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    bus = Bus("shop", database_url, **dict[str, Any](PATIENT, step_timeout=timedelta(seconds=6)))
    bus.application.transports.append(Standing(bus.settings))
    bus.route(Done, to="memory://peer")
    async with bus:
        before = bus.runtime.node_id
        await send(bus, 1)

        reported = "sending to memory://peer: send a batch has stood"
        await eventually(lambda: reported in "".join(bus.runtime.life.problems()), within=20)
        await eventually(another_node(bus, before), within=20)

        def is_sent() -> bool:
            with psycopg.connect(database_url) as conn:
                return conn.execute("SELECT count(*) FROM durable.outgoing_envelopes").fetchone() == (0,)

        await eventually(is_sent, within=20)
    assert any("send a batch has stood" in r.getMessage() and r.levelname == "ERROR" for r in caplog.records)


# ---------------------------------------------------------------- threads that handlers do not leave


@message("memberships.other")
class Other(msgspec.Struct):
    number: int


STUCK_SOON: dict[str, Any] = {**QUICK, "step_timeout": timedelta(seconds=6), "drain_timeout": timedelta(seconds=1)}


async def problems(bus: Bus) -> str:
    return "\n".join((await bus.runtime.monitor.read()).problems)


class PassThrough(Middleware):
    """The handler's work is done in steps within it."""

    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        return await call_next(incoming)


@pytest.mark.parametrize("in_steps", [False, True], ids=["in one thread", "in steps"])
async def test_hanging_thread_is_replaced_and_reported(database_url: str, in_steps: bool) -> None:
    bus = Bus("shop", database_url, **QUICK)
    go_on, handled = threading.Event(), list[int]()

    @bus.handles(Done, concurrency=2, timeout="1s", retry=Retry(immediate=0, delays=[]))
    def handle(done: Done, session: Session) -> None:
        if done.number < 0:
            go_on.wait(120)
        handled.append(done.number)

    if in_steps:
        bus.use(PassThrough())
    try:
        async with bus:
            before = bus.runtime.node_id
            await send(bus, -1, *range(40))
            await eventually(lambda: sorted(handled) == list(range(40)), within=40)
            await eventually(lambda: bus.statistics().handling["memberships.done"].stuck_threads == 1, within=20)

            async def is_reported() -> bool:
                return "handler memberships.done: 1 thread is stuck in messages " in await problems(bus)

            await eventually(is_reported, within=20)
            await eventually(lambda: waiting(database_url) == 0, within=20)  # it has become a dead letter
            assert bus.runtime.node_id == before
            go_on.set()
            await eventually(lambda: bus.statistics().handling["memberships.done"].stuck_threads == 0, within=20)
    finally:
        go_on.set()


async def test_node_leaves_a_handler_to_the_others_when_all_its_threads_hang(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    bus = Bus("shop", database_url, **STUCK_SOON)
    go_on, handled, entered = threading.Event(), list[int](), list[int]()

    @bus.handles(Done, concurrency=2, timeout="1s", retry=Retry(immediate=0, delays=[]))
    def handle(done: Done) -> None:
        entered.append(done.number)
        if done.number < 0:
            go_on.wait(120)
        handled.append(done.number)

    @bus.handles(Other)
    async def handle_other(other: Other) -> None:
        handled.append(other.number)

    try:
        async with bus:
            before = bus.runtime.node_id
            await send(bus, -1, -2)
            await eventually(lambda: bus.statistics().handling["memberships.done"].stuck_threads == 2, within=20)
            await send(bus, 1)

            async def is_reported() -> bool:
                return "handler memberships.done: 2 threads are stuck in messages " in await problems(bus)

            await eventually(is_reported, within=20)
            await eventually(another_node(bus, before), within=30)
            assert any("handler memberships.done (see" in record.getMessage() for record in caplog.records)
            again = bus.runtime.node_id
            async with bus.unit_of_work() as uow:
                uow.send(Other(100))
            await eventually(lambda: 100 in handled, within=20)
            await asyncio.sleep(8)  # longer than step_timeout: what the former node lost is not lost once more
            assert (bus.runtime.node_id, sorted(entered)) == (again, [-2, -1])
            assert waiting(database_url) == 1
            go_on.set()
            await eventually(lambda: 1 in handled, within=20)
    finally:
        go_on.set()


async def test_handler_without_a_connection_is_reported(database_url: str) -> None:
    settings = {"pool_size": 1, "pool_timeout": "200ms", "health_unattended": "3s"}
    bus = Bus("shop", database_url, **{**QUICK, **settings})
    handled: list[int] = []

    @bus.handles(Done, concurrency=1)
    def handle(done: Done, session: Session) -> None:
        handled.append(done.number)

    async with bus:
        taken = await asyncio.to_thread(bus.runtime.sessions.sync_engine.connect)
        await send(bus, 1)

        async def is_reported() -> bool:
            return "handler memberships.done has begun nothing for " in await problems(bus)

        await eventually(is_reported, within=30)
        await asyncio.to_thread(taken.close)
        await eventually(lambda: handled == [1], within=20)

        async def is_over() -> bool:
            return "has begun nothing" not in await problems(bus)

        await eventually(is_over, within=20)


# ---------------------------------------------------------------- the lock's connection, and that of the tables


async def test_start_without_the_lock_connection_logs_no_end_of_the_bus(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    nobody = "postgresql://postgres@127.0.0.1:1/nobody"
    bus = Bus("shop", database_url, **QUICK, lock_database_url=nobody, start_timeout=timedelta(seconds=3))
    with pytest.raises(StorageUnavailable):
        async with bus:
            pass
    assert [record.getMessage() for record in caplog.records if record.levelname == "CRITICAL"] == []


async def test_start_waits_longer_than_a_membership_may_be_lost(
    database_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database goes away while the first node joins, and stays away."""
    nobody = "postgresql://postgres@127.0.0.1:1/nobody"
    times = {"membership_timeout": timedelta(seconds=2), "start_timeout": timedelta(seconds=5)}
    bus = Bus("shop", database_url, lock_database_url=nobody, **dict[str, Any]({**QUICK, **times}))
    make_node = bus.runtime.life._make_node

    def away(*_: object) -> None:
        raise StorageUnavailable("the server is shut down")

    def make(memberships: Memberships) -> Node:
        monkeypatch.setattr("durable.runtime.check_ready", away)
        return make_node(memberships)

    monkeypatch.setattr(bus.runtime.life, "_make_node", make)
    with pytest.raises(StorageUnavailable, match="the server is shut down"):
        async with bus:
            pass
    assert [record.getMessage() for record in caplog.records if record.levelname == "CRITICAL"] == []


def run(database: str, statement: str) -> None:
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(statement.encode())


@pytest.fixture
def role(database_url: str) -> Iterator[str]:
    name = f"tables_{os.getpid()}"
    run(database_url, f"CREATE ROLE {name} SUPERUSER LOGIN PASSWORD 'tables'")
    yield name
    run(database_url, f"DROP ROLE {name}")


async def test_process_is_no_node_while_only_the_connection_of_the_lock_works(
    database_url: str, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    tables = make_url(database_url).set(username=role, password="tables").render_as_string(hide_password=False)
    bus = Bus("shop", tables, **QUICK, lock_database_url=database_url)

    def joined() -> int:
        return sum(" joined" in record.getMessage() for record in caplog.records)

    async with bus:
        before = bus.runtime.node_id
        await asyncio.to_thread(run, database_url, f"ALTER ROLE {role} NOLOGIN")
        await asyncio.to_thread(cut_everything, database_url)
        await eventually(lambda: bus.runtime.node_id == ANY_NODE, within=20)
        await asyncio.sleep(3)  # many tries to join
        assert joined() == 1
        await asyncio.to_thread(run, database_url, f"ALTER ROLE {role} LOGIN")
        await eventually(another_node(bus, before), within=20)
        assert joined() == 2
        assert sum("took back" in record.getMessage() for record in caplog.records) == 1


# ---------------------------------------------------------------- processes

SHOP = """
import asyncio, sys, threading, time
import msgspec
from durable import Bus, message

@message("memberships.done")
class Done(msgspec.Struct):
    number: int

bus = Bus("shop")

@bus.handles(Done, concurrency=1)
{handler}

bus.run()
"""
STUBBORN = """
async def handle(done: Done) -> None:
    print("begun", flush=True)
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass
"""
BLOCKING = """
async def handle(done: Done) -> None:
    print("begun", flush=True)
    time.sleep(600)
"""
LEAVING = """
async def handle(done: Done) -> None:
    print("begun", flush=True)

import atexit
atexit.register(lambda: (print("has left", flush=True), time.sleep(600)))
"""
HUNG_THREAD = """
def handle(done: Done) -> None:
    print("begun", flush=True)
    time.sleep(600)
"""


class Process:
    """A process of the shop, and everything that it has said."""

    def __init__(self, folder: Path, database: str, handler: str, **settings: str) -> None:
        self.output = folder / "output"
        program = folder / "shop.py"
        program.write_text(SHOP.format(handler=textwrap.dedent(handler).strip()))
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("DURABLE_")},
            "PYTHONPATH": str(ROOT),
            "DURABLE_DATABASE_URL": database,
            "DURABLE_DRAIN_TIMEOUT": "1",
            **settings,
        }
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(program)], env=environment, stdout=file, stderr=subprocess.STDOUT
            )

    async def says(self, what: str) -> None:
        await eventually(lambda: what in self.output.read_text() or self.process.poll() is not None, within=60)
        assert what in self.output.read_text(), self.output.read_text()

    async def exit_code(self) -> int:
        await eventually(lambda: self.process.poll() is not None, within=60)
        assert self.process.returncode is not None
        return self.process.returncode


@pytest.fixture
def start(tmp_path: Path, database_url: str) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(handler: str, **settings: str) -> Process:
        started.append(Process(tmp_path, database_url, handler, **settings))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.process.wait()


@pytest.fixture
async def message_waits(database_url: str) -> None:
    bus = Bus("shop", database_url, mode="send-only")

    @bus.handles(Done)
    async def handle(done: Done) -> None: ...

    async with bus:
        await send(bus, 1)


@pytest.mark.usefixtures("message_waits")
@pytest.mark.parametrize("handler", [STUBBORN, BLOCKING, HUNG_THREAD], ids=["stubborn", "blocking", "thread"])
async def test_process_obeys_sigterm_despite_any_handler(start: Callable[..., Process], handler: str) -> None:
    process = start(handler)
    await process.says("begun")
    process.process.send_signal(signal.SIGTERM)
    assert await process.exit_code() == EXIT_STUCK
    assert process.output.read_text().count("the process ends: ") == 1


@pytest.mark.usefixtures("message_waits")
async def test_second_signal_ends_the_process_at_once(start: Callable[..., Process]) -> None:
    process = start(STUBBORN, DURABLE_DRAIN_TIMEOUT="300")
    await process.says("begun")
    process.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.5)
    process.process.send_signal(signal.SIGTERM)
    assert await process.exit_code() == 1
    assert "a second SIGTERM has come" in process.output.read_text()


@pytest.mark.usefixtures("message_waits")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_signal_after_the_node_has_left_ends_the_process_at_once(
    start: Callable[..., Process], number: signal.Signals
) -> None:
    process = start(LEAVING)
    await process.says("begun")
    process.process.send_signal(signal.SIGTERM)
    await process.says("has left")
    await asyncio.sleep(0.5)  # until then it is an echo of the first
    process.process.send_signal(number)
    assert await process.exit_code() == 1
    assert f"a second {number.name} has come" in process.output.read_text()


@pytest.mark.usefixtures("message_waits")
async def test_process_with_a_stubborn_handler_ends_when_its_membership_is_lost(
    start: Callable[..., Process], database_url: str
) -> None:
    process = start(STUBBORN)
    await process.says("begun")
    await asyncio.to_thread(cut_membership, database_url)
    assert await process.exit_code() == EXIT_STUCK
    assert process.output.read_text().count("the process ends: ") == 1


@pytest.mark.usefixtures("message_waits")
async def test_process_ends_when_all_its_threads_hang(start: Callable[..., Process]) -> None:
    process = start(HUNG_THREAD, DURABLE_HANDLER_TIMEOUT="1", DURABLE_STEP_TIMEOUT="2")
    await process.says("begun")
    assert await process.exit_code() == EXIT_STUCK
    assert "threads of handler memberships.done did not end" in process.output.read_text()


@pytest.mark.usefixtures("message_waits")
async def test_watchdog_ends_a_process_with_a_blocked_event_loop(start: Callable[..., Process]) -> None:
    process = start(BLOCKING, DURABLE_MEMBERSHIP_TIMEOUT="4")
    await process.says("begun")
    assert await process.exit_code() == EXIT_NO_MEMBER
    said = process.output.read_text()
    assert "its event loop stood still" in said
    assert "the event loop stands in handle memberships.done" in said
    assert "shop.py:" in said


# ---------------------------------------------------------------- a real server


@pytest.fixture
def own_server() -> Iterator[Embedded]:
    with own_postgres(EMBEDDED) as server:
        yield server


def restart_at_once(server: Embedded) -> None:
    """As a crash: no connection is told, and none is waited for."""
    os.kill(int((server.server.data / "postmaster.pid").read_text().split()[0]), signal.SIGQUIT)
    while (server.server.data / "postmaster.pid").exists():
        time.sleep(0.01)
    server.server.run()


async def test_busy_node_is_a_node_again_after_each_immediate_restart_of_postgres(own_server: Embedded) -> None:
    database = own_server.url("shop")
    migrator.upgrade(database.replace("postgresql://", "postgresql+psycopg://"), "durable")
    bus = Bus("shop", database, **QUICK, pool_size=20)
    seen: set[int] = set()

    @bus.handles(Done, concurrency=16)
    async def handle(done: Done, session: AsyncSession) -> None:
        await session.execute(text("SELECT pg_sleep(0.01)"))
        seen.add(done.number)

    async with bus:
        for round_number in range(4):
            before = bus.runtime.node_id
            await send(bus, *range(round_number * 200, round_number * 200 + 200))
            await eventually(has_seen(seen, round_number * 200 + 10), within=20)
            await asyncio.to_thread(restart_at_once, own_server)
            await eventually(another_node(bus, before), within=30)
            await eventually(has_seen(seen, round_number * 200 + 200), within=30)
        await eventually(lambda: waiting(database) == 0, within=30)
