"""State of the archive in the database, one row for each table that is archived.

    archived_below    everything that transactions below it wrote is in the lake: maintenance may drop it, and only it
    claimed_below     an archiver may have committed up to here, and have died before it could say so

The lake's own log is the truth; the row follows it. Each commit has a number at random, which the database notes before
the commit is made (`archive_claims`). A lake whose last commit this database does not know was archived into by another
life of it: it was restored to an earlier state, or copied, and its transactions are numbered as those of the other. A
lake that is behind `archived_below` was restored itself.

`identity` says which cluster, timeline and database the numbers are of. A dump that was restored, a copy, an upgrade
and a failover change it: then nothing is archived, and nothing dropped, before an operator has decided that this
database succeeds the one that was archived. With that another generation of transaction numbers begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

from sqlalchemy import Connection, Row

from durable.storage.horizons import Running, naming_users
from durable.storage.locks import Job, jobs_class
from durable.storage.sql import absent
from durable.storage.sql import archive as statements

_ENDLESS: Final = 2**63 - 1
_KEEP_COMMITS: Final = timedelta(days=365)


GapKind = Literal["gap", "lost"]
"""Rows that no lake has, and those that a lake had before it was restored: it may come back with them."""


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
    looked_at: datetime | None
    looked_number: int | None
    """An earlier look at what runs: no transaction with a later number had it at that moment."""

    def complete_until(self, horizon: int, running: Running) -> datetime | None:
        """Return a moment before which no row was written that lies at or above the horizon; None where none is known.

        Beside what runs now, the earlier look tells it, once all that had a number then have ended. Where some
        transaction always runs that hides when it began, nothing else does.
        """
        moments = [running.complete_until(horizon)]
        if self.looked_number is not None and self.looked_number < horizon:
            moments.append(self.looked_at)
        return max((moment for moment in moments if moment is not None), default=None)


class Absent(NamedTuple):
    """Rows of a day that the database does not have any more."""

    day: date
    first_at: datetime
    last_at: datetime
    rows: int
    below: int
    """None of them is of this transaction, or of a later one."""


class Commit(NamedTuple):
    """Rows of the transactions [low, high) that were archived at once, from the first of these days to the last."""

    table: str
    low: int
    high: int
    first_day: date
    last_day: date
    rows: int
    at: datetime


class LakeEnd(NamedTuple):
    """End of a lake: the transaction below which it was archived, and the time of before which it has every row."""

    lake_id: str
    low: int
    until: datetime | None


def try_lock(conn: Connection, schema: str) -> bool:
    """Take the archiver's lock until unlock(), for as long as this connection lasts, or return False at once."""
    return bool(conn.execute(statements.LOCK_ARCHIVE.within(schema), _lock(schema)).scalar_one())


def unlock(conn: Connection, schema: str) -> None:
    """Give it back now: that of a connection which is merely closed is free a moment later."""
    conn.execute(statements.UNLOCK_ARCHIVE.within(schema), _lock(schema))


def is_locked(conn: Connection, schema: str) -> bool:
    """Tell whether an archiver, or another job with this lock, is at work now."""
    return bool(conn.execute(statements.IS_ARCHIVE_LOCKED.within(schema), _lock(schema)).scalar_one())


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


def is_numbered_anew(conn: Connection, schema: str, table: str, margin: int = 0) -> bool:
    """Tell whether the table holds rows of another cluster: of transactions that this generation has not come to.

    With a margin only rows so far ahead count, and the number is read once for all rows: a page has no time for more.
    """
    if margin:
        ahead = int(conn.execute(statements.READ_NEXT.within(schema)).scalar_one()) + margin
        params = {"low": ahead, "high": _ENDLESS}
        return bool(conn.execute(statements.BY_TRANSACTION[table].exists.within(schema), params).scalar_one())
    return bool(conn.execute(statements.BY_TRANSACTION[table].is_from_elsewhere.within(schema)).scalar_one())


