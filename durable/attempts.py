"""One attempt of a handler: it, what it sends, and the completion of its messages, in one transaction.

    session --> calls: [ handler, cascades ] for each message --> flush, completion --> COMMIT
                                                                      |
                                                   fewer rows than leases: LeaseLost, and nothing has happened

Async handlers run in the loop, sync ones in threads of their own, with their session. What goes wrong is raised as it
is: what becomes of the message then is not decided here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable.circuit_control import PauseRequest
from durable.envelope import Leased, NodeId
from durable.errors import LeaseLost
from durable.failpoints import failpoint
from durable.handlers import Context, Handler, Incoming
from durable.middleware import Onion
from durable.outbox import Outbox
from durable.sessions import Sessions
from durable.settings import Settings
from durable.stepping import closing, step
from durable.storage import inbox


class Task(NamedTuple):
    """A message about to be handled: decoded, with the number of this attempt."""

    lease: Leased
    message: object
    attempt: int


class Attempts:
    """Runs one handler over messages that this node owns."""

    def __init__(
        self, handler: Handler, *, sessions: Sessions, node: NodeId, settings: Settings, onion: Onion | None = None
    ) -> None:
        self.handler = handler
        self._asked: list[PauseRequest] = []
        self._name = handler.name
        onion = onion or Onion()
        self._has_middleware = onion.handles
        self._handle = onion.around_handling(handler.run if handler.is_async else self._handle_in_thread)
        self._sessions = sessions
        self._node = node
        self._schema = settings.db_schema
        self._keep_body = settings.history_bodies
        self._timeout = (handler.timeout or settings.handler_timeout).total_seconds()
        self._threads = (
            None
            if handler.is_async
            else ThreadPoolExecutor(
                handler.concurrency or settings.concurrency, thread_name_prefix=f"durable {handler.message_type}"
            )
        )

    async def run(self, tasks: Sequence[Task]) -> None:
        """Handle these messages in one transaction, within the handler's timeout.

        Raises what the handler raises, LeaseLost when another node has one of them by now, and what the database says.
        """
        try:
            async with asyncio.timeout(self._timeout):
                if self._threads is None:
                    await self._run_async(tasks)
                elif self._has_middleware:
                    await self._run_in_steps(tasks, self._threads)
                else:
                    await asyncio.get_running_loop().run_in_executor(self._threads, self._run_in_thread, tasks)
        except asyncio.CancelledError as error:
            if (worker := asyncio.current_task()) and worker.cancelling():
                raise
            # What the handler awaited was cancelled, not this worker, which would end for good.
            raise RuntimeError("something that the handler awaited was cancelled") from error
        failpoint("C18")

    def take_asked(self) -> list[PauseRequest]:
        """What the handler has asked to be stopped since this was called last."""
        asked = self._asked[:]
        del self._asked[: len(asked)]
        return asked

    async def finish(self) -> None:
        """Wait for the threads: attempts that timed out go on in them."""
        if self._threads is not None:
            await asyncio.to_thread(self._threads.shutdown)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    async def _run_async(self, tasks: Sequence[Task]) -> None:
        async with self._sessions.open() as session:
            outbox = self._sessions.outbox(session)
            outbox.commits_itself = False
            with self._sessions.scope.entered(lambda: outbox):
                for call in self._calls(tasks, session, outbox):
                    await self._handle(call)
            await session.run_sync(self._complete, outbox, tasks)
            await session.commit()
            outbox.close()  # what a task that the handler left behind sends now would be in no transaction
        failpoint("C17")

    def _run_in_thread(self, tasks: Sequence[Task]) -> None:
        with self._sessions.open_sync() as session:
            outbox = self._sessions.outbox(session)
            outbox.commits_itself = False
            with self._sessions.scope.entered(lambda: outbox):
                for call in self._calls(tasks, session, outbox):
                    self.handler.run_sync(call)
            self._complete_and_commit(session, outbox, tasks)
        failpoint("C17")

    async def _run_in_steps(self, tasks: Sequence[Task], threads: ThreadPoolExecutor) -> None:
        """A sync handler with middleware, which stays in the loop: only the handler and the session's I/O are in
        threads."""
        async with closing(threads, self._sessions.open_sync()) as session:
            outbox = self._sessions.outbox(session)
            outbox.commits_itself = False
            with self._sessions.scope.entered(lambda: outbox):
                for call in self._calls(tasks, session, outbox):
                    await self._handle(call)
            await step(threads, session, self._complete_and_commit, session, outbox, tasks)
        failpoint("C17")

    async def _handle_in_thread(self, call: Incoming) -> object:
        assert self._threads is not None
        assert isinstance(call.session, Session)
        return await step(self._threads, call.session, self.handler.run_sync, call)

    def _complete_and_commit(self, session: Session, outbox: Outbox, tasks: Sequence[Task]) -> None:
        self._complete(session, outbox, tasks)
        session.commit()
        outbox.close()

    def _calls(self, tasks: Sequence[Task], session: Session | AsyncSession, outbox: Outbox) -> Iterator[Incoming]:
        """One call for each message, or one for all. What a call sends is caused by its message."""
        failpoint("C15")
        if self.handler.takes_list:
            seen = tasks if self._has_middleware else tasks[:1]  # such a handler itself is given none
            contexts = [Context(task.lease, task.attempt, outbox, self._asked) for task in seen]
            yield Incoming([task.message for task in tasks], session, contexts, self._name)
            return
        for task in tasks:
            outbox.cause = self.handler.cause(task.lease.envelope)
            yield Incoming(task.message, session, (Context(task.lease, task.attempt, outbox, self._asked),), self._name)

    def _complete(self, session: Session, outbox: Outbox, tasks: Sequence[Task]) -> None:
        """The fence: the rows are finished in this transaction, or it does not commit."""
        session.flush()
        owned = [task.lease for task in tasks]
        finished = inbox.finish_handled(
            session.connection(), self._schema, self._node, owned, keep_body=self._keep_body
        )
        if finished != len(owned):
            raise LeaseLost
        outbox.commits_itself = True
        failpoint("C16")
