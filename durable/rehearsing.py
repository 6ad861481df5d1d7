"""The handler of a dead letter, run by hand: without consequences, or with them.

    Rehearsal.run()   [ handler, its sends ] in one transaction --> rolled back; what would have happened is returned
    handle()          [ handler, its sends, the letter resolved ] in one transaction --> COMMIT

During a rehearsal every session of the bus joins one transaction, also those that the handler opens for itself by
`bus.unit_of_work()`: what they commit is undone with the rest, and what they send is only looked at. What a handler
does elsewhere (a mail, another service, a connection of its own) is done, as in every attempt that is rolled back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from durable import codec
from durable.bus import Bus
from durable.composing import Cause
from durable.envelope import Envelope, Leased
from durable.errors import DurableError, InvalidMessage, UnknownMessageType, WiringError
from durable.handlers import Call, Context, Handler
from durable.runtime import Runtime
from durable.sessions import Sessions
from durable.storage import dead_letters, letter_statements
from durable.storage.database import translated
from durable.storage.dead_letters import DeadLetter
from durable.storage.outbox import Key, Sent
from durable.unit_of_work import Outbox, enlist

Outcome = Literal["succeeds", "fails", "is sent"]
Finish = Callable[[Session, Outbox], None]
"""Ends the transaction of an attempt, after its handler."""

_OURS = "durable.rehearsal"
_JOINED: dict[str, Any] = {
    "join_transaction_mode": "create_savepoint",
    "expire_on_commit": False,
    "close_resets_only": False,
}


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What would become of a letter. "is sent": to another service, and its handler would tell."""

    letter: DeadLetter
    outcome: Outcome
    sends: Sequence[Envelope] = ()
    error: Exception | None = None


class AlreadyResolved(DurableError):
    """The letter was resolved by somebody else meanwhile; nothing was done here."""


class Rehearsal:
    """Runs letters one after the other, each in a transaction that is rolled back. See rehearsal()."""

    def __init__(self, bus: Bus, sessions: _JoinedSessions, *, unhurried: bool) -> None:
        self._bus = bus
        self._sessions = sessions
        self._unhurried = unhurried

    async def run(self, letter: DeadLetter) -> Rehearsed:
        """What would become of it if it were replayed now. Raises StorageUnavailable."""
        if letter.summary.side == "outgoing" and letter.summary.replayable:
            return Rehearsed(letter, "is sent")
        try:
            handler, lease = handler_of(self._bus, letter), whole(letter)
        except DurableError as error:
            return Rehearsed(letter, "fails", error=error)
        async with self._sessions.rolled_back(is_async=handler.is_async):
            try:
                await self._attempt(handler, lease)
            except Exception as error:  # the handler's, whatever it is: this is what was asked for
                return Rehearsed(letter, "fails", error=error)
            return Rehearsed(letter, "succeeds", [sent.envelope for sent in self._sessions.sent])

    async def _attempt(self, handler: Handler, lease: Leased) -> None:
        limit = (handler.timeout or self._bus.settings.handler_timeout).total_seconds()
        async with asyncio.timeout(None if self._unhurried else limit) as timeout:
            await attempt(handler, lease, self._sessions, _look, unhurried=self._unhurried)
            if (deadline := timeout.when()) is not None and asyncio.get_running_loop().time() > deadline:
                raise TimeoutError  # a sync handler has kept the loop from noticing


@asynccontextmanager
async def rehearsal(bus: Bus, *, unhurried: bool = False) -> AsyncIterator[Rehearsal]:
    """Put a bus that does not run into rehearsal for a block. With `unhurried` nothing is cut off for its length:
    somebody looks at the handler with a debugger."""
    if bus.runtime.is_running:
        raise WiringError("this bus runs: rehearse in a process of its own")
    sessions = _JoinedSessions(bus.runtime)
    try:
        with bus.running_on(_RehearsalRuntime(bus, sessions)):
            yield Rehearsal(bus, sessions, unhurried=unhurried)
    finally:
        await bus.runtime.sessions.close()


async def handle(bus: Bus, letter: DeadLetter, *, actor: str, reason: str | None = None) -> Sequence[Envelope]:
    """Handle a letter here and now, for good; returns what was sent.

    Raises what the handler raises, and AlreadyResolved; nothing has happened then.
    """
    sends: list[Envelope] = []

    def commit(session: Session, outbox: Outbox) -> None:
        session.flush()
        schema, number = bus.settings.db_schema, letter.summary.letter_id
        if not dead_letters.handle(session.connection(), schema, number, actor=actor, reason=reason):
            raise AlreadyResolved
        sends.extend(outbox.pending)
        outbox.commits_itself = True
        session.commit()

    try:
        await attempt(handler_of(bus, letter), whole(letter), bus.runtime.sessions, commit, unhurried=True)
    finally:
        await bus.runtime.sessions.close()
    return sends


# ---------------------------------------------------------------- one attempt


