"""State of the archive in the database, one row for each table that is archived.

    archived_below    everything that transactions below it wrote is in the lake: maintenance may drop it, and only it
    claimed_below     an archiver may have committed up to here, and have died before it could say so

The lake's own log is the truth; the row follows it. A lake that is further than `claimed_below` has archived what this
database does not remember: it was restored to an earlier state, and its transactions are numbered as those before. A
lake that is behind `archived_below` was restored itself.

`identity` says which cluster, timeline and database the numbers are of. A dump that was restored, a copy, an upgrade
and a failover change it: then nothing is archived, and nothing dropped, before an operator has decided that this
database succeeds the one that was archived. With that another generation of transaction numbers begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from uuid import UUID

from sqlalchemy import Connection, Row, TextClause
from sqlalchemy.exc import OperationalError

from durable.errors import DurableError
from durable.storage.locks import Job, jobs_class
from durable.storage.outages import sqlstate
from durable.storage.slices import relation
from durable.storage.sql import absent
from durable.storage.sql import archive as statements
from durable.storage.sql.times import FIRST, LAST

_KEEP_COMMITS: Final = timedelta(days=365)
_LOCKED: Final = "55P03"
_BATCH_SIZE: Final = 10_000
_WORD: Final = (1 << 64) - 1

Key: TypeAlias = tuple[Any, ...]
"""The identity of a row: the values of archive_statements.KEYS, an id as its 16 bytes."""


class Place(NamedTuple):
    """Lake of a table, and the name under which the lake keeps this table's offset."""

    service: str
    app_id: str
    lake: str
    lake_id: str


class Archive(NamedTuple):
    """Archive of a table: its lake, and how far it has come."""

    service: str
    app_id: str
    lake: str
    lake_id: str
    claimed_below: int
    archived_below: int
    archived_at: datetime | None
    identity: str
    """The identity of the cluster, timeline and database to which the numbers belong."""
    ended_at: datetime | None
    """The time at which archiving was ended; since then maintenance drops rows past their retention."""
    left_lakes: Mapping[str, int]
    """Lakes into which this database was archived before, by their ids: the transaction below which that was."""
    lost_above: int | None
    lost_below: int | None
    """The lake has lost what was archived of the transactions [lost_above, lost_below), and it is not all archived
    again."""


class Absent(NamedTuple):
    """Rows of a day that the database does not have any more."""

    day: date
    first_at: datetime
    last_at: datetime
    rows: int
    below: int
    """None of them is of this transaction, or of a later one."""


class LakeEnd(NamedTuple):
    """End of a lake: the transaction below which it was archived, and the time of before which it has every row."""

    lake_id: str
    low: int
    until: datetime | None


class Lag(NamedTuple):
    """Rows that are not archived yet."""

    rows: int
    age: timedelta | None


class Holder(NamedTuple):
    """The transaction that holds the horizon back."""

    who: str
    age: timedelta | None
    """None where this role may not see it."""
    query: str


class Block(NamedTuple):
    """Some of the rows of a side of a day."""

    day: date
    side: str
    number: int


class Digest(NamedTuple):
    """Digest of rows: their number, and the sum of their digests."""

    rows: int
    digest: int
    """64 bits."""


def try_lock(conn: Connection, schema: str) -> bool:
    """Take the archiver's lock until unlock(), for as long as this connection lasts, or return False at once."""
    return bool(conn.execute(statements.LOCK_ARCHIVE.within(schema), _lock(schema)).scalar_one())


def unlock(conn: Connection, schema: str) -> None:
    """Give it back now: that of a connection which is merely closed is free a moment later."""
    conn.execute(statements.UNLOCK_ARCHIVE.within(schema), _lock(schema))


def identity(conn: Connection, schema: str) -> str:
    """The cluster, its timeline and the database: what changes when transactions are numbered anew."""
    return str(conn.execute(statements.READ_IDENTITY.within(schema)).scalar_one())


