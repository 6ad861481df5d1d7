"""The page of the pipeline: what the database knows of the archive, erasures, publishing and replays.

It reads by the functions of `pipeline status`, bounded, and without a look into the lake: neither Spark nor pyarrow is
loaded here. Audits, reports and verifications leave nothing in the database.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta
from typing import Final, NamedTuple

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from durable.bus import Bus
from durable.console.access import Person, Role
from durable.console.pages import Pages
from durable.console.shown import age, count
from durable.console.viewers import HIDDEN
from durable.grammar import several
from durable.pipeline.lake_tables import SOURCES, LakeTable
from durable.pipeline.recovering import known_gaps
from durable.pipeline.spans import Gap
from durable.pipeline.status import problem_of
from durable.storage import archives, erasures, horizons, purging, replays, staging, status
from durable.storage.archives import Archive, Commit
from durable.storage.bounded import Look, limit_times, look
from durable.storage.erasures import Erasure
from durable.storage.horizons import Holder, Lag
from durable.storage.replays import Begun
from durable.storage.staging import Remembered

MOST_BEHIND: Final = 10_000
"""Rows behind that are counted, of each table."""
_MOST_SHOWN: Final = 10
_MOST_GAPS: Final = 50
_LONG_BEHIND: Final = timedelta(days=2)
_LONG_HELD: Final = timedelta(minutes=5)
_LONGEST_PROBLEM: Final = timedelta(milliseconds=500)
"""It may look at every row that was written since the last vacuum."""
_MARGIN: Final = 1_000_000
"""Transactions by which a row of another cluster is ahead of this one."""


class ArchivedTable(NamedTuple):
    """A table that may be archived. `archive` is None where it never was."""

    table: LakeTable
    archive: Archive | None
    lag: Look[Lag]
    problem: Look[str | None]
    gaps: Sequence[Gap]
    commits: Sequence[Commit]

    @property
    def is_archived(self) -> bool:
        return self.archive is not None and self.archive.ended_at is None

    @property
    def state(self) -> str:
        if self.archive is None:
            return "not archived"
        if self.archive.ended_at is not None:
            return "ended"
        return "to be decided" if self.problem.found else "archived"


class KnownLake(NamedTuple):
    """A lake, or the part of it, that has rows of one table of this database."""

    table: str
    lake_id: str
    place: str | None


class PipelineState(NamedTuple):
    """State of the pipeline as the database knows it, by its own clock."""

    now: datetime
    database: str | None
    services: Sequence[str]
    horizon: int
    holder: Holder | None
    is_at_work: bool
    tables: Sequence[ArchivedTable]
    days_to_purge: Sequence[date]
    erasures: Sequence[Erasure]
    replays: Sequence[Begun]
    batches: Sequence[Remembered]

    @property
    def is_known(self) -> bool:
        """True when something was archived once."""
        return any(each.archive is not None for each in self.tables)

    @property
    def lakes(self) -> list[KnownLake]:
        """The lakes that this database has used, a table at a time; of earlier ones only the id is known."""
        found: list[KnownLake] = []
        for each in self.tables:
            if each.archive is not None:
                found.append(KnownLake(each.table, each.archive.lake_id, each.archive.lake))
                found += [KnownLake(each.table, left, None) for left in each.archive.left_lakes]
        known = {each.lake_id for each in found}
        for erasure in self.erasures:
            if erasure.lake_id is not None and erasure.lake_id not in known:
                known.add(erasure.lake_id)
                found.append(KnownLake("erasures", erasure.lake_id, erasure.lake))
        return found


class PipelinePage:
    """The page, read in one transaction."""

    def __init__(self, pages: Pages, bus: Bus) -> None:
        self._pages = pages
        self._bus = bus

    async def __call__(self, request: Request, person: Person) -> Response:
        keep = self._bus.settings.history_retention
        found = await self._bus.runtime.database.transaction(read, keep)
        if found.holder is not None and person.role < Role.OPERATOR:
            found = found._replace(holder=found.holder._replace(query=HIDDEN if found.holder.query else ""))
        return self._pages.render(
            request,
            "pipeline.html",
            person,
            found=found,
            needs=list(needs(found)),
            keep=keep,
            most_behind=MOST_BEHIND,
            commits=commits(found),
        )


def read(conn: Connection, schema: str, keep: timedelta) -> PipelineState:
    """Read it, with the archived days that are past this retention of history."""
    limit_times(conn, schema)
    tables = [_table(conn, schema, table) for table in SOURCES]
    is_archived = any(each.table == "history" and each.is_archived for each in tables)
    return PipelineState(
        now=status.clock(conn, schema),
        database=archives.known_database(conn, schema),
        services=archives.services(conn, schema),
        horizon=horizons.horizon(conn, schema),
        holder=horizons.holder(conn, schema),
        is_at_work=archives.is_locked(conn, schema),
        tables=tables,
        days_to_purge=purging.days_older_than(conn, schema, keep) if is_archived else (),
        erasures=erasures.some(conn, schema, _MOST_SHOWN),
        replays=replays.newest(conn, schema, _MOST_SHOWN),
        batches=staging.newest(conn, schema, _MOST_SHOWN),
    )


def needs(found: PipelineState) -> Iterator[str]:
    """Work for somebody."""
    for each in found.tables:
        if each.problem.found:
            yield f"{each.table}: {each.problem.found}"
        elif each.archive is not None and each.archive.lost_above is not None:
            yield (
                f"{each.table}: the lake was restored without rows that were archived; run: durable-agent pipeline "
                "archive, and durable-agent pipeline status, which counts the rows that are gone"
            )
        waits = each.lag.found.age if each.is_archived and each.lag.found is not None else None
        if waits is not None and waits > _LONG_BEHIND:
            yield f"{each.table}: rows have waited for {age(waits)} to be archived; run: durable-agent pipeline archive"
    behind = sum(each.lag.found.rows for each in found.tables if each.is_archived and each.lag.found is not None)
    holder = found.holder
    if holder is not None and behind and holder.age is not None and holder.age > _LONG_HELD:
        yield f"{holder.who} has held the archive back for {age(holder.age)}"
    undone = sum(each.finished_at is None for each in found.erasures)
    if undone:
        are = "1 erasure is" if undone == 1 else f"{count(undone, _MOST_SHOWN)} erasures are"
        yield (f"{are} not done; run: durable-agent pipeline erase with the same --id or --key again")
    if len(found.days_to_purge) > _LONG_BEHIND.days:
        yield (
            f"{several(len(found.days_to_purge), 'archived days')} of history, from {found.days_to_purge[0]} on, are "
            "past their retention; run: durable-agent pipeline purge"
        )


def commits(found: PipelineState) -> list[tuple[Commit, bool]]:
    """The newest commits of all tables, and whether each is confirmed."""
    known = [
        (commit, each.archive is not None and commit.high <= each.archive.archived_below)
        for each in found.tables
        for commit in each.commits
    ]
    return sorted(known, key=lambda one: one[0].at, reverse=True)[:_MOST_SHOWN]


def _table(conn: Connection, schema: str, table: LakeTable) -> ArchivedTable:
    source = SOURCES[table]
    archive = archives.find(conn, schema, source)
    low = 0
    if archive is not None and archive.identity == archives.identity(conn, schema):
        low = archive.archived_below
    problem = Look[str | None](None)
    if archive is not None and archive.ended_at is None:
        limit_times(conn, schema, _LONGEST_PROBLEM)
        problem = look(conn, schema, _problem, archive, source)
        limit_times(conn, schema)
    return ArchivedTable(
        table=table,
        archive=archive,
        lag=look(conn, schema, horizons.lag, source, low, MOST_BEHIND),
        problem=problem,
        gaps=known_gaps(conn, schema, table)[-_MOST_GAPS:],
        commits=archives.commits(conn, schema, source, _MOST_SHOWN),
    )


def _problem(conn: Connection, schema: str, archive: Archive, source: str) -> str | None:
    return problem_of(conn, schema, archive, archive.archived_below, None, source, margin=_MARGIN)
