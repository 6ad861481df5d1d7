"""Errors of the database, sorted by what can be done about them, and told in one line without any data.

    refused data      InvalidMessage       the same row fails again, whoever writes it
    outage            StorageUnavailable   the database, or the way to it, is away: no fault of the work
    passing           StorageUnavailable   for agents only: deadlocks, locks, time limits; their work is done again
    lack              Lack                 a table, column or right of durable is missing: no fault of the work either
    anything else     as it is             a mistake in a statement

SQLAlchemy's own texts hold the statement and its parameters, and Postgres' details hold rows: neither is repeated.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.exc import DataError, DBAPIError, OperationalError, StatementError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from durable.errors import InvalidMessage, SchemaMismatch, StorageUnavailable, leaves_of, text_of

_ASYNCPGS_STATES: Final = ("cannot switch to state", 'cannot switch to "idle" state')  # by number
_DRIVERS: Final = ("sqlalchemy", "asyncpg", "psycopg")
_BAD_DATA: Final = "22"  # SQLSTATE class: data exception
_NO_TABLE: Final = "42P01"
_NO_RIGHT: Final = "42501"
_SERIALIZATION_FAILURE: Final = "40001"
_SHORTAGE: Final = "53"  # SQLSTATE class: insufficient resources
_LIMIT: Final = "53400"
_DEADLOCK: Final = "40P01"
_NO_LOCK: Final = "55P03"
_TOO_MUCH: Final = "54000"
_LISTENERS: Final = (
    "end the session that has listened within a transaction for long: SELECT pid, state, xact_start FROM "
    "pg_stat_activity ORDER BY xact_start"
)
_READ_ONLY: Final = "25006"
PRIMARY: Final = (
    "the server is a standby, or default_transaction_read_only is on; name the primary in the setting database_url "
    "(DURABLE_DATABASE_URL)"
)
_NO_COLUMN: Final = "42703"
_MIGRATE: Final = "run: durable-agent migrate APP:BUS"
GRANT: Final = "as owner of the schema, run: durable-agent migrate APP:BUS --grant-to ROLE"
_ADVICE: Final = {_NO_TABLE: _MIGRATE, _NO_COLUMN: _MIGRATE, _NO_RIGHT: GRANT}
_PARAMETERS: Final = re.compile(r"^[^\n]*\$1 = (?:'|NULL).*", re.MULTILINE | re.DOTALL)
"""The last part of a context, where the setting log_parameter_max_length_on_error adds it."""
LOST_STATEMENTS: Final = ("26000", "42P05")
"""A prepared statement is missing, or its name is taken: a pooler has put another server connection behind ours."""
_OUTAGE: Final = (*LOST_STATEMENTS, "08", _READ_ONLY, "25P03", "28", "3D", _SHORTAGE, "57P", "58")
# connection · read-only after a failover · idle in its transaction, for longer than the work may take: the statement
# was lost, or the process paused · authorization · no such database · resources · shutdown · system
_PASSING: Final = (*_OUTAGE, "25", "40", "55006", "55P", "57")
# transaction state · serialization and deadlock · in use, lock not available · operator: gone at the next try


class Lack(StorageUnavailable):
    """A table, a column or a right of durable is missing: the text says which, and what to run."""


def is_outage(error: BaseException | None) -> bool:
    """True for a failure of the infrastructure, not of the work that met it: such an attempt does not count.

    The causes of the error count too. Lock waits and time limits are none: another attempt may meet them because of
    what the work does. For deadlocks there is is_conflict().
    """
    return outage_in(error) is not None


def is_outage_itself(error: BaseException) -> bool:
    """The same without the causes of the error, for one that the application may have raised before: an object that it
    raises again and again keeps its first causes. Once the session has its connection, a pool without one is that of
    another engine.
    """
    return any(_is_of_infrastructure(each) and not isinstance(each, PoolTimeout) for each in leaves_of(error))


def outage_in(error: BaseException | None) -> BaseException | None:
    """Return the failure of the infrastructure among an error, its causes, and what groups among them hold."""
    return next(filter(_is_of_infrastructure, causes_of(error, below=_is_not_of_the_database)), None)


def _is_of_infrastructure(error: BaseException) -> bool:
    if isinstance(error, DBAPIError):
        state = sqlstate(error)
        is_met = state.startswith(_OUTAGE) if state else _is_broken(error)
        return is_met or _is_full_of_notifications(error) or _is_met_while_connecting(error)
    return isinstance(error, StorageUnavailable | PoolTimeout) or _is_bare(error)


def is_shortage(error: BaseException) -> bool:
    """True where the database has no room, memory or connections left, by the error or a cause of it."""
    return any(map(_is_short, causes_of(error)))


def is_outage_of_all(error: DBAPIError) -> bool:
    """True for a shortage, or a server that is read-only, which any work would meet; a limit of the configuration
    (53400) may be that of this one. The causes of the error do not count: it may have been met after another one.
    """
    return sqlstate(error) == _READ_ONLY or (_is_short(error) and sqlstate(error) != _LIMIT)


def _is_short(error: BaseException) -> bool:
    return str(_state(error)).startswith(_SHORTAGE) or _is_full_of_notifications(error)


def is_conflict(error: BaseException) -> bool:
    """True where Postgres rolled back so that another transaction goes on; the causes of the error do not count."""
    return any(_state(each) in (_SERIALIZATION_FAILURE, _DEADLOCK) for each in leaves_of(error))


def met_lock(error: BaseException) -> bool:
    """True where a lock was not to be had, or in a deadlock; the causes of the error do not count."""
    return any(_state(each) in (_DEADLOCK, _NO_LOCK) for each in leaves_of(error))


def _any(_: BaseException) -> bool:
    return True


def _is_not_of_the_database(error: BaseException) -> bool:
    """Tell whether the causes of an error say more than it does itself."""
    return not isinstance(error, DBAPIError)


def causes_of(error: BaseException | None, *, below: Callable[[BaseException], bool] = _any) -> Iterator[BaseException]:
    """The error, what it was raised from, and what groups among them hold. `below`: tells whether the causes of this
    one are asked for."""
    met: set[int] = set()
    left = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in met:
            continue
        met.add(id(each))
        yield each
        if below(each):
            left.append(each.__cause__ or (None if each.__suppress_context__ else each.__context__))
            left.extend(reversed(each.exceptions) if isinstance(each, BaseExceptionGroup) else ())


def _state(error: BaseException) -> object:
    return sqlstate(error) if isinstance(error, DBAPIError) else getattr(error, "sqlstate", None)


def _is_broken(error: DBAPIError) -> bool:
    """True for a connection that broke off. SQLAlchemy does not always see it: asyncpg has met an error that nobody
    asked for, before the end of the connection."""
    return (
        error.connection_invalidated
        or isinstance(error, OperationalError)
        or _first_line(error).startswith(_ASYNCPGS_STATES)
    )


def is_passing(error: DBAPIError) -> bool:
    """True when the same statement may succeed at the next try: infrastructure, locks or time limits."""
    return is_outage(error) or sqlstate(error).startswith(_PASSING)


def sqlstate(error: DBAPIError) -> str:
    """The five characters of this error, or nothing where the server did not speak."""
    return getattr(error.orig, "sqlstate", None) or ""


def described(error: BaseException) -> str:
    """The cause in one line: no statement, no parameter, no row."""
    cause = _cause(error)
    if isinstance(cause, TimeoutError) and not str(cause).strip():
        return "no answer in time"
    said = _first_line(cause)
    if remedy := _remedy_of(error):
        return f"{said}; {remedy}"
    if said.startswith(_ASYNCPGS_STATES):
        return "the connection broke off in the middle of a statement"
    return said or type(cause).__name__


def tells_remedy(error: BaseException) -> bool:
    """True where described() says what to do about the error, or a cause of it."""
    return any(_remedy_of(each) is not None for each in causes_of(error))


def _remedy_of(error: BaseException) -> str | None:
    if _is_full_of_notifications(error):
        return _LISTENERS
    return f"the transaction was set READ ONLY, or {PRIMARY}" if _state(error) == _READ_ONLY else None


def unusable(reason: str) -> str:
    """The text of an outage."""
    return f"the database cannot be used: {reason}"


def _is_full_of_notifications(error: BaseException) -> bool:
    """Tell whether Postgres refuses a commit for its queue of notifications. Its word is NOTIFY in any language."""
    return _state(error) == _TOO_MUCH and "NOTIFY" in _first_line(error)


def _cause(error: BaseException) -> BaseException:
    return error.orig if isinstance(error, StatementError) and error.orig is not None else error


def _first_line(error: BaseException) -> str:
    cause = _cause(error)
    first = cause.args[0] if cause.args and isinstance(cause.args[0], str) else text_of(cause)
    return first.strip().partition("\n")[0].strip()


@contextmanager
def translated(schema: str | None = None) -> Iterator[None]:
    """The drivers' errors as durable's; what is neither bad data nor passing is left as it is, and errors of files.

    `schema`: for statements over the tables of durable alone; what they lack is told as a Lack.
    """
    try:
        yield
    except DBAPIError as error:
        if _is_refused_data(error):
            raise InvalidMessage(f"the database refuses the data: {_condition(error)}") from None
        if is_passing(error):
            raise _unavailable(error) from error.orig
        if schema is not None and (lack := lack_of(error, schema)):
            raise lack from error.orig
        raise
    except (TimeoutError, PoolTimeout) as error:
        raise _unavailable(error) from error
    except OSError as error:
        if not _is_from_a_driver(error):  # of a file, or of another server, which the block uses as well
            raise
        raise _unavailable(error) from error
    except StatementError as error:  # a value that the driver cannot encode
        raise InvalidMessage(f"the driver refuses the data: {type(error.orig).__name__}") from None
    except UnicodeEncodeError as error:  # psycopg's and the headers' encoders raise it bare; it holds the whole text
        raise InvalidMessage(f"the text cannot be encoded: {error.reason} at {error.start}") from None
    except Exception as error:
        if _is_bare(error):
            raise _unavailable(error) from error
        raise


def mismatch(error: DBAPIError, schema: str) -> SchemaMismatch | None:
    """Return the error for tables of durable that are missing, or of another version; None for any other fault of one
    of its statements."""
    faults = {_NO_TABLE: "has no durable tables", _NO_COLUMN: "is at another version than this code"}
    fault = faults.get(sqlstate(error))
    if fault is None or _is_within_code(error, schema):
        return None
    reason = str(error.orig).partition("\n")[0]
    return SchemaMismatch(f"schema {schema!r} {fault} ({reason}); {_MIGRATE}")


def lack_of(error: DBAPIError, schema: str) -> Lack | None:
    """Return the error for a table, column or right that a statement of durable lacks; None for any other fault."""
    advice = advice_of(error)
    if advice is None or _is_within_code(error, schema):
        return None
    return Lack(unusable(f"{described(error)}; {advice}"))


def advice_of(error: DBAPIError) -> str | None:
    """Return what to do about a table, column or right of durable that is missing; None for any other fault."""
    return None if _is_met_while_connecting(error) else _ADVICE.get(sqlstate(error))


def lacking_right(error: BaseException) -> BaseException | None:
    """Return Postgres' refusal for a right that the role lacks, among an error and its causes."""
    return next((each for each in causes_of(error) if _state(each) == _NO_RIGHT), None)


