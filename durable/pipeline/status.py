"""How far the archive has come: offsets, what is not archived yet, and what holds it back. Needs no Spark."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection

from durable.pipeline.copying import connection
from durable.pipeline.lake import SOURCES, Lake, LakeTable
from durable.storage import archives, migrator
from durable.storage.archives import Holder


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStatus:
    """One table. `offset` is that of the lake; None where it is not archived."""

    table: str
    lake: str | None
    offset: int | None
    confirmed: int | None
    """Below it maintenance may drop what is past its retention."""
    archived_at: datetime | None
    lag_rows: int
    lag_age: timedelta | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Of all tables that are archived. Nothing at or above `horizon` can be archived now."""

    horizon: int
    holder: Holder | None
    tables: list[TableStatus]


def read_status(url: str, schema: str, lake: Lake | None) -> Status:
    """`lake` is needed only for its own offsets. Raises SchemaMismatch; StorageUnavailable; InvalidSetting."""
    with connection(url) as conn:
        migrator.check_version(conn, schema)
        return Status(
            horizon=archives.horizon(conn, schema),
            holder=archives.holder(conn, schema),
            tables=[_table(conn, schema, lake, table) for table in SOURCES],
        )


def _table(conn: Connection, schema: str, lake: Lake | None, table: LakeTable) -> TableStatus:
    source = SOURCES[table]
    archive = archives.find(conn, schema, source)
    if archive is None:
        lag = archives.lag(conn, schema, source, 0)
        return TableStatus(
            table=table, lake=None, offset=None, confirmed=None, archived_at=None, lag_rows=lag.rows, lag_age=lag.age
        )
    offset = archive.archived_below if lake is None else lake.offset(archive.app_id, table)
    lag = archives.lag(conn, schema, source, offset)
    return TableStatus(
        table=table,
        lake=archive.lake,
        offset=offset,
        confirmed=archive.archived_below,
        archived_at=archive.archived_at,
        lag_rows=lag.rows,
        lag_age=lag.age,
    )
