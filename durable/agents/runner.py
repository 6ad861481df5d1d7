"""The one way in which handlers are run: in one transaction, which their messages are completed in.

    open --> prepare --> entered --> call, call, ... --> flush, completion --> end: COMMIT
             a connection            flush and fence     the fence
                                     between

The steps are the same for each place where the work of a session is done: InLoop (an AsyncSession), Here (a Session, in
the present thread) and InSteps (a Session, each piece of its work in a thread, awaited in the loop). Errors are raised
unchanged, except for two cases without a fault of the handler: NoRoom and Outage.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable.agents.driving import driven
from durable.agents.fence import Fence, forget_fence
from durable.agents.threads import closing_in_thread, run_in_thread
from durable.agents.traces import Traces
from durable.application.incoming import Incoming
from durable.errors import NoUnitOfWork, SchemaMismatch, StorageUnavailable, TransactionEnded, text_of, told_by
from durable.outbox.outbox import Outbox
from durable.outbox.sessions import Sessions
from durable.outbox.transactions import forget
from durable.outbox.unit_of_work import close, close_sync
from durable.storage.outages import (
    described,
    is_outage,
    is_outage_itself,
    is_shortage,
    outage_in,
    translated,
    unusable,
)
from durable.tasks.cancelling import current_task, is_cancelled
from durable.tasks.enclosed import Enclosed

T = TypeVar("T")


class NoRoom(StorageUnavailable):
    """No connection or no thread was free for the attempt: nothing of it is stored."""


class Outage(StorageUnavailable):
    """The database went away before the attempt was committed; whether it is committed is unknown."""


class Shortage(Outage):
    """The database lacked room, memory or connections for the end of the attempt."""


class Place(Protocol):
    """Place where the work of one session is done."""

    @property
    def session(self) -> Session | AsyncSession: ...
    @property
    def sync_session(self) -> Session: ...
    def closing(self) -> AbstractAsyncContextManager[object]:
        """Close the session at the end of the block."""
        ...

    async def do(self, work: Callable[[Session], T]) -> T:
        """Run work of the session that may wait for the database."""
        ...

    async def commit(self) -> None: ...


class InLoop:
    """An AsyncSession."""

    def __init__(self, session: AsyncSession, closes: Callable[[], None] = lambda: None) -> None:
        """Call `closes` before the session is closed, which may wait for a statement of another task."""
        self.session = session
        self.sync_session = session.sync_session
        self._closes = closes

    @asynccontextmanager
    async def closing(self) -> AsyncIterator[AsyncSession]:
        try:
            yield self.session
        finally:
            self._closes()
            with suppress(asyncio.CancelledError):  # one that the handler left behind must not replace its error
                await close(self.session)
            _forget(self.sync_session)

    async def do(self, work: Callable[[Session], T]) -> T:
        return await self.session.run_sync(work)

    async def commit(self) -> None:
        await self.session.commit()


class Here:
    """A Session in the thread that this runs in; nothing is waited for, so that finished() can run all of it."""

    def __init__(self, session: Session) -> None:
        self.session = self.sync_session = session

    @asynccontextmanager
    async def closing(self) -> AsyncIterator[Session]:
        try:
            yield self.session
        finally:
            close_sync(self.session)
            _forget(self.session)

    async def do(self, work: Callable[[Session], T]) -> T:
        return work(self.session)

    async def commit(self) -> None:
        self.session.commit()


class InSteps:
    """A Session whose work is done in these threads, one step at a time."""

    def __init__(
        self, session: Session, threads: ThreadPoolExecutor, is_ended: Callable[[], bool] = is_cancelled
    ) -> None:
        """Close the session without a wait once the attempt `is_ended`."""
        self.session = self.sync_session = session
        self._threads = threads
        self._is_ended = is_ended

    @asynccontextmanager
    async def closing(self) -> AsyncIterator[Session]:
        try:
            async with closing_in_thread(self._threads, self.session, self._is_ended):
                yield self.session
        finally:
            if not self._is_ended():  # else a thread may still be in it
                _forget(self.session)

    async def do(self, work: Callable[[Session], T]) -> T:
        return await run_in_thread(self._threads, self.session, work, self.session)

    async def commit(self) -> None:
        await run_in_thread(self._threads, self.session, self.session.commit)


def _forget(session: Session) -> None:
    """Let go of a session whose attempt is over. Of one that a thread may still be in, its fence and outbox stay."""
    forget(session)
    forget_fence(session)


async def commit(place: Place) -> None:
    """The end of an attempt that counts."""
    await place.commit()


def nothing(session: Session) -> None:
    """The preparation of a handler that needs no connection before it is entered."""


@dataclass(frozen=True, slots=True)
class Run:
    """Calls of a handler in one transaction, and how it ends."""

    sessions: Sessions
    calls: Callable[[Session | AsyncSession, Outbox], Iterator[Incoming]]
    """One call for each message, or one for all; each is made just before it is handled."""
    handle: Callable[[Incoming], Awaitable[object]]
    complete: Callable[[Session, Outbox], None]
    """Flushes the session and finishes the messages, in the transaction. StorageUnavailable from it is an Outage."""
    end: Callable[[Place], Awaitable[None]] = commit
    prepare: Callable[[Session], object] = nothing
    connect: Callable[[Session], object] = nothing
    """Opens the connection that the handler has not needed, before the flush and the completion."""
    entered: Callable[[], None] = lambda: None
    """Called just before the first call."""
    watch: Callable[[Traces], None] | None = None
    """Called with the traces at the beginning; then these are complete when a message has ended."""
    met_conflict: Callable[[DBAPIError], None] = lambda error: None
    """Called where a call failed after the database had rolled a statement of the session back so that another
    transaction goes on, whatever is raised in its place."""

    is_ended: Callable[[], bool] = is_cancelled
    """Tells whether the attempt is to end: its time is up, or its node ends. Any other cancellation of its task is the
    handler's own."""

    async def at(self, place: Place) -> None:
        """Run the attempt. Raises NoRoom, Outage, TransactionEnded, and errors of the handler and the completion."""
        async with place.closing():
            outbox = self.sessions.outbox(place.session)
            outbox.commit_allowed = False
            fence = Fence(place.sync_session)
            if self.watch:
                fence.traces.mark(place.session)
                self.watch(fence.traces)
            await self._prepare(place)
            self.entered()
            with self.sessions.scope.entered(lambda: outbox):
                try:
                    await self._call(place, outbox, fence)
                except BaseException as error:
                    if self._is_asked_for(error):
                        raise
                    if fence.has_lost_connection or fence.outage_behind(error):  # whatever is raised in its place
                        raise _outage(error, fence) from error
                    if conflict := fence.conflict_behind(error):
                        self.met_conflict(conflict)
                    told = told_by(error)
                    if isinstance(told, NoUnitOfWork) and fence.has_failed:  # no mistake: the next one has a session
                        raise TransactionEnded from error
                    raise
                await self._finish(place, outbox, fence)  # listeners of its flush may send, too

    async def _prepare(self, place: Place) -> None:
        try:
            with translated():
                await place.do(self.prepare)
        except StorageUnavailable as error:
            raise NoRoom(text_of(error)) from error

    def _connect(self, session: Session, fence: Fence) -> None:
        if fence.is_connected:
            return
        try:
            self.connect(session)
        except PoolTimeout as error:
            if fence.is_connected:  # a listener has waited, for another pool
                raise
            raise NoRoom(text_of(error)) from error

    async def _call(self, place: Place, outbox: Outbox, fence: Fence) -> None:
        for number, call in enumerate(self.calls(place.session, outbox)):
            if number:
                place.sync_session.expunge_all()  # each message reads its objects anew, as in a session of its own
            fence.begin_message()
            try:
                variables = outbox.variables()  # inherited by its tasks: what they send is caused by the message
                await driven(variables, Enclosed(variables.run(self.handle, call)), fence.traces.when_waiting)
            except GeneratorExit as error:  # to what awaits this, the coroutine would seem to be closed
                raise RuntimeError("the handler raised GeneratorExit") from error
            finally:
                await self._forget_cancellations()
            await self._end_message(place, fence)
            if self.watch:
                fence.traces.compare()

    async def _end_message(self, place: Place, fence: Fence) -> None:
        """Flush and release what a message has left: the next one must not undo it."""

        def flush(session: Session) -> None:
            self._connect(session, fence)
            Session.flush(session)  # a stand-in of a test has no changes

        if _has_changes(place.sync_session) and not fence.has_failed:
            await place.do(flush)
        if fence.is_disturbed:
            await place.do(lambda _: fence.check())

    async def _finish(self, place: Place, outbox: Outbox, fence: Fence) -> None:
        def complete(session: Session) -> None:
            fence.check()
            self._connect(session, fence)
            self.complete(session, outbox)
            fence.check()  # listeners of the flush are the application's, too
            fence.is_complete = True

        try:
            await place.do(complete)
            await self.end(place)
            outbox.close()  # what a task that the handler left behind sends now would be in no transaction
        except BaseException as error:
            if self._is_asked_for(error):
                raise
            if isinstance(error, NoRoom):
                raise
            if conflict := fence.conflict_behind(error):
                self.met_conflict(conflict)
            is_lost = fence.outage_behind(error) is not None or (
                fence.has_lost_connection and (_is_consequence(error) or is_outage(error))
            )
            if is_lost or isinstance(error, StorageUnavailable | SchemaMismatch) or is_outage_itself(error):
                raise _outage(error, fence) from error
            raise

    def _is_asked_for(self, error: BaseException) -> bool:
        """Tell whether the agent ends the attempt; a handler may raise the same by itself."""
        return isinstance(error, GeneratorExit) or (isinstance(error, asyncio.CancelledError) and self.is_ended())

    async def _forget_cancellations(self) -> None:
        """Forget what the handler has left behind in its own task: the end of the attempt must not meet it."""
        task = current_task()
        if task is None or not task.cancelling() or self.is_ended():
            return
        while task.cancelling():
            task.uncancel()
        with suppress(asyncio.CancelledError):  # up to Python 3.12, one that was not raised yet is raised all the same
            await asyncio.sleep(0)


def _outage(error: BaseException, fence: Fence) -> Outage:
    """Make the error of an attempt that the database is the cause of. The handler may have told it in words of its own,
    which may hold data, or have swallowed it.
    """
    met = fence.outage_behind(error)
    kind = Shortage if any(is_shortage(each) for each in (met, error) if each is not None) else Outage
    cause = error if isinstance(error, SchemaMismatch) else outage_in(error)  # tables that are missing for a while
    if isinstance(cause, StorageUnavailable | SchemaMismatch):
        return kind(text_of(cause))
    cause = cause or met
    reason = described(cause) if cause is not None else fence.loss
    return kind(unusable(reason or type(error).__name__))


def _has_changes(session: Session) -> bool:
    return bool(session.new or session.dirty or session.deleted)


def _is_consequence(error: BaseException) -> bool:
    """Tell whether an error says only that the session cannot be used any more, or that the handler has left a
    cancellation behind. The handler may have swallowed the cause.
    """
    return isinstance(error, NoUnitOfWork | TransactionEnded | InvalidRequestError | asyncio.CancelledError)


def finished(run: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits: see Here."""
    try:
        run.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    run.close()
    raise RuntimeError("the work of a thread has waited for an event loop")
