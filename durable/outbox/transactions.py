"""Ends of transactions, told to the outboxes of a session: by the session that ends one, and by the connection's
COMMIT.

    Session      after_transaction_create, before_commit, after_begin, after_commit, after_rollback,
                 after_transaction_end
    Connection   before_cursor_execute, after_cursor_execute, handle_error, rollback, rollback_twophase, commit,
                 commit_twophase, prepare_twophase: before each COMMIT or PREPARE, whoever asks for it

The session's events alone do not tell a COMMIT: `before_commit` comes before open savepoints are released, and
`after_commit` of a session that has joined a transaction comes after nothing, or after RELEASE. Connections are
followed from the first statement of a session with outboxes to the end of their transaction. Savepoints are followed
in the statements that the database has accepted, those of SQLAlchemy and those of the application alike: the events for
them come before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final, Protocol

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import ExceptionContext, ExecutionContext, RootTransaction
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.sql.elements import ReleaseSavepointClause, RollbackToSavepointClause, SavepointClause

from durable.errors import NoUnitOfWork, WiringError
from durable.outbox.sql_text import About, control_of
from durable.storage.engines import is_in_autocommit
from durable.storage.left_in_use import watch

_ENDED_AS_TEXT: Final = (
    "SQL text must not end the transaction of a session that sends messages ({told!r}): use commit() or rollback() of "
    "the session"
)
_UNREADABLE: Final = "a statement of type {kind} cannot be read for ends of its transaction: pass it as text"
_OWN_SAVEPOINTS: Final = (SavepointClause, RollbackToSavepointClause, ReleaseSavepointClause)
_KEY = "_durable"  # among the attributes of a session, and of a connection
_IS_OVER: Final = "_durable_is_over"  # among the attributes of a session's transaction
_OVER: Final = "this session has ended, and executes nothing for a task left behind; await the task within its block"


class Ending:
    """The end of a transaction that no event tells: its connection committed it, not the session."""

    def __init__(self, transaction: RootTransaction) -> None:
        self._transaction = transaction
        self.has_failed = False

    @property
    def is_over(self) -> bool:
        return not self._transaction.is_active


class Follower(Protocol):
    """An outbox, as transactions see it."""

    def transaction_begun(self, transaction: SessionTransaction) -> None: ...
    def connected(self, transaction: SessionTransaction, connection: Connection) -> None: ...
    def savepoint_connected(self, transaction: SessionTransaction, connection: Connection) -> None: ...
    def about_to_commit(self) -> None: ...
    def may_commit(self) -> None: ...
    def savepoint_released(self, transaction: SessionTransaction) -> None: ...
    def session_committed(self) -> None: ...
    def session_rolled_back(self) -> None: ...
    def transaction_ended(self, transaction: SessionTransaction) -> None: ...

    @property
    def holds_messages(self) -> bool: ...
    @property
    def is_in_transaction(self) -> bool: ...
    def savepoints_met(self, about: Sequence[About]) -> None: ...
    def savepoints_doubted(self, about: Sequence[About]) -> None: ...
    def commit_begins(self, connection: Connection) -> None: ...
    def store_last(self, connection: Connection) -> None: ...
    def stored_last(self) -> bool: ...
    def commit_failed(self) -> None: ...
    def connection_rolled_back(self, connection: Connection) -> bool: ...


class Enlistment:
    """State that the outboxes of one session share, up to the end of its unit of work.

    It is an attribute of the session: SQLAlchemy gives copies of `info` to other sessions.
    """

    def __init__(self) -> None:
        self.outboxes: dict[Hashable, Any] = {}
        """By the envelope_factory of their bus."""
        self.opened: list[Connection] = []
        """Connections that the session has opened itself beside its outboxes; closed ones until it opens another."""
        self.commit_allowed = True
        """False while a handler has the session: then every COMMIT of its connection is refused."""
        self.closes_with_commit = False
        """True when the next COMMIT is the last one: a listener that hears of its end can send nothing."""
        self.is_closed = False
        """True from when on nothing can be sent."""
        self.is_over = False
        """True when the session is the application's again, or closed for good: what becomes of it is not told."""

    def end(self) -> None:
        self.is_over = self.is_closed = self.commit_allowed = True
        self.outboxes.clear()
        self.opened.clear()


def enlistment_of(session: Session) -> Enlistment:
    """The enlistment of a session, made when it is first asked for."""
    found: Enlistment = vars(session).setdefault(_KEY, Enlistment())
    return found


def open_connections(session: Session) -> list[Connection]:
    """Return those of Enlistment.opened that nobody has closed: the session has lost some of them, when the end of a
    transaction failed.
    """
    found: Enlistment | None = vars(session).get(_KEY)
    return [] if found is None else [connection for connection in found.opened if not connection.closed]


