"""Messages that are committed with the business data.

An Outbox belongs to one session and follows its transactions by SQLAlchemy's events:

    send()                        remembered in memory; nothing is flushed, no connection is opened
    savepoint rolled back         what was sent since the savepoint is forgotten
    before the outermost COMMIT   flush, then one INSERT for everything that was sent
    after it                      the agents are told; that is only a hint, the table is the truth
    rollback, close               forgotten

Every commit of the session goes this way, not only the first. Before the insert room is reserved with the agents: a
row is owned by this node only when it will have the envelope in memory, and is left to any node otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import NoReturn, Protocol, Self, Unpack
from uuid import UUID

from sqlalchemy import event
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, SessionTransaction

from durable.composing import Cause, Composer, Outgoing, SendOptions
from durable.envelope import ANY_NODE, Envelope, NodeId, new_id
from durable.errors import NoUnitOfWork, WiringError
from durable.failpoints import failpoint
from durable.routing import LOCAL
from durable.storage import outbox as storage
from durable.storage.outbox import Sent

_KEY = "durable.outbox"


class Dispatcher(Protocol):
    """The agents of this process, as a unit of work sees them. Called from any thread."""

    def reserve(self, envelopes: Sequence[Envelope]) -> list[NodeId]:
        """Who owns each of these rows: this node, which now keeps room for it, or ANY_NODE."""
        ...

    @property
    def claims_ordered(self) -> bool:
        """Does this process claim what is ordered, when it hears of the commit? Otherwise other nodes must be told."""
        ...

    def committed(self, sent: Sequence[Sent]) -> None:
        """They are in the database."""
        ...

    def abandoned(self, sent: Sequence[Sent]) -> None:
        """They were rolled back, or nobody knows: give the room back."""
        ...


class Outbox:
    """The messages of one session. Made by `bus.enlist(session)`; not shared between sessions or threads."""

    def __init__(self, session: Session, schema: str, composer: Composer, dispatcher: Dispatcher) -> None:
        self.session = session
        self.cause: Cause | None = None
        self._schema = schema
        self._composer = composer
        self._dispatcher = dispatcher
        self.commits_itself = True
        self._pending: list[Envelope] = []
        self._savepoints = dict.fromkeys(_open_savepoints(session), 0)
        self._stored: list[Sent] = []
        self._is_committing = False

    def send(self, message: object, *, to: str | None = None, **options: Unpack[SendOptions]) -> UUID:
        """Send a command when the session commits; returns the envelope's id.

        Raises RoutingError when the message has not exactly one destination, InvalidMessage when it could not be
        stored or decoded.
        """
        return self._send(Outgoing(message, "command", to, options, self.cause, self._remember))

    def answer(self, message: object, *, to: str, **options: Unpack[SendOptions]) -> UUID:
        """Send a command to the address that a message of another service names; raises InvalidMessage where that is
        neither declared nor allowed."""
        return self._send(Outgoing(message, "answer", to, options, self.cause, self._remember))

    def publish(self, message: object, **options: Unpack[SendOptions]) -> UUID:
        """Send an event to every subscriber when the session commits; returns the id that all copies share."""
        return self._send(Outgoing(message, "event", None, options, self.cause, self._remember))

    def destinations_of(self, uri: str) -> list[str]:
        """As Composer.destinations_of."""
        return self._composer.destinations_of(uri)

    @property
    def pending(self) -> Sequence[Envelope]:
        """What the next commit sends."""
        return tuple(self._pending)

    def cascade(self, result: object) -> None:
        """Send what a handler returned: a message, several in a list or tuple, or None."""
        for message in result if isinstance(result, list | tuple) else [result]:
            if message is not None:
                self._send(Outgoing(message, "cascade", None, {}, self.cause, self._remember))

    def _send(self, outgoing: Outgoing) -> UUID:
        """Its id; what middleware drops gets one too, that nothing has."""
        return self._composer.send(outgoing) or new_id()

    def _remember(self, envelopes: Sequence[Envelope]) -> None:
        if not self.session.in_transaction():
            self._begin()
        self._pending.extend(envelopes)
        failpoint("C1")
        if self._is_committing:  # sent by a listener that runs after ours: stored now, or refused by the session
            self.store()

    def _begin(self) -> None:
        """SQLAlchemy's bookkeeping only: a rollback must reach us; no connection is taken."""
        try:
            self.session.begin()
        except InvalidRequestError as error:
            raise NoUnitOfWork(
                "this session is closed: what is sent with it would never be stored; open another by "
                "`async with bus.unit_of_work()`"
            ) from error

    def savepoint_begun(self, transaction: SessionTransaction) -> None:
        self._savepoints[transaction] = len(self._pending)

    def savepoint_released(self, transaction: SessionTransaction) -> None:
        self._savepoints.pop(transaction, None)

    def store(self) -> None:
        """Insert what was sent, as the last statement of the transaction."""
        if not self.commits_itself:
            raise WiringError(
                "a handler must not commit its session: durable commits it, with the message's completion"
            )
        self.session.flush()  # listeners of the flush may send too
        if self._pending:
            self._store(_each_once(self._pending))
            failpoint("C2")
        self._is_committing = True

    def _store(self, envelopes: Sequence[Envelope]) -> None:
        places = [self._composer.place(envelope) for envelope in envelopes]
        free = [envelope for envelope, place in zip(envelopes, places, strict=True) if place.ordering_key is None]
        owners = iter(self._dispatcher.reserve(free) if free else ())
        sent = [
            Sent(
                envelope,
                LOCAL if envelope.destination == LOCAL else None,
                next(owners) if place.ordering_key is None else ANY_NODE,
                place,
            )
            for envelope, place in zip(envelopes, places, strict=True)
        ]
        self._pending.clear()
        self._stored += sent  # before the insert: when it fails, the room is given back with all the rest
        known = self.insert(sent)
        if known:
            self._stored[-len(sent) :] = [each for each in sent if each.key not in known]
            self._dispatcher.abandoned([each for each in sent if each.key in known])

    def insert(self, sent: Sequence[Sent]) -> set[storage.Key]:
        """Into the tables, in the session's transaction; durable.testing keeps them in memory instead.

        Returns the keys of those that had been sent before.
        """
        told = self._dispatcher.claims_ordered
        return storage.store(self.session.connection(), self._schema, sent, claims_ordered=told)

    def committed(self) -> None:
        if self._stored:
            failpoint("C3")
            sent, self._stored = self._stored, []
            self._dispatcher.committed(sent)

    def transaction_ended(self, transaction: SessionTransaction) -> None:
        sent_before = self._savepoints.pop(transaction, None)
        if sent_before is not None:  # it was not released, so it was rolled back
            del self._pending[sent_before:]
        if transaction.parent is None:
            self._is_committing = False
            self._pending.clear()
            if self._stored:
                sent, self._stored = self._stored, []
                self._dispatcher.abandoned(sent)