def handler_of(bus: Bus, letter: DeadLetter) -> Handler:
    """Its handler today; raises UnknownMessageType."""
    message_type = letter.summary.message_type
    handler = bus.application.handlers.get(message_type or "")
    if handler is None:
        raise UnknownMessageType(f"{bus.service} has no handler for {message_type or 'what has no type'}")
    return handler


def whole(letter: DeadLetter) -> Leased:
    """An incoming letter as its handler gets it; raises InvalidMessage."""
    number, lease = letter.summary.letter_id, letter.lease()
    if letter.summary.side != "incoming":
        raise InvalidMessage(f"letter {number} was for {letter.summary.address}: there is no handler of it here")
    if lease is None:
        raise InvalidMessage(f"letter {number} is no whole envelope: its bytes are kept for people to look at")
    return lease


async def attempt(
    handler: Handler, lease: Leased, sessions: Sessions, finish: Finish, *, unhurried: bool = False
) -> None:
    """Run the handler in this very thread, a sync one too; then let `finish` end the transaction."""
    message = codec.decode(lease.envelope.body, handler.cls, lease.envelope.content_type)
    given = [message] if handler.takes_list else message
    cause = None if handler.takes_list else Cause(lease.envelope)  # as in the handling agent
    if handler.is_async:
        async with sessions.open() as session:
            if unhurried:
                await session.run_sync(_allow_idling)
            with _entered(sessions, session, cause) as outbox:
                outbox.cascade(await handler.run(Call(given, session, Context(lease, 1, outbox))))
            await session.run_sync(finish, outbox)
    else:
        with sessions.open_sync() as session:
            if unhurried:
                _allow_idling(session)
            with _entered(sessions, session, cause) as outbox:
                outbox.cascade(handler.run_sync(Call(given, session, Context(lease, 1, outbox))))
            finish(session, outbox)


@contextmanager
def _entered(sessions: Sessions, session: Session | AsyncSession, cause: Cause | None) -> Iterator[Outbox]:
    outbox = sessions.outbox(session)
    outbox.commits_itself = False
    outbox.cause = cause
    with sessions.scope.entered(lambda: outbox):
        yield outbox


def _allow_idling(session: Session) -> None:
    session.execute(letter_statements.ALLOW_IDLING.within(""))


def _look(session: Session, outbox: Outbox) -> None:
    """The end of a rehearsed attempt: everything that a commit does, but the commit."""
    outbox.commits_itself = True
    outbox.store()
    session.execute(letter_statements.CHECK_CONSTRAINTS.within(""))


# ---------------------------------------------------------------- what a bus works on meanwhile


class _RehearsedOutbox(Outbox):
    """Its messages are looked at instead of stored."""

    sent: list[Sent]

    def insert(self, sent: Sequence[Sent]) -> set[Key]:
        self.sent += sent
        return set()


class _JoinedSessions(Sessions):
    """Sessions that are all part of one transaction: their commits only end savepoints of it."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.settings, runtime.composer, runtime, runtime.sessions.scope)
        self.sent: list[Sent] = []
        self._runtime = runtime
        self._real = runtime.sessions
        self._schema = runtime.settings.db_schema
        self._connection: AsyncConnection | Connection | None = None

    @asynccontextmanager
    async def rolled_back(self, *, is_async: bool) -> AsyncIterator[None]:
        """The transaction. Raises StorageUnavailable."""
        self.sent = []
        if is_async:
            with translated():
                connection = await self._real.engine.connect()
            async with aclosing(connection):
                outer = await connection.begin()
                with self._joining(connection):
                    yield
                await outer.rollback()
        else:
            with translated():
                connection_sync = self._real.engine_sync.connect()
            with connection_sync:
                outer_sync = connection_sync.begin()
                with self._joining(connection_sync):
                    yield
                outer_sync.rollback()

    @contextmanager
    def _joining(self, connection: AsyncConnection | Connection) -> Iterator[None]:
        self._connection = connection
        try:
            yield
        finally:
            self._connection = None

    def open(self) -> AsyncSession:
        if not isinstance(self._connection, AsyncConnection):
            raise WiringError(
                "a rehearsed sync handler cannot open an AsyncSession: its transaction could not be undone"
            )
        session = AsyncSession(self._connection, **_JOINED)
        session.sync_session.info[_OURS] = True
        return session

    def open_sync(self) -> Session:
        if not isinstance(self._connection, Connection):
            raise WiringError("an async handler cannot open a Session in a rehearsal: it could not be undone")
        session = Session(self._connection, **_JOINED)
        session.info[_OURS] = True
        return session

    def outbox(self, session: Session | AsyncSession) -> Outbox:
        sync_session = session.sync_session if isinstance(session, AsyncSession) else session
        if _OURS not in sync_session.info:
            raise WiringError("a rehearsal cannot undo what a session of the application's own commits")
        outbox = enlist(session, self._schema, self._composer, self._runtime, _RehearsedOutbox)
        assert isinstance(outbox, _RehearsedOutbox)
        outbox.sent = self.sent
        return outbox


class _RehearsalRuntime(Runtime):
    def __init__(self, bus: Bus, sessions: Sessions) -> None:
        super().__init__(bus.application, bus.settings, sessions.scope)
        self.sessions = sessions
