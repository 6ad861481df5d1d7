"""Recovery of an archive: what a lake, or a database, that was restored has lost.

the lake lost commits        their rows are archived again; those that the database has dropped are gone: a gap, until
                             the lake is put back to one of these commits
the database lost a life     its rows are in the lake, and only there; where the lake loses them as well, how many
                             they were is not known: a gap from the end of the lake to where that life had come
a letter changed in it       the lake has a newer state of the letter, which is not true any more: the state of this
                             database is archived once more, so that it is the newest
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from datetime import date, datetime, timedelta
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection

from durable.errors import InvalidSetting
from durable.pipeline import places
from durable.pipeline.columns import LETTER
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import DAY_OF, SOURCES, LakeTable, Whose, file_schema
from durable.pipeline.origin import Origin, hashed
from durable.pipeline.spans import Gap, after, merged
from durable.storage import archives
from durable.storage.archives import Absent, Archive, Commit, LakeEnd
from durable.storage.days import midnight

_MICROSECOND = timedelta(microseconds=1)
_DAY = timedelta(days=1)
_SAMPLE = 20  # of each day
_STATE = ("xid", "replay_count", "resolved_at")


def earlier_name(conn: Connection, lake: Lake, origin: Origin) -> str | None:
    """Return the name under which the lake has rows of this database, which was never archived as it remembers: it was
    put back to a state before that, or is a copy of such a state.
    """
    for table, source in SOURCES.items():
        by_day = lake.files_by_day(table)
        if not by_day:
            continue  # a new lake, which is no reason to read all of the database
        mine = {
            (row.id, row.side, row.moment, row.xid) for row in archives.oldest(conn, origin.schema, source, _SAMPLE)
        }
        for name, *row in _rows_of(lake, table, by_day, origin.service, mine):
            if tuple(row) in mine:
                return str(name)
    return None


def refuse_unnamed(conn: Connection, lakes: Iterable[Lake], origin: Origin) -> None:
    """Raise InvalidSetting where a lake has rows of this database, and the database does not know by which name."""
    if archives.known_database(conn, origin.schema) is not None:
        return
    for lake in lakes:
        if (name := earlier_name(conn, lake, origin)) is not None:
            raise InvalidSetting(
                f"lake {lake.url}: has rows of this database, as {name}, and this database was never archived: it was "
                f"restored to a state before that, or copied; run pipeline archive --successor first, and then this"
            )


def newest_commit(conn: Connection, schema: str, table: LakeTable) -> Commit | None:
    return next(iter(archives.commits(conn, schema, SOURCES[table], 1)), None)


def is_put_back_by_restore(lake: Lake, table: LakeTable, archive: Archive, newest: Commit | None) -> bool:
    """Tell whether the lake lacks what its offset says, because a version of the table was put back by RESTORE.

    The log is looked at only where no file of the newest commit is listed: compaction replaces them, too.
    """
    if newest is None or newest.high > lake.offset(archive.app_id, table):
        return False
    begins = f"part-{hashed(archive.app_id)}-{newest.low}-"
    if any(path.rpartition("/")[2].startswith(begins) for _, path, _ in lake.listed(table)):
        return False
    return lake.was_restored_since(archive.app_id, table)


def _rows_of(
    lake: Lake,
    table: LakeTable,
    by_day: Mapping[date, Sequence[str]],
    service: str,
    sample: Collection[tuple[Any, ...]],
) -> Iterator[list[Any]]:
    """The rows of the lake with the ids of this sample: the database, and what the sample has."""
    import pyarrow.dataset as ds

    paths = [path for day in {moment.date() for _, _, moment, _ in sample} for path in by_day.get(day, ())]
    if not paths:
        return
    found = ds.field("id").isin([each for each, *_ in sample]) & (ds.field("service") == service)
    names = ["database", "id", "side", DAY_OF[table], "xid"]
    rows = places.ParquetFiles(lake.table_url(table), paths, file_schema(table)).to_table(columns=names, filter=found)
    for row in rows.to_pylist():
        if row["database"] is not None:
            yield [row[name] for name in names]


def note_foreign_gaps(conn: Connection, origin: Origin, table: LakeTable, end: LakeEnd) -> list[Gap]:
    """Note, and return, the times of which a lake has lost rows that only it had."""
    return _times(archives.note_as_gaps(conn, origin.schema, SOURCES[table], "foreign", end))


def note_dropped_gaps(conn: Connection, origin: Origin, table: LakeTable, end: LakeEnd) -> list[Gap]:
    """Note, and return, the times of which a lake that is behind has lost rows that were dropped here: those that this
    database has archived are counted as gone, and those that it found in the lake are not.
    """
    return _times(archives.note_as_gaps(conn, origin.schema, SOURCES[table], "dropped", end, noted="lost"))


def _times(found: Iterable[tuple[datetime, datetime]]) -> list[Gap]:
    return [Gap(first, last + _MICROSECOND) for first, last in found]


def note_gone(
    conn: Connection,
    origin: Origin,
    table: LakeTable,
    gone: Mapping[date, int],
    until: datetime | None,
    ends: Mapping[date, int] = MappingProxyType({}),
) -> None:
    """Note the days of rows that are neither in the lake nor here. The lake has every row of before `until`, so that of
    a day in which it ends only the rest is gone.

    `ends`: of commits that the lake has lost, by day; with such a commit it may come back from another backup.
    """
    kinds: tuple[tuple[archives.GapKind, Set[date]], ...] = (
        ("gap", gone.keys() - ends.keys()),
        ("lost", gone.keys() & ends.keys()),
    )
    for kind, days in kinds:
        found = []
        for day in sorted(days):
            first, last = midnight(day), midnight(day + _DAY)
            begin = until if until is not None and first < until < last else first
            found.append(Absent(day, begin, last - _MICROSECOND, gone[day], ends.get(day, 0)))
        archives.note_gaps(conn, origin.schema, SOURCES[table], found, kind=kind)


def gaps(conn: Connection, origin: Origin, table: LakeTable, until: datetime | None) -> tuple[Gap, ...]:
    """The gaps of a lake that has all until then."""
    known = known_gaps(conn, origin.schema, table)
    if table == "dead_letters":  # a letter that was resolved has another transaction, and the lake its first state
        return after(known, until)
    return known


def known_gaps(conn: Connection, schema: str, table: LakeTable) -> tuple[Gap, ...]:
    """All gaps that the database knows of; it keeps them for a lake that is restored once more."""
    return merged(_times(archives.gaps(conn, schema, SOURCES[table])))


def renew_letters(conn: Connection, lake: Lake, origin: Origin, whose: Whose) -> int:
    """Let the letters be archived once more of which the lake has another state that is newer; return how many.

    Such a state is of a life that this database has lost.
    """
    newest = _newest_states(lake, whose)
    if not newest:
        return 0
    stale = []
    for row in archives.earlier_letters(conn, origin.schema):
        state = newest.get((row.letter_id, row.id, row.failed_at))
        if state is not None and state[0] >= row.xid and state[1:] != (row.replay_count, row.resolved_at):
            stale.append(row.letter_id)
    return archives.renew_letters(conn, origin.schema, stale) if stale else 0


def _newest_states(lake: Lake, whose: Whose) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """Transaction, number of replays and time of resolution of the newest state in the lake, by letter."""
    found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    names = [*LETTER, *_STATE]
    for paths in lake.files_by_day("dead_letters").values():
        days = places.ParquetFiles(lake.table_url("dead_letters"), paths, file_schema("dead_letters"))
        for batch in days.to_batches(columns=names, filter=whose.condition()):
            for row in batch.select(names).to_pylist():
                letter, state = tuple(map(row.get, LETTER)), tuple(map(row.get, _STATE))
                if letter not in found or state[0] > found[letter][0]:
                    found[letter] = state
    return found