def _each_once(envelopes: Sequence[Envelope]) -> list[Envelope]:
    """Without those that have the id and the destination of an earlier one: one business key, sent twice."""
    first: dict[tuple[UUID, str], Envelope] = {}
    for envelope in envelopes:
        first.setdefault((envelope.id, envelope.destination), envelope)
    return list(first.values())


def _open_savepoints(session: Session) -> Iterator[SessionTransaction]:
    transaction = session.get_nested_transaction()
    while transaction is not None:
        if transaction.nested:
            yield transaction
        transaction = transaction.parent


def _outbox_of(session: Session) -> Outbox | None:
    return session.info.get(_KEY)


# Listening once on the class costs every session one look-up; listening on each instance would cost each enlisted
# session five registrations, as much as the insert itself.


@event.listens_for(Session, "after_transaction_create")
def _transaction_created(session: Session, transaction: SessionTransaction) -> None:
    if transaction.nested and (outbox := _outbox_of(session)):
        outbox.savepoint_begun(transaction)


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    if not session.in_nested_transaction() and (outbox := _outbox_of(session)):
        outbox.store()


@event.listens_for(Session, "after_commit")
def _after_commit(session: Session) -> None:
    if outbox := _outbox_of(session):
        savepoint = session.get_nested_transaction()
        if savepoint is None:
            outbox.committed()
        else:
            outbox.savepoint_released(savepoint)


@event.listens_for(Session, "after_transaction_end")
def _transaction_ended(session: Session, transaction: SessionTransaction) -> None:
    if outbox := _outbox_of(session):
        outbox.transaction_ended(transaction)


class Scope:
    """The unit of work in which `bus.send()` finds itself: one for each task and thread.

    What is in scope is a function: the unit of work of a web request begins with the first message that is sent.
    """

    def __init__(self) -> None:
        self._current: ContextVar[Callable[[], Outbox] | None] = ContextVar("durable.unit_of_work", default=None)

    @property
    def outbox(self) -> Outbox:
        """The outbox in scope; raises NoUnitOfWork."""
        current = self._current.get()
        if current is None:
            raise NoUnitOfWork
        return current()

    @contextmanager
    def entered(self, outbox: Callable[[], Outbox]) -> Iterator[None]:
        token = self._current.set(outbox)
        try:
            yield
        finally:
            self._current.reset(token)


def enlist(
    session: Session | AsyncSession,
    schema: str,
    composer: Composer,
    dispatcher: Dispatcher,
    kind: type[Outbox] = Outbox,
) -> Outbox:
    """The outbox of this session; the same one however often it is asked for."""
    sync_session = session.sync_session if isinstance(session, AsyncSession) else session
    outbox = _outbox_of(sync_session)
    if outbox is None:
        outbox = sync_session.info[_KEY] = kind(sync_session, schema, composer, dispatcher)
    return outbox


class UnitOfWork:
    """One AsyncSession and one transaction: committed when the block ends, rolled back when it raises."""

    def __init__(self, session: AsyncSession, outbox: Outbox, scope: Scope) -> None:
        self.session = session
        self.outbox = outbox
        self._entered = scope.entered(lambda: outbox)

    def __enter__(self) -> NoReturn:
        raise WiringError("unit_of_work: it is entered by `async with bus.unit_of_work()`; the `async` is missing")

    def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> Self:
        self._entered.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.end(commit=error is None)
        finally:
            self._entered.__exit__(None, None, None)

    async def end(self, *, commit: bool) -> None:
        """Commit or roll back, and close the session for good. A session that has no transaction has nothing to commit:
        its owner has ended it already."""
        try:
            if not commit:
                await self.session.rollback()
            elif self.session.in_transaction():
                await self.session.commit()
        finally:
            await self.session.__aexit__(None, None, None)  # unlike close(), it goes on when this task is cancelled

    def send(self, message: object, *, to: str | None = None, **options: Unpack[SendOptions]) -> UUID:
        """As Outbox.send."""
        return self.outbox.send(message, to=to, **options)

    def publish(self, message: object, **options: Unpack[SendOptions]) -> UUID:
        """As Outbox.publish."""
        return self.outbox.publish(message, **options)
