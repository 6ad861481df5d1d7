"""The handler of a dead letter, run by hand: without consequences, or with them.

    Rehearsal.run()   [ handler, its sends ] in one transaction --> rolled back; what would have happened is returned
    handle()          [ handler, its sends, the letter resolved ] in one transaction --> COMMIT

During a rehearsal every session of the bus joins one transaction, also those that the handler opens for itself by
`bus.unit_of_work()`: what they commit is undone with the rest, and what they send is only looked at. What a handler
does elsewhere (a mail, another service, a connection of its own) is done, as in every attempt that is rolled back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from sqlalchemy.orm import Session

from durable.agents.attempts import Task, calls
from durable.agents.runner import Here, InLoop, Place, Run, commit, nothing
from durable.application.context import PauseRequest
from durable.application.handlers import Handler
from durable.application.incoming import Incoming
from durable.application.middleware import HandleNext
from durable.bus import Bus
from durable.dead_letters.joined_sessions import JoinedSessions, RehearsalRuntime
from durable.encryption.decoding import decode
from durable.envelope import Envelope, LeasedEnvelope
from durable.errors import DurableError, InvalidMessage, UnknownMessageType, WiringError, told_by
from durable.outbox.outbox import Outbox
from durable.storage import actions, circuits, dead_letters
from durable.storage.actions import Action
from durable.storage.dead_letters import DeadLetter
from durable.storage.sql import dead_letters as letter_statements
from durable.tasks.cancelling import end_if_cancelled
from durable.tasks.crew import in_turn

Outcome = Literal["succeeds", "fails", "is sent"]
Finish = Callable[[Session, Outbox], None]
"""Completes an attempt in its transaction, after its handler."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """Result of a rehearsal. "is sent" goes to another service, whose handler would tell."""

    letter: DeadLetter
    outcome: Outcome
    sends: Sequence[Envelope] = ()
    does: Sequence[str] = ()
    """The changes that a handler would make to circuits, schedules and delayed messages."""
    error: Exception | None = None


class AlreadyResolved(DurableError):
    """The letter was resolved meanwhile, or its message is under way; nothing was done here."""


class Rehearsal:
    """Runs letters one after the other, each in a transaction that is rolled back. See rehearsal()."""

    def __init__(self, bus: Bus, sessions: JoinedSessions, *, unhurried: bool) -> None:
        self._bus = bus
        self._sessions = sessions
        self._unhurried = unhurried

    async def run(self, letter: DeadLetter) -> Rehearsed:
        """Rehearse a replay of the letter. Raises StorageUnavailable."""
        if letter.summary.side == "outgoing" and letter.summary.replayable:
            return Rehearsed(letter, "is sent")
        try:
            handler, lease = handler_of(self._bus, letter), whole(letter)
        except DurableError as error:
            return Rehearsed(letter, "fails", error=error)
        async with self._sessions.rolled_back(is_async=handler.is_async):
            try:
                await self._attempt(handler, lease)
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) and task.cancelling():
                    raise
                return Rehearsed(
                    letter, "fails", error=RuntimeError("something that the handler awaited was cancelled")
                )
            except Exception as error:  # the handler's, whatever it is: this is what was asked for
                end_if_cancelled()
                told = told_by(error)
                return Rehearsed(letter, "fails", error=told if isinstance(told, Exception) else error)
            sends = [sent.envelope for sent in self._sessions.sent]
            return Rehearsed(letter, "succeeds", sends, self._sessions.done)

    async def _attempt(self, handler: Handler, lease: LeasedEnvelope) -> None:
        limit = (handler.timeout or self._bus.settings.handler_timeout).total_seconds()
        async with asyncio.timeout(None if self._unhurried else limit) as timeout:
            await attempt(self._bus, handler, lease, _record, end=_leave, unhurried=self._unhurried)
            if (deadline := timeout.when()) is not None and asyncio.get_running_loop().time() > deadline:
                raise TimeoutError  # a sync handler has kept the loop from noticing


@asynccontextmanager
async def rehearsal(bus: Bus, *, unhurried: bool = False) -> AsyncIterator[Rehearsal]:
    """Put a bus that does not run into rehearsal for a block. With `unhurried` nothing is cut off for its length:
    somebody looks at the handler with a debugger."""
    if bus.runtime.is_running:
        raise WiringError("the bus runs already: rehearse in a process of its own")
    sessions = JoinedSessions(bus.runtime)
    try:
        with bus.running_on(RehearsalRuntime(bus, sessions)):
            yield Rehearsal(bus, sessions, unhurried=unhurried)
    finally:
        await bus.runtime.sessions.close()


async def handle(bus: Bus, letter: DeadLetter, *, actor: str, reason: str | None = None) -> Sequence[Envelope]:
    """Handle a letter here and now, for good; returns what was sent.

    Raises what the handler raises, and AlreadyResolved; nothing has happened then.
    """
    sends: list[Envelope] = []

    def resolve(session: Session, outbox: Outbox) -> None:
        session.flush()
        conn, number, settings = session.connection(), letter.summary.letter_id, bus.settings
        keep_body = settings.history_bodies
        if not dead_letters.handle(conn, settings.db_schema, number, actor=actor, reason=reason, keep_body=keep_body):
            raise AlreadyResolved(
                f"letter {number} was not handled: somebody else has resolved it, its message waits, or its id was "
                "used meanwhile; what the handler did is rolled back"
            )
        action = Action(actor=actor, verb="handle", target=f"dead letters: letter {number}", reason=reason)
        actions.record(conn, settings.db_schema, action)
        sends.extend(outbox.pending)
        outbox.allow_last_commit()

    try:
        await attempt(bus, handler_of(bus, letter), whole(letter), resolve, unhurried=True)
    finally:
        await in_turn(bus.runtime.database.close(), bus.runtime.sessions.close())
    return sends


# ---------------------------------------------------------------- one attempt


def handler_of(bus: Bus, letter: DeadLetter) -> Handler:
    """Return today's handler of the letter; raises UnknownMessageType."""
    message_type = letter.summary.message_type
    handler = bus.application.by_type().get(message_type or "")
    if handler is None:
        raise UnknownMessageType(
            f"{bus.service} has no handler for {message_type or 'a letter without type'}; declare one"
        )
    return handler