def database(conn: Connection, schema: str, name: str | None = None) -> str:
    """The name under which a lake knows this database. It is given once, and stays through dumps and restores.

    It is given this one, or a new one.
    """
    conn.execute(statements.NAME_DATABASE.within(schema), {"name": name})
    return str(conn.execute(statements.READ_DATABASE.within(schema)).scalar_one())


def known_database(conn: Connection, schema: str) -> str | None:
    """The same, and None where it was given none yet."""
    found = conn.execute(statements.READ_DATABASE.within(schema)).scalar_one_or_none()
    return None if found is None else str(found)


def is_numbered_anew(conn: Connection, schema: str, table: str) -> bool:
    """Tell whether the table holds rows of another cluster: of transactions that this generation has not come to."""
    return bool(conn.execute(statements.BY_TRANSACTION[table].is_from_elsewhere.within(schema)).scalar_one())


def begin_generation(conn: Connection, schema: str) -> None:
    """Number what is written from now on above all that is here, and let the archives follow this database.

    Waits up to two seconds for transactions that write history or dead letters; raises DurableError then.
    """
    with _naming_users(conn, schema, *statements.BY_TRANSACTION), conn.begin_nested():
        conn.execute(statements.BEGIN_GENERATION.within(schema))


def generation_base(conn: Connection, schema: str) -> int:
    """Return the first transaction number of this generation."""
    return int(conn.execute(statements.READ_GENERATION_BASE.within(schema)).scalar_one())


def services(conn: Connection, schema: str) -> list[str]:
    """The service whose tables were archived, or else those whose nodes use this schema now."""
    return list(conn.execute(statements.READ_SERVICES.within(schema)).scalars())


def find(conn: Connection, schema: str, table: str) -> Archive | None:
    row = conn.execute(statements.READ_ARCHIVE.within(schema), {"table": table}).one_or_none()
    return None if row is None else Archive(*row)


def read(conn: Connection, schema: str, table: str) -> Archive:
    """Read the archive of a table that is archived."""
    return Archive(*conn.execute(statements.READ_ARCHIVE.within(schema), {"table": table}).one())


def begin(conn: Connection, schema: str, table: str, place: Place) -> None:
    """Archive this table there from now on."""
    conn.execute(statements.BEGIN_ARCHIVE.within(schema), {"table": table, **place._asdict()})


def move(conn: Connection, schema: str, table: str, place: Place) -> None:
    """Archive into another lake from now on, from the beginning."""
    conn.execute(statements.MOVE_ARCHIVE.within(schema), {"table": table, **place._asdict()})


def forget_left_lakes(conn: Connection, schema: str) -> None:
    """Forget the lakes that were used before: those of the original are not those of a copy."""
    conn.execute(statements.FORGET_LEFT_LAKES.within(schema))


def note_foreign(conn: Connection, schema: str, table: str, lake_id: str, found: Iterable[Absent]) -> None:
    """Note rows that this lake has, of a life that this database has lost."""
    _note(conn, schema, table, "foreign", found, lake_id)


def resume(conn: Connection, schema: str, table: str) -> None:
    """Archive again, from where the lake is: nothing is dropped from now on that is not archived."""
    conn.execute(statements.RESUME_ARCHIVE.within(schema), {"table": table})


def end(conn: Connection, schema: str) -> int:
    """Archive no more: maintenance drops what is past its retention again. Returns how many tables were archived."""
    return conn.execute(statements.END_ARCHIVES.within(schema)).rowcount


def claim(conn: Connection, schema: str, table: str, high: int) -> None:
    conn.execute(statements.CLAIM_ARCHIVE.within(schema), {"table": table, "high": high})


def confirm(conn: Connection, schema: str, table: str, high: int) -> None:
    """The lake has committed everything below `high`."""
    conn.execute(statements.CONFIRM_ARCHIVE.within(schema), {"table": table, "high": high})


