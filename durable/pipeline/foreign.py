"""Foreign rows: those of a life that the database has lost, so that only a lake has them.

    files of the lake, ─┬─ of days of which the database has no row ──> all of their rows, by the files' statistics
    since both parted   └─ of other days ──> rows of which the database does not have the keys

What was written before they parted, and archived after it, is on both sides: it is archived again wherever the lake
loses it, and comes into each other lake. The keys of foreign rows are named in the lake, for audits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from sqlalchemy import Connection

from durable.pipeline import known, lost_lives, places
from durable.pipeline.columns import COLUMNS
from durable.pipeline.copying import copy
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import DAY_OF, SOURCES, LakeTable, Whose, file_schema
from durable.pipeline.lost_lives import KEYS
from durable.pipeline.origin import Origin
from durable.storage import archives, horizons
from durable.storage.archives import Absent
from durable.storage.days import beginning, end
from durable.storage.slices import Slice, relation

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds

PATIENCE: Final = timedelta(seconds=10)
"""The caller's transaction has locked the tables: who waits for it may have this reader wait, and Postgres does not see
such a circle.
"""


class Foreign(NamedTuple):
    """Foreign rows: by day, as the database notes them, and their keys, with those of lives that were lost before."""

    noted: list[Absent]
    keys: pa.Table | None


@dataclass(frozen=True)
class Parted:
    """Rows of a table of the lake from the transaction on at which this database, and another life of it, parted."""

    lake: Lake
    table: LakeTable
    whose: Whose
    since: int
    below: int

    def foreign(self, conn: Connection, origin: Origin) -> Foreign:
        """Find those that this database does not have. Until the transaction ends, its maintenance drops no day of the
        others.
        """
        import pyarrow as pa

        files, named = self.lake.rows_from(self.table, self.whose, self.since), self._named()
        here = archives.days(conn, origin.schema, SOURCES[self.table]) if files or named else set()
        absent, keys = [each for each in files.values() if each.day not in here], []
        for day in sorted({*(each.day for each in files.values()), *named}):
            rows = self._in_lake([path for path, each in files.items() if each.day == day])
            before = named.get(day, rows.slice(0, 0).drop_columns("xid"))
            if day in here:
                of_day = self._here(origin, day)
                rows, before = (known.unknown(each, of_day, KEYS[self.table]) for each in (rows, before))
                absent += self._absent(day, rows)
            keys += [rows.select(KEYS[self.table]), known.unknown(before, rows, KEYS[self.table])]
        return Foreign(
            _by_day(absent, self.below), self._judged(pa.concat_tables(keys), conn, origin) if keys else None
        )

    def _named(self) -> dict[date, pa.Table]:
        """The rows of lives that were lost before, by day."""
        import pyarrow as pa
        from pyarrow.compute import call_function

        rows = lost_lives.read(self.lake, self.table, self.whose).select(KEYS[self.table])
        days = rows[DAY_OF[self.table]].cast(pa.date32())
        return {day: rows.filter(call_function("equal", [days, day])) for day in days.unique().to_pylist()}

    def _judged(self, rows: pa.Table, conn: Connection, origin: Origin) -> pa.Table:
        """Leave out rows of before the history of this database: it may have dropped them."""
        from pyarrow.compute import call_function

        begins = horizons.begins_at(conn, origin.schema)
        if begins is None:
            return rows
        return rows.filter(call_function("greater_equal", [rows[DAY_OF[self.table]], begins]))

    def _absent(self, day: date, rows: pa.Table) -> Iterator[Absent]:
        from pyarrow.compute import call_function

        if len(rows):
            first, last = (call_function(name, [rows[DAY_OF[self.table]]]).as_py() for name in ("min", "max"))
            yield Absent(day, first, last, len(rows), call_function("max", [rows["xid"]]).as_py() + 1)

    def name_noted(self, conn: Connection, origin: Origin, noted: Sequence[Absent]) -> None:
        """Let the lake name those that the database has noted, beside those that it names already."""
        import pyarrow as pa
        from pyarrow.dataset import field

        files, here = self.lake.files_by_day(self.table), archives.days(conn, origin.schema, SOURCES[self.table])
        known_so_far = lost_lives.read(self.lake, self.table, self.whose).select(KEYS[self.table])
        keys, moment = [known_so_far], field(DAY_OF[self.table])
        for each in noted:
            of_life = (field("xid") < each.below) & (moment >= each.first_at) & (moment <= each.last_at)
            rows = self._in_lake(files.get(each.day, []), of_life).select(KEYS[self.table])
            compared = [self._here(origin, each.day)] if each.day in here else []
            for others in (known_so_far, *compared):
                rows = known.unknown(rows, others, KEYS[self.table])
            keys.append(rows)
        lost_lives.write(self.lake, self.table, self.whose, self._judged(pa.concat_tables(keys), conn, origin))

    def _in_lake(self, paths: Sequence[str], chosen: ds.Expression | None = None) -> pa.Table:
        import pyarrow.dataset as ds

        files = places.ParquetFiles(self.lake.table_url(self.table), paths, file_schema(self.table))
        wanted = self.whose.condition() & (ds.field("xid") >= self.since)
        wanted = wanted if chosen is None else wanted & chosen
        return files.to_table(columns=[*KEYS[self.table], "xid"], filter=wanted)

    def _here(self, origin: Origin, day: date) -> pa.Table:
        """The keys of the rows of a day that the database has."""
        import pyarrow as pa

        columns = [each for each in COLUMNS[SOURCES[self.table]] if each.name in KEYS[self.table]]
        of_day = Slice(relation(origin.schema, SOURCES[self.table]), filters=tuple(self._limits(day)))
        batches = copy(origin.url, (of_day,), [each.sql for each in columns], patience=PATIENCE)
        return pa.Table.from_batches(batches, pa.schema([each.arrow.with_nullable(True) for each in columns]))

    def _limits(self, day: date) -> Iterator[str]:
        for compared, limit in ((">=", beginning(day)), ("<", end(day + timedelta(days=1)))):
            if limit is not None:
                yield f"{DAY_OF[self.table]} {compared} TIMESTAMPTZ '{limit.isoformat()}'"


def _by_day(found: Iterable[Absent], below: int) -> list[Absent]:
    """Put the rows of a day together, of transactions below this one."""
    days: dict[date, list[Absent]] = {}
    for each in found:
        days.setdefault(each.day, []).append(each)
    return [
        Absent(
            day,
            min(each.first_at for each in of_day),
            max(each.last_at for each in of_day),
            sum(each.rows for each in of_day),
            min(max(each.below for each in of_day), below),
        )
        for day, of_day in days.items()
    ]
