"""Units of work: a session, and its outboxes."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Final, NoReturn, Self, Unpack
from uuid import UUID

from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.util import greenlet_spawn

from durable.duration import Duration
from durable.errors import NoUnitOfWork, WiringError
from durable.outbox.envelope_factory import EnvelopeFactory, SendOptions
from durable.outbox.outbox import Dispatcher, Outbox
from durable.outbox.scope import Scope
from durable.outbox.transactions import (
    close_connections,
    enlistment_of,
    forget,
    give_back_what_comes,
    open_connections,
)
from durable.tasks.cancelling import raise_if_cancelled, run_to_completion

_NOT_ENTERED: Final = (
    "unit of work: it was not entered, and nobody commits what is sent with it; write "
    "`async with bus.unit_of_work() as uow`"
)
_ENDED_ANYHOW: Final = (DBAPIError, InvalidRequestError)
"""Errors of a rollback whose connection is lost, or in use by another task: its transaction ends with it. They stay
behind what the session ends for.
"""


def enlist(
    session: Session | AsyncSession,
    schema: str,
    envelope_factory: EnvelopeFactory,
    dispatcher: Dispatcher,
    kind: type[Outbox] = Outbox,
) -> Outbox:
    """The outbox of this session and the bus of this envelope_factory; the same one however often it is asked for."""
    sync_session = session.sync_session if isinstance(session, AsyncSession) else session
    outboxes = enlistment_of(sync_session).outboxes
    if envelope_factory not in outboxes:
        outboxes[envelope_factory] = kind(sync_session, schema, envelope_factory, dispatcher)
    outbox = outboxes[envelope_factory]
    assert isinstance(outbox, Outbox)
    return outbox


async def close(session: AsyncSession) -> None:
    """Close a session to its end, and its connections, however often the current task is cancelled meanwhile."""
    give_back_what_comes(session.sync_session)
    if session.in_transaction() or open_connections(session.sync_session):
        await run_to_completion(_close(session))
    else:
        session.sync_session.close()  # without a connection there is nothing to wait for


async def _close(session: AsyncSession) -> None:
    with suppress(*_ENDED_ANYHOW):
        try:
            await greenlet_spawn(close_connections, session.sync_session)
        finally:
            await session.close()


def close_sync(session: Session) -> None:
    """Close a Session, and its connections. The error for which it ends stays when one of them is lost."""
    give_back_what_comes(session)
    with suppress(*_ENDED_ANYHOW):
        try:
            close_connections(session)
        finally:
            session.close()


async def _roll_back(session: AsyncSession) -> None:
    give_back_what_comes(session.sync_session)
    with suppress(*_ENDED_ANYHOW):
        await session.rollback()


class Enlisting(AbstractContextManager[Outbox]):
    """Block of `with bus.enlist(session)`."""

    def __init__(self, block: AbstractContextManager[Outbox]) -> None:
        self._block = block

    def __enter__(self) -> Outbox:
        return self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._block.__exit__(kind, error, trace)

    async def __aenter__(self) -> NoReturn:
        raise WiringError("enlist: `async with` does not enter it; write `with bus.enlist(session)`")

    async def __aexit__(self, *_: object) -> None: ...


class UnitOfWork:
    """Unit of work, an AsyncSession and one transaction: committed when the block ends, rolled back when it raises."""

    def __init__(self, session: AsyncSession, outbox: Outbox, scope: Scope) -> None:
        self.session = session
        self._outbox = outbox
        self._has_begun = False
        self._entered = scope.entered(lambda: outbox)

    def __enter__(self) -> NoReturn:
        raise WiringError("unit_of_work: `with` does not enter it; write `async with bus.unit_of_work()`")

    def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> Self:
        self._entered.__enter__()
        return self.begin()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.end(commit=error is None)
        finally:
            self._entered.__exit__(None, None, None)
        if isinstance(error, _ENDED_ANYHOW):
            raise_if_cancelled(error)

    def begin(self) -> Self:
        """Take messages from now on; for whoever ends it by end()."""
        self._has_begun = True
        return self

    @property
    def outbox(self) -> Outbox:
        """The outbox of the session; raises NoUnitOfWork for a unit of work that nobody has entered."""
        if not self._has_begun:
            raise NoUnitOfWork(_NOT_ENTERED)
        return self._outbox

    async def end(self, *, commit: bool) -> None:
        """Commit or roll back, and close the session for good. A session without a transaction is only closed: its
        owner has ended the transaction already.
        """
        try:
            if not commit:
                await run_to_completion(_roll_back(self.session))
            elif self.session.in_transaction():
                self._outbox.allow_last_commit()
                await self.session.commit()
        finally:
            self._outbox.close()  # before other tasks run: nobody commits what they send now
            await close(self.session)
            forget(self.session.sync_session)

    def send(self, message: object, *, to: str | None = None, **options: Unpack[SendOptions]) -> UUID:
        """Send a message as Outbox.send()."""
        return self.outbox.send(message, to=to, **options)

    def request(
        self,
        message: object,
        *answers: type,
        to: str | None = None,
        timeout: Duration | None = None,
        **options: Unpack[SendOptions],
    ) -> UUID:
        """Send a request as Outbox.request()."""
        return self.outbox.request(message, *answers, to=to, timeout=timeout, **options)

    def publish(self, message: object, **options: Unpack[SendOptions]) -> UUID:
        """Publish an event as Outbox.publish()."""
        return self.outbox.publish(message, **options)
