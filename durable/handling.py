"""The handling agent: one for each handler, between the inbox and the application.

    stored / claimed --> buffer --> worker --> attempt: [ handler, its sends, its completion ] one transaction
                                                  |
                                failure: the policy decides (durable.retry), after the rollback
                                lease lost: rolled back and forgotten, another node has it

The completion deletes the inbox row where owner and epoch are still this node's; when it meets no row the whole
transaction rolls back, so a node that was paused and declared dead leaves no second effect. With `group=N` up to N
waiting messages share one transaction; when one of them fails it rolls back, and each is run alone.

A message whose nodes died again and again is a suspect. Its attempts are counted before they run, and a node runs one
suspect at a time: so the one that kills its process is found and comes to its end, and its neighbours are handled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable import codec
from durable.batching import Buffer
from durable.clock import Clock
from durable.composing import Cause
from durable.envelope import ANY_NODE, Envelope, Lease, Leased, NodeId
from durable.errors import InvalidMessage, LeaseLost
from durable.failpoints import failpoint
from durable.handlers import Call, Context, Handler
from durable.retry import DeadLetter, HandBack, Pause, Policy, RunAgain, RunLater
from durable.routing import LOCAL
from durable.sessions import Sessions
from durable.settings import Settings
from durable.storage import circuits, inbox, leases
from durable.storage.circuits import Kind
from durable.storage.database import Database
from durable.storage.rows import KEPT_ATTEMPTS, Failure, Letter
from durable.storage.statements import INCOMING
from durable.telemetry import Counters, Event, log
from durable.unit_of_work import Outbox

_SUSPICIOUS = 2  # deaths; one is an accident, and what the dead node had in memory is handled at full speed


class Task(NamedTuple):
    """A message about to be handled: decoded, with the number of this attempt."""

    lease: Leased
    message: object
    attempt: int


class HandlingAgent:
    """Runs one handler over the messages of its type that this node owns."""

    def __init__(
        self,
        handler: Handler,
        *,
        policy: Policy,
        database: Database,
        sessions: Sessions,
        node: NodeId,
        settings: Settings,
        clock: Clock,
        counters: Counters,
        has_room: Callable[[], None],
        suspects: asyncio.Lock | None = None,
    ) -> None:
        self.handler = handler
        self._policy = policy
        self.buffer: Buffer[Leased] = Buffer(settings.buffer_size, settings.buffer_bytes)
        self.wants_more = False
        self._database = database
        self._sessions = sessions
        self._node = node
        self._settings = settings
        self._clock = clock
        self._counters = counters
        self._has_room = has_room
        self._suspects = suspects or asyncio.Lock()
        self._working: set[Lease] = set()
        self._changed = asyncio.Event()
        self._stopping = False
        self.paused = False
        self._concurrency = handler.concurrency or settings.concurrency
        self._timeout = (handler.timeout or settings.handler_timeout).total_seconds()
        self._threads = (
            None
            if handler.is_async
            else ThreadPoolExecutor(self._concurrency, thread_name_prefix=f"durable {handler.message_type}")
        )

    # ------------------------------------------------------------------ what others tell it

    def reserve(self, envelope: Envelope) -> NodeId:
        """Keep room for an envelope that is about to be stored, or leave it to any node. From any thread."""
        return self._node if not (self._stopping or self.paused) and self.buffer.reserve([envelope]) else ANY_NODE

    def accept(self, claimed: Sequence[Leased]) -> None:
        """Handle these: they are committed, owned by this node, and have room."""
        self.buffer.put(claimed)
        self._changed.set()

    def observe_circuit(self, is_open: bool) -> None:
        """Follow what `circuits` says: while it is open nothing new is begun, and what waits goes back to any node."""
        if is_open != self.paused:
            log.warning("%s is %s", self.handler.message_type, "paused" if is_open else "resumed")
            self.paused = is_open
            self._changed.set()
            if not is_open:
                self._has_room()

    def stop(self) -> None:
        """Finish what is being handled, take nothing new, then end run()."""
        self._stopping = True
        self._changed.set()

    def held(self) -> set[Lease]:
        return {lease.key for lease in self.buffer.waiting()} | self._working

    # ------------------------------------------------------------------ its workers

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as workers:
                for number in range(self._concurrency):
                    workers.create_task(self._work(), name=f"handle {self.handler.message_type} {number}")
            if self._threads is not None:
                await asyncio.to_thread(self._threads.shutdown)  # attempts that timed out go on in their threads
        finally:
            if self._threads is not None:
                self._threads.shutdown(wait=False)

    async def _work(self) -> None:
        while not self._stopping:
            if self.paused:
                await self._stay_paused()
            elif taken := self.buffer.take(self.handler.group, self._settings.batch_bytes):
                await self._handle(taken)
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _stay_paused(self) -> None:
        """Hold nothing, until something changes."""
        self._changed.clear()
        waiting = self.buffer.take(self._settings.buffer_size, self._settings.buffer_bytes)
        if waiting:
            await self._database.insist(leases.release, INCOMING, self._node, [lease.key for lease in waiting])
            self.buffer.done(waiting)
        else:
            await self._changed.wait()

    async def _handle(self, taken: Sequence[Leased]) -> None:
        failpoint("C14")
        self._working.update(lease.key for lease in taken)
        try:
            sound = [lease for lease in taken if not _is_suspect(lease)]
            tasks = [task for lease in sound if (task := await self._prepare(lease)) is not None]
            if len(tasks) < 2 or not await self._succeeds_together(tasks):
                for task in tasks:
                    await self._handle_alone(task)
            for lease in taken:
                if _is_suspect(lease):
                    await self._handle_suspect(lease)
        except Exception:
            # Not the handler's failure, which _handle_alone settles, but ours. The rows stay owned, and are released
            # as forgotten, so another attempt follows.
            log.exception("handling of %s broke off", [str(lease.envelope.id) for lease in taken])
        finally:
            self._working.difference_update(lease.key for lease in taken)
            self.buffer.done(taken)
            if self.wants_more and self.buffer.room >= min(self._settings.batch_size, self._settings.buffer_size):
                self.wants_more = False
                self._has_room()

    async def _prepare(self, lease: Leased) -> Task | None:
        """The message, unless it has expired, cannot be decoded, or has killed too many processes."""
        envelope, attempt = lease.envelope, lease.attempts + 1
        if envelope.deliver_by is not None and envelope.deliver_by < self._clock.now() and await self._expired(lease):
            return None
        if _is_suspect(lease):
            counted = await self._database.insist(inbox.begin_suspect_attempt, self._node, lease)
            if counted is None:
                return None
            attempt = counted
            if attempt > self._policy.max_attempts:
                reason = f"its node died {lease.interruptions} times while it was being handled"
                await self._dead_letter(lease, Letter.because(reason, "killed its node"), counted=0)
                return None
        try:
            return Task(lease, codec.decode(envelope.body, self.handler.cls, envelope.content_type), attempt)
        except InvalidMessage as error:
            await self._dead_letter(lease, Letter.from_error(error), failures=[self._failure(error, attempt)])
            return None

    async def _succeeds_together(self, tasks: Sequence[Task]) -> bool:
        """Handle them in one transaction. False when it rolled back."""
        try:
            await self._attempt(tasks)
        except Exception as error:
            log.info("a group of %d rolled back, each is run alone: %s", len(tasks), error)
            return False
        return True

    async def _handle_suspect(self, lease: Leased) -> None:
        """With no other suspect counted meanwhile: if the node dies now, it was this one, or accident."""
        async with self._suspects:
            if self._stopping:  # it is released with all that this node owns
                return
            task = await self._prepare(lease)
            if task is not None:
                await self._handle_alone(task)

    async def _handle_alone(self, task: Task) -> None:
        lease, attempt = task.lease, task.attempt
        failures: Sequence[Failure] = ()
        while True:
            try:
                await self._attempt([Task(lease, task.message, attempt)])
                return
            except LeaseLost:
                self._counters.add(Event.LEASE_LOST)
                log.warning("lease of %s lost: rolled back", lease.envelope.id)
                return
            except Exception as error:
                failures = [*failures, self._failure(error, attempt)][-KEPT_ATTEMPTS:]
                if not await self._runs_again(lease, attempt, error, failures):
                    return
            attempt += 1

    async def _runs_again(self, lease: Leased, attempt: int, error: Exception, failures: Sequence[Failure]) -> bool:
        """Settle a failed attempt as the policy decides. True when the message is to run again at once."""
        decision = self._policy.decide(error, attempt, self._clock.now() - lease.envelope.sent_at)
        log.warning("%s of %s failed, attempt %d: %r", self.handler.name, lease.envelope.id, attempt, error)
        counted_before = lease.attempts + (1 if _is_suspect(lease) else 0)
        match decision:
            case RunAgain():
                return True
            case RunLater(delay=delay):
                failpoint("C19")
                await self._database.insist(
                    inbox.retry_later,
                    self._node,
                    lease,
                    delay=delay,
                    counted=attempt - counted_before,
                    failures=failures,
                )
                failpoint("C19")
                self._counters.add(Event.RETRIED)
            case HandBack():
                await self._database.insist(leases.release, INCOMING, self._node, [lease.key])
            case Pause(duration=duration, reason=reason):
                await self._database.insist(self._pause, lease, duration, reason)
                self.observe_circuit(True)
            case DeadLetter():
                failpoint("C19")
                letter = Letter.from_error(error)
                await self._dead_letter(lease, letter, counted=attempt - counted_before, failures=failures)
                failpoint("C19")
        return False

    # ------------------------------------------------------------------ one attempt, one transaction

    async def _attempt(self, tasks: Sequence[Task]) -> None:
        """Run the handler over these messages in one transaction, with their completion; raises what it raises."""
        try:
            async with asyncio.timeout(self._timeout):
                if self._threads is None:
                    await self._attempt_async(tasks)
                else:
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self._threads, self._attempt_in_thread, tasks)
        except asyncio.CancelledError as error:
            if (worker := asyncio.current_task()) and worker.cancelling():
                raise
            # What the handler awaited was cancelled, not this worker, which would end for good.
            raise RuntimeError("something that the handler awaited was cancelled") from error
        failpoint("C18")
        self._counters.add(Event.HANDLED, len(tasks))

    async def _attempt_async(self, tasks: Sequence[Task]) -> None:
        async with self._sessions.open() as session:
            outbox = self._sessions.outbox(session)
            outbox.commits_itself = False
            with self._sessions.scope.entered(lambda: outbox):
                for call in self._calls(tasks, session, outbox):
                    outbox.cascade(await self.handler.run(call))
            await session.run_sync(self._complete, outbox, tasks)
            await session.commit()
        failpoint("C17")

    def _attempt_in_thread(self, tasks: Sequence[Task]) -> None:
        with self._sessions.open_sync() as session:
            outbox = self._sessions.outbox(session)
            outbox.commits_itself = False
            with self._sessions.scope.entered(lambda: outbox):
                for call in self._calls(tasks, session, outbox):
                    outbox.cascade(self.handler.run_sync(call))
            self._complete(session, outbox, tasks)
            session.commit()
        failpoint("C17")

    def _calls(self, tasks: Sequence[Task], session: Session | AsyncSession, outbox: Outbox) -> Iterator[Call]:
        """One call for each message, or one for all. What a call sends is caused by its message."""
        failpoint("C15")
        if self.handler.takes_list:
            yield Call([task.message for task in tasks], session, Context(tasks[0].lease, tasks[0].attempt, outbox))
            return
        for task in tasks:
            outbox.cause = Cause(task.lease.envelope)
            yield Call(task.message, session, Context(task.lease, task.attempt, outbox))

    def _complete(self, session: Session, outbox: Outbox, tasks: Sequence[Task]) -> None:
        """The fence: the rows are finished in this transaction, or it does not commit."""
        session.flush()
        owned = [task.lease for task in tasks]
        conn, keep_body = session.connection(), self._settings.history_bodies
        finished = inbox.finish_handled(conn, self._database.schema, self._node, owned, keep_body=keep_body)
        if finished != len(owned):
            raise LeaseLost
        outbox.commits_itself = True
        failpoint("C16")

    def _pause(self, conn: Connection, schema: str, lease: Leased, duration: timedelta, reason: str) -> None:
        """Its handler and the endpoint that it came by, for every node; then hand it back."""
        paused = [(Kind.HANDLER, self.handler.message_type)]
        if lease.endpoint != LOCAL:
            paused.append((Kind.LISTENER, lease.endpoint))
        for kind, key in paused:
            circuits.pause(conn, schema, kind, key, reason=reason, actor=f"node {self._node}", duration=duration)
        leases.release(conn, schema, INCOMING, self._node, [lease.key])

    # ------------------------------------------------------------------ other ends

    async def _expired(self, lease: Leased) -> bool:
        expired = await self._database.insist(inbox.expire, self._node, lease, keep_body=self._settings.history_bodies)
        self._counters.add(Event.EXPIRED, int(expired))
        return expired

    def _failure(self, error: Exception, attempt: int) -> Failure:
        return Failure.from_error(error, number=attempt, failed_at=self._clock.now())

    async def _dead_letter(
        self, lease: Leased, letter: Letter, *, counted: int = 1, failures: Sequence[Failure] = ()
    ) -> None:
        moved = await self._database.insist(
            inbox.dead_letter,
            self._node,
            lease,
            letter,
            counted=counted,
            failures=failures,
            keep_body=self._settings.history_bodies,
        )
        if moved:
            self._counters.add(Event.DEAD_LETTERED)
            log.error("dead letter %s (%s): %s", lease.envelope.id, lease.envelope.message_type, letter.reason)


def _is_suspect(lease: Leased) -> bool:
    return lease.interruptions >= _SUSPICIOUS


class Lanes:
    """The handling agents of a node by message type: the `Intake` of what arrives and of what is sent locally."""

    def __init__(self, agents: Mapping[str, HandlingAgent]) -> None:
        self._agents = agents

    def reserve(self, envelope: Envelope) -> NodeId:
        agent = self._agents.get(envelope.message_type)
        return agent.reserve(envelope) if agent is not None else ANY_NODE

    def accept(self, leases: Sequence[Leased]) -> None:
        by_type: dict[str, list[Leased]] = {}
        for lease in leases:
            by_type.setdefault(lease.envelope.message_type, []).append(lease)
        for message_type, group in by_type.items():
            self._agents[message_type].accept(group)

    def abandon(self, envelopes: Sequence[Envelope]) -> None:
        for envelope in envelopes:
            self._agents[envelope.message_type].buffer.done([envelope])
