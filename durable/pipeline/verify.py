"""Verifying: is what the database still has, and says is archived, in the lake, once and with the same content?

    by block           counts and digests of whole rows on both sides: by day, side and a few bits of the ids
    where they differ  the rows of these blocks: missing in the lake, there twice, or of other content
    a few of those     the columns that differ

The database computes its digests itself, so that no row leaves it unless its block differs. The lake's files are read:
a file that cannot be is named, also one of a day that only the lake has. The lake may hold more: what the database has
let go of, and what other databases of this service have archived. A lake that ends before what was archived was
restored: what it had beyond its end is missing there, or gone altogether.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Literal, NamedTuple

from sqlalchemy import Engine

from durable.errors import InvalidSetting
from durable.pipeline import lost_lives
from durable.pipeline.copying import connection, opened
from durable.pipeline.differing import differing_columns
from durable.pipeline.lake import Lake
from durable.pipeline.lake_digests import Rows, Spark, lake_digests, rows_of_blocks
from durable.pipeline.lake_tables import SOURCES, LakeTable, Whose
from durable.pipeline.origin import Origin
from durable.pipeline.own_lake import require_own
from durable.pipeline.progress import Show
from durable.storage import archived_content, archives
from durable.storage.archived_content import Block, Digest, Key
from durable.storage.outages import translated
from durable.storage.readiness import refuse_veil
from durable.storage.slices import Snapshot, exported_snapshot, joined

_ROWS_AT_ONCE = 200_000
_EXAMPLES = 20

Flaw = Literal["missing", "twice", "differs"]


class Finding(NamedTuple):
    """A row that is not in the lake as it is in the database."""

    flaw: Flaw
    day: date
    key: Key
    columns: Sequence[str] = ()
    """Those that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Findings about one table, below the offset of the lake."""

    table: LakeTable
    offset: int
    days: int
    rows: int
    missing: int
    """Rows of the database that the lake does not have."""
    twice: int
    """Rows that the lake has more often than the database."""
    differing: int
    """Rows that the lake has with another content."""
    gone: Mapping[date, int]
    """Rows that the lake had before it was restored, and the database has no more, by day."""
    unreadable: Mapping[str, str]
    """Files of the lake that cannot be read as they were written, and why."""
    files: int
    """Files of the lake that were read, and compared with their checksums and the log, of so many days."""
    file_days: int
    without_checksum: int
    """Files of older versions, of other programs, or of a compaction that was cut short: their rows were compared, and
    their bytes could not be. A text that is no checksum is none.
    """
    examples: Sequence[Finding]
    """Some of the rows."""

    @property
    def is_whole(self) -> bool:
        return not (self.missing or self.twice or self.differing or self.gone or self.unreadable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """Rows of one table that the lake must have: all of `database` below `offset`, less those that are `gone`."""

    table: LakeTable
    database: str
    offset: int
    gone: Mapping[date, int]


def claimed(origin: Origin, lake: Lake, table: LakeTable) -> Claimed:
    """Read the archived contents that the database records, in transactions that end before the lake is read. Raises
    InvalidSetting where none were archived, or from another database, or into another lake.
    """
    source = SOURCES[table]
    with connection(origin.url) as conn:
        archive, identity = archives.find(conn, origin.schema, source), archives.identity(conn, origin.schema)
    if archive is None:
        raise InvalidSetting(f"{source} of this database is not archived; run: durable-agent pipeline archive")
    if archive.identity != identity:
        raise InvalidSetting(
            f"{source}: another database was archived into {archive.lake}; run: durable-agent pipeline "
            "archive, which says what to do"
        )
    low = lake.offset(archive.app_id, table)
    require_own(archive, table, lake, low)
    commit_id = lake.commit_id(archive.app_id, table)
    with connection(origin.url) as conn:
        if commit_id is not None and archives.claimed(conn, origin.schema, source, [commit_id]) is None:
            raise InvalidSetting(
                f"lake {lake.table_url(table)}: has a commit that this database does not know; run: durable-agent "
                "pipeline archive, which says what to do"
            )
        return Claimed(
            table=table,
            database=archives.database(conn, origin.schema),
            offset=max(low, archive.archived_below),
            gone=archives.gone(conn, origin.schema, source, low),
        )


def verify(
    spark: Spark,
    lake: Lake,
    origin: Origin,
    of: Claimed,
    *,
    until: date | None = None,
    local_rows: int = 200_000,
    show: Show = lambda done, total: None,
) -> Verified:
    """Compare the rows of the days before `until`, in the lake's files of the same days; without an end, all of the
    table's files are read, of whichever day. A letter is compared in the state that it has now.

    Up to `local_rows` rows of the lake are read in this process, without Spark.
    """
    table, whose = of.table, Whose(origin.service, of.database)
    rows = Rows(lake.table_url(table), table, whose, of.offset)
    with opened(origin.url) as engine, translated(origin.schema), exported_snapshot(engine) as snapshot:
        with joined(engine, snapshot) as seen:
            here = archived_content.digests(seen, origin.schema, SOURCES[table], of.offset, until=until)
            refuse_veil(seen, origin.schema)  # its locks keep policies as they were for the digests
        days = sorted({block.day for block in here})
        there = lake_digests(spark, lake, rows, days, reads_all=until is None, local_rows=local_rows, show=show)
        compared = _Comparison(lake, rows, origin, engine, snapshot)
        for day, blocks in _doubtful(here, there.blocks):
            compared.look_at(day, blocks)
        examples = [*compared.examples()]
    return Verified(
        table=table,
        offset=of.offset,
        days=len(days),
        rows=sum(digest.rows for digest in here.values()),
        missing=compared.counts["missing"],
        twice=compared.counts["twice"],
        differing=compared.counts["differs"],
        gone={day: count for day, count in of.gone.items() if until is None or day < until},
        unreadable=there.unreadable | lost_lives.damage(lake, table, whose),
        files=there.files,
        file_days=there.file_days,
        without_checksum=len(there.without_checksum),
        examples=examples,
    )


def _doubtful(here: Mapping[Block, Digest], there: Mapping[Block, Digest]) -> Iterator[tuple[date, list[int]]]:
    """The numbers of the blocks that differ, day by day, as many at once as are compared within some memory."""
    rows: dict[date, Counter[int]] = {}
    for block, digest in sorted(here.items()):
        if there.get(block) != digest:
            rows.setdefault(block.day, Counter())[block.number] += digest.rows
    for day, counts in rows.items():
        gathered: list[int] = []
        for number, count in counts.items():
            if gathered and sum(counts[each] for each in gathered) + count > _ROWS_AT_ONCE:
                yield day, gathered
                gathered = []
            gathered.append(number)
        yield day, gathered


class _Comparison:
    """Compares rows one by one, within one snapshot."""

    def __init__(self, lake: Lake, rows: Rows, origin: Origin, engine: Engine, snapshot: Snapshot) -> None:
        self._lake, self._rows, self._origin = lake, rows, origin
        self._engine, self._snapshot = engine, snapshot
        self.counts: Counter[Flaw] = Counter()
        self._found: list[Finding] = []

    def look_at(self, day: date, blocks: Sequence[int]) -> None:
        """The rows of these blocks of a day."""
        here, there = _Digests(), _Digests()
        with joined(self._engine, self._snapshot) as seen:
            source, below = SOURCES[self._rows.table], self._rows.below
            for key, digest in archived_content.row_digests(seen, self._origin.schema, source, below, day, blocks):
                here.add(key, digest)
        for key, digest in rows_of_blocks(self._lake, self._rows, day, blocks):
            if key in here.of:
                there.add(key, digest)
        for key, digests in here.of.items():
            self._compare(day, key, digests, there.of.get(key, Counter()))

    def _compare(self, day: date, key: Key, here: Counter[int], there: Counter[int]) -> None:
        count, others = here.total(), there.total()
        found: dict[Flaw, int] = {
            "missing": max(count - others, 0),
            "twice": max(others - count, 0),
            "differs": min(count, others) - (here & there).total(),
        }
        for flaw, rows in found.items():
            self.counts[flaw] += rows
            if rows and len(self._found) < _EXAMPLES:
                self._found.append(Finding(flaw, day, key))

    def examples(self) -> Iterator[Finding]:
        """Some of what was found, with the columns that differ."""
        days = sorted({finding.day for finding in self._found if finding.flaw == "differs"})
        columns = {day: self._columns(day) for day in days}
        for finding in self._found:
            named = columns[finding.day].get(finding.key, ()) if finding.flaw == "differs" else ()
            yield finding._replace(columns=named)

    def _columns(self, day: date) -> dict[Key, list[str]]:
        keys = [finding.key for finding in self._found if finding.day == day and finding.flaw == "differs"]
        return differing_columns(self._lake, self._rows, self._origin, self._snapshot, day, keys)


class _Digests:
    """The digests of the rows of each key: of a sound table each has one."""

    def __init__(self) -> None:
        self.of: dict[Key, Counter[int]] = {}

    def add(self, key: Key, digest: int) -> None:
        self.of.setdefault(key, Counter())[digest] += 1
