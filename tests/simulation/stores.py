"""The same work on both stores: the tables in memory, and Postgres; and their rows in one form.

Times are compared in steps of ten minutes, numbers of a sequence by their order. Each store knows which of its tables
have changed, so that only these are read and compared after a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, LiteralString, cast

import msgspec
import psycopg
from psycopg.rows import dict_row
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import OperationalError

from durable.envelope import LeasedEnvelope
from tests.simulation.database import Light
from tests.simulation.sql import SCHEMA, Known, known
from tests.simulation.tables import Store, Table, Transaction, Waits

Work = Callable[..., Any]
LOCKED: Final = "it waits for the lock of another transaction"
FRUITFUL: Final[set[str]] = set()
"""The statements that have found or changed something in memory."""
_STEP: Final = 600.0
_LOCK_NOT_AVAILABLE: Final = "55P03"
TABLES: Final[Mapping[str, LiteralString]] = {
    "outgoing": "SELECT * FROM durable.outgoing_envelopes ORDER BY seq",
    "incoming": "SELECT * FROM durable.incoming_envelopes ORDER BY seq",
    "received_ids": "SELECT * FROM durable.received_ids",
    "undated_ids": "SELECT * FROM durable.undated_ids",
    "history": "SELECT *, body IS NOT NULL AS has_body FROM durable.envelope_history",
    "letters": "SELECT * FROM durable.dead_letters",
    "failed_attempts": """SELECT attempt.*, (SELECT count(*) FROM durable.failed_attempts AS before
        WHERE before.attempt_id < attempt.attempt_id) AS rank FROM durable.failed_attempts AS attempt""",
    "circuits": "SELECT * FROM durable.circuits",
    "counts": "SELECT * FROM durable.handler_counts",
    "schedules": "SELECT * FROM durable.schedules",
    "placements": "SELECT * FROM durable.placements",
}
_NAMES: Final = {
    "outgoing": "outgoing_envelopes",
    "incoming": "incoming_envelopes",
    "history": "envelope_history",
    "letters": "dead_letters",
    "counts": "handler_counts",
}
"""The names in Postgres of the tables that have another one there."""
_OF_OTHERS: Final = {"received_ids": {"given_up", "sent_at"}}
"""Columns that a row in memory has, and its table has not."""
_UNTOLD: Final = {"seq", "letter_id", "attempt_id", "carried", "xid"}


class Memory:
    """The tables in memory."""

    def __init__(self, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.store = Store(clock)
        self.store.watch = self._hear
        self.changed: set[str] = set()
        """The tables of which rows have changed."""
        self._held: Transaction | None = None

    def _hear(self, table: Table[Any], key: Hashable, before: Any, after: Any) -> None:
        self.changed.add(table.name)

    def run(self, work: Work, *args: Any, **kwargs: Any) -> Any:
        transaction = Transaction(self.store)
        try:
            result = work(_over(transaction), SCHEMA, *args, **kwargs)
        except Waits:
            transaction.rollback()
            return LOCKED
        except BaseException:
            transaction.rollback()
            raise
        transaction.commit()
        return result

    def hold(self, work: Work, *args: Any, **kwargs: Any) -> Any:
        """Run work in a transaction that stays open."""
        self._held = Transaction(self.store)
        return work(_over(self._held), SCHEMA, *args, **kwargs)

    def end(self, *, commit: bool) -> None:
        if self._held is not None:
            (self._held.commit if commit else self._held.rollback)()
        self._held = None

    def rows(self, names: Collection[str]) -> dict[str, Any]:
        """The committed rows of these tables."""
        found = {name: [_asdict(row) for row in self.store.tables[name].rows.values()] for name in names}
        for name in ("outgoing", "incoming"):
            found.get(name, []).sort(key=lambda row: row["seq"])
        numbers = sorted(row["attempt_id"] for row in found.get("failed_attempts", []))
        for row in found.get("failed_attempts", []):
            row["rank"] = numbers.index(row["attempt_id"])
        return found


class _Direct:
    """A connection without a server."""

    def __init__(self, transaction: Transaction) -> None:
        self.transaction = transaction

    def execute(self, sql: str, params: Mapping[str, Any]) -> tuple[Known, Any]:
        statement = known(sql)
        found = statement.work(self.transaction, params)
        if found and found != [(0,)]:
            FRUITFUL.add(statement.name)
        return statement, found


def _over(transaction: Transaction) -> Connection:
    return cast(Connection, Light(cast(Any, _Direct(transaction))))


def _asdict(row: Any) -> dict[str, Any]:
    return msgspec.structs.asdict(row)


def make_engine(url: str) -> Engine:
    """An engine whose transactions do not wait for the lock of another one for long."""
    return create_engine(
        url.replace("postgresql:", "postgresql+psycopg:"),
        pool_size=3,
        connect_args={"options": "-c lock_timeout=100ms"},
    )


class Postgres:
    """The tables in Postgres."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.changed: set[str] = set()
        """The tables of which rows may have changed."""
        self._held: Connection | None = None
        with engine.connect() as conn:
            tables = [f"durable.{_NAMES.get(name, name)}" for name in TABLES]
            parts = _cursor(conn).execute(_PARTS, {"names": list(TABLES), "tables": tables}).fetchall()
        self._parts = {name: [part[name] for part in parts] for name in ("name", "oid")}

    def run(self, work: Work, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.engine.begin() as conn:
                result = work(conn, SCHEMA, *args, **kwargs)
                self._note_changes(conn)
                return result
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
                raise
            return LOCKED

    def hold(self, work: Work, *args: Any, **kwargs: Any) -> Any:
        self._held = self.engine.connect()
        return work(self._held, SCHEMA, *args, **kwargs)

    def end(self, *, commit: bool) -> None:
        if self._held is not None:
            if commit:
                self._note_changes(self._held)
            (self._held.commit if commit else self._held.rollback)()
            self._held.close()
        self._held = None

    def _note_changes(self, conn: Connection) -> None:
        """Ask a transaction what it has written, before it ends; what is counted is forgotten with its end."""
        self.changed.update(row["name"] for row in _cursor(conn).execute(_CHANGED, self._parts, prepare=True))

    def rows(self, names: Collection[str]) -> dict[str, Any]:
        with self.engine.connect() as conn:
            return {name: _cursor(conn).execute(TABLES[name].encode(), prepare=True).fetchall() for name in names}

    def empty(self) -> None:
        with self.engine.begin() as conn:
            for name in ("nodes", *TABLES):
                conn.exec_driver_sql(f"DELETE FROM durable.{_NAMES.get(name, name)}")

    def close(self) -> None:
        self.end(commit=False)


_PARTS: Final = """
SELECT name, oid
FROM unnest(%(names)s::text[], %(tables)s::regclass[]) AS each (name, whole),
LATERAL (SELECT whole::oid AS oid UNION SELECT relid::oid FROM pg_partition_tree(whole)) AS part
"""
_CHANGED: Final = """
SELECT DISTINCT name
FROM pg_stat_force_next_flush(), unnest(%(name)s::text[], %(oid)s::oid[]) AS part (name, oid)
WHERE pg_stat_get_xact_tuples_inserted(oid) > 0
   OR pg_stat_get_xact_tuples_updated(oid) > 0
   OR pg_stat_get_xact_tuples_deleted(oid) > 0
"""


def _cursor(conn: Connection) -> psycopg.Cursor[dict[str, Any]]:
    """A cursor of the driver: many rows are read, and SQLAlchemy's would take twice the time."""
    driver = cast(psycopg.Connection[Any], conn.connection.driver_connection)
    return driver.cursor(row_factory=dict_row)


# ---------------------------------------------------------------- one form


def plain(value: Any, now: datetime) -> Any:
    """A value in a form in which those of both stores are the same."""
    match value:
        case datetime():
            return f"{round((value - now).total_seconds() / _STEP)} steps"
        case timedelta():
            return f"{round(value.total_seconds() / _STEP)} steps long"
        case LeasedEnvelope():
            return plain(_asdict(value) | {"seq": 0}, now)  # the stores number the places in a queue differently
        case msgspec.Struct():
            return plain(_asdict(value), now)
        case Mapping():
            return {str(key): plain(each, now) for key, each in value.items()}
        case tuple() if (named := getattr(value, "_asdict", None)) is not None:
            return plain(named(), now)
        case set() | frozenset():
            return sorted((plain(each, now) for each in value), key=repr)
        case list() | tuple():
            return [plain(each, now) for each in value]
        case memoryview() | bytes():
            return bytes(value)
        case float():
            return round(value / _STEP)
        case _:
            return value


def same_columns(ours: Mapping[str, Any], theirs: Mapping[str, Any], now: datetime) -> tuple[Any, Any]:
    """The rows of both, with the columns that the tables in memory have."""
    return _comparable(ours, ours, now), _comparable(theirs, ours, now)


def _comparable(tables: Mapping[str, Any], columns_of: Mapping[str, Any], now: datetime) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, rows in tables.items():
        columns = columns_of[name][0].keys() - _UNTOLD - _OF_OTHERS.get(name, set()) if columns_of[name] else set()
        listed = [_row(row, columns, now) for row in rows]
        found[name] = listed if name in ("outgoing", "incoming") else sorted(listed, key=repr)
    return found


def _row(row: Mapping[str, Any], columns: Iterable[str], now: datetime) -> dict[str, Any]:
    renamed = {"address": row.get("address", row.get("destination", row.get("endpoint")))}
    values = {name: row.get(name, renamed.get(name)) for name in sorted(columns)}
    if isinstance(values.get("headers"), str):
        values["headers"] = msgspec.json.decode(values["headers"])
    if "letter_id" in row and "number" in row:
        values["has_letter"] = row["letter_id"] is not None
    return {name: plain(value, now) for name, value in values.items()}
