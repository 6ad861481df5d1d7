"""The transaction that an attempt began, which must be the one that ends it.

    attempt:  BEGIN -- handler, handler, ... -- completion -- COMMIT
                          |
                          session.rollback(), Connection.rollback()   noticed: the attempt has failed
                          session.commit(), Connection.commit(),
                          "COMMIT", "ROLLBACK", ... as SQL text       refused before they are sent

A handler that rolls back takes the effects of the other messages of its group along; one that commits leaves effects
behind whose messages are not finished. A savepoint that a handler leaves open is released after it, as COMMIT does it:
the next message's rollback to a savepoint must not reach beyond its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet, ref

from sqlalchemy import Connection, Engine, Transaction, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, SessionTransaction

from durable.agents.traces import Traces
from durable.errors import TransactionEnded, Verdict, WiringError, told_by
from durable.outbox.savepoints import Savepoints
from durable.outbox.sql_text import About, control_of
from durable.outbox.transactions import is_of_sqlalchemy, sql_of
from durable.storage.engines import is_in_autocommit
from durable.storage.outages import causes_of, described, is_conflict, is_outage_of_all

_KEY: Final = "_durable_fence"  # among the attributes of a session
_REFUSED: Final = (
    "a handler must not end its transaction ({told}): durable commits it, with the message's completion; "
    "put what may fail into session.begin_nested()"
)

_AUTOCOMMIT: Final = (
    "a handler's connection is in AUTOCOMMIT: its effects would stay when it fails, and be there twice after the next "
    "attempt; give the bus an engine without it, and use an engine of your own for what cannot run in a transaction"
)

# Fences know their connections: kept here themselves, both would stay for ever. A fence lives as long as its session.
_fences: WeakKeyDictionary[Connection, ref[Fence]] = WeakKeyDictionary()
_watched: WeakSet[Engine] = WeakSet()


class _Begun:
    """Transaction of a connection when it joined: its own, or a savepoint of one that it was given."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._savepoint = connection.get_nested_transaction()
        self._transaction: Transaction | None = self._savepoint or connection.get_transaction()
        self.savepoints = Savepoints[int]()
        """Those that were begun since, each marked with the number of its message."""

    @property
    def is_active(self) -> bool:
        return self._transaction is not None and self._transaction.is_active

    @property
    def is_nested(self) -> bool:
        """Tell whether a savepoint of the connection itself has been left open."""
        return self.connection.get_nested_transaction() is not self._savepoint

    def release(self) -> None:
        while self.is_nested and (savepoint := self.connection.get_nested_transaction()) is not None:
            savepoint.commit()


