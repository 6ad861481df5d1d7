"""pipeline archive · verify · purge · status: history into the lake, compared, let go of, and how far it has come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date, timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from durable.cli.output import Block, Cell, Table, age, progress
from durable.cli.pipeline.erase import erasure_rows, erasure_table, is_unfinished, undone_table
from durable.cli.pipeline.options import LakeUrl, Master, Remote, Service, few_rows, find_lake, open_session
from durable.cli.pipeline.steps import Ended, Step
from durable.cli.target import DatabaseUrl, Debug, OptionalBusName, SchemaName, connection, load_target
from durable.errors import InvalidSetting
from durable.pipeline.erasing import Listed, listed
from durable.pipeline.erasures import State
from durable.pipeline.lake import SOURCES, Lake
from durable.pipeline.origin import find_origin
from durable.pipeline.session import check_session, needs_spark
from durable.pipeline.status import Status, read_status
from durable.settings import Settings
from durable.storage import archives
from durable.storage.database import lock_url
from durable.storage.sql.archive import ERASURE

if TYPE_CHECKING:
    from durable.pipeline.archive import Archived
    from durable.pipeline.purge import Purged
    from durable.pipeline.verify import Verified

NewLake = Annotated[
    bool, typer.Option("--new-lake", help="begin anew in this lake, and leave the one that was used before behind")
]
Successor = Annotated[
    bool,
    typer.Option(
        "--successor",
        help="go on with a database in place of the one that was archived (restored, upgraded, failed over): "
        "archive the rows that the lake lacks",
    ),
]
End = Annotated[
    bool,
    typer.Option(
        "--end", help="archive no more: maintenance drops rows that are past their retention, archived or not"
    ),
]
Keep = Annotated[
    float | None,
    typer.Option("--keep", metavar="DAYS", help="days of history that stay; default: history_retention"),
]


def archive(
    app: OptionalBusName = None,
    lake: LakeUrl = None,
    service: Service = None,
    new_lake: NewLake = False,
    successor: Successor = False,
    end: End = False,
    master: Master = None,
    remote: Remote = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    debug: Debug = False,
) -> Step:
    """Archive history and dead letters in the lake, each row once: those written since the last run.

    From the first run on, nodes drop no history and no dead letters; `pipeline purge` does.
    """
    settings, name = _target(app, database, schema, service)
    if end:
        yield
        return _end(settings)
    found = find_lake(lake, settings)
    with needs_spark():
        from durable.pipeline.archive import archive as archive_table
    named_spark = master is not None or remote is not None
    if named_spark:
        check_session(master, remote)
    yield
    origin = find_origin(settings, name)
    spark = cache(lambda: open_session(master, remote, debug=debug))
    if named_spark:
        spark()
    archive_into_lake = partial(
        archive_table,
        is_new_lake=new_lake,
        is_successor=successor,
        local_rows=few_rows(settings, master, remote),
        compact_above=settings.pipeline_compact_above,
    )
    done = []
    for table in SOURCES:
        with progress(f"archiving {table}") as show:
            done.append(archive_into_lake(spark, found, table, origin, show=show))
    tables = [asdict(each) | {"gone": _by_day(each.gone)} for each in done]
    gone = _gone([(each.table, each.gone) for each in done])
    undone = _undone_erasures(settings, found) if successor or gone else []
    return Ended(
        {"service": origin.service, "lake": found.url, "tables": tables, "erasures": erasure_rows(undone)},
        [_archived(found, done), *gone, *undone_table(undone)],
        failed=bool(gone or undone),
    )


def _undone_erasures(settings: Settings, lake: Lake) -> list[Listed]:
    """Return the erasures whose content a restore has brought back, here or into the lake."""
    with connection(settings) as conn:
        return [each for each in listed(conn, settings.db_schema, lake) if each.state is not State.DONE]


def verify(
    app: OptionalBusName = None,
    lake: LakeUrl = None,
    service: Service = None,
    master: Master = None,
    remote: Remote = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    debug: Debug = False,
) -> Step:
    """Compare what is archived, and still here, with the content of the lake.

    Ends with 1 when rows are missing there, are there twice, or differ.
    """
    settings, name = _target(app, database, schema, service)
    found = find_lake(lake, settings)
    with needs_spark():
        from durable.pipeline.verify import claimed
        from durable.pipeline.verify import verify as verify_table
    local_rows = few_rows(settings, master, remote)
    if not local_rows:
        check_session(master, remote)
    yield
    origin = find_origin(settings, name)
    with connection(settings) as conn:
        claims = {table: claimed(conn, found, table, origin) for table in SOURCES}
        erased = listed(conn, origin.schema, found)
    spark = cache(lambda: open_session(master, remote, debug=debug, lakes=[found]))
    done = []
    for table, claim in claims.items():
        with progress(f"comparing {table}") as show:
            done.append(verify_table(spark, found, origin, claim, local_rows=local_rows, show=show))
    tables = [_verified_document(each) for each in done]
    gone = _gone([(each.table, each.gone) for each in done])
    return Ended(
        {"service": origin.service, "lake": found.url, "tables": tables, "erasures": erasure_rows(erased)},
        [_verified(found, done), *_unreadable(done), *_examples(done), *gone, *erasure_table(erased)],
        failed=not all(each.is_whole for each in done) or is_unfinished(erased),
    )


def purge(
    app: OptionalBusName = None,
    lake: LakeUrl = None,
    service: Service = None,
    keep: Keep = None,
    master: Master = None,
    remote: Remote = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    debug: Debug = False,
) -> Step:
    """Drop history and resolved letters that are past their retention, after they were compared with the lake.

    Once a table is archived, nodes themselves drop none of its rows.
    """
    settings, name = _target(app, database, schema, service)
    found = find_lake(lake, settings)
    with needs_spark():
        from durable.pipeline.purge import Retention
        from durable.pipeline.purge import purge as purge_archived
    kept = Retention(settings.history_retention if keep is None else _days(keep), settings.dead_letter_retention)
    local_rows = few_rows(settings, master, remote)
    if not local_rows:
        check_session(master, remote)
    yield
    origin = find_origin(settings, name)
    spark = cache(lambda: open_session(master, remote, debug=debug, lakes=[found]))
    with progress("purging") as show:
        done = purge_archived(spark, found, origin, kept, local_rows=local_rows, show=show)
    return Ended({"service": origin.service, "lake": found.url, **asdict(done)}, _purged(done, kept.history))


def status(
    app: OptionalBusName = None,
    lake: LakeUrl = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    debug: Debug = False,
) -> Step:
    """Show the state of the archive: offsets, rows that wait, and the transaction that holds them back. Needs no Spark.

    Ends with 1 when archiving waits for a decision, the lake lacks archived rows, or an erasure is not done.
    """
    settings, _ = _target(app, database, schema, None)
    place = lake or settings.lake
    named = Lake(place) if place else None
    yield
    found = read_status(lock_url(settings), settings.db_schema, named, settings.history_retention)
    with connection(settings) as conn:
        erased = listed(conn, settings.db_schema, named)
    problems = [f"\n{each.table}: {each.problem}" for each in found.tables if each.problem]
    gone = _gone([(each.table, each.gone) for each in found.tables])
    return Ended(
        _status_document(found) | {"erasures": erasure_rows(erased)},
        [_status(found), _horizon(found), *_to_purge(found), *problems, *gone, *erasure_table(erased)],
        failed=bool(problems) or is_unfinished(erased),
    )


def _target(
    app: str | None, database: str | None, schema: str | None, service: str | None
) -> tuple[Settings, str | None]:
    bus, settings = load_target(app, database, schema)
    return settings, service or (bus.service if bus is not None else None)


def _purged(done: Purged, kept: timedelta) -> list[Block]:
    if done.days:
        blocks: list[Block] = [
            f"dropped {len(done.days)} days with {done.rows:,} rows, {done.days[0]} to {done.days[-1]}"
        ]
    else:
        rows = f"; dropped {done.rows:,} rows" if done.rows else ""
        blocks = [f"no day of history is older than {age(kept)}{rows}"]
    if done.letters:
        blocks.append(f"dropped {done.letters:,} resolved dead letters")
    return blocks


def _end(settings: Settings) -> Ended:
    with connection(settings) as conn:
        count = archives.end(conn, settings.db_schema)
    return Ended({"ended": count}, [f"{count} tables are archived no more; what is in the lake stays there"])


def _days(given: float) -> timedelta:
    if not 0 < given <= 36_500:
        raise InvalidSetting(f"--keep: {given:g} is no number of days; write such as 30")
    return timedelta(days=given)


# ---------------------------------------------------------------- what is shown


def _archived(lake: Lake, done: list[Archived]) -> Table:
    rows: list[list[Cell]] = [
        [each.table, each.rows, each.known, each.files, each.size, each.low, each.high] for each in done
    ]
    columns = ["table", "rows", "there before", "files", "bytes", "from xid", "to xid"]
    return Table(f"archived into {lake.url}", columns, rows)


def _gone(tables: Sequence[tuple[str, Mapping[date, int]]]) -> list[Table]:
    """List the rows that a restored lake had, and that the database has dropped."""
    rows: list[list[Cell]] = [[table, str(day), count] for table, gone in tables for day, count in gone.items()]
    title = "gone: the lake was restored without these rows, and the database has let go of them"
    return [Table(title, ["table", "day", "rows"], rows)] if rows else []


def _by_day(gone: Mapping[date, int]) -> dict[str, int]:
    return {str(day): rows for day, rows in gone.items()}


def _verified(lake: Lake, done: list[Verified]) -> Table:
    rows: list[list[Cell]] = [
        [each.table, each.days, each.rows, each.missing, each.twice, each.differing] for each in done
    ]
    return Table(f"compared with {lake.url}", ["table", "days", "rows", "missing", "twice", "differing"], rows)


def _unreadable(done: list[Verified]) -> list[Table]:
    rows: list[list[Cell]] = [
        [each.table, file, reason] for each in done for file, reason in sorted(each.unreadable.items())
    ]
    return [Table("files of the lake that cannot be read", ["table", "file", "reason"], rows)] if rows else []


def _examples(done: list[Verified]) -> list[Block]:
    rows: list[list[Cell]] = [
        [each.table, found.flaw, str(found.day), _key(found.key), ", ".join(found.columns) or None]
        for each in done
        for found in each.examples
    ]
    columns = ["table", "in the lake", "day", "row", "columns that differ"]
    blocks: list[Block] = (
        [Table("rows that the lake does not hold as the database does", columns, rows)] if rows else []
    )
    if any(ERASURE in found.columns for each in done for found in each.examples):
        blocks.append(
            "\nrows whose erasure_id differs are erased in one of the places only: run durable-agent pipeline erase "
            "with their --id, or with the same --id or --key as before"
        )
    return blocks


def _key(values: Sequence[object]) -> str:
    """A row's key: an id or the number of a letter first, the transaction last."""
    return " ".join(str(UUID(bytes=value)) if isinstance(value, bytes) else str(value) for value in values)