def note_commit(conn: Connection, schema: str, table: str, low: int, high: int, rows: Mapping[date, int]) -> None:
    """The lake is about to get these rows, counted by day, of the transactions [low, high)."""
    params = {"table": table, "low": low, "high": high, "keep": _KEEP_COMMITS}
    counts = {"days": list(rows), "counts": list(rows.values())}
    conn.execute(statements.NOTE_COMMIT.within(schema), params | counts)


def gaps(conn: Connection, schema: str, table: str) -> list[tuple[datetime, datetime]]:
    """The first and the last times of rows that were dropped and not archived, day by day."""
    rows = conn.execute(absent.READ_GAPS.within(schema), {"table": table})
    return [(row.first_at, row.last_at) for row in rows]


def note_gaps(conn: Connection, schema: str, table: str, found: Iterable[Absent]) -> None:
    """Note rows that are neither in the lake any more, nor here."""
    _note(conn, schema, table, "gap", found)


def note_as_gaps(
    conn: Connection,
    schema: str,
    table: str,
    kind: Literal["dropped", "foreign"],
    end: LakeEnd,
    *,
    others: bool = False,
) -> list[tuple[datetime, datetime]]:
    """Note that a lake lacks rows of this kind, and return their first and last times, day by day; `others`: also those
    that only other lakes have.
    """
    params = {"table": table, "kind": kind, "others": others, **end._asdict()}
    rows = conn.execute(absent.NOTE_AS_GAPS.within(schema), params).all()
    return [(row.first_at, row.last_at) for row in sorted(rows) if row.first_at is not None]


def _note(conn: Connection, schema: str, table: str, kind: str, found: Iterable[Absent], lake_id: str = "") -> None:
    columns = [list(each) for each in zip(*found, strict=True)] or [[] for _ in Absent._fields]
    params = dict(zip(("days", "firsts", "lasts", "counts", "belows"), columns, strict=True))
    conn.execute(absent.NOTE.within(schema), {"table": table, "kind": kind, "lake_id": lake_id, **params})


def rewind(conn: Connection, schema: str, table: str, low: int) -> None:
    """The lake was found to end at `low`: what is beyond is not archived any more."""
    conn.execute(statements.REWIND_ARCHIVE.within(schema), {"table": table, "low": low})


def settle(conn: Connection, schema: str, table: str) -> None:
    """All that the lake had lost is archived again, or named as gone."""
    conn.execute(statements.SETTLE_ARCHIVE.within(schema), {"table": table})


def gone(conn: Connection, schema: str, table: str, low: int) -> dict[date, int]:
    """Count, by day, the rows that a lake which ends at `low` has lost, and that the database has dropped.

    They may be more while rows of an earlier generation are yet to be archived again: which of those that are here the
    lake has, only their keys tell. A letter counts as dropped where the database knows that one was.
    """
    lost = conn.execute(statements.READ_LOST.within(schema), {"table": table, "low": low}).all()
    if not any(row.rows > 0 for row in lost):
        return {}
    days = statements.BY_TRANSACTION[table].count_days.within(schema)
    here = {row.day: row.rows for row in conn.execute(days, {"low": lost[0].first, "high": lost[0].end})}
    found = {row.day: row.rows - here.get(row.day, 0) for row in lost}
    if table == "dead_letters":  # the lake has a row for each state of a letter, the database has the newest
        dropped = {row.day: row.rows for row in conn.execute(absent.COUNT_DROPPED.within(schema), {"table": table})}
        found = {day: min(rows, dropped.get(day, 0)) for day, rows in found.items()}
    return {day: rows for day, rows in sorted(found.items()) if rows > 0}


def earlier_letters(conn: Connection, schema: str) -> Sequence[Row[Any]]:
    """The letters of earlier generations: number, id, time of failure, replays, time of resolution, transaction."""
    return conn.execute(statements.READ_EARLIER_LETTERS.within(schema)).all()


def renew_letters(conn: Connection, schema: str, letters: Sequence[int]) -> int:
    """Give these letters, of an earlier generation, a transaction of this one; return how many."""
    return conn.execute(statements.RENEW_LETTERS.within(schema), {"letters": list(letters)}).rowcount


