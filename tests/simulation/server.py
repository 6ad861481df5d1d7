"""A database server of the simulation: its connections, and what becomes of statements and COMMITs on their way.

    statement --latency--> done, or begun again behind the lock of another transaction
    COMMIT    --latency--> applied --latency--> answered
                  |           |
                  |           +--> the answer is lost: the client sees a broken connection
                  +--> the connection breaks before that: rolled back

A COMMIT that was sent is carried out also when its client has died or stands. The locks of a client that is gone are
kept until the server notices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from random import Random
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.util.concurrency import await_only

from tests.simulation.loop import VirtualLoop
from tests.simulation.sql import Known, known
from tests.simulation.tables import Store, Transaction, Waits

if TYPE_CHECKING:
    from tests.simulation.process import Process

EPOCH: Final = datetime(2026, 3, 1, 11, 59, 50, tzinfo=UTC)
"""Ten seconds before a schedule is due."""
_LONGEST_WAIT: Final = 15.0  # seconds behind a lock: statement_timeout
_SILENCE: Final = 20.0  # seconds until a client gives up an answer that does not come


class ServerError(Exception):
    """An error that the server tells, or the end of the connection."""

    def __init__(self, sqlstate: str, text: str, *, is_lost: bool = False) -> None:
        super().__init__(text)
        self.sqlstate = sqlstate
        self.is_lost = is_lost


class CommitFault(Enum):
    """What becomes of a COMMIT."""

    LOST = "the connection breaks before it"
    UNANSWERED = "applied, and the connection breaks before the answer"
    SILENT = "applied, and no answer comes"


class Server:
    """The database of one service."""

    def __init__(self, name: str, loop: VirtualLoop, rng: Random) -> None:
        self.name = name
        self.loop = loop
        self.rng = rng
        self.is_up = True
        self.clock_error = 0.0
        """Seconds by which the clock is ahead."""
        self.store = Store(self.now)
        self.connections: dict[int, Connection] = {}
        self.listening: dict[int, Callable[[str], None]] = {}
        """What a NOTIFY calls, by node."""
        self.lost: dict[int, Callable[[str], None]] = {}
        """What the end of a node's own connection calls."""
        self.slowness = 1.0
        self.break_share = 0.0
        """Share of the statements at which the connection breaks."""
        self.commit_fault: CommitFault | None = None
        self.commit_share = 0.0
        """Share of the COMMITs that meet this fault."""
        self._numbers = 0

    def now(self) -> datetime:
        return EPOCH + timedelta(seconds=self.loop.time() + self.clock_error)

    def latency(self) -> float:
        return self.rng.uniform(0.0002, 0.002) * self.slowness

    async def connect(self, process: Process) -> Connection:
        process.at("connect")
        await asyncio.sleep(self.latency())
        if not self.is_up:
            raise ServerError("57P03", "the database system is starting up", is_lost=True)
        return self.open(process)

    def open(self, process: Process) -> Connection:
        self._numbers += 1
        connection = self.connections[self._numbers] = Connection(self, process, self._numbers)
        return connection

    # ------------------------------------------------------------------ faults

    @property
    def is_troubled(self) -> bool:
        return not self.is_up or self.slowness > 1 or bool(self.break_share or self.commit_share)

    def fault_of_commit(self) -> CommitFault | None:
        return self.commit_fault if self.commit_share and self.rng.random() < self.commit_share else None

    def stop(self) -> None:
        """Break every connection, and free every lock."""
        self.is_up = False
        for connection in list(self.connections.values()):
            connection.kill()
        for tell in list(self.lost.values()):
            tell("the server went away")
        self.store.node_locks.clear()

    def start(self) -> None:
        if not self.is_up:
            self.is_up = True
            self.store.started_at = self.now()

    def drop(self, process: Process, after: float) -> None:
        """Notice after this time that a process is gone."""
        for connection in list(self.connections.values()):
            if connection.process is process:
                self.loop.call_later(after, connection.kill, context=process.outside)

    # ------------------------------------------------------------------ nodes

    def join(self, node: int, woken: Callable[[str], None], lost: Callable[[str], None]) -> None:
        self.store.node_locks.add(node)
        self.listening[node] = woken
        self.lost[node] = lost

    def leave(self, node: int) -> None:
        self.store.node_locks.discard(node)
        self.listening.pop(node, None)
        self.lost.pop(node, None)

    def notify(self, payload: str) -> None:
        for woken in list(self.listening.values()):
            woken(payload)