def begin_generation(conn: Connection, schema: str) -> None:
    """Number what is written from now on above all that is here, and let the archives follow this database.

    Waits up to two seconds for transactions that write history or dead letters; raises DurableError then.
    """
    with naming_users(conn, schema, *statements.BY_TRANSACTION), conn.begin_nested():
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


def place(conn: Connection, schema: str, table: str, where: Place) -> None:
    """Note where the lake of this table is now."""
    params = {"table": table, "lake": where.lake, "lake_id": where.lake_id}
    conn.execute(statements.PLACE_ARCHIVE.within(schema), params)


def move(conn: Connection, schema: str, table: str, place: Place) -> None:
    """Archive into another lake from now on, from the beginning."""
    conn.execute(statements.MOVE_ARCHIVE.within(schema), {"table": table, **place._asdict()})


def forget_left_lakes(conn: Connection, schema: str) -> None:
    """Forget the lakes that were used before: those of the original are not those of a copy."""
    conn.execute(statements.FORGET_LEFT_LAKES.within(schema))


def note_foreign(conn: Connection, schema: str, table: str, lake_id: str, found: Iterable[Absent]) -> None:
    """Note rows that this lake has, of a life that this database has lost."""
    _note(conn, schema, table, "foreign", found, lake_id)


def foreign(conn: Connection, schema: str, table: str, lake_id: str) -> list[Absent]:
    """The rows that this lake had when they were noted, of lives that this database has lost, by day."""
    params = {"table": table, "lake_id": lake_id}
    return [Absent(*row) for row in conn.execute(absent.READ_FOREIGN.within(schema), params)]


def resume(conn: Connection, schema: str, table: str) -> None:
    """Archive again, from where the lake is: nothing is dropped from now on that is not archived."""
    conn.execute(statements.RESUME_ARCHIVE.within(schema), {"table": table})


def end(conn: Connection, schema: str) -> int:
    """Archive no more: maintenance drops what is past its retention again. Returns how many tables were archived."""
    return conn.execute(statements.END_ARCHIVES.within(schema)).rowcount


def claim(conn: Connection, schema: str, table: str, high: int, commit_id: int) -> None:
    """A commit of the lake with this number is about to be made, up to `high`."""
    conn.execute(statements.CLAIM_ARCHIVE.within(schema), {"table": table, "high": high})
    adopt(conn, schema, table, {commit_id: high})


def adopt(conn: Connection, schema: str, table: str, ends: Mapping[int, int]) -> None:
    """Know these commits of the lake from now on, whoever has made them, by their numbers and ends."""
    params = {"table": table, "commit_ids": list(ends), "highs": list(ends.values()), "keep": _KEEP_COMMITS}
    conn.execute(statements.CLAIM_COMMITS.within(schema), params)


def claimed(conn: Connection, schema: str, table: str, commit_ids: Iterable[int]) -> int | None:
    """Return the end of the newest of these commits that this database knows; None where it knows none of them."""
    params = {"table": table, "commit_ids": list(commit_ids)}
    found: int | None = conn.execute(statements.READ_CLAIMED.within(schema), params).scalar_one()
    return found


def confirm(conn: Connection, schema: str, table: str, high: int) -> None:
    """The lake has committed everything below `high`."""
    conn.execute(statements.CONFIRM_ARCHIVE.within(schema), {"table": table, "high": high})


def note_commit(conn: Connection, schema: str, table: str, low: int, high: int, rows: Mapping[date, int]) -> None:
    """The lake is about to get these rows, counted by day, of the transactions [low, high)."""
    params = {"table": table, "low": low, "high": high, "keep": _KEEP_COMMITS}
    counts = {"days": list(rows), "counts": list(rows.values())}
    conn.execute(statements.NOTE_COMMIT.within(schema), params | counts)


def commits(conn: Connection, schema: str, table: str, limit: int) -> list[Commit]:
    """The newest commits of a table, the last first. One that reaches beyond `archived_below` is not confirmed."""
    params = {"table": table, "limit": limit}
    return [Commit(*row) for row in conn.execute(statements.READ_COMMITS.within(schema), params)]