def oldest(conn: Connection, schema: str, table: str, rows: int) -> Sequence[Row[Any]]:
    """The oldest rows of a table that have an id: `id` as 16 bytes, `side`, `xid`, and `moment`, of its day."""
    return conn.execute(statements.BY_TRANSACTION[table].oldest.within(schema), {"rows": rows}).all()


def horizon(conn: Connection, schema: str) -> int:
    """Every transaction below it is finished."""
    return int(conn.execute(statements.READ_HORIZON.within(schema)).scalar_one())


def complete_until(conn: Connection, schema: str) -> datetime | None:
    """A moment before which every row was written that a snapshot taken later does not miss; None where none is known.

    A transaction that runs holds it back to its own beginning.
    """
    found = conn.execute(statements.READ_COMPLETE_UNTIL.within(schema)).one()
    return found.moment if found.is_quiet or not found.is_hidden else None


def begins_at(conn: Connection, schema: str) -> datetime | None:
    """Return the time from which every outcome is here: that of the first day that was not dropped."""
    params = {"table": relation(schema, "envelope_history")}
    oldest: datetime | None = conn.execute(statements.READ_OLDEST_DAY.within(schema), params).scalar_one()
    return oldest


def start(conn: Connection, schema: str, table: str) -> int:
    """Below it there is no row, and none will appear."""
    params = {"high": horizon(conn, schema)}
    return int(conn.execute(statements.BY_TRANSACTION[table].find_start.within(schema), params).scalar_one())


def end_of_batch(conn: Connection, schema: str, table: str, low: int, high: int, rows: int | None) -> int | None:
    """Return the end of a batch from `low` on: `high`, or after about so many rows. None when it would be empty."""
    of_table, params = statements.BY_TRANSACTION[table], {"low": low, "high": high}
    if rows is not None:
        end = conn.execute(of_table.find_end.within(schema), params | {"rows": rows}).scalar_one()
        return None if end is None else int(end)
    return high if conn.execute(of_table.exists.within(schema), params).scalar_one() else None


def lag(conn: Connection, schema: str, table: str, low: int) -> Lag:
    return Lag(*conn.execute(statements.BY_TRANSACTION[table].lag.within(schema), {"low": low}).one())


def holder(conn: Connection, schema: str) -> Holder | None:
    """Return the holder of the oldest transaction number; a prepared transaction holds it until it is ended."""
    row = conn.execute(statements.READ_HOLDER.within(schema)).one_or_none()
    return None if row is None else _holder(row)


def _holder(row: Row[Any]) -> Holder:
    if row.gid is not None:
        return Holder(f"prepared transaction {row.gid}", row.age, "")
    who = f"process {row.pid} ({row.application_name or 'unnamed'}, role {row.role}), {row.state or 'hidden'}"
    return Holder(who, row.age, row.query or "")


@contextmanager
def _naming_users(conn: Connection, schema: str, *tables: str) -> Iterator[None]:
    """Say who uses one of the tables where its lock cannot be had."""
    try:
        yield
    except OperationalError as error:
        if sqlstate(error) != _LOCKED:
            raise
        params = {"tables": [relation(schema, table) for table in tables]}
        row = conn.execute(statements.READ_USER.within(schema), params).one_or_none()
        user = "a transaction that has just ended" if row is None else _holder(row).who
        raise DurableError(f"{' or '.join(tables)} is in use by {user}; run this again when that has ended") from error


def digests(
    conn: Connection, schema: str, table: str, high: int, since: date | None = None, until: date | None = None
) -> dict[Block, Digest]:
    """The content of what is archived and here, by block; `since` is included, `until` is not."""
    params = {"high": high, "since": _from(since), "until": _to(until)}
    rows = conn.execute(statements.BY_TRANSACTION[table].digest_blocks.within(schema), params)
    return {Block(row.day, row.side, row.block): Digest(row.rows, int(row.digest) & _WORD) for row in rows}