def _verified_document(done: Verified) -> dict[str, object]:
    examples = [
        {"flaw": found.flaw, "day": str(found.day), "row": _key(found.key), "columns": [*found.columns]}
        for found in done.examples
    ]
    document = {"whole": done.is_whole, "gone": _by_day(done.gone), "examples": examples}
    return asdict(done) | document


def _status(found: Status) -> Table:
    rows = [
        [
            each.table,
            each.lake or "(not archived)",
            each.offset,
            each.lag_rows,
            None if each.lag_age is None else age(each.lag_age),
            None if each.archived_at is None else f"{each.archived_at:%Y-%m-%d %H:%M:%S}Z",
        ]
        for each in found.tables
    ]
    columns = ["table", "lake", "archived to xid", "rows behind", "oldest of them", "last moved"]
    return Table("archive", columns, rows)


def _to_purge(found: Status) -> list[Block]:
    days = found.days_to_purge
    if not days:
        return []
    return [
        f"{len(days)} days of history, from {days[0]} on, are past their retention; run durable-agent pipeline purge"
    ]


def _status_document(found: Status) -> dict[str, object]:
    holder = found.holder
    seconds = holder.age.total_seconds() if holder is not None and holder.age is not None else None
    held = None if holder is None else {"who": holder.who, "seconds": seconds, "query": holder.query}
    tables = [
        asdict(each) | {"lag_age": each.lag_age and each.lag_age.total_seconds(), "gone": _by_day(each.gone)}
        for each in found.tables
    ]
    return {
        "horizon": found.horizon,
        "held_back_by": held,
        "tables": tables,
        "days_to_purge": found.days_to_purge,
    }


def _horizon(found: Status) -> str:
    if found.holder is None:
        return f"\nxid {found.horizon} is as far as can be archived now; no transaction holds it back"
    since = "" if found.holder.age is None else f", for {age(found.holder.age)}"
    return f"\nxid {found.horizon} is as far as can be archived now{since}: {found.holder.who}"
