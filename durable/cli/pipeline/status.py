"""pipeline status: how far the archive has come, and what holds it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date

from durable.cli.command import reading
from durable.cli.output import Block, Columns, Table, age
from durable.cli.pipeline.erase import erasure_rows, erasure_table, is_unfinished
from durable.cli.pipeline.options import LakeUrl, named_lake
from durable.cli.pipeline.steps import Ended, Step
from durable.cli.target import Target, connection, load_target
from durable.errors import InvalidSetting
from durable.grammar import several
from durable.pipeline.erasing import listed, noted
from durable.pipeline.lake import Lake
from durable.pipeline.spans import Gap
from durable.pipeline.status import Status, read_status
from durable.storage.database import lock_url


@reading(target=load_target)
def status(target: Target, lake: LakeUrl = None) -> Step:
    """Show the state of the archive: offsets, rows that wait, and the transaction that holds them back. Needs no Spark.

    Ends with 1 when archiving waits for a decision, the lake lacks archived rows, or an erasure is not done.
    """
    settings = target.settings
    named = named_lake(lake, settings)
    yield
    found = read_status(lock_url(settings), settings.db_schema, named, settings.history_retention)
    _refuse_no_lake(lake, named)
    with connection(settings) as conn:
        here = noted(conn, settings.db_schema)
    erased = listed(here, named)
    gaps = Table.of(
        "gaps: rows of these times are not in the lake, and the database has dropped them", found.gaps, _GAPS
    )
    problems = [f"\n{each.table}: {each.problem}" for each in found.tables if each.problem]
    gone = gone_rows([(each.table, each.gone) for each in found.tables])
    return Ended(
        _document(found) | {"erasures": erasure_rows(erased)},
        [
            _table(found),
            _horizon(found),
            *_to_purge(found),
            *([gaps] if found.gaps else []),
            *problems,
            *gone,
            *erasure_table(erased),
        ],
        failed=bool(problems) or is_unfinished(erased),
    )


def _refuse_no_lake(given: str | None, named: Lake | None) -> None:
    """Raise InvalidSetting for an option that names a place without a lake. That of the settings may be yet to come."""
    if given and named is not None and not named.tables():
        raise InvalidSetting(
            f"--lake {named.url}: there is no lake; correct the place, or fill it with durable-agent pipeline archive"
        )


def gone_rows(tables: Sequence[tuple[str, Mapping[date, int]]]) -> list[Table]:
    """List the rows that a restored lake had, and that the database has dropped."""
    rows = [(table, day, count) for table, gone in tables for day, count in gone.items()]
    title = "gone: the lake was restored without these rows, and the database has let go of them"
    return [Table(title, ["table", "day", "rows"], rows)] if rows else []


def lost_rows(tables: Sequence[tuple[str, Mapping[date, int]]]) -> list[Table]:
    """List the rows of a life that the database has lost: the lake alone has them."""
    rows = [(table, day, count) for table, lost in tables for day, count in lost.items()]
    title = "lost: the lake alone has these rows; to see what is undone, run: durable-agent pipeline audit"
    return [Table(title, ["table", "day", "rows"], rows)] if rows else []


def foreign_rows(tables: Sequence[tuple[str, Sequence[Gap]]]) -> list[Table]:
    """List the times of which a restored lake had rows that the database, restored as well, did not have."""
    rows = [(table, gap.begin, gap.end) for table, gaps in tables for gap in gaps]
    title = (
        "gone: rows of these times were in the lake alone, since the database was restored; now it was restored, too"
    )
    return [Table(title, ["table", "from", "to"], rows)] if rows else []


def by_day(gone: Mapping[date, int]) -> dict[str, int]:
    """Return the same for JSON, which has no days as keys."""
    return {str(day): rows for day, rows in gone.items()}


_GAPS: Columns = {"table": "table", "from": "begin", "to": "end"}


def _table(found: Status) -> Table:
    columns: Columns = {
        "table": "table",
        "lake": lambda each: each.lake or "(not archived)",
        "archived to xid": "offset",
        "rows behind": "lag_rows",
        "oldest of them": lambda each: None if each.lag_age is None else age(each.lag_age),
        "last moved": "archived_at",
    }
    return Table.of("archive", found.tables, columns)


def _to_purge(found: Status) -> list[Block]:
    days = found.days_to_purge
    if not days:
        return []
    return [
        f"{several(len(days), 'days')} of history, from {days[0]} on, {'is' if len(days) == 1 else 'are'} past the "
        "retention; run durable-agent pipeline purge"
    ]


def _document(found: Status) -> dict[str, object]:
    holder = found.holder
    seconds = holder.age.total_seconds() if holder is not None and holder.age is not None else None
    held = None if holder is None else {"who": holder.who, "seconds": seconds, "query": holder.query}
    tables = [
        asdict(each) | {"lag_age": each.lag_age and each.lag_age.total_seconds(), "gone": by_day(each.gone)}
        for each in found.tables
    ]
    return {
        "horizon": found.horizon,
        "held_back_by": held,
        "tables": tables,
        "days_to_purge": found.days_to_purge,
        "gaps": [asdict(each) for each in found.gaps],
    }


def _horizon(found: Status) -> str:
    if found.holder is None:
        return f"\nxid {found.horizon} is as far as can be archived now; no transaction holds it back"
    since = "" if found.holder.age is None else f", for {age(found.holder.age)}"
    return f"\nxid {found.horizon} is as far as can be archived now{since}: {found.holder.who}"