def row_digests(
    conn: Connection, schema: str, table: str, high: int, day: date, blocks: Sequence[int]
) -> Iterator[tuple[Key, int]]:
    """The key of each archived row of these blocks of a day, and the digest of its content, 64 bits."""
    params = {"high": high, "since": _from(day), "until": _to(day + timedelta(days=1)), "blocks": list(blocks)}
    for row in conn.execute(statements.BY_TRANSACTION[table].digest_rows.within(schema), params):
        *key, digest = row
        yield tuple(each.bytes if isinstance(each, UUID) else each for each in key), digest & _WORD


def unarchived_days(conn: Connection, schema: str, low: int, until: date) -> dict[date, int]:
    """Count the rows of the days before `until` that are not archived, by day."""
    params = {"low": low, "until": midnight(until)}
    return {row.day: row.rows for row in conn.execute(statements.COUNT_UNARCHIVED.within(schema), params)}


def days_older_than(conn: Connection, schema: str, keep: timedelta) -> list[date]:
    """The days of history that have a partition and are past this retention, the oldest first."""
    params = {"table": relation(schema, "envelope_history"), "keep": keep}
    return list(conn.execute(statements.READ_OLD_DAYS.within(schema), params).scalars())


def first_day_kept(conn: Connection, schema: str, keep: timedelta) -> date:
    """Every day before it is past this retention."""
    day: date = conn.execute(statements.READ_FIRST_DAY_KEPT.within(schema), {"keep": keep}).scalar_one()
    return day


def stray_rows(conn: Connection, schema: str, high: int, until: date) -> int:
    """Count the archived rows of the days before `until` that lie in no day's partition."""
    params = {"high": high, "until": midnight(until)}
    return int(conn.execute(statements.COUNT_STRAY_HISTORY.within(schema), params).scalar_one())


def drop_stray_rows(conn: Connection, schema: str, high: int, until: date) -> int:
    """Delete them, and return how many."""
    params = {"high": high, "until": midnight(until), "batch_size": _BATCH_SIZE}
    return _drained(conn, statements.PURGE_STRAY_HISTORY.within(schema), params)


def resolved_letters(conn: Connection, schema: str, high: int, keep: timedelta) -> int:
    """Count the archived dead letters that were resolved longer ago than this."""
    params = {"high": high, "keep": keep}
    return int(conn.execute(statements.COUNT_RESOLVED_LETTERS.within(schema), params).scalar_one())


def drop_resolved_letters(conn: Connection, schema: str, high: int, keep: timedelta) -> int:
    """Delete them, and return how many."""
    params = {"high": high, "keep": keep, "batch_size": _BATCH_SIZE}
    return _drained(conn, statements.PURGE_RESOLVED_LETTERS.within(schema), params)


def drop_day(conn: Connection, schema: str, day: date) -> str:
    """Detach and drop this day's partition. The database refuses unless all of it is archived.

    Raises DurableError when others use the history just now.
    """
    with _naming_users(conn, schema, "envelope_history"):
        return str(conn.execute(statements.DROP_ARCHIVED_HISTORY.within(schema), {"day": day}).scalar_one())


def _drained(conn: Connection, statement: TextClause, params: Mapping[str, Any]) -> int:
    """Repeat a bounded statement, of which each run is a transaction, until nothing is left to it."""
    count = 0
    while rows := conn.execute(statement, params).scalar_one():
        count += rows
    return count


def midnight(day: date) -> datetime:
    """Return the time when a UTC day begins."""
    return datetime.combine(day, time.min, UTC)


def _from(day: date | None) -> datetime | None:
    """The begin of a day; None for the first day of all, which has the earlier times, too."""
    return None if day is None or day <= FIRST.date() else midnight(day)


def _to(day: date | None) -> datetime | None:
    """The end of the day before; None behind the last day of all, which has the later times, too."""
    return None if day is None or day > LAST.date() else midnight(day)


def _lock(schema: str) -> dict[str, int]:
    return {"class_id": jobs_class(schema), "key": int(Job.ARCHIVE)}