def is_lack(error: BaseException) -> bool:
    """True where something of durable is missing; the causes of the error count too."""
    return any(isinstance(each, Lack) for each in causes_of(error))


def _is_within_code(error: DBAPIError, schema: str) -> bool:
    """Tell whether a trigger or function of the application has met the fault, within a statement of durable.

    The context names it then, in any language; the functions and tables of durable are named with their schema.
    """
    raised = _raised(error)
    context = getattr(getattr(raised, "diag", raised), "context", None) or ""
    code = _PARAMETERS.sub("", context)
    return bool(code) and not re.search(rf"\b{re.escape(schema)}\.", f"{_first_line(error)} {code}")


@contextmanager
def keeping_cancellation() -> Iterator[None]:
    """Raise CancelledError where an error has taken its place: the ROLLBACK of a cancelled task fails on a connection
    that is gone, and nobody would see the cancellation."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    except Exception:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError from None
        raise


def _unavailable(error: BaseException) -> StorageUnavailable:
    return StorageUnavailable(unusable(described(error)))


def _is_refused_data(error: DBAPIError) -> bool:
    if _is_met_while_connecting(error):
        return False
    if state := sqlstate(error):
        return state.startswith(_BAD_DATA)
    return isinstance(error, DataError) or isinstance(_raised(error), ValueError)


def _raised(error: DBAPIError) -> BaseException | None:
    """The driver's own error: SQLAlchemy puts one of its own between for asyncpg."""
    return getattr(error.orig, "orig", None) or error.orig


