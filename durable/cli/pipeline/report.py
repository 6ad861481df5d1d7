"""pipeline report: throughput, latencies and failures of a lake's days, as one HTML page or as JSON."""

from __future__ import annotations

import re
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from durable.arguments import refuse_empty_period
from durable.cli.arguments import parse_time
from durable.cli.command import reading
from durable.cli.output import phases
from durable.cli.pipeline.options import SparkPlace, load_lake
from durable.cli.pipeline.steps import Ended, Step
from durable.errors import InvalidSetting
from durable.grammar import several
from durable.pipeline.lake import Lake
from durable.pipeline.session import spark_errors
from durable.pipeline.unwritable import writing
from durable.settings import load_settings

if TYPE_CHECKING:
    from durable.pipeline.report import Mark

Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="file for the page")]
Title = Annotated[str, typer.Option("--title", metavar="TEXT", help="title of the page")]
Since = Annotated[str | None, typer.Option("--since", metavar="DAY", help="first UTC day: 2030-12-31, 7d ago")]
Until = Annotated[str | None, typer.Option("--until", metavar="DAY", help="first UTC day after the report")]
By = Annotated[
    list[str] | None,
    typer.Option(
        "--by", metavar="COLUMN", help="show volume by this, such as partition_key or body.customer; may be repeated"
    ),
]
Marks = Annotated[
    list[str] | None,
    typer.Option("--mark", metavar="TIME=LABEL", help="show when this happened; may be repeated", show_default=False),
]


@reading(lake=load_lake, spark=SparkPlace)
def report(
    lake: Lake,
    spark: SparkPlace,
    out: Out = Path("report.html"),
    title: Title = "What became of the messages",
    since: Since = None,
    until: Until = None,
    by: By = None,
    mark: Marks = None,
) -> Step:
    """Write a page of plots about throughput, latencies and failures. The page needs no network."""
    days = parse_period_of_days(since, until)
    from durable.pipeline import rollups
    from durable.pipeline.page import render
    from durable.pipeline.report import check_dimension, report

    marks = [_mark(text) for text in mark or ()]
    if out.is_dir():
        raise InvalidSetting(f"--out: {out} is a folder; name a file in it")
    if not out.parent.is_dir():
        raise InvalidSetting(f"--out: there is no folder {out.parent}")
    for name in by or ():
        check_dimension(name)
    rollups.check_place(lake)
    spark.check()
    yield
    lake.require("history")
    if not lake.files("history"):
        return Ended({"page": None}, [f"lake {lake.url}: no row of history yet; no page was written"])
    with spark_errors(), phases("report") as phase:
        phase("starting Spark")
        session = spark.open_session([lake])
        window = load_settings().dedupe_window
        found = report(
            session, lake, since=days[0], until=days[1], dimensions=by or (), dedupe_window=window, phase=phase
        ).marked(marks)
        phase("writing the page")
        with writing(str(out), "--out"):
            out.write_text(render(found, title), encoding="utf-8")
    computed = several(found.days_computed, "days")
    said = f"{out}: {several(found.totals['total'], 'rows')} of history, {computed} computed anew"
    return Ended({"page": str(out), **asdict(found)}, [said])


def parse_period_of_days(since: str | None, until: str | None) -> tuple[date | None, date | None]:
    """Read --since and --until. Raises InvalidSetting for what is no day, and when no day is between them."""
    first, last = _day(since, "--since"), _day(until, "--until")
    refuse_empty_period(first, last, dashes="--")
    return first, last


def _day(text: str | None, option: str) -> date | None:
    if text is None:
        return None
    ago = re.fullmatch(r"([0-9]{1,5}) ?d( ago)?", text.strip())
    try:
        if ago is not None:
            return datetime.now(UTC).date() - timedelta(days=int(ago[1]))
        return date.fromisoformat(text)
    except (ValueError, OverflowError):
        raise InvalidSetting(f"{option}: {text!r} is no day; write 2030-12-31, or 7d for that long ago") from None


def _mark(text: str) -> Mark:
    from durable.pipeline.report import Mark

    time, separator, label = text.partition("=")
    if not separator or not label.strip():
        raise InvalidSetting(f"--mark: {text!r} is no mark; write it like 2030-12-31T23:59Z=new release")
    return Mark(parse_time(time, datetime.now(UTC), option="--mark"), label.strip())
