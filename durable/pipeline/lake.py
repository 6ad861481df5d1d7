"""The lake: Delta tables in a folder or an object store, with the history of any number of services.

    LAKE/history/day=2026-11-20/part-<batch>-<task>-<n>.parquet      one table for both sides, and one for all services
    LAKE/history/_delta_log/                                         what is part of it, and up to where it was archived
    LAKE/history/_checksums/                                         of each file; no part of what Delta knows
    LAKE/dead_letters/...                                            each state of each letter; the newest counts

A commit adds files and moves an offset, both or neither: so no row is there twice, and none is passed over. Parquet
files that no commit names are not part of the lake.

The tables are written by `deltalake` and read by Spark as plain Parquet files, so that neither side needs a jar.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from durable.errors import ArchiveConflict, DurableError, InvalidSetting
from durable.pipeline import checksums, lake_log, places
from durable.pipeline.describing import DESCRIPTIONS, commented, describe, properties, refuse_newer
from durable.pipeline.lake_log import LakeFile
from durable.pipeline.lake_marks import Whole, beside_mark, commit_mark, has_beside, marked, owners, span_of
from durable.pipeline.lake_tables import DAY_OF, SOURCES, DataFile, LakeTable, Whose, arrow_schema, spark_schema
from durable.pipeline.places import StoredFile
from durable.pipeline.progress import Show
from durable.pipeline.session import needs_spark
from durable.pipeline.spans import NO_SPAN, Span
from durable.pipeline.spellings import spelled
from durable.pipeline.table_log import TableLog
from durable.pipeline.unwritable import writing
from durable.storage.archives import Absent

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable
    from deltalake.transaction import AddAction, RemoveAction
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Lake"]

_REPLACES: Final = "durable.replaces"
"""In the commits that bring no new rows."""
_HIGH: Final = "durable.high"
_APP: Final = "durable.app"
_COMMIT: Final = "durable.commit"
"""In the commits that do: their end, their archive, and the number by which the database knows them."""
_DAY = timedelta(days=1)


class Lake:
    """Looks at the logs of its tables whenever it is asked, for one thread at a time."""

    def __init__(self, url: str) -> None:
        """`url`: a folder, or the URL of an object store, whose credentials are in the environment."""
        self.url = spelled(url)
        self._logs = {table: TableLog(self.table_url(table)) for table in SOURCES}
        if "://" not in self.url and any(place.is_file() for place in (Path(self.url), *Path(self.url).parents)):
            raise InvalidSetting(f"lake {self.url}: is a file; name a folder, or the URL of an object store")

    def is_at(self, other: Lake) -> bool:
        """Tell whether both are of one place: a folder has several names, by links and mounts."""
        if self.url == other.url:
            return True
        try:
            return os.path.samefile(self.url, other.url)
        except OSError:  # a place of a store is no file
            return False

    def table_url(self, table: LakeTable) -> str:
        return f"{self.url}/{table}"

    # ---------------------------------------------------------------- reading

    def read(
        self, spark: SparkSession, table: LakeTable, since: date | None = None, until: date | None = None
    ) -> DataFrame:
        """The rows of these days as a DataFrame; `since` is included, `until` is not. Columns as in spark_schema()."""
        paths = self._chosen(table, since, until)
        schema = spark_schema(table)
        if not paths:
            return spark.createDataFrame([], schema)
        places.check_present(self.table_url(table), paths)
        named = {"basePath": places.hadoop(self.table_url(table)), "__globPaths__": "false"}  # brackets are no patterns
        return spark.read.schema(schema).options(**named).parquet(*self._named(table, paths))

    def check(
        self,
        table: LakeTable,
        since: date | None = None,
        until: date | None = None,
        show: Show = lambda done, total: None,
    ) -> None:
        """Raise DurableError, which names it, for the first file of these days whose bytes are not those that were
        written. read() takes what is there.
        """
        checksums.check(self.table_url(table), self._chosen(table, since, until), show)

    def files(self, table: LakeTable, since: date | None = None, until: date | None = None) -> list[str]:
        """The URLs of the files that hold these days."""
        return self._named(table, self._chosen(table, since, until))

    def _named(self, table: LakeTable, paths: Sequence[str]) -> list[str]:
        folder = places.hadoop(self.table_url(table))
        return [f"{folder}/{path}" for path in paths]

    def _chosen(self, table: LakeTable, since: date | None, until: date | None) -> list[str]:
        return [
            path
            for day, path, _ in self.listed(table)
            if (since is None or since <= day) and (until is None or day < until)
        ]

    def files_by_day(self, table: LakeTable) -> dict[date, list[str]]:
        """The files of each day, as paths within the table."""
        found: dict[date, list[str]] = {}
        for day, path, _ in self.listed(table):
            found.setdefault(day, []).append(path)
        return found

    def sizes(self, table: LakeTable, since: date | None = None, until: date | None = None) -> dict[str, int]:
        """The files that hold these days, each as its path within the table, and how many rows it has."""
        return {
            path: rows
            for day, path, rows in self.listed(table)
            if (since is None or since <= day) and (until is None or day < until)
        }

    def listed(self, table: LakeTable) -> list[tuple[date, str, int]]:
        """Day, path and number of rows of each file."""
        if not self.exists(table):
            return []
        with lake_log.readable(self.url):
            return lake_log.adds(self.opened(table))

    def logged(self, table: LakeTable) -> list[LakeFile]:
        """All that the log says of each file."""
        if not self.exists(table):
            return []
        with lake_log.readable(self.url):
            return lake_log.files(self.opened(table))

    def tables(self) -> list[LakeTable]:
        """The tables that something was archived into."""
        return [table for table in SOURCES if self.exists(table)]

    def exists(self, table: LakeTable) -> bool:
        with needs_spark():
            import deltalake  # noqa: F401
        with lake_log.readable(self.url):
            return self._logs[table].exists()

    def require(self, table: LakeTable) -> None:
        """Raise InvalidSetting unless something was archived into this table."""
        if not self.exists(table):
            self.refuse_gone(table)
            named = table.replace("_", " ")
            raise InvalidSetting(f"lake {self.url}: no {named}; fill it with durable-agent pipeline archive")

    def refuse_gone(self, table: LakeTable) -> None:
        """Raise DurableError where something was archived into this table, and it is gone, or its log is. A lake of an
        archive that has never come to the dead letters has none.
        """
        if self.exists(table):
            return
        is_known = table == "dead_letters" and self.exists("history") and self._has_beside()
        if is_known or places.files(self.table_url(table)):
            raise DurableError(
                f"lake: {self.table_url(table)} is gone, or its _delta_log; put it back from a backup of the lake, or "
                "let durable-agent pipeline archive --new-lake write what the database still has into another lake"
            )

    def _has_beside(self) -> bool:
        with lake_log.readable(self.url):
            return has_beside(self._numbers("history"))

    def require_any(self) -> None:
        """Raise InvalidSetting unless there is a lake."""
        if not any(self.exists(table) for table in SOURCES):
            raise InvalidSetting(
                f"lake {self.url}: there is no lake; name the one that was archived into, or make it with "
                "durable-agent pipeline archive"
            )

    def offset(self, app_id: str, table: LakeTable) -> int:
        """Return the transaction below which rows were archived here; 0 if never. It is always read anew."""
        if not self.exists(table):
            return 0
        with lake_log.readable(self.url):
            return self._numbers(table).get(app_id, 0)

    def commit_id(self, app_id: str, table: LakeTable) -> int | None:
        """Return the number of the last commit of this archive; None if there is none, or it has none."""
        return self.marks(table, [commit_mark(app_id)]).get(commit_mark(app_id))

    def commits(self, app_id: str, table: LakeTable) -> dict[int, int]:
        """Return the ends of the commits of this archive that the log still has, by their numbers; it keeps those of
        some weeks.
        """
        if not self.exists(table):
            return {}
        with lake_log.readable(self.url):
            found = self.opened(table).history()
        return {int(each[_COMMIT]): int(each[_HIGH]) for each in found if each.get(_APP) == app_id}

    def was_restored_since(self, app_id: str, table: LakeTable) -> bool:
        """Tell whether Delta's RESTORE has put the table back since the last commit of this archive that its log has.
        It leaves the offsets where they are.
        """
        with lake_log.readable(self.url):
            found = self.opened(table).history()
        since = next((place for place, each in enumerate(found) if each.get(_APP) == app_id), len(found))
        return any(each.get("operation") == "RESTORE" for each in found[:since])

    def marks(self, table: LakeTable, names: Sequence[str]) -> dict[str, int]:
        """Return the numbers that the table's log keeps for these names, where it has one."""
        if not self.exists(table):
            return {}
        with lake_log.readable(self.url):
            found = self._numbers(table)
        return {name: found[name] for name in names if name in found}

    def span(self, table: LakeTable, whose: Whose) -> Span:
        """Return the span of which the table has every row of this database. Rows archived by older versions have no
        span.
        """
        if not self.exists(table):
            return NO_SPAN
        with lake_log.readable(self.url):
            return span_of(self._numbers(table), whose)

    def owners(self, table: LakeTable) -> set[Whose]:
        """Return the databases that were archived into this table, with or without a row. Those of older versions are
        not among them.
        """
        if not self.exists(table):
            return set()
        with lake_log.readable(self.url):
            return owners(self._numbers(table))

    def rows_from(self, table: LakeTable, whose: Whose, xid: int) -> dict[str, Absent]:
        """Describe the files that may have rows of this database of this transaction or a later one, by their
        statistics: each as its path within the table.
        """
        if not self.exists(table):
            return {}
        with lake_log.readable(self.url):
            return lake_log.rows_from(self.opened(table), DAY_OF[table], whose, xid)

    def table_id(self, table: LakeTable) -> str | None:
        """Return the unique id of a table; None where there is no table."""
        return str(self.opened(table).metadata().id) if self.exists(table) else None

    def created_at(self, table: LakeTable) -> datetime | None:
        """Return the time when a table was made; None where there is none, or it does not say."""
        if not self.exists(table):
            return None
        with lake_log.readable(self.url):
            made = self.opened(table).metadata().created_time  # in milliseconds; other writers may leave it out
        return datetime.fromtimestamp(made / 1_000, UTC) if made else None

    def archived_at(self, table: LakeTable) -> datetime | None:
        """Return the time when rows were last committed; None if never. Rows of long before are in the table."""
        if not self.exists(table):
            return None
        with lake_log.readable(self.url):
            commits = self.opened(table).history()
        appends = [commit for commit in commits if commit.get("operation") == "WRITE" and _REPLACES not in commit]
        written = [commit["timestamp"] for commit in appends]
        return datetime.fromtimestamp(max(written) / 1_000, UTC) if written else None

    # ---------------------------------------------------------------- writing

    def create(self, table: LakeTable) -> str:
        """Make the table unless it is there, and add what it lacks: columns, comments and properties.

        Returns its id, which no other table has. Raises DurableError where it cannot be written.
        """
        with needs_spark():
            from deltalake import DeltaTable, Schema
        schema = Schema.from_arrow(commented(arrow_schema(table), table))
        with lake_log.readable(self.url), writing(self.table_url(table)):
            if not self.exists(table):
                DeltaTable.create(
                    self.table_url(table),
                    schema,
                    mode="ignore",
                    partition_by=["day"],
                    description=DESCRIPTIONS[table],
                    configuration=properties(table),
                    raise_if_key_not_exists=False,
                )
            opened = self.opened(table)
            known = {field.name for field in opened.schema().fields}
            missing = [field for field in schema.fields if field.name not in known]
            if missing:
                opened.alter.add_columns(missing)
            describe(opened, table)
            return str(opened.metadata().id)

    def commit(
        self,
        table: LakeTable,
        files: Sequence[DataFile],
        *,
        app_id: str,
        low: int,
        high: int,
        commit_id: int | None = None,
        whole: Whole | None = None,
    ) -> None:
        """Make these files part of the table and move the offset of `app_id` from `low` to `high`: both or neither.

        `commit_id`: the number by which the database knows this commit.
        `whole`: from when to when the table then has every row of a database; the first beginning that is named stays,
        and so do all gaps.
        Raises ArchiveConflict when the offset is not `low` any more: somebody else has archived these rows.
        """
        from deltalake import CommitProperties
        from deltalake.transaction import AddAction, Transaction

        opened = self.opened(table)
        now = int(time.time() * 1_000)
        adds = [AddAction(file.path, file.size, {"day": str(file.day)}, now, True, file.stats) for file in files]
        numbers = self._logs[table].numbers()
        if numbers.get(app_id, 0) != low:
            raise ArchiveConflict
        properties = CommitProperties(
            custom_metadata={
                "durable.low": str(low),
                _HIGH: str(high),
                **({} if commit_id is None else {_APP: app_id, _COMMIT: str(commit_id)}),
            },
            app_transactions=[
                Transaction(app_id, high),
                *([] if commit_id is None else [Transaction(commit_mark(app_id), commit_id)]),
                *marked(numbers, whole),
                *([Transaction(beside_mark(app_id), 1)] if table == "history" and self.exists("dead_letters") else []),
            ],
        )
        self._write(opened, table, adds, properties)

    def replace(
        self,
        table: LakeTable,
        replaced: Sequence[tuple[date, str]],
        files: Sequence[DataFile],
        offsets: Mapping[str, int],
        marks: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Let these files take the place of those, whose rows they hold, in one commit.

        `offsets` of archivers stay as they are; `marks` are numbers that the table's log keeps for these names. Raises
        ArchiveConflict when an offset has moved, or somebody else has replaced a file.
        """
        from deltalake import CommitProperties
        from deltalake.transaction import AddAction, RemoveAction, Transaction

        opened, now = self.opened(table), int(time.time() * 1_000)
        removes = [RemoveAction(path, True, now, None, {"day": str(day)}) for day, path in replaced]
        adds = [AddAction(file.path, file.size, {"day": str(file.day)}, now, True, file.stats) for file in files]
        numbers = self._logs[table].numbers()
        if any(numbers.get(name, 0) != offset for name, offset in offsets.items()):
            raise ArchiveConflict
        if not {path for _, path in replaced} <= {path for _, path, _ in lake_log.adds(opened)}:
            raise ArchiveConflict  # Delta takes the removal of a file that is gone already
        properties = CommitProperties(
            custom_metadata={_REPLACES: "true"},
            app_transactions=[Transaction(name, number) for name, number in {**offsets, **marks}.items() if number],
        )
        self._write(opened, table, [*removes, *adds], properties)

    def _write(
        self,
        opened: DeltaTable,
        table: LakeTable,
        actions: Sequence[AddAction | RemoveAction],
        properties: CommitProperties,
    ) -> None:
        """Write one commit. Raises ArchiveConflict when another one that contradicts it was first."""
        from deltalake.exceptions import CommitFailedError

        try:
            with writing(f"{self.table_url(table)}/_delta_log"):
                opened.create_write_transaction(
                    list(actions),
                    mode="append",
                    schema=opened.schema(),
                    partition_by=["day"],
                    commit_properties=properties,
                )
        except CommitFailedError as error:
            raise ArchiveConflict from error

    @contextmanager
    def removed_unless_written(self, table: LakeTable, name: str) -> Iterator[None]:
        """Remove the files of an attempt of this name that fails before its commit: a full disk would stay full. What
        cannot be removed, or is written by a task that still runs, is for the next archive to remove.
        """
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the error of the attempt is the one to tell
                for file in places.files(self.table_url(table)):
                    if file.path.rpartition("/")[2].startswith(f"part-{name}-"):
                        self.remove(table, file.path)
            raise

    @contextmanager
    def removed_unless_committed(self, table: LakeTable, files: Sequence[DataFile]) -> Iterator[None]:
        """Remove the files of a commit that has failed for certain. One may have happened in spite of its error, as the
        log tells then; and an object store may yet carry out what it has answered with an error.
        """
        try:
            yield
        except Exception as error:
            with suppress(Exception):
                is_over = isinstance(error, ArchiveConflict) or "://" not in self.url
                if is_over and {file.path for file in files}.isdisjoint(self.sizes(table)):
                    for file in files:
                        self.remove(table, file.path)
            raise

    # ---------------------------------------------------------------- files that are no part of it

    def unlisted(self, table: LakeTable, day: date) -> list[str]:
        """The files in the folder of this day which no commit has made part of the table, relative to the table.

        Files that a later commit has replaced are none of them: readers of older versions need them until vacuum().
        """
        folder = f"day={day}"
        with lake_log.readable(self.url):
            replaced = self.opened(table).vacuum(0, dry_run=True, enforce_retention_duration=False)
        committed = [*self.files_by_day(table).get(day, []), *replaced]
        listed = {file.rpartition("/")[2] for file in committed}
        return [f"{folder}/{name}" for name in places.names(self.table_url(table), folder) if name not in listed]

    def orphans(self, table: LakeTable) -> list[StoredFile]:
        """The data files below the folder of the table, of any day, that are part of no version of it.

        The folder is read first: a file that is committed meanwhile is none of them.
        """
        found = [file for file in places.files(self.table_url(table)) if file.path.startswith("day=")]
        with lake_log.readable(self.url):
            opened = self.opened(table)
            replaced = opened.vacuum(0, dry_run=True, enforce_retention_duration=False)
            committed = [*(path for _, path, _ in lake_log.adds(opened)), *replaced]
        listed = {path.rpartition("/")[2] for path in committed}
        return [file for file in found if file.path.rpartition("/")[2] not in listed]

    def remove(self, table: LakeTable, path: str) -> None:
        places.remove(self.table_url(table), path)
        checksums.remove(self.table_url(table), path)

    def opened(self, table: LakeTable) -> DeltaTable:
        """The table as it is now. Raises InvalidSetting where only a newer version of durable may touch it."""
        with lake_log.readable(self.url), lake_log.sound_log(self.table_url(table)):
            found = self._logs[table].opened()
        refuse_newer(found, self.url)
        return found

    def _numbers(self, table: LakeTable) -> Mapping[str, int]:
        """The numbers that the table's log keeps now."""
        self.opened(table)
        return self._logs[table].numbers()