def _condition(error: DBAPIError) -> str:
    """The name of what is wrong, as Postgres' documentation has it: the text holds the value."""
    from psycopg import errors

    try:
        return errors.lookup(sqlstate(error)).__name__
    except KeyError:
        return type(_raised(error)).__name__


def _is_bare(error: BaseException) -> bool:
    """True for an error that SQLAlchemy passes on as it is while it opens a connection: one of the system, or one of
    asyncpg, before its types are set up."""
    from asyncpg import InterfaceError, InternalClientError, PostgresError

    of_drivers = OSError | TimeoutError | InterfaceError | InternalClientError | PostgresError
    return isinstance(error, of_drivers) and _is_from_the_dialect(error)


def _is_from_the_dialect(error: BaseException) -> bool:
    """Tell an error of the driver from one of some other code of the handler."""
    return any(name.startswith("sqlalchemy.dialects.") for name in _modules(error))


def _is_met_while_connecting(error: BaseException) -> bool:
    """Tell an error of a connection that is being opened, whatever its state: no work has begun there."""
    return "sqlalchemy.pool.base" in _modules(error)


def _is_from_a_driver(error: BaseException) -> bool:
    return any(name.partition(".")[0] in _DRIVERS for name in _modules(error))


def _modules(error: BaseException) -> Iterator[str]:
    """The names of the modules that an error has passed."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next
