"""Foreign rows: those of a life that the database has lost, so that only a lake has them.

    files of the lake, ─┬─ of days of which the database has no row ──> all of their rows, by the files' statistics
    since both parted   └─ of other days ──> rows of which the database does not have the keys

What was written before they parted, and archived after it, is on both sides: it is archived again wherever the lake
loses it, and comes into each other lake.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection

from durable.pipeline import known, places
from durable.pipeline.columns import COLUMNS, LETTER
from durable.pipeline.copying import copy
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import DAY_OF, SOURCES, LakeTable, Whose, file_schema
from durable.pipeline.origin import Origin
from durable.storage import archives
from durable.storage.archives import Absent
from durable.storage.days import beginning, end
from durable.storage.slices import Slice, relation

if TYPE_CHECKING:
    import pyarrow as pa

_KEYS: Final[Mapping[LakeTable, Sequence[str]]] = {"history": known.KEYS["history"], "dead_letters": LETTER}
"""Of a letter those of all its states: where the lake loses the newest one, the database still has the letter."""

PATIENCE: Final = timedelta(seconds=10)
"""The caller's transaction has locked the tables: who waits for it may have this reader wait, and Postgres does not see
such a circle.
"""


@dataclass(frozen=True)
class Parted:
    """Rows of a table of the lake from the transaction on at which this database, and another life of it, parted."""

    lake: Lake
    table: LakeTable
    whose: Whose
    since: int
    below: int

    def foreign(self, conn: Connection, origin: Origin) -> list[Absent]:
        """Describe, by day, those that this database does not have. Until the transaction ends, its maintenance drops
        no day of the others.
        """
        files = self.lake.rows_from(self.table, self.whose, self.since)
        here = archives.days(conn, origin.schema, SOURCES[self.table]) if files else set()
        found = [each for each in files.values() if each.day not in here]
        for day in sorted({each.day for each in files.values()} & here):
            found += self._absent(origin, day, [path for path, each in files.items() if each.day == day])
        return _by_day(found, self.below)

    def _absent(self, origin: Origin, day: date, paths: Sequence[str]) -> Iterator[Absent]:
        from pyarrow.compute import call_function

        rows = known.unknown(self._in_lake(paths), self._here(origin, day), _KEYS[self.table])
        if len(rows):
            first, last = (call_function(name, [rows[DAY_OF[self.table]]]).as_py() for name in ("min", "max"))
            yield Absent(day, first, last, len(rows), call_function("max", [rows["xid"]]).as_py() + 1)

    def _in_lake(self, paths: Sequence[str]) -> pa.Table:
        import pyarrow.dataset as ds

        files = places.dataset(self.lake.table_url(self.table), paths, file_schema(self.table))
        chosen = self.whose.condition() & (ds.field("xid") >= self.since)
        return files.to_table(columns=[*_KEYS[self.table], "xid"], filter=chosen)

    def _here(self, origin: Origin, day: date) -> pa.Table:
        """The keys of the rows of a day that the database has."""
        import pyarrow as pa

        columns = [each for each in COLUMNS[SOURCES[self.table]] if each.name in _KEYS[self.table]]
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