def whole(letter: DeadLetter) -> LeasedEnvelope:
    """An incoming letter as its handler gets it; raises InvalidMessage."""
    number, lease = letter.summary.letter_id, letter.lease()
    if letter.summary.side != "incoming":
        raise InvalidMessage(f"letter {number} was for {letter.summary.address}: there is no handler of it here")
    if lease is None:
        raise InvalidMessage(f"letter {number} is no whole envelope: the bytes are kept for people to look at")
    return lease


async def attempt(
    bus: Bus,
    handler: Handler,
    lease: LeasedEnvelope,
    complete: Finish,
    *,
    end: Callable[[Place], Awaitable[None]] = commit,
    unhurried: bool = False,
) -> None:
    """Run the handler in this very thread, a sync one too, within its middleware; complete its message, and end its
    transaction."""
    sessions = bus.runtime.sessions
    asked: list[PauseRequest] = []
    task = Task(lease, decode(bus.application.ring, lease, handler.cls), 1)
    run = Run(
        sessions,
        partial(calls, handler, [task], asked),
        bus.application.stack.around_handling(_in_this_thread(handler)),
        complete,
        end,
        _allow_idling if unhurried else nothing,
        Session.connection,
    )
    await run.at(InLoop(sessions.open()) if handler.is_async else Here(sessions.open_sync()))
    await _pause(bus, handler, asked)


async def _pause(bus: Bus, handler: Handler, asked: Sequence[PauseRequest]) -> None:
    """Pause what the handler asked to pause by its context."""
    for request in asked:
        kind, key = request.of(handler.message_type)
        said: Any = {"reason": request.reason, "actor": bus.service + circuits.BY_CODE, "duration": request.time}
        await bus.runtime.database.transaction(circuits.pause_at_least, kind, key, **said)


def _in_this_thread(handler: Handler) -> HandleNext:
    async def run(incoming: Incoming) -> object:
        return await handler.run(incoming) if handler.is_async else handler.run_sync(incoming)

    return run


def _allow_idling(session: Session) -> None:
    session.execute(letter_statements.ALLOW_IDLING.within(""))


def _record(session: Session, outbox: Outbox) -> None:
    """The completion of a rehearsed attempt: everything that a commit does, but the commit."""
    outbox.commit_allowed = True
    outbox.store()
    session.execute(letter_statements.CHECK_CONSTRAINTS.within(""))


async def _leave(place: Place) -> None:
    """The end of a rehearsed attempt: its transaction is rolled back by whoever began it."""