class Connection:
    """One connection, with the transaction that it is in."""

    def __init__(self, server: Server, process: Process, number: int) -> None:
        self.server = server
        self.process = process
        self.number = number
        self.is_dead = False
        self.is_committing = False
        self.last = ""
        """The last statement."""
        self.is_session = False
        """True for a unit of work or a handler."""
        self.transaction: Transaction | None = None

    def execute(self, sql: str, params: Mapping[str, Any]) -> tuple[Known, Any]:
        """Run a statement; within a greenlet, for it may wait."""
        statement = known(sql)
        self.last = statement.name
        self.process.at(statement.name)
        server = self.server
        if server.slowness > 1 or server.rng.random() < 0.1:
            await_only(asyncio.sleep(server.latency()))
        if server.break_share and server.rng.random() < server.break_share:
            self.kill()
        while True:
            transaction = self._begun()
            mark = transaction.mark()
            try:
                return statement, statement.work(transaction, params)
            except Waits as wait:
                transaction.back_to(mark)
                await_only(self._wait_for(transaction, wait.holder))

    def _begun(self) -> Transaction:
        if self.is_dead:
            raise ServerError("57P01", "the connection is closed", is_lost=True)
        if self.transaction is None:
            self.transaction = Transaction(self.server.store)
        elif self.transaction.is_over:
            raise ServerError("25P02", "the transaction is aborted")
        return self.transaction

    async def _wait_for(self, own: Transaction, holder: Transaction) -> None:
        other: Transaction | None = holder
        while other is not None:
            if other is own:
                own.rollback()
                raise ServerError("40P01", "deadlock detected")
            other = other.waits_for
        own.waits_for = holder
        try:
            async with asyncio.timeout(_LONGEST_WAIT):
                await holder.ended()
        except TimeoutError:
            own.rollback()
            raise ServerError("57014", "canceling statement due to statement timeout") from None
        finally:
            own.waits_for = None

    # ------------------------------------------------------------------ its ends

    async def commit(self) -> None:
        transaction = self.transaction
        if transaction is None or (transaction.is_read_only and not self.is_dead):
            self.rollback()
            return
        self._begun()
        self.process.at(f"commit after {self.last}")
        self.is_committing = True
        loop = self.server.loop
        answer: asyncio.Future[None] = loop.create_future()
        loop.call_later(self.server.latency(), self._arrive, answer, context=self.process.outside)
        await answer
        self.process.at(f"committed {self.last}")

    def _arrive(self, answer: asyncio.Future[None]) -> None:
        """The COMMIT reaches the server."""
        self.is_committing = False
        fault = None if self.is_dead else self.server.fault_of_commit()
        if fault is CommitFault.LOST:
            self.kill()
        transaction = self.transaction
        if self.is_dead or transaction is None:
            self._answer(answer, ServerError("57P01", "the connection broke at COMMIT", is_lost=True))
            return
        notifies, payload = transaction.notifies, transaction.payload
        transaction.commit()
        self.transaction = None
        if notifies:
            self.server.notify(payload)
        if fault is not None:
            self.kill()
            error = ServerError("08006", "the connection broke, and COMMIT had no answer", is_lost=True)
            self._answer(answer, error, _SILENCE if fault is CommitFault.SILENT else 0.0)
        else:
            self._answer(answer, None)

    def _answer(self, answer: asyncio.Future[None], error: ServerError | None, silence: float = 0.0) -> None:
        def tell() -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)

        delay = silence or self.server.latency()
        self.server.loop.call_later(delay, tell, context=self.process.outside)

    def rollback(self) -> None:
        if self.transaction is not None and not self.is_committing:
            self.transaction.rollback()
            self.transaction = None

    def close(self) -> None:
        """Close it; a COMMIT that is on its way arrives all the same."""
        self.rollback()
        self.server.connections.pop(self.number, None)

    def kill(self) -> None:
        """Break it: its transaction is rolled back."""
        self.is_dead = True
        if self.transaction is not None:
            self.transaction.rollback()
        self.server.connections.pop(self.number, None)
