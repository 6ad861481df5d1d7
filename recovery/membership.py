"""A node's place among the nodes: its id, its locks, its heartbeat, and the wake-ups that others send.

All live on one connection in one thread of their own, so that a blocked event loop does not look dead. A loop
that stays blocked for longer than the setting handler_timeout does: then the heartbeats stop, and others take over.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, create_engine, pool
from sqlalchemy.exc import DBAPIError

from durable.calls.singletons import Singletons
from durable.envelope import NodeId
from durable.errors import InvalidSetting, LeaseLost, StorageUnavailable
from durable.recovery.singleton_locks import SingletonLocks
from durable.settings import Settings
from durable.storage import nodes
from durable.storage.connection_names import of_service
from durable.storage.database import channel, lock_url
from durable.storage.engines import OWN_PATH
from durable.storage.locks import nodes_class
from durable.storage.new_work import NewWork
from durable.storage.outages import lack_of
from durable.storage.registry import CHANGED
from durable.storage.session_limits import unlimited
from durable.storage.sql import housekeeping
from durable.storage.sql.statement import Statement
from durable.tasks.waiting import is_set_within
from durable.telemetry import log
from durable.version import __version__

if TYPE_CHECKING:
    import psycopg

    from durable.storage.answering import PsycopgConnection

_LISTEN_SECONDS = 0.2  # how soon the thread notices that it should stop
_LONGEST_LEAVING = 5.0  # seconds


class Membership:
    """Joins the nodes of this schema, stays one, and leaves.

    `lost` is set when the node is no member any more: its connection ended, its lock is gone, or it was struck off.
    """

    def __init__(
        self,
        service: str,
        settings: Settings,
        *,
        handlers: Mapping[str, str],
        wake: Callable[[NewWork], None],
        singletons: Singletons,
        registry_changed: Callable[[], None],
    ) -> None:
        self.lost = asyncio.Event()
        self.node = NodeId(0)
        self._service = service
        self._settings = settings
        self._handlers = handlers
        self._wake = wake
        self._registry_changed = registry_changed
        self._singletons = SingletonLocks(singletons, settings)
        self._loop = asyncio.get_running_loop()
        self._joined: asyncio.Future[NodeId] = self._loop.create_future()
        self._leaving = threading.Event()
        self._ended = asyncio.Event()
        self._loop_ticked = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="durable node", daemon=True)

    async def join(self) -> NodeId:
        """Register under a fresh id, take its lock, and return the id. Raises StorageUnavailable, InvalidSetting."""
        self._thread.start()
        try:
            self.node = await self._joined
        except asyncio.CancelledError:
            self._leaving.set()  # the thread strikes off what it registers now
            raise
        return self.node

    async def leave(self) -> None:
        """Strike the node off and give the lock back. Its rows must have been released before."""
        self._leaving.set()
        await is_set_within(self._ended, _LONGEST_LEAVING)

    async def tick(self) -> None:
        """Show that the event loop is alive, for as long as it is."""
        while True:
            self._loop_ticked = time.monotonic()
            await asyncio.sleep(self._settings.heartbeat_interval.total_seconds())

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            engine = create_engine("postgresql+psycopg://", creator=self._connect, poolclass=pool.NullPool)
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
                try:
                    self._be_a_node(conn)
                except BaseException:
                    conn.invalidate()  # the ROLLBACK of a lost connection fails, and would take the place of the reason
                    raise
        except BaseException as error:  # whatever ends this thread ends the membership
            self._tell(self._report_failure, error)
        finally:
            self._tell(self._ended.set)

    def _be_a_node(self, conn: Connection) -> None:
        node = self._register(conn)
        self._tell(self._report_joined, node)
        self._stay(conn, node)
        self._singletons.leave(conn)
        conn.execute(self._sql(housekeeping.REMOVE_NODE), {"node": node})

    def _connect(self) -> PsycopgConnection:
        """Connect without server settings: a pooler refuses them with an error that names no setting of durable."""
        from durable.storage.answering import PsycopgConnection

        timeout = int(self._settings.connect_timeout.total_seconds()) or 1
        url = lock_url(self._settings)
        name = of_service(self._service, "node").direct
        options = {"fallback_application_name": name} | _client_options(self._settings)
        connection = PsycopgConnection.connect(url, **{"connect_timeout": timeout, **options})  # type: ignore[arg-type]
        # A heartbeat that is not answered by then comes too late in any case.
        connection.answer_within = self._settings.heartbeat_stale.total_seconds() / 2
        return connection

    def _register(self, conn: Connection) -> NodeId:
        driver = _driver(conn)
        told, actual = driver.info.backend_pid, conn.execute(self._sql(housekeeping.READ_SERVER)).one().pid
        if told != actual:
            raise InvalidSetting(
                "lock_database_url: the connection goes through a pooler, which cannot keep a session's lock; "
                "set DURABLE_LOCK_DATABASE_URL to a direct connection"
            )
        own = unlimited(driver.info.server_version) | _server_settings(self._settings)
        values = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in own.items())
        conn.exec_driver_sql(f"SELECT {values}")
        row = conn.execute(
            self._sql(housekeeping.REGISTER_NODE),
            {
                "service": self._service,
                "description": f"{socket.gethostname()}:{os.getpid()}",
                "version": __version__,
                "capabilities": nodes.capabilities(self._handlers),
            },
        ).one()
        node = NodeId(row.node_id)
        key = {"class_id": nodes_class(self._settings.db_schema), "node": node}
        if not conn.execute(self._sql(housekeeping.LOCK_NODE), key).scalar_one():
            raise LeaseLost(f"new node {node}: the lock is held by another session")
        driver.execute(f'LISTEN "{channel(self._settings.db_schema)}"'.encode())
        return node

    def _stay(self, conn: Connection, node: NodeId) -> None:
        interval = self._settings.heartbeat_interval.total_seconds()
        due = 0.0
        while not self._leaving.is_set():
            if self._loop.is_closed():  # its agents are gone, and others must have its rows
                log.error("node %d ends: its event loop was closed before the bus was stopped", node)
                raise LeaseLost(f"node {node} was left behind: the event loop was closed")
            if time.monotonic() >= due and self._loop_is_alive():
                self._beat(conn, node)
                due = time.monotonic() + interval
            if self._loop_is_alive():
                self._singletons.look(conn, node)
            for notified in _driver(conn).notifies(timeout=_LISTEN_SECONDS, stop_after=1):
                self._hear(notified.payload)

    def _hear(self, payload: str) -> None:
        if payload == CHANGED:
            self._singletons.hasten()
            self._tell(self._registry_changed)
        else:
            self._tell(self._wake, NewWork.of(payload))

    def _beat(self, conn: Connection, node: NodeId) -> None:
        """Write the heartbeat, and see on this very session that the lock is still held."""
        if conn.execute(self._sql(housekeeping.HEARTBEAT), {"node": node}).first() is None:
            raise LeaseLost(f"node {node} was struck off: no heartbeat for too long")
        key = {"class_id": nodes_class(self._settings.db_schema), "node": node}
        if not conn.execute(self._sql(housekeeping.HOLDS_NODE_LOCK), key).scalar_one():
            raise LeaseLost(f"node {node} was struck off: the lock is lost")

    def _loop_is_alive(self) -> bool:
        longest = self._settings.handler_timeout + self._settings.heartbeat_interval  # it ticks at each heartbeat
        return time.monotonic() - self._loop_ticked < longest.total_seconds()

    def _sql(self, statement: Statement) -> Any:
        return statement.within(self._settings.db_schema)

    # ------------------------------------------------------------------ back in the event loop

    def _tell(self, function: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody is left to tell
            self._loop.call_soon_threadsafe(function, *args)

    def _report_joined(self, node: NodeId) -> None:
        if not self._joined.done():
            self._joined.set_result(node)

    def _report_failure(self, error: BaseException) -> None:
        if isinstance(error, DBAPIError):
            error = lack_of(error, self._settings.db_schema) or error
        if not self._joined.done():
            if not isinstance(error, InvalidSetting):
                unavailable = StorageUnavailable(f"cannot join the nodes: {said(error)}")
                unavailable.__cause__ = error
                error = unavailable
            self._joined.set_exception(error)
        elif not self._leaving.is_set():
            log.error("node %d is no member any more: %s", self.node, said(error))
            self.lost.set()


def said(error: BaseException) -> str:
    """The reason in one line, without the statement and its parameters."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return " ".join(str(cause).split()) or type(cause).__name__


def _server_settings(settings: Settings) -> dict[str, str]:
    """Measured: without these a stopped client or a half-open connection holds its lock for minutes."""
    timeout = f"{_milliseconds(settings.statement_timeout)}ms"
    return {
        "tcp_keepalives_idle": "5",
        "tcp_keepalives_interval": "2",
        "tcp_keepalives_count": "3",
        "tcp_user_timeout": f"{_milliseconds(settings.tcp_user_timeout)}ms",
        "client_connection_check_interval": "2s",
        "idle_in_transaction_session_timeout": timeout,
        "statement_timeout": timeout,
        "search_path": OWN_PATH,
    }


def _client_options(settings: Settings) -> dict[str, str | int]:
    return {
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": _milliseconds(settings.tcp_user_timeout),
    }


def _milliseconds(span: timedelta) -> int:
    return max(1, int(span.total_seconds() * 1_000))  # 0 means no limit


def _driver(conn: Connection) -> psycopg.Connection[Any]:
    import psycopg

    driver = conn.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    return driver