def close_connections(session: Session) -> None:
    """Close what the session has opened, so that Session.close() has nothing to roll back there.

    It would begin with the innermost savepoint. One that could not be released is in the way of those around it: it
    would fail, and keep the connection with its transaction open.
    """
    transaction, opened = session.get_transaction(), open_connections(session)
    others = () if transaction is None else transaction.connections.difference(opened)
    with ExitStack() as closing:
        for connection in opened:
            closing.callback(connection.close)
        for connection in others:
            closing.callback(_leave_failed_savepoints, connection)


def _leave_failed_savepoints(connection: Connection) -> None:
    while (savepoint := connection.get_nested_transaction()) is not None and not savepoint.is_active:
        savepoint.close()


def give_back_what_comes(session: Session) -> None:
    """Give each connection back that a task which was left behind opens in the session's transaction from now on.

    Its next transaction, if it has one, is that of an application which has lent the session.
    """
    if (transaction := session.get_transaction()) is not None:
        vars(transaction)[_IS_OVER] = True


def forget(session: Session) -> None:
    """End the enlistment of a session whose unit of work is over. They know each other: only a search for garbage would
    find them otherwise. Its outboxes follow a transaction that the session has joined to the end of that.
    """
    found: Enlistment | None = vars(session).pop(_KEY, None)
    if found is not None:
        found.end()


def follow(connection: Connection, outbox: Follower) -> bool:
    """Tell this outbox of the connection's transaction, up to its end. False when it is told already."""
    followers = _followers(connection)
    if outbox in followers:
        return False
    _keep_followers(connection, [*followers, outbox])
    return True


# They are an attribute of the connection, so that they end with it: they know it, and would keep it in any table. To
# make them an execution option of it computes as long as to send a message.


def _followers(connection: Connection) -> Sequence[Follower]:
    found: Sequence[Follower] = vars(connection).get(_KEY, ())
    return found


def _keep_followers(connection: Connection, followers: Sequence[Follower]) -> None:
    vars(connection)[_KEY] = followers


# ---------------------------------------------------------------- sessions

# Listening once on the class costs every session one look-up; listening on each instance would cost each enlisted
# session a registration for each event, as much as the insert itself.


def _outboxes(session: Session) -> Sequence[Follower]:
    found: Enlistment | None = vars(session).get(_KEY)
    return () if found is None else tuple(found.outboxes.values())


@event.listens_for(Session, "after_transaction_create")
def _transaction_created(session: Session, transaction: SessionTransaction) -> None:
    outboxes = _outboxes(session)
    if transaction.nested or transaction.parent is None:
        for outbox in outboxes:
            outbox.transaction_begun(transaction)