def gaps(conn: Connection, schema: str, table: str) -> list[tuple[datetime, datetime]]:
    """The first and the last times of rows that were dropped and not archived, day by day."""
    rows = conn.execute(absent.READ_GAPS.within(schema), {"table": table})
    return [(row.first_at, row.last_at) for row in rows]


def note_gaps(conn: Connection, schema: str, table: str, found: Iterable[Absent], *, kind: GapKind = "gap") -> None:
    """Note rows that are neither in the lake any more, nor here."""
    _note(conn, schema, table, kind, found)


def forget_found(conn: Connection, schema: str, table: str, commit_id: int) -> None:
    """Forget the rows that the lake had lost, and has again: this commit, its newest one, was lost before them."""
    conn.execute(absent.DELETE_FOUND.within(schema), {"table": table, "commit_id": commit_id})


def note_as_gaps(
    conn: Connection,
    schema: str,
    table: str,
    kind: Literal["dropped", "foreign"],
    end: LakeEnd,
    *,
    since: datetime | None = None,
    others: bool = False,
    noted: GapKind = "gap",
) -> list[tuple[datetime, datetime]]:
    """Note that a lake lacks rows of this kind, of the days from `since` on, and return their first and last times, day
    by day; `others`: also those that only other lakes have.
    """
    params = {"table": table, "kind": kind, "since": since, "others": others, "noted": noted, **end._asdict()}
    rows = conn.execute(absent.NOTE_AS_GAPS.within(schema), params).all()
    return [(row.first_at, row.last_at) for row in sorted(rows) if row.first_at is not None]


def _note(conn: Connection, schema: str, table: str, kind: str, found: Iterable[Absent], lake_id: str = "") -> None:
    columns = [list(each) for each in zip(*found, strict=True)] or [[] for _ in Absent._fields]
    params = dict(zip(("days", "firsts", "lasts", "counts", "belows"), columns, strict=True))
    conn.execute(absent.NOTE.within(schema), {"table": table, "kind": kind, "lake_id": lake_id, **params})


def note_look(conn: Connection, schema: str, table: str, running: Running, horizon: int) -> None:
    """Keep this look at what runs, unless an earlier one still waits for the horizon to pass it."""
    params = {"table": table, "moment": running.moment, "number": running.number, "horizon": horizon}
    conn.execute(statements.NOTE_LOOK.within(schema), params)


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


def lost_ends(conn: Connection, schema: str, table: str) -> dict[date, int]:
    """Return the ends of the newest commits that the lake has lost, by the days of their rows."""
    found = conn.execute(statements.READ_LOST_ENDS.within(schema), {"table": table})
    return {row.day: row.high for row in found}


def days(conn: Connection, schema: str, table: str) -> set[date]:
    """Return the days of which a row is here. Until the transaction ends, no such day of history is dropped."""
    found = conn.execute(statements.BY_TRANSACTION[table].count_days.within(schema), {"low": 0, "high": _ENDLESS})
    return {row.day for row in found}


def earlier_letters(conn: Connection, schema: str) -> Sequence[Row[Any]]:
    """The letters of earlier generations: number, id, time of failure, replays, time of resolution, transaction."""
    return conn.execute(statements.READ_EARLIER_LETTERS.within(schema)).all()


def renew_letters(conn: Connection, schema: str, letters: Sequence[int]) -> int:
    """Give these letters, of an earlier generation, a transaction of this one; return how many."""
    return conn.execute(statements.RENEW_LETTERS.within(schema), {"letters": list(letters)}).rowcount


def oldest(conn: Connection, schema: str, table: str, rows: int) -> Sequence[Row[Any]]:
    """The oldest rows of each day of a table that have an id: `id` as 16 bytes, `side`, `xid`, and `moment`."""
    return conn.execute(statements.BY_TRANSACTION[table].oldest.within(schema), {"rows": rows}).all()


def _lock(schema: str) -> dict[str, int]:
    return {"class_id": jobs_class(schema), "key": int(Job.ARCHIVE)}
