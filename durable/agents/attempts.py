"""Attempt of a handler: its call, the messages that it sends, and the completion of its messages, in one transaction.

    session --> calls: [ handler, cascades ] for each message --> flush, completion --> COMMIT
                                                                      |
                                                   fewer rows than leases: LeaseLost, and nothing has happened

Async handlers run in the loop, sync ones in threads of their own, with their session. Errors are raised unchanged; the
settlement of the message is decided elsewhere (durable.agents.delivery). The handler's time begins when the handler is
entered: waits for a connection or a thread do not count. A bound cancels the attempt, and refuses its COMMIT: a handler
may make a result of its cancellation. A thread whose handler overran its time is stuck, and another takes its place:
see durable.agents.stuck_threads.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable.agents.context import AgentContext
from durable.agents.pace import Standing
from durable.agents.runner import Here, InLoop, InSteps, NoRoom, Run, finished, nothing
from durable.agents.stuck_threads import StuckThreads
from durable.agents.threads import Threads, last_step, run_in_thread
from durable.agents.traces import Traces
from durable.application.context import PauseRequest
from durable.application.handlers import Handler
from durable.application.incoming import Context, Incoming
from durable.application.middleware import MiddlewareStack
from durable.envelope import LeasedEnvelope, request_of
from durable.errors import LeaseLost
from durable.failpoints import failpoint
from durable.grammar import several
from durable.outbox.outbox import Outbox
from durable.outbox.sessions import Sessions
from durable.storage import answers, inbox
from durable.storage.answers import Arrived
from durable.storage.outages import lack_of
from durable.storage.outbox import store
from durable.tasks.cancelling import current_task
from durable.telemetry import log

LONGEST: Final = 10
"""Budgets of a group until it is rolled back for a message that does not end: each is run alone then."""
_SUSPICIOUS: Final = 2  # deaths; one is an accident, and what the dead node had in memory is handled at full speed
_LONG: Final = f"a message of the group took longer than {LONGEST} times group_time"


class Task(NamedTuple):
    """A message about to be handled, with the number of this attempt."""

    lease: LeasedEnvelope
    message: object
    attempt: int

    @property
    def uncounted(self) -> int:
        """Attempts that failed before this one and that the row does not count; that of a suspect counts this one."""
        return self.attempt - 1 - self.lease.attempts - int(is_suspect(self.lease))


def is_suspect(lease: LeasedEnvelope) -> bool:
    return lease.interruptions >= _SUSPICIOUS


class Group:
    """Messages that share a transaction, or a single one. Safe between threads."""

    def __init__(self, tasks: Sequence[Task], budget: float | None = None, *, is_watched: bool = False) -> None:
        """`budget`: seconds after which no other of them begins; None: all begin, unless the handler pauses itself.
        `is_watched`: none begins after one that must be the last of its transaction.
        """
        self.tasks = tasks
        self.budget = budget
        self.is_watched = is_watched
        self.begun = 0
        """The number of those whose handler was called in this attempt."""
        self.seconds: list[float] = []
        """The time of each message whose handler came to its end."""
        self.is_handling = False
        """True while one of them is handled; False before, between, and at the completion."""
        self.in_handler: Sequence[Task] = ()
        """Those whose handler was called and has not come to its end."""
        self.timeout = asyncio.Timeout(None)
        """The time of the handler."""
        self.bound = asyncio.Timeout(None)
        """The time for which those before a long one wait for their commit."""
        self.conflict: DBAPIError | None = None
        """Why the database has rolled a statement of it back, so that another transaction goes on."""
        self._traces: Traces | None = None
        self._lock = threading.Lock()

    @property
    def trace(self) -> str | None:
        """Return what one of them has left for the next, which must not follow; None: nothing, or it is not watched."""
        return None if self._traces is None else self._traces.first

    def watch(self, traces: Traces) -> None:
        self._traces = traces

    def meet_conflict(self, error: DBAPIError) -> None:
        self.conflict = error

    def end_time(self) -> None:
        """Let no bound expire any more: the attempt has its result, and only its session is to be closed."""
        self.is_handling = False
        with suppress(RuntimeError):  # it has expired, or ended
            self.timeout.reschedule(None)

    def end_watch(self) -> None:
        """Note no more traces: the attempt is about to be cancelled."""
        if self._traces is not None:
            self._traces.is_closed = True

    def refuse_overdue(self) -> None:
        """Raise TimeoutError, or LongInGroup, when a bound has expired."""
        if self.timeout.expired():
            raise TimeoutError
        if self.bound.expired():
            raise LongInGroup(_LONG)

    def begin(self, count: int = 1) -> bool:
        """Begin the next of them, or so many. False when none is left."""
        with self._lock:
            if self.begun + count > len(self.tasks):
                return False
            self.begun += count
            return True

    def cut(self) -> Sequence[Task]:
        """Take those out that have not begun, and return them. The first stays: it may wait for its connection."""
        with self._lock:
            kept = max(self.begun, 1)
            left, self.tasks = self.tasks[kept:], self.tasks[:kept]
            return left


class LateInGroup(Exception):
    """A message expired while the others of its group were handled."""


class LongInGroup(Exception):
    """A message kept those before it from their commit for too long."""


@asynccontextmanager
async def bounded(group: Group) -> AsyncIterator[None]:
    """Raise LongInGroup in the block when one of a sized group takes so long that those before it must not wait."""
    if group.budget is None:
        yield
        return
    loop = asyncio.get_running_loop()

    def end() -> None:
        if group.is_handling and group.begun > 1:  # not at the COMMIT, of which nobody would know what became
            group.end_watch()
            group.bound.reschedule(loop.time())

    timer = loop.call_later(group.budget * LONGEST, end)
    try:
        async with group.bound:
            yield
    except Exception as error:
        if group.bound.expired():
            raise LongInGroup(_LONG) from error
        raise
    finally:
        timer.cancel()


def calls(
    handler: Handler,
    tasks: Sequence[Task],
    asked: list[PauseRequest],
    session: Session | AsyncSession,
    outbox: Outbox,
) -> Iterator[Incoming]:
    """Return one call for each message, or one call for all. Messages sent in a call are caused by its message."""
    if handler.takes_list:
        cause = handler.cause_of_list([task.lease for task in tasks])
        outbox.begin_message(cause)
        contexts = [Context(task.lease, task.attempt, outbox, asked, cause) for task in tasks]
        yield Incoming([task.message for task in tasks], session, contexts, handler.name)
        return
    for task in tasks:
        cause = handler.cause(task.lease)
        outbox.begin_message(cause)
        yield Incoming(task.message, session, (Context(task.lease, task.attempt, outbox, asked, cause),), handler.name)


def arrived(leases: Sequence[LeasedEnvelope]) -> list[Arrived]:
    """Return those of the messages that answer a request, with its id."""
    named = [(request_of(lease.envelope), lease) for lease in leases]
    return [Arrived(request_id, lease) for request_id, lease in named if request_id is not None]


def tell_left_out(leases: Sequence[LeasedEnvelope], kept: Collection[UUID]) -> None:
    """Log the answers that were not kept, once for all of them."""
    left_out = [str(lease.envelope.id) for lease in leases if lease.envelope.id not in kept]
    if left_out:
        log.warning("answers dropped, because their requests have one already or were forgotten: %s", left_out)


class Entry:
    """Flag set when a handler is entered: from then on its attempt counts. Safe between threads."""

    def __init__(self, when_entered: Callable[[], None]) -> None:
        self._when_entered = when_entered
        self.last_job: Callable[[], Future[Any] | None] = lambda: None
        """The step that runs for the attempt in a thread, or ran there last."""
        self._lock = threading.Lock()
        self._is_entered = self._is_given_up = False

    def enter(self) -> None:
        """Raise NoRoom when the attempt is not waited for any more."""
        with self._lock:
            if self._is_given_up:
                raise NoRoom
            self._is_entered = True
        self._when_entered()

    def give_up(self) -> bool:
        """Let nothing enter any more. False when it was entered before."""
        with self._lock:
            self._is_given_up = True
            return not self._is_entered


class Attempts:
    """Runs one handler over messages that this node owns."""

    def __init__(
        self,
        handler: Handler,
        context: AgentContext,
        sessions: Sessions,
        *,
        onion: MiddlewareStack | None = None,
        stuck: StuckThreads | None = None,
    ) -> None:
        settings = context.settings
        self.handler = handler
        self.when_freed: Callable[[], None] = lambda: None
        """Called in the loop when a stuck thread has come back."""
        self.is_cancelled: Callable[[], bool] = lambda: False
        """Tells in the loop whether the handlers were cancelled, for their node ends."""
        self._stuck = stuck or StuckThreads()
        self._has_lost_threads = False
        self._step_seconds = settings.step_timeout.total_seconds()
        self._concurrency = handler.concurrency or settings.concurrency
        self._asked: list[PauseRequest] = []
        onion = onion or MiddlewareStack()
        self._has_middleware = onion.handles
        self._handle = onion.around_handling(handler.run if handler.is_async else self._handle_sync)
        self._sessions = sessions
        self._node = context.node
        self._schema = settings.db_schema
        self._keep_body = settings.history_bodies
        self._longest = handler.timeout or settings.handler_timeout
        self._timeout = self._longest.total_seconds()
        self._clock = context.clock
        self._connect: Callable[[Session], object] = Session.connection
        self._prepare = self._connect if handler.takes_session else nothing
        self._threads = (
            None
            if handler.is_async
            else Threads(2 * self._concurrency, name=f"durable {handler.message_type}")  # as many may be stuck
        )

    async def run(self, group: Group) -> None:
        """Handle these messages in one transaction, within the handler's timeout. Those that have not begun at
        its end are not handled.

        Raises what the handler raises, LeaseLost when another node has one of them by now, what the database says, and
        NoRoom when the handler was not entered.
        """
        loop = asyncio.get_running_loop()

        def begin() -> None:
            with suppress(RuntimeError):  # it has ended meanwhile
                group.timeout.reschedule(loop.time() + self._timeout)

        entry = Entry(begin if self._runs_in_loop else lambda: _soon(loop, begin))
        try:
            async with asyncio.timeout(self._timeout) as group.timeout, bounded(group):
                await self._run(group, entry)
        except TimeoutError as error:
            if entry.give_up():
                raise NoRoom(f"no connection or thread was free within {self._timeout:g} s") from error
            self._note_stuck(entry.last_job(), group.tasks)
            raise
        failpoint("C18")

    @property
    def stuck_threads(self) -> int:
        return len(self._stuck.of(self.handler.message_type))

    @property
    def has_threads(self) -> bool:
        """Tell whether a thread is free for another attempt, when as many threads may be stuck as may run."""
        return self._threads is None or self.stuck_threads < self._concurrency

    @property
    def has_last_threads(self) -> bool:
        """Tell whether any thread is left. The messages of a group whose thread is stuck run alone, to find the one
        that hangs; otherwise the same group would be given back and begun again for ever, without an attempt that
        counts.
        """
        return self._threads is None or self.stuck_threads < 2 * self._concurrency

    def standing(self) -> Standing | None:
        """Return the time for which every thread has been stuck, if the last one got stuck here."""
        if self.has_threads or not self._has_lost_threads:
            return None
        stuck = sorted(thread.monotonic for thread in self._stuck.of(self.handler.message_type))
        if len(stuck) < self._concurrency:  # one has come back just now
            return None
        seconds = time.monotonic() - stuck[self._concurrency - 1]
        threads = several(len(stuck), "threads", "are")
        name = f"handling {self.handler.message_type}: {threads} stuck, that is all of them, and it"
        return Standing(name, seconds, seconds / self._step_seconds)

    async def stuck_threads_end(self) -> None:
        """Wait until the threads that are stuck now have come back."""
        jobs = self._stuck.jobs(self.handler.message_type)
        await asyncio.gather(*map(asyncio.wrap_future, jobs), return_exceptions=True)

    def _note_stuck(self, job: Future[Any] | None, tasks: Sequence[Task]) -> None:
        if job is None or job.done():
            return
        self._has_lost_threads = True
        loop, messages = asyncio.get_running_loop(), [task.lease.envelope.id for task in tasks]
        log.error(
            "handler %s overran its timeout, %g s, and its thread is stuck in %s: another thread takes its place",
            self.handler.name,
            self._timeout,
            ", ".join(map(str, messages)),
        )
        self._stuck.add(self.handler.message_type, job, messages, lambda: _soon(loop, self.when_freed))

    def take_asked(self) -> list[PauseRequest]:
        """Return the pauses that the handler has asked for since the last call."""
        asked = self._asked[:]
        del self._asked[: len(asked)]
        return asked

    async def finish(self) -> None:
        """Wait for the threads: attempts that timed out go on in them."""
        if self._threads is not None:
            await self._threads.finish()

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    # ------------------------------------------------------------------ the three ways

    @property
    def _runs_in_loop(self) -> bool:
        return self._threads is None or self._has_middleware

    async def _run(self, group: Group, entry: Entry) -> None:
        """An async handler in the loop; a sync one in a thread, but for its middleware, which stays in the loop."""
        is_ended = partial(self._is_ended, group)
        attempt = Run(
            self._sessions,
            partial(self._calls, group),
            self._handle,
            partial(self._complete_unless_cancelled, group),
            prepare=self._prepare,
            connect=self._connect,
            entered=entry.enter,
            watch=group.watch if group.is_watched else None,
            met_conflict=group.meet_conflict,
            is_ended=is_ended,
        )
        if self._threads is None:
            await attempt.at(InLoop(self._sessions.open(self._longest), group.end_time))
        elif self._has_middleware:
            session = self._sessions.open_sync(self._longest)
            entry.last_job = lambda: last_step(session)
            await attempt.at(InSteps(session, self._threads, is_ended))
        else:
            job = self._threads.submit(lambda: finished(attempt.at(Here(self._sessions.open_sync(self._longest)))))
            entry.last_job = lambda: job
            await asyncio.wrap_future(job)
        failpoint("C17")

    async def _handle_sync(self, call: Incoming) -> object:
        """Run a sync handler in the thread of the attempt; within middleware, in a thread of its own."""
        if not self._has_middleware or self._threads is None:
            return self.handler.run_sync(call)
        assert isinstance(call.session, Session)
        return await run_in_thread(self._threads, call.session, self.handler.run_sync, call)

    def _calls(self, group: Group, session: Session | AsyncSession, outbox: Outbox) -> Iterator[Incoming]:
        failpoint("C15")
        tasks = group.tasks
        began = before = time.perf_counter()
        for number, call in enumerate(calls(self.handler, tasks, self._asked, session, outbox)):
            if number and tasks[number].lease.envelope.is_late(self._clock.now()):
                if group.budget is not None:
                    return
                raise LateInGroup
            if not group.begin(len(tasks) if self.handler.takes_list else 1):
                return
            group.is_handling = True
            group.in_handler = tasks if self.handler.takes_list else (tasks[number],)
            yield call
            group.is_handling = False
            group.in_handler = ()
            self._refuse_cancelled(group)
            now = time.perf_counter()
            group.seconds.append(now - before)
            before = now
            if self._asked or group.trace or (group.budget is not None and now - began >= group.budget):
                return

    def _complete_unless_cancelled(self, group: Group, session: Session, outbox: Outbox) -> None:
        self._complete(group.tasks[: group.begun], session, outbox)
        self._refuse_cancelled(group)

    def _is_ended(self, group: Group) -> bool:
        """Tell whether this cancels the attempt, by its time or with its node."""
        return group.timeout.expired() or group.bound.expired() or self.is_cancelled()

    def _refuse_cancelled(self, group: Group) -> None:
        group.refuse_overdue()
        if current_task() is not None and self.is_cancelled():
            raise asyncio.CancelledError

    def _complete(self, tasks: Sequence[Task], session: Session, outbox: Outbox) -> None:
        """The fence: the rows are finished in this transaction, or it does not commit."""
        session.flush()
        owned = [task.lease for task in tasks]
        try:
            self._write_down(owned, session.connection(), sum(task.uncounted for task in tasks[:1]))
        except DBAPIError as error:
            if lack := lack_of(error, self._schema):
                raise lack from error
            raise
        outbox.allow_last_commit()
        failpoint("C16")

    def end_nothing(self, conn: Connection, schema: str) -> None:
        """Do for no message what the end of an attempt does: the database refuses it for as long as it refuses that."""
        self._write_down([], conn)
        inbox.try_to_finish(conn, schema)
        store(conn, schema, [])

    def _write_down(self, owned: Sequence[LeasedEnvelope], conn: Connection, counted: int = 0) -> None:
        if self.handler.keeps_answers:
            kept = answers.keep(conn, self._schema, arrived(owned))
            tell_left_out(owned, kept)
        met = inbox.finish_handled(conn, self._schema, self._node, owned, counted=counted, keep_body=self._keep_body)
        if met != len(owned):
            raise LeaseLost


def _soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call a function in the loop, unless the loop is closed: then no caller waits for the thread."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