class Fence:
    """Watches over the transaction of one session, until it is complete."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._root = session.get_transaction() or session.begin()
        self._begun: dict[Connection, _Begun] = {}
        self._message = 0
        self.loss: str | None = None
        """Why a connection of the session is lost: the database has ended it, or the way to it is gone."""
        self._fault: DBAPIError | None = None
        """The last conflict or outage that a statement of the session has met."""
        self._refusing: Connection | None = None
        """The connection that has met it, until the database takes a statement there again."""
        self.is_complete = False
        """True if the next COMMIT is that of the runner."""
        vars(session)[_KEY] = self
        self.traces = Traces()

    @property
    def has_lost_connection(self) -> bool:
        return self.loss is not None

    @property
    def is_connected(self) -> bool:
        return bool(self._begun)

    def conflict_behind(self, error: BaseException) -> DBAPIError | None:
        """Return the error of a statement that was rolled back so that another transaction goes on, if it is why the
        attempt ended with this error, whatever that says."""
        fault = self._fault_behind(error)
        return fault if fault is not None and is_conflict(fault) else None

    def outage_behind(self, error: BaseException) -> DBAPIError | None:
        """Return the same for a statement for which the database lacked room or connections, or was read-only."""
        fault = self._fault_behind(error)
        return fault if fault is not None and is_outage_of_all(fault) else None

    def _fault_behind(self, error: BaseException) -> DBAPIError | None:
        """A transaction that goes on, as a savepoint was rolled back, has ended by the handler's own decision, unless
        the fault itself was raised on."""
        if self._refusing is not None:
            return self._fault
        is_decided = isinstance(told_by(error), Verdict) or all(each is not self._fault for each in causes_of(error))
        return None if is_decided else self._fault

    def meet(self, error: DBAPIError, connection: Connection) -> None:
        if is_conflict(error) or is_outage_of_all(error):
            self._fault, self._refusing = error, connection

    def go_on(self, connection: Connection) -> None:
        """Note that the database takes statements there: after a fault, only when a savepoint was rolled back."""
        if connection is self._refusing:
            self._refusing = None

    @property
    def is_disturbed(self) -> bool:
        """Tell, without I/O, whether check() has work to do."""
        return (
            self._has_ended
            or self._session.in_nested_transaction()
            or any(each.is_nested for each in self._begun.values())
        )

    def check(self) -> None:
        """Release what is left of savepoints. Raise TransactionEnded when the transaction is not the one that began."""
        if self._has_ended:
            raise TransactionEnded
        while (savepoint := self._session.get_nested_transaction()) is not None:
            savepoint.commit()
        for each in self._begun.values():
            each.release()

    @property
    def _has_ended(self) -> bool:
        is_root = self._session.get_transaction() is self._root
        return not is_root or not all(each.is_active for each in self._begun.values())

    @property
    def has_failed(self) -> bool:
        """Tell whether no commit can succeed any more: after a rollback, a failed flush, or the end of the session."""
        return self._has_ended or not self._session.is_active

    def begin_message(self) -> None:
        """Leave the savepoints that the messages before have begun as SQL text to them."""
        self._message += 1
        self.traces.begin_message()

    def check_savepoints(self, connection: Connection, about: Sequence[About]) -> None:
        """Raise TransactionEnded for a statement about a savepoint that this message has not begun: alone, the database
        would refuse it; in a group it may reach into the messages before.
        """
        savepoints = self._begun[connection].savepoints.copy()
        for verb, name in about:
            savepoint = savepoints.meet(verb, name, self._message)
            if savepoint is None or savepoint.mark != self._message:
                raise TransactionEnded

    def meet_savepoints(self, connection: Connection, about: Sequence[About]) -> None:
        """Follow a statement that the database has accepted."""
        for verb, name in about:
            self._begun[connection].savepoints.meet(verb, name, self._message)

    def doubt_savepoints(self, connection: Connection, about: Sequence[About]) -> None:
        """Note that some of these may have been carried out: a text of several statements has failed."""
        self._begun[connection].savepoints.doubt(about, self._message)

    def begun(self, transaction: SessionTransaction, connection: Connection) -> None:
        """Note that a connection takes part in a transaction of the session. Raises WiringError in AUTOCOMMIT."""
        if transaction is not self._root:
            return
        if is_in_autocommit(connection):
            raise WiringError(_AUTOCOMMIT)
        self._begun[connection] = _Begun(connection)
        _fences[connection] = ref(self)
        if connection.engine not in _watched:
            _watched.add(connection.engine)
            event.listen(connection.engine, "before_cursor_execute", _before_statement)
            event.listen(connection.engine, "after_cursor_execute", _after_statement)
            event.listen(connection.engine, "commit", _before_commit)
            event.listen(connection.engine, "handle_error", _after_error)
        self.traces.join(connection)

    def leave(self) -> None:
        """Watch over nothing any more."""
        for connection in self._begun:
            if _fence_of(connection) is self:
                del _fences[connection]


def forget_fence(session: Session) -> None:
    """Forget the fence of a session whose attempt is over: it knows the session. Connections that the session was given
    are the application's again.
    """
    fence: Fence | None = vars(session).pop(_KEY, None)
    if fence is not None:
        fence.leave()


@event.listens_for(Session, "after_begin")
def _after_begin(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    fence: Fence | None = vars(session).get(_KEY)
    if fence is not None:
        fence.begun(transaction, connection)


def _before_statement(
    connection: Connection, _cursor: Any, statement: object, _parameters: Any, context: Any, _many: bool
) -> None:
    fence = _fence_of(connection)
    if fence is None or fence.is_complete:
        return
    sql = sql_of(connection, statement)
    control = control_of(sql)
    if control.ends:
        raise WiringError(_REFUSED.format(told=f"it sent {sql.strip()[:40]!r}"))
    if control.savepoints and not is_of_sqlalchemy(context):
        fence.check_savepoints(connection, control.savepoints)
    fence.traces.begin_statement(sql, control)


def _after_statement(
    connection: Connection, _cursor: Any, statement: object, parameters: Any, _context: Any, many: bool
) -> None:
    fence = _fence_of(connection)
    if fence is None or fence.is_complete:
        return
    fence.go_on(connection)
    fence.traces.end_statement()
    if about := control_of(sql_of(connection, statement)).savepoints:
        fence.meet_savepoints(connection, about * (len(parameters) if many else 1))


def _before_commit(connection: Connection) -> None:
    if _is_guarded(connection):
        # For SQLAlchemy the transaction is over now, whatever is raised: it would give the connection back as it is.
        connection.engine.dialect.do_rollback(connection.connection)
        raise WiringError(_REFUSED.format(told="it committed its connection"))


def _after_error(context: ExceptionContext) -> None:
    """The handler may swallow it, and the session forgets its connection. A statement that the handler has cancelled
    breaks its connection too, but that is no outage."""
    fence = None if context.connection is None else _fence_of(context.connection)
    if fence is None or context.connection is None:
        return
    fence.traces.end_statement()
    if context.is_disconnect and isinstance(context.original_exception, Exception):
        fence.loss = fence.loss or described(context.original_exception)
    error = context.sqlalchemy_exception
    if isinstance(error, DBAPIError):
        fence.meet(error, context.connection)
    control = control_of(sql_of(context.connection, context.statement))
    if not control.is_alone:
        fence.doubt_savepoints(context.connection, control.savepoints)


def _is_guarded(connection: Connection) -> bool:
    fence = _fence_of(connection)
    return fence is not None and not fence.is_complete


def _fence_of(connection: Connection) -> Fence | None:
    found = _fences.get(connection)
    return found() if found is not None else None
