"""Messages that are committed with the business data.

An Outbox belongs to one session and one bus, and follows their transactions (durable.outbox.transactions):

    send()                          remembered in memory; nothing is flushed, no connection is opened
    savepoint rolled back           what was sent since the savepoint is forgotten
    before the session's COMMIT     flush, then one INSERT for everything that was sent
    before the connection's COMMIT  another INSERT, if anything is left: whoever commits, and whatever is open
    after it                        the agents are told; that is only a hint, the table is the truth
    rollback, close                 forgotten

Only a COMMIT of the database connection counts. A session that has joined a transaction stores its messages when it
commits, and they are handed over when that transaction has. While the COMMIT is under way nothing can be sent: it
would be in no transaction.

Before the insert room is reserved with the agents: a row is owned by this node only when it will have the envelope in
memory, and is left to any node otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Final, Protocol, Unpack
from uuid import UUID

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import InvalidRequestError, UnboundExecutionError
from sqlalchemy.orm import Session, SessionTransaction

from durable.arguments import Argument, length_of_time, refuse_misfits
from durable.duration import Duration
from durable.envelope import ANY_NODE, Envelope, NodeId, new_id
from durable.errors import InvalidMessage, NoUnitOfWork, UnknownMessageType, WiringError
from durable.failpoints import failpoint
from durable.messages.registry import name_of
from durable.messages.routing import LOCAL
from durable.outbox.envelope_factory import Cause, EnvelopeFactory, Kind, Sending, SendOptions, check_options
from durable.outbox.pending import Entry, Pending
from durable.outbox.sql_text import About
from durable.outbox.transactions import Ending, enlistment_of, follow, has_opened, open_savepoints
from durable.storage import outbox as storage
from durable.storage.outbox import Sent
from durable.storage.sharing import refuse_shared

_OVER: Final = (
    "this unit of work is over, or its COMMIT is under way: what is sent with it now would never be stored; open "
    "another by `async with bus.unit_of_work()`"
)
_ROLLED_BACK: Final = (
    "this transaction of the session was rolled back: what is sent with it now would be forgotten; call "
    "session.rollback(), or roll the savepoint back, and send it then"
)
_LOST: Final = (
    "savepoint as SQL text: it was rolled back to after a text of several statements had failed, or its name cannot be "
    "read, and nobody can say which messages were sent within it; roll the transaction back, and give each savepoint a "
    "statement of its own and a plain name"
)
_SEVERAL_CONNECTIONS: Final = (
    "the session has begun transactions of several connections, whose commits are not one: messages would be sent "
    "although other rows were rolled back; give it one engine for all that it reads and writes, or twophase=True"
)
_BEGINS_NONE: Final = (
    "the session is in no transaction, and begins none by itself (autobegin=False): send within `with session.begin()`"
)
_NO_ENGINE: Final = (
    "the session has no engine for messages, only those of its classes, and has begun no transaction of one: give it "
    "bind= beside binds=, or let it read or write before it commits"
)
_HANDLERS_COMMIT: Final = "a handler must not commit its session: durable commits it, with the message's completion"


_cause: ContextVar[tuple[Outbox | None, Cause | None]] = ContextVar("durable.outbox.cause", default=(None, None))


class Dispatcher(Protocol):
    """The agents of this process, as a unit of work sees them. Called from any thread."""

    def reserve(self, envelopes: Sequence[Envelope]) -> list[NodeId]:
        """Return the owner of each row: this node, which keeps room for it, or ANY_NODE."""
        ...

    def committed(self, sent: Sequence[Sent]) -> None:
        """Take rows that are in the database."""
        ...

    def committing(self, ending: Ending, sent: Sequence[Sent]) -> None:
        """The COMMIT of the transaction that holds them begins: they are in the database when it ends well."""
        ...

    def abandoned(self, sent: Sequence[Sent]) -> None:
        """Give back the room of rows that were rolled back, or whose end is not known."""
        ...


class Outbox:
    """The messages of one session and one bus. Made by `bus.enlist(session)`; not shared between threads."""

    def __init__(
        self, session: Session, schema: str, envelope_factory: EnvelopeFactory, dispatcher: Dispatcher
    ) -> None:
        self.session = session
        self.cause: Cause | None = None
        """The cause of what is sent outside of the context of any message, as in a flush behind it."""
        self._enlistment = enlistment_of(session)
        self._schema = schema
        self._envelope_factory = envelope_factory
        self._dispatcher = dispatcher
        self._pending = Pending()
        self._connection: Connection | None = None
        self._is_joined = False
        self._is_ending = False
        self._is_rolled_back = False
        self._is_committing = False
        self._ending: Ending | None = None
        self._remembering = threading.RLock()  # threads that a web request waits for may send at once
        self._follow_what_is_open()

    def _follow_what_is_open(self) -> None:
        root = self.session.get_transaction()
        if root is None:
            return
        nested = self.session.get_nested_transaction()
        while nested is not None:
            if not nested.connections:
                self._pending.begin(nested)
            nested = nested.parent
        self._pending.begin(root)
        for connection in root.connections:
            self.connected(root, connection, late=True)

    # ------------------------------------------------------------------ for the application

    def send(self, message: object, *, to: str | None = None, **options: Unpack[SendOptions]) -> UUID:
        """Send a command when the session commits; returns the envelope's id.

        Raises RoutingError when the message has not exactly one destination, InvalidMessage when it could not be
        stored or decoded, NoUnitOfWork when the session is closed or its COMMIT is under way.
        """
        if options or to is not None:
            check_options("send", options, to=to)
        return self._envelope_factory.send(self._sending(message, "command", to, options)) or new_id()

    def request(
        self,
        message: object,
        *answers: type,
        to: str | None = None,
        timeout: Duration | None = None,
        **options: Unpack[SendOptions],
    ) -> UUID:
        """Send a command whose answer is awaited by `bus.wait_for(id, Answer)`; returns its id.

        `answers`: the classes of which the answer is one, each declared by bus.expects(). `timeout` (seconds, or a
        timedelta): the request expires unless it was handled by then. Guarantees and errors as in send().
        """
        check_options("request", options, to=to)
        refuse_misfits("request", [Argument("answers", each, type) for each in answers], InvalidMessage)
        message_type = name_of(type(message))
        if timeout is not None:
            options["deliver_by"] = length_of_time("request", "timeout", timeout)
        options["reply_to"] = options.get("reply_to") or self._envelope_factory.reply_to(message_type, answers)
        return self.send(message, to=to, **options)

    def answer(self, message: object, *, to: str, **options: Unpack[SendOptions]) -> UUID:
        """Send a command to the address that a message of another service names; raises InvalidMessage where that is
        neither declared nor allowed."""
        check_options("reply", options, to=to)
        return self._envelope_factory.send(self._sending(message, "answer", to, options)) or new_id()

    def publish(self, message: object, **options: Unpack[SendOptions]) -> UUID:
        """Send an event to every subscriber when the session commits; returns the id that all copies share."""
        if options:
            check_options("publish", options)
        return self._envelope_factory.send(self._sending(message, "event", None, options)) or new_id()

    def destinations_of(self, uri: str) -> list[str]:
        """Return the destinations as EnvelopeFactory.destinations_of()."""
        return self._envelope_factory.destinations_of(uri)

    @property
    def pending(self) -> Sequence[Envelope]:
        """Envelopes of the next commit."""
        return tuple(entry.envelope for entry in self._pending.unstored())

    def cascade(self, result: object) -> None:
        """Send the messages that a handler returned: one, several in a list or tuple, or None."""
        for message in result if isinstance(result, list | tuple) else [result]:
            if message is not None:
                _refuse_no_message(message)
                self._envelope_factory.send(self._sending(message, "cascade", None, {}))

    @property
    def commit_allowed(self) -> bool:
        """False while a handler has the session: then every COMMIT of its connection is refused."""
        return self._enlistment.commit_allowed

    @commit_allowed.setter
    def commit_allowed(self, allowed: bool) -> None:
        self._enlistment.commit_allowed = allowed

    def allow_last_commit(self) -> None:
        """Allow the COMMIT after which the session is closed: a listener that hears of its end can send nothing, by
        whatever bus.
        """
        self.commit_allowed = self._enlistment.closes_with_commit = True

    def begin_message(self, cause: Cause) -> None:
        """Let what is sent now be caused by this message, and refuse what tasks of the one before send."""
        if self.cause is not None:
            self.cause.is_over = True
        self.cause = cause

    def variables(self) -> Context:
        """Return a copy of the context variables in which what is sent is caused by the message that has begun."""
        variables = copy_context()
        variables.run(_cause.set, (self, self.cause))
        return variables

    @contextmanager
    def caused_by(self, cause: Cause | None) -> Iterator[None]:
        """Let what is sent in the block, and in the tasks that are started there, be caused by this."""
        token = _cause.set((self, cause))
        try:
            yield
        finally:
            _cause.reset(token)

    def _cause_here(self) -> Cause | None:
        """Return the cause in this context. Raises NoUnitOfWork when its message is over."""
        outbox, cause = _cause.get()
        if outbox is not self:
            cause = self.cause
        if cause is not None and cause.is_over:
            raise NoUnitOfWork(_OVER)
        return cause

    def close(self) -> None:
        """Refuse messages from now on, of every bus: the session will not commit again."""
        self._enlistment.is_closed = True

    def _sending(self, message: object, kind: Kind, to: str | None, options: SendOptions) -> Sending:
        """Return a message as middleware sees it. A message that middleware drops uses up an id too."""
        cause = self._cause_here()
        return Sending(message, kind, to, options, cause.envelope if cause else None, cause, self._remember)

    def _remember(self, envelopes: Sequence[Envelope]) -> None:
        if self._enlistment.is_closed or self._is_committing or (self._ending is not None and not self._ending.is_over):
            raise NoUnitOfWork(_OVER)
        if self._is_rolled_back:
            raise NoUnitOfWork(_ROLLED_BACK)
        with self._remembering:
            if not self.session.in_transaction():
                self._begin()
            elif self._is_ending and self._connection is None:
                self._connect()  # without a connection there would be no COMMIT to store it by
            self._pending.remember(envelopes)
        failpoint("C1")

    def _begin(self) -> None:
        """Join the session's transaction in SQLAlchemy's bookkeeping only, to hear of a rollback; no connection is
        taken.
        """
        if not self.session.autobegin:
            raise NoUnitOfWork(_BEGINS_NONE)
        try:
            self.session.begin()
        except InvalidRequestError as error:
            raise NoUnitOfWork(
                "the session is closed: messages sent with it would never be stored; open another by "
                "`async with bus.unit_of_work()`"
            ) from error

    # ------------------------------------------------------------------ storing

    def store(self) -> None:
        """Flush the session and insert the sent envelopes, in its transaction."""
        self.session.flush()  # listeners of the flush may send too
        if self._pending.unstored():
            self._store(self._connect(), self._pending.unstored(), owned=not self._is_joined)
            failpoint("C2")

    def is_stored(self, message_id: UUID) -> bool:
        """Tell whether store() has written the message of this id, which had not been sent before."""
        return self._pending.has_row(message_id)

    def _connect(self) -> Connection | None:
        """Let the session have a connection, which tells of its COMMIT; durable.testing does without.

        A session that chooses an engine for each statement would choose one that has none of its rows.
        """
        try:
            connection = self._connection or self.session.connection()
        except UnboundExecutionError as error:
            raise WiringError(_NO_ENGINE) from error
        self._check_connections()
        return connection

    def _check_connections(self) -> None:
        """Raise WiringError when a part of the session's data would be committed by itself."""
        root = self.session.get_transaction()
        if root is not None and len(root.connections) > 1 and not self.session.twophase:
            raise WiringError(_SEVERAL_CONNECTIONS)

    def _store(self, connection: Connection | None, entries: Sequence[Entry], *, owned: bool) -> None:
        rows = self._rows([entry.envelope for entry in entries], owned=owned)
        try:
            known = self.insert(connection, list(rows.values()))
        except BaseException:
            self._dispatcher.abandoned(list(rows.values()))
            raise
        insert = self._pending.begin_insert()
        for entry in entries:  # of two with one business key the first has the row
            entry.stored_by = insert
            sent = rows.pop((entry.envelope.id, entry.envelope.destination), None)
            entry.sent = None if sent is None or sent.key in known else sent
            if sent is not None and entry.sent is None:
                self._dispatcher.abandoned([sent])

    def _rows(self, envelopes: Sequence[Envelope], *, owned: bool) -> dict[tuple[UUID, str], Sent]:
        """The rows to insert: one for each id and destination."""
        first: dict[tuple[UUID, str], Envelope] = {}
        for envelope in envelopes:
            first.setdefault((envelope.id, envelope.destination), envelope)
        places = {key: self._envelope_factory.place(envelope) for key, envelope in first.items()}
        free = [envelope for key, envelope in first.items() if owned and places[key].ordering_key is None]
        owners = dict(zip(map(id, free), self._dispatcher.reserve(free), strict=True)) if free else {}
        return {
            key: Sent(
                envelope,
                LOCAL if envelope.destination == LOCAL else None,
                owners.get(id(envelope), ANY_NODE),
                places[key],
            )
            for key, envelope in first.items()
        }

    def insert(self, connection: Connection | None, sent: Sequence[Sent]) -> set[storage.Key]:
        """Write rows to the tables, in the session's transaction; durable.testing keeps them in memory instead.

        Returns the keys of those that had been sent before.
        """
        assert connection is not None
        refuse_shared(connection.engine.pool)
        return storage.store(connection, self._schema, sent)

    def _hand_over(self, sent: Sequence[Sent]) -> None:
        if sent:
            failpoint("C3")
            self._dispatcher.committed(sent)

    def _abandon(self, sent: Sequence[Sent]) -> None:
        if sent:
            self._dispatcher.abandoned(sent)

    # ------------------------------------------------------------------ what becomes of the session's transactions

    def transaction_begun(self, transaction: SessionTransaction) -> None:
        self._pending.begin(transaction)

    def connected(self, transaction: SessionTransaction, connection: Connection, *, late: bool = False) -> None:
        """The session has begun to use this connection, for all of this transaction. `late`: some time ago."""
        if self._connection is not None or self._engine not in (None, connection.engine):
            return
        self._connection = connection
        self._is_joined = not has_opened(transaction, connection)
        is_new = follow(connection, self)
        self._pending.connect(transaction, open_savepoints(connection), late=is_new and (late or self._is_joined))

    @property
    def _engine(self) -> Engine | None:
        """The engine of the session; None when each class has its own."""
        try:
            return self.session.get_bind().engine
        except UnboundExecutionError:
            return None

    def savepoint_connected(self, transaction: SessionTransaction, connection: Connection) -> None:
        if connection is self._connection:
            self._pending.begin_on_connection(transaction)

    def about_to_commit(self) -> None:
        """Write the pending envelopes before the session commits, with no savepoint open."""
        self._check_commit()
        self.store()
        self._is_ending = True

    def may_commit(self) -> None:
        """Write the pending envelopes before the session commits, or releases a savepoint: the connection tells the
        end.
        """
        if self._pending.unstored() or not self.commit_allowed:
            self._connect()
        self._is_ending = True

    def _check_commit(self) -> None:
        if not self.commit_allowed:
            raise WiringError(_HANDLERS_COMMIT)
        if self._pending.is_lost:
            raise WiringError(_LOST)

    def savepoint_released(self, transaction: SessionTransaction) -> None:
        self._pending.keep(transaction)
        self._is_ending = False

    def session_committed(self) -> None:
        """Finish after the commit of the session's transaction, which may have joined one that goes on."""
        self._is_committing = True
        self._enlistment.is_closed |= self._enlistment.closes_with_commit
        if self._connection is None:
            self._commit_without_connection()
        elif not self._connection.in_transaction():
            self._hand_over(self._pending.take())

    def _commit_without_connection(self) -> None:
        """Finish without a COMMIT: envelopes that are left were sent by a listener, after the last look."""
        self._check_commit()
        root = self.session.get_transaction()
        if root is not None and self._pending.since(root):
            raise NoUnitOfWork(_OVER)

    def session_rolled_back(self) -> None:
        """The session's transaction, or a savepoint, was rolled back; it ends later."""
        self._is_rolled_back = True

    def transaction_ended(self, transaction: SessionTransaction) -> None:
        self._is_rolled_back = False
        self._abandon(self._pending.forget(transaction))
        if transaction.parent is None:
            if self._connection is not None and not self._connection.in_transaction():
                self._abandon(self._pending.take())  # a COMMIT that fails ends it, and no rollback follows
            self._connection = None
            self._is_joined = self._is_ending = self._is_committing = False

    # ------------------------------------------------------------------ what becomes of the connection's transaction

    @property
    def _not_connected(self) -> SessionTransaction | None:
        """The session's transaction, as long as it is no part of any connection's."""
        return self._root if self._connection is None else None

    @property
    def _root(self) -> SessionTransaction | None:
        """The session's transaction; None after the unit of work, whatever the session begins then."""
        return None if self._enlistment.is_over else self.session.get_transaction()

    def savepoints_met(self, about: Sequence[About]) -> None:
        for verb, name in about:
            self._abandon(self._pending.meet(verb, name, self._not_connected))

    def savepoints_doubted(self, about: Sequence[About]) -> None:
        self._pending.doubt(about)

    @property
    def holds_messages(self) -> bool:
        """Tell whether the end of the transaction matters here: it is another matter while a handler runs, or when
        the end has begun.
        """
        return self.commit_allowed and not self._is_committing and bool(self._pending)

    @property
    def is_in_transaction(self) -> bool:
        """Tell whether the session takes part in the connection's transaction, and may still send; a handler's is the
        matter of its fence.
        """
        return self.commit_allowed and not self._is_committing and self._connection is not None

    def commit_begins(self, connection: Connection) -> None:
        """Refuse messages of other tasks until the COMMIT, or the end after PREPARE, is over."""
        if self._commits or (self._connection is not None and self.session.twophase):
            self._is_committing = True
        else:
            transaction = connection.get_transaction()
            assert transaction is not None
            self._ending = Ending(transaction)

    @property
    def _commits(self) -> bool:
        """Tell whether the commit on the connection is the session's own; then the session tells how it ends."""
        return self._connection is not None and self._root is not None and not self._root.is_active

    def store_last(self, connection: Connection) -> None:
        """Insert the envelopes that the session has not stored, as the last statement before the COMMIT."""
        self._check_commit()
        if unstored := self._pending.unstored(self._not_connected):
            self._check_connections()
            self._store(connection, unstored, owned=self._commits)
            failpoint("C2")

    def stored_last(self) -> bool:
        """The COMMIT is sent now. True when the connection is of interest after it, too."""
        if self._is_committing:
            return True
        assert self._ending is not None
        sent = self._pending.take(self._not_connected)
        if sent:
            self._dispatcher.committing(self._ending, sent)
        return bool(sent) or self._connection is not None

    def commit_failed(self) -> None:
        """A statement of the connection has failed; if its COMMIT is under way, it is that."""
        if self._ending is not None and not self._ending.is_over:
            self._ending.has_failed = True

    def connection_rolled_back(self, connection: Connection) -> bool:
        """True when the connection is of interest after it, too."""
        self._abandon(self._pending.take(self._not_connected))
        return self._connection is not None


def _refuse_no_message(result: object) -> None:
    try:
        name_of(type(result))
    except UnknownMessageType as error:
        raise UnknownMessageType(f"{error}; a handler returns a message, a list of them, or None") from None
