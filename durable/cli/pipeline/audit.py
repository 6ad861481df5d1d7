"""pipeline audit: what was sent against what was received, over the lakes of any number of services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from durable.cli.arguments import parse_period, parse_span, parse_time
from durable.cli.command import reading
from durable.cli.output import Block, Columns, Table, age, phases, utc
from durable.cli.pipeline.options import SparkPlace, opened, row_count
from durable.cli.pipeline.steps import Ended, Step
from durable.errors import InvalidSetting
from durable.pipeline.session import spark_errors
from durable.pipeline.spellings import absolute
from durable.pipeline.unwritable import writing
from durable.settings import load_settings

if TYPE_CHECKING:
    from durable.pipeline.audit import Verdict

_MEANINGS = {
    "lost": "sent, and seen at fewer places than it was sent to",
    "undone": "seen only in a life that its receiver's database has lost: send it again, pipeline replay --same-ids",
    "twice": "handled more than once by one endpoint",
    "overdue": "open, and its receiver's archive stands still",
    "forgotten": "received, and sent only in a life that its sender's database has lost",
    "alien": "received, and sent by none of the senders",
    "late": "handled after its deadline, or after --late-after",
    "open": "too new to be judged",
    "unarchived": "unknown: the other side lies in a gap of an archive, or before it begins",
}

Senders = Annotated[
    list[str], typer.Option("--sender", metavar="LAKE", help="the lake of a service that sends; may be repeated")
]
Receivers = Annotated[
    list[str], typer.Option("--receiver", metavar="LAKE", help="the lake of a service that receives; may be repeated")
]
Since = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="sent then or later: 7d ago, or ISO 8601 [where every lake has rows]"),
]
Until = Annotated[str | None, typer.Option("--until", metavar="TIME", help="sent before that")]
Settle = Annotated[
    str,
    typer.Option("--settle", metavar="TIME", help="time before its last commit up to which a lake is complete"),
]
ArchivedUntil = Annotated[
    str | None,
    typer.Option(
        "--archived-until",
        metavar="TIME",
        help="every lake is complete up to then, though a service that had nothing to archive left no commit",
    ),
]
LateAfter = Annotated[
    str | None,
    typer.Option("--late-after", metavar="TIME", help="messages that took longer than this are late, such as 10m"),
]
OverdueAfter = Annotated[
    str,
    typer.Option(
        "--overdue-after",
        metavar="TIME",
        help="time before the newest history's end: what is open since before then fails",
    ),
]
LostDatabase = Annotated[
    list[str] | None,
    typer.Option(
        "--lost-database",
        metavar="NAME",
        help="database that exists no more: nothing is awaited from it, and what it has not archived is lost; may be "
        "repeated",
    ),
]
Out = Annotated[
    str | None, typer.Option("--out", metavar="FOLDER", help="write every finding there, as Parquet; it must be new")
]
Examples = Annotated[int, typer.Option("--examples", min=0, max=1_000, help="examples of each finding that are shown")]


@reading(spark=SparkPlace)
def audit(
    spark: SparkPlace,
    sender: Senders,
    receiver: Receivers,
    since: Since = None,
    until: Until = None,
    settle: Settle = "15m",
    archived_until: ArchivedUntil = None,
    late_after: LateAfter = None,
    overdue_after: OverdueAfter = "1d",
    lost_database: LostDatabase = None,
    out: Out = None,
    examples: Examples = 10,
) -> Step:
    """Prove from history that no message was lost, undone or handled twice. Ends with 1 when one was."""
    from durable.pipeline.audit import Question, audit, audit_here

    now, settings, (first, last) = datetime.now(UTC), load_settings(), parse_period(since, until)
    if first is not None and first >= now:
        raise InvalidSetting(f"--since: {since} is not in the past, and nothing was sent since; give an earlier time")
    question = Question(
        since=first,
        until=last,
        settle=parse_span(settle, option="--settle"),
        archived_until=None if archived_until is None else parse_time(archived_until, now, option="--archived-until"),
        late_after=None if late_after is None else parse_span(late_after, option="--late-after"),
        overdue_after=parse_span(overdue_after, option="--overdue-after"),
        lost_databases=lost_database or (),
        dedupe_window=settings.dedupe_window,
        example_count=examples,
    )
    place = None if out is None else absolute(out)
    if place is not None and "://" not in place and Path(place).exists():
        raise InvalidSetting(f"--out: {out} is there already; name a new folder")
    lakes = [opened(each) for each in sender], [opened(each) for each in receiver]
    spark.check()
    local_rows = spark.few_rows(settings)
    yield
    for lake in (*lakes[0], *lakes[1]):
        lake.require("history")
    if place is not None and "://" not in place:
        with writing(place, "--out"):  # of Spark it would be an aborted job
            Path(place).mkdir(parents=True)
            Path(place).rmdir()
    with spark_errors(), phases("audit") as phase:
        if row_count([*lakes[0], *lakes[1]]) <= local_rows:
            phase("matching ids")
            verdict = audit_here(*lakes, question, out=place)
        else:
            phase("starting Spark")
            verdict = audit(spark.open_session([*lakes[0], *lakes[1]]), *lakes, question, out=place, phase=phase)
    return Ended({"failed": verdict.failed, **asdict(verdict)}, _blocks(verdict), failed=verdict.failed)


def _blocks(verdict: Verdict) -> list[Block]:
    blocks: list[Block] = [
        f"judged: what was sent from {_since(verdict.since)} on, as far as the histories reach",
        Table.of("histories", verdict.spans, _SPANS),
        *_behind(verdict),
        *_later(verdict),
        *_gaps(verdict),
        *([] if verdict.totals else ["no lake has a row of this period: nothing was judged"]),
        Table.of("history", verdict.totals, _TOTALS),
        Table(
            "findings",
            ("finding", "envelopes", ""),
            [(kind, verdict.counts[kind], meaning) for kind, meaning in _MEANINGS.items()],
        ),
    ]
    if verdict.erased:
        title = "erased: content that is gone on purpose; its rows are judged like all others"
        blocks.append(Table.of(title, verdict.erased, _ERASURES))
    for kind in _MEANINGS:
        examples = [row for row in verdict.examples if row["finding"] == kind]
        if examples:
            blocks.append(_examples(kind, examples, verdict.counts[kind]))
    blocks.append("" if not verdict.failed else "\nFAILED: the guarantee does not hold, or a lake is not whole")
    return blocks


def _behind(verdict: Verdict) -> list[Block]:
    rows = [
        (row["service"], row["side"], row["held_by"], utc(row["until"]), age(timedelta(seconds=row["behind_seconds"])))
        for row in verdict.spans
        if row["behind_seconds"] is not None
    ]
    title = (
        "behind: nobody knows what came here since; let durable-agent pipeline archive go on there, or name a database "
        "that exists no more by --lost-database"
    )
    return [Table(title, ("service", "side", "database", "until", "behind"), rows)] if rows else []


def _later(verdict: Verdict) -> list[Block]:
    rows = [
        (row["service"], row["side"], later["database"], utc(later["begin"]))
        for row in verdict.spans
        for later in row["later"]
    ]
    title = "begin later: what came to these databases before is unknown, and does not keep a loss from being one"
    return [Table(title, ("service", "side", "database", "complete from"), rows)] if rows else []


def _gaps(verdict: Verdict) -> list[Block]:
    rows = [
        (row["service"], row["side"], utc(gap["begin"]), utc(gap["end"]))
        for row in verdict.spans
        for gap in row["gaps"]
    ]
    title = "gaps: rows of these times are in no lake, and the database has dropped them"
    return [Table(title, ("service", "side", "from", "until"), rows)] if rows else []


def _examples(kind: str, rows: Sequence[Mapping[str, Any]], total: int) -> Table:
    title = kind if len(rows) == total else f"{kind}, the oldest {len(rows)} of {total:,}"
    return Table.of(title, rows, _EXAMPLES)


def _since(moment: datetime | None) -> str:
    return "the beginning" if moment is None else utc(moment)


_SPANS: Columns = {
    "service": "service",
    "side": "side",
    "complete from": lambda row: _since(row["begin"]),
    "until": lambda row: row["until"] and utc(row["until"]),
    "held back by": "held_by",
}
_TOTALS: Columns = {
    "lake": "lake",
    "service": "service",
    "side": "side",
    "outcome": "outcome",
    "envelopes": "count",
    "local": "local",
    "first": "first",
    "last": "last",
}
_ERASURES: Columns = {"service": "service", "at": "erased_at", "by": "actor", "reason": "reason", "rows": "rows"}
_EXAMPLES: Columns = {
    "id": "id",
    "message type": "message_type",
    "source": "source",
    "address": "address",
    "sent": "sent_at",
    "": "detail",
}
