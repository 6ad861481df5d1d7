"""pipeline archive · verify · purge: history into the lake, compared, and let go of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from durable.cli.arguments import parse_days
from durable.cli.command import reading
from durable.cli.output import Block, Table, age, progress
from durable.cli.pipeline.erase import erasure_rows, erasure_table, is_unfinished, undone_table
from durable.cli.pipeline.options import Place, SparkPlace, load_place
from durable.cli.pipeline.status import by_day, foreign_rows, gone_rows, lost_rows
from durable.cli.pipeline.steps import Ended, Step
from durable.cli.target import connection
from durable.errors import InvalidSetting
from durable.grammar import several
from durable.pipeline.erasing import Listed, listed, noted
from durable.pipeline.erasures import State
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES
from durable.pipeline.origin import Origin
from durable.pipeline.session import needs_spark
from durable.settings import Settings
from durable.storage import archives
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


@reading(place=load_place, spark=SparkPlace)
def archive(
    place: Place, spark: SparkPlace, new_lake: NewLake = False, successor: Successor = False, end: End = False
) -> Step:
    """Archive history and dead letters in the lake, each row once: those written since the last run.

    From the first run on, nodes drop no history and no dead letters; `pipeline purge` does.
    """
    if end:
        _refuse_beside_end({"--new-lake": new_lake, "--successor": successor})
        yield
        return _end(place.find_origin(), place.settings)
    lake = place.require_lake()
    with needs_spark():
        from durable.pipeline.archive import archive as archive_table
        from durable.pipeline.beginning import Wish
    if spark.is_named:
        spark.check()
    yield
    origin = place.find_origin()
    session = cache(spark.open_session)
    if spark.is_named:
        session()
    archive_into_lake = partial(
        archive_table,
        wish=Wish(new_lake, successor),
        local_rows=spark.few_rows(place.settings),
        compact_above=place.settings.pipeline_compact_above,
    )
    done = []
    for table in SOURCES:
        with progress(f"archiving {table}") as show:
            done.append(archive_into_lake(session, lake, table, origin, show=show))
    tables = [asdict(each) | {"gone": by_day(each.gone), "lost": by_day(each.lost)} for each in done]
    lost = lost_rows([(each.table, each.lost) for each in done])
    gone = gone_rows([(each.table, each.gone) for each in done])
    foreign = foreign_rows([(each.table, each.foreign) for each in done])
    undone = _undone_erasures(place.settings, lake, is_restored=any(each.was_restored for each in done))
    return Ended(
        {"service": origin.service, "lake": lake.url, "tables": tables, "erasures": erasure_rows(undone)},
        [_archived(lake, done), *lost, *gone, *foreign, *undone_table(undone)],
        failed=bool(gone or foreign or undone),
    )


def _undone_erasures(settings: Settings, lake: Lake, *, is_restored: bool) -> list[Listed]:
    """Return the erasures whose content a restore has brought back, here or into the lake."""
    with connection(settings) as conn:
        here = noted(conn, settings.db_schema)
    return [each for each in listed(here, lake, counts_rows=is_restored) if each.state is not State.DONE]


@reading(place=load_place, spark=SparkPlace)
def verify(place: Place, spark: SparkPlace) -> Step:
    """Compare what is archived, and still here, with the content of the lake, and each of its files with its checksum.

    Ends with 1 when rows are missing there, are there twice, or differ, or a file is damaged, of whichever day.
    """
    lake = place.require_lake()
    with needs_spark():
        from durable.pipeline.verify import claimed
        from durable.pipeline.verify import verify as verify_table
    local_rows = spark.few_rows(place.settings)
    if not local_rows:
        spark.check()
    yield
    origin = place.find_origin()
    claims = {table: claimed(origin, lake, table) for table in SOURCES}
    with connection(place.settings) as conn:
        here = noted(conn, origin.schema)
    erased = listed(here, lake)
    session = cache(lambda: spark.open_session([lake]))
    done = []
    for table, claim in claims.items():
        with progress(f"comparing {table}") as show:
            done.append(verify_table(session, lake, origin, claim, local_rows=local_rows, show=show))
    tables = [_verified_document(each) for each in done]
    gone = gone_rows([(each.table, each.gone) for each in done])
    return Ended(
        {"service": origin.service, "lake": lake.url, "tables": tables, "erasures": erasure_rows(erased)},
        [_verified(lake, done), *_damaged(done), *_examples(done), *gone, *erasure_table(erased)],
        failed=not all(each.is_whole for each in done) or is_unfinished(erased),
    )


@reading(place=load_place, spark=SparkPlace)
def purge(place: Place, spark: SparkPlace, keep: Keep = None) -> Step:
    """Drop history and resolved letters that are past their retention, after they were compared with the lake.

    Once a table is archived, nodes themselves drop none of its rows.
    """
    lake, settings = place.require_lake(), place.settings
    with needs_spark():
        from durable.pipeline.purge import Retention
        from durable.pipeline.purge import purge as purge_archived
    history = settings.history_retention if keep is None else parse_days(keep, option="--keep")
    kept = Retention(history, settings.dead_letter_retention)
    local_rows = spark.few_rows(settings)
    if not local_rows:
        spark.check()
    yield
    origin = place.find_origin()
    session = cache(lambda: spark.open_session([lake]))
    with progress("purging") as show:
        done = purge_archived(session, lake, origin, kept, local_rows=local_rows, show=show)
    return Ended({"service": origin.service, "lake": lake.url, **asdict(done)}, _purged(done, kept.history))


def _purged(done: Purged, kept: timedelta) -> list[Block]:
    if done.days:
        blocks: list[Block] = [
            f"dropped {several(len(done.days), 'days')} with {several(done.rows, 'rows')}, "
            f"{done.days[0]} to {done.days[-1]}"
        ]
    else:
        rows = f"; dropped {several(done.rows, 'rows')}" if done.rows else ""
        blocks = [f"no day of history is older than {age(kept)}{rows}"]
    if done.letters:
        blocks.append(f"dropped {several(done.letters, 'resolved dead letters')}")
    return blocks


def _refuse_beside_end(given: Mapping[str, bool]) -> None:
    for option, is_given in given.items():
        if is_given:
            raise InvalidSetting(f"--end: archives nothing, and {option} says how to archive; leave one of them out")


def _end(origin: Origin, settings: Settings) -> Ended:
    with connection(settings) as conn:
        count = archives.end(conn, origin.schema)
    return Ended(
        {"ended": count}, [f"{several(count, 'tables', 'are')} archived no more; what is in the lake stays there"]
    )


# ---------------------------------------------------------------- what is shown


def _archived(lake: Lake, done: list[Archived]) -> Table:
    columns = {
        "table": "table",
        "rows": "rows",
        "there before": "known",
        "files": "files",
        "bytes": "size",
        "from xid": "low",
        "to xid": "high",
    }
    return Table.of(f"archived into {lake.url}", done, columns)


def _verified(lake: Lake, done: list[Verified]) -> Table:
    columns = ("table", "days", "rows", "missing", "twice", "differing", "files")
    named = {column: column for column in columns} | {"of days": "file_days"}
    return Table.of(f"compared with {lake.url}", done, named)


def _damaged(done: list[Verified]) -> list[Block]:
    rows = [(each.table, file, reason) for each in done for file, reason in sorted(each.unreadable.items())]
    blocks: list[Block] = []
    if rows:
        blocks.append(Table("files of the lake that cannot be read as written", ["table", "file", "reason"], rows))
    if count := sum(each.without_checksum for each in done):
        blocks.append(
            f"\n{several(count, 'files', 'have')} no checksum, or a damaged one, being of an older version, of another "
            "program, or of a compaction that was cut short: the rows were compared, and not by what readers pass them "
            "over"
        )
    return blocks


def _examples(done: list[Verified]) -> list[Block]:
    rows = [
        (each.table, found.flaw, found.day, _key(found.key), ", ".join(found.columns) or None)
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
    document = {"whole": done.is_whole, "gone": by_day(done.gone), "examples": examples}
    return asdict(done) | document