@event.listens_for(Session, "after_begin")
def _connected(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    if _IS_OVER in vars(_root(transaction)):
        if has_opened(transaction, connection):
            connection.close()
        raise NoUnitOfWork(_OVER)
    outboxes = _outboxes(session)
    if outboxes and has_opened(transaction, connection):
        _opened(session, connection)
    for outbox in outboxes:
        if transaction.parent is None:
            outbox.connected(transaction, connection)
        elif transaction.nested:
            outbox.savepoint_connected(transaction, connection)


def _opened(session: Session, connection: Connection) -> None:
    enlistment_of(session).opened = [*open_connections(session), connection]
    if connection.engine.dialect.is_async:  # all in one thread, while others may use the pool of a sync one
        watch(connection.engine)


def _root(transaction: SessionTransaction) -> SessionTransaction:
    return transaction if transaction.parent is None else _root(transaction.parent)


def has_opened(transaction: SessionTransaction, connection: Connection) -> bool:
    """Tell whether the session has opened this connection itself. One that it was given, in whatever way, is closed by
    whoever has opened it.
    """
    _, _, _, closes_it = transaction._connections[connection]
    return closes_it


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    """Tell the outboxes of a commit. With a savepoint open, either it or the transaction around it may be meant."""
    for outbox in _outboxes(session):
        if session.in_nested_transaction():
            outbox.may_commit()
        else:
            outbox.about_to_commit()


@event.listens_for(Session, "after_commit")
def _after_commit(session: Session) -> None:
    savepoint = session.get_nested_transaction()
    for outbox in _outboxes(session):
        if savepoint is None:
            outbox.session_committed()
        else:
            outbox.savepoint_released(savepoint)


@event.listens_for(Session, "after_rollback")
def _after_rollback(session: Session) -> None:
    for outbox in _outboxes(session):
        outbox.session_rolled_back()


@event.listens_for(Session, "after_transaction_end")
def _transaction_ended(session: Session, transaction: SessionTransaction) -> None:
    if transaction.nested or transaction.parent is None:
        for outbox in _outboxes(session):
            outbox.transaction_ended(transaction)


# ---------------------------------------------------------------- connections


def open_savepoints(connection: Connection) -> list[str]:
    """The names of all that are open, from inside out."""
    names, savepoint = [], connection.get_nested_transaction()
    while savepoint is not None:
        names.append(savepoint._savepoint)
        savepoint = savepoint._previous_nested
    return names


@event.listens_for(Engine, "before_cursor_execute")
def _before_statement(connection: Connection, _cursor: Any, statement: object, *_: Any) -> None:
    """Refuse an end of the transaction as SQL text. No event follows it: what is sent before it would be stored by no
    COMMIT, or by the next one, although its rows were rolled back. And for asyncpg's adapter the transaction goes on:
    each statement after it would commit by itself.
    """
    if (followers := _followers(connection)) and control_of(sql := sql_of(connection, statement)).ends:
        is_autocommit = is_in_autocommit(connection)
        if any(each.holds_messages or (each.is_in_transaction and not is_autocommit) for each in followers):
            raise WiringError(_ENDED_AS_TEXT.format(told=sql.strip()[:40]))


@event.listens_for(Engine, "after_cursor_execute")
def _after_statement(
    connection: Connection, _cursor: Any, statement: object, parameters: Any, _context: Any, many: bool
) -> None:
    """Follow savepoints once the database has accepted them."""
    if (followers := _followers(connection)) and (about := control_of(sql_of(connection, statement)).savepoints):
        for outbox in followers:
            outbox.savepoints_met(about * (len(parameters) if many else 1))


def sql_of(connection: Connection, statement: object) -> str:
    """Return the text of a statement; drivers take other kinds, too. Raises WiringError when it has none."""
    match statement:
        case str():
            return statement
        case bytes():
            return statement.decode(errors="replace")
        case None:
            return ""
        case _:
            return _composed(connection, statement)


def _composed(connection: Connection, statement: object) -> str:
    if (as_string := getattr(statement, "as_string", None)) is None:
        raise WiringError(_UNREADABLE.format(kind=type(statement).__name__))
    return str(as_string(None if connection.invalidated else connection.connection.driver_connection))


def is_of_sqlalchemy(context: ExecutionContext | None) -> bool:
    """Tell whether SQLAlchemy begins or ends a savepoint of its own by this statement."""
    return isinstance(getattr(getattr(context, "compiled", None), "statement", None), _OWN_SAVEPOINTS)


@event.listens_for(Engine, "rollback")
def _rollback(connection: Connection) -> None:
    if followers := _followers(connection):
        _keep_followers(connection, [each for each in followers if each.connection_rolled_back(connection)])


@event.listens_for(Engine, "rollback_twophase")
def _rollback_twophase(connection: Connection, _xid: str, _is_prepared: bool) -> None:
    _rollback(connection)


@event.listens_for(Engine, "prepare_twophase")
def _prepare_twophase(connection: Connection, _xid: str) -> None:
    """Store the envelopes; when that fails, the session rolls back."""
    if followers := _followers(connection):
        _store(connection, followers)


@event.listens_for(Engine, "commit")
def _commit(connection: Connection) -> None:
    if followers := _followers(connection):
        _end(connection, followers, lambda: connection.dialect.do_rollback(connection.connection))


@event.listens_for(Engine, "commit_twophase")
def _commit_twophase(connection: Connection, xid: str, is_prepared: bool) -> None:
    if not is_prepared and (followers := _followers(connection)):
        _end(connection, followers, lambda: connection.dialect.do_rollback_twophase(connection, xid, is_prepared=False))


def _end(connection: Connection, followers: Sequence[Follower], undo: Callable[[], None]) -> None:
    """Store the envelopes that are not stored yet; a failure keeps this transaction from committing."""
    try:
        _store(connection, followers)
    except BaseException:
        # For SQLAlchemy a COMMIT that raises has ended the transaction: it would give the connection back to its
        # pool with the transaction open.
        if not connection.invalidated:
            with suppress(Exception):
                undo()
        _rollback(connection)
        raise


def _store(connection: Connection, followers: Sequence[Follower]) -> None:
    for outbox in followers:
        outbox.commit_begins(connection)
    for outbox in followers:
        outbox.store_last(connection)
    _keep_followers(connection, [each for each in followers if each.stored_last()])


@event.listens_for(Engine, "handle_error")
def _error(context: ExceptionContext) -> None:
    if context.connection is not None and (followers := _followers(context.connection)):
        control = control_of(sql_of(context.connection, context.statement))
        for outbox in followers:
            outbox.commit_failed()
            if not control.is_alone:
                outbox.savepoints_doubted(control.savepoints)
