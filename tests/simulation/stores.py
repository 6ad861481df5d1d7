"""The same work on both stores: the tables in memory, and Postgres; and their rows in one form.

Times are compared in steps of ten minutes, numbers of a sequence by their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

import msgspec
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import OperationalError

from tests.simulation.database import Light
from tests.simulation.sql import SCHEMA, Known, known
from tests.simulation.tables import Store, Transaction, Waits

Work = Callable[..., Any]
LOCKED: Final = "it waits for the lock of another transaction"
FRUITFUL: Final[set[str]] = set()
"""The statements that have found or changed something in memory."""
_STEP: Final = 600.0
_LOCK_NOT_AVAILABLE: Final = "55P03"
_TABLES: Final = {
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
_OF_OTHERS: Final = {"received_ids": {"given_up", "sent_at"}}
"""Columns that a row in memory has, and its table has not."""
_UNTOLD: Final = {"seq", "letter_id", "attempt_id", "carried", "xid"}


class Memory:
    """The tables in memory."""

    def __init__(self) -> None:
        self.store = Store(lambda: datetime.now(UTC))
        self._held: Transaction | None = None

    def run(self, work: Work, *args: Any, **kwargs: Any) -> Any:
        transaction = Transaction(self.store)
        try:
            result = work(_over(transaction), SCHEMA, *args, **kwargs)
        except Waits:
            transaction.rollback()
            return LOCKED
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

    def rows(self) -> dict[str, Any]:
        """The committed rows of each table."""
        found = {name: [_asdict(row) for row in self.store.tables[name].rows.values()] for name in _TABLES}
        for name in ("outgoing", "incoming"):
            found[name].sort(key=lambda row: row["seq"])
        numbers = sorted(row["attempt_id"] for row in found["failed_attempts"])
        for row in found["failed_attempts"]:
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


class Postgres:
    """The tables in Postgres."""

    def __init__(self, url: str) -> None:
        self.engine: Engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"), pool_size=3)
        self._held: Connection | None = None

    def run(self, work: Work, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.engine.begin() as conn:
                conn.exec_driver_sql("SET LOCAL lock_timeout = '100ms'")
                return work(conn, SCHEMA, *args, **kwargs)
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
                raise
            return LOCKED

    def hold(self, work: Work, *args: Any, **kwargs: Any) -> Any:
        self._held = self.engine.connect()
        return work(self._held, SCHEMA, *args, **kwargs)

    def end(self, *, commit: bool) -> None:
        if self._held is not None:
            (self._held.commit if commit else self._held.rollback)()
            self._held.close()
        self._held = None

    def rows(self) -> dict[str, Any]:
        with self.engine.connect() as conn:
            return {name: [dict(row._mapping) for row in conn.execute(text(sql))] for name, sql in _TABLES.items()}

    def empty(self) -> None:
        names = "outgoing_envelopes, incoming_envelopes, received_ids, undated_ids, envelope_history, dead_letters, "
        names += "failed_attempts, circuits, handler_counts, schedules, placements, nodes"
        tables = ", ".join(f"durable.{name}" for name in names.split(", "))
        with self.engine.begin() as conn:
            conn.exec_driver_sql(f"TRUNCATE {tables} CASCADE")

    def close(self) -> None:
        self.end(commit=False)
        self.engine.dispose()


# ---------------------------------------------------------------- one form


def plain(value: Any, now: datetime) -> Any:
    """A value in a form in which those of both stores are the same."""
    match value:
        case datetime():
            return f"{round((value - now).total_seconds() / _STEP)} steps"
        case timedelta():
            return f"{round(value.total_seconds() / _STEP)} steps long"
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
