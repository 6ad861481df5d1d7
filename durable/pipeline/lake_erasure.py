"""The lake's side of an erasure: files are rewritten, marked and recorded, and what is left of the old ones removed.

table ──> files with wanted rows ──> rewritten ──> one commit: old ones out, new ones in, and the erasure's mark
      ──> record of the erasure in LAKE/erasures
      ──> scrub(): replaced files, leftovers of dead writers; logs hold no content
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final
from uuid import UUID, uuid4

from sqlalchemy import Connection

from durable.errors import ArchiveConflict, DurableError
from durable.failpoints import failpoint
from durable.pipeline import blanking, checksums, places
from durable.pipeline.blanking import Wanted
from durable.pipeline.checksums import Compared
from durable.pipeline.erasures import Recorded, mark, record
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES, LakeTable, Whose
from durable.pipeline.leftovers import Scrubbed, remove_all
from durable.pipeline.origin import Origin, app_id, hashed
from durable.pipeline.unwritable import writing
from durable.storage import archives
from durable.storage.erasures import Chosen, Erasure

_TRIES: Final = 5  # against who compacts the same days meanwhile
_ALL: Final = (1 << 63) - 1  # above every transaction


class LakeErasure:
    """Erasure of one choice in the lakes of a database, under the archiver's lock."""

    def __init__(
        self,
        conn: Connection,
        origin: Origin,
        lakes: Sequence[Lake],
        chosen: Chosen,
        lost: Sequence[str],
        compared: Compared,
    ) -> None:
        self._conn, self._origin, self._lakes, self._compared = conn, origin, lakes, compared
        self._database = archives.database(conn, origin.schema)
        whose = [Whose(origin.service, each) for each in dict.fromkeys([self._database, *lost])]
        self._wanted, self._has_lost = Wanted(chosen.ids, chosen.keys, whose), bool(lost)

    def erase(self, erasure: Erasure) -> Erasure:
        """Erase in each lake, and note it there; returns the record with the counts of this database's own lake."""
        done = [self._erase(lake, erasure) for lake in self._lakes]
        return done[0] if done else erasure

    def scrub(self, lake: Lake, table: LakeTable) -> Scrubbed:
        """Remove files of one table."""
        here = {file.path.rpartition("/")[2] for file in places.files(lake.table_url(table))}
        with writing(lake.table_url(table)):
            replaced = lake.opened(table).vacuum(0, dry_run=False, enforce_retention_duration=False)
        checksums.remove_stray(lake.table_url(table))
        apps = [hashed(each) for each in self._app_ids(table)]
        left = remove_all(lake, table, apps, self._wanted, self._compared)
        return Scrubbed(removed=sum(path.rpartition("/")[2] in here for path in replaced)) + left

    def _erase(self, lake: Lake, erasure: Erasure) -> Erasure:
        counts: dict[LakeTable, int] = dict.fromkeys(SOURCES, 0)
        for table in lake.tables():
            lake.create(table)  # adds the column that marks such rows, to a lake of an earlier version
            counts[table] = self._rewrite(lake, table, erasure.erasure_id)
            failpoint("E2")
        done = erasure._replace(
            lake=lake.url,
            lake_id=lake.table_id("history"),
            lake_history_rows=counts["history"],
            lake_letter_rows=counts["dead_letters"],
        )
        record(lake, _as_recorded(done, self._database))
        failpoint("E3")
        return done

    def _rewrite(self, lake: Lake, table: LakeTable, erasure_id: UUID) -> int:
        """Rewrite the files, and return how many rows this erasure has emptied by then; repeat when another writer
        replaces the same files meanwhile, up to a limit.
        """
        name = mark(erasure_id)
        for _ in range(_TRIES):
            offsets = self._offsets(lake, table)
            attempt = self._name(table, offsets)
            with lake.removed_unless_written(table, attempt):
                replaced, written = blanking.rewritten(lake, table, self._wanted, erasure_id, attempt, self._compared)
            if not replaced:
                marked = lake.marks(table, [name]).get(name, 0)
                count = _count(lake, table, erasure_id, _ALL)
                if count == _count(lake, table, erasure_id, marked):
                    return count
            below = _ALL if self._has_lost else next(iter(offsets.values()), 0) or _ALL
            try:
                with lake.removed_unless_committed(table, written):
                    lake.replace(table, replaced, written, offsets, {name: below})
            except ArchiveConflict:
                continue
            return _count(lake, table, erasure_id, below)
        raise ArchiveConflict(
            f"lake {lake.url}: {table} was changed by others {_TRIES} times meanwhile; erase once more"
        )

    def _offsets(self, lake: Lake, table: LakeTable) -> dict[str, int]:
        """Return this database's offset in the lake, which must not move meanwhile."""
        archive = archives.find(self._conn, self._origin.schema, SOURCES[table])
        if archive is None or archive.lake_id != lake.table_id(table):
            return {}
        return {archive.app_id: lake.offset(archive.app_id, table)}

    def _app_ids(self, table: LakeTable) -> list[str]:
        """The names under which archivers of this database have archived the table."""
        source = SOURCES[table]
        archive = archives.find(self._conn, self._origin.schema, source)
        given = app_id(self._origin.service, self._database, self._origin.schema, source)
        return [given if archive is None else archive.app_id, given]

    def _name(self, table: LakeTable, offsets: Mapping[str, int]) -> str:
        """Name files as an archive does, so that it cleans up after an erasure that has died; the attempt begins with
        a letter that theirs do not begin with.
        """
        low = next(iter(offsets.values()), 0)
        return f"{hashed(self._app_ids(table)[0])}-{low}-x{uuid4().hex[:7]}"


def _count(lake: Lake, table: LakeTable, erasure_id: UUID, below: int) -> int:
    counts = blanking.count_erased(lake, table, {erasure_id: below})
    if counts is None:
        raise DurableError(f"lake {lake.url}: files of {table} cannot be read; run: durable-agent pipeline verify")
    return counts[erasure_id]


def _as_recorded(erasure: Erasure, database: str) -> Recorded:
    return Recorded(
        erasure_id=erasure.erasure_id,
        service=erasure.service,
        database=database,
        actor=erasure.actor,
        reason=erasure.reason,
        chosen_by=erasure.chosen_by,
        chosen_count=erasure.chosen_count,
        choice_digest=erasure.choice_digest,
        erased_at=datetime.now(UTC),
        history_rows=erasure.lake_history_rows,
        letter_rows=erasure.lake_letter_rows,
    )
