"""pipeline audit: what was sent against what was received, over the lakes of any number of services."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from durable.cli.arguments import parse_time
from durable.cli.output import Block, Table, phases
from durable.cli.pipeline.options import Master, Remote, few_rows, open_session, row_count
from durable.cli.pipeline.steps import Ended, Step
from durable.cli.target import Debug
from durable.errors import InvalidSetting
from durable.pipeline.lake import Lake
from durable.pipeline.session import check_session, spark_errors
from durable.settings import load_settings

if TYPE_CHECKING:
    from durable.pipeline.audit import Verdict

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}
_MEANINGS = {
    "lost": "sent, and seen at fewer places than it was sent to",
    "twice": "handled more than once by one endpoint",
    "alien": "received, and sent by none of the senders",
    "late": "handled after its deadline, or after --late-after",
    "open": "too new to be judged",
    "unarchived": "unknown: the other side lies in a gap of an archive",
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
Out = Annotated[
    str | None, typer.Option("--out", metavar="FOLDER", help="write every finding there, as Parquet; it must be new")
]
Examples = Annotated[int, typer.Option("--examples", min=0, max=1_000, help="examples of each finding that are shown")]


def audit(
    sender: Senders,
    receiver: Receivers,
    since: Since = None,
    until: Until = None,
    settle: Settle = "15m",
    archived_until: ArchivedUntil = None,
    late_after: LateAfter = None,
    out: Out = None,
    examples: Examples = 10,
    master: Master = None,
    remote: Remote = None,
    debug: Debug = False,
) -> Step:
    """Prove from history that no message was lost or handled twice. Ends with 1 when one was."""
    from durable.pipeline.audit import Question, audit, audit_here

    now = datetime.now(UTC)
    question = Question(
        since=None if since is None else parse_time(since, now, option="--since"),
        until=None if until is None else parse_time(until, now, option="--until"),
        settle=_duration(settle, "--settle"),
        archived_until=None if archived_until is None else parse_time(archived_until, now, option="--archived-until"),
        late_after=None if late_after is None else _duration(late_after, "--late-after"),
        example_count=examples,
    )
    if out is not None and "://" not in out and Path(out).exists():
        raise InvalidSetting(f"--out: {out} is there already; name a new folder")
    lakes = [Lake(place) for place in sender], [Lake(place) for place in receiver]
    check_session(master, remote)
    local_rows = few_rows(load_settings(), master, remote)
    yield
    for lake in (*lakes[0], *lakes[1]):
        lake.require("history")
    with spark_errors(), phases("audit") as phase:
        verdict = None
        if out is None and row_count([*lakes[0], *lakes[1]]) <= local_rows:
            phase("matching ids")
            verdict = audit_here(*lakes, question)
        if verdict is None:
            phase("starting Spark")
            spark = open_session(master, remote, debug=debug, lakes=[*lakes[0], *lakes[1]])
            verdict = audit(spark, *lakes, question, out=out, phase=phase)
    return Ended({"failed": verdict.failed, **asdict(verdict)}, _blocks(verdict), failed=verdict.failed)


def _duration(text: str, option: str) -> timedelta:
    match = re.fullmatch(r"([0-9]{1,9}) ?(s|m|min|h|d)", text.strip())
    if match is None or (seconds := int(match[1]) * _UNITS[match[2]]) > 36_500 * 86_400:
        raise InvalidSetting(f"{option}: {text!r} is no duration; write 90s, 30m, 2h or 7d")
    return timedelta(seconds=seconds)


def _blocks(verdict: Verdict) -> list[Block]:
    blocks: list[Block] = [
        f"judged: what was sent from {_time(verdict.since)} on, as far as the histories reach",
        Table(
            "histories",
            ("service", "side", "complete from", "until"),
            [(row["service"], row["side"], _time(row["begin"]), _time(row["until"])) for row in verdict.spans],
        ),
        *_gaps(verdict),
        Table(
            "history",
            ("lake", "service", "side", "outcome", "envelopes", "local", "first", "last"),
            [
                (
                    row["lake"],
                    row["service"],
                    row["side"],
                    row["outcome"],
                    row["count"],
                    row["local"],
                    _time(row["first"]),
                    _time(row["last"]),
                )
                for row in verdict.totals
            ],
        ),
        Table(
            "findings",
            ("finding", "envelopes", ""),
            [(kind, verdict.counts[kind], _MEANINGS[kind]) for kind in _MEANINGS],
        ),
    ]
    if verdict.erased:
        rows = [
            (each["service"], _time(each["erased_at"]), each["actor"], each["reason"], each["rows"])
            for each in verdict.erased
        ]
        title = "erased: content that is gone on purpose; its rows are judged like all others"
        blocks.append(Table(title, ("service", "at", "by", "reason", "rows"), rows))
    for kind in _MEANINGS:
        examples = [row for row in verdict.examples if row["finding"] == kind]
        if examples:
            blocks.append(_examples(kind, examples, verdict.counts[kind]))
    blocks.append("" if not verdict.failed else "\nFAILED: the guarantee does not hold, or a lake is not whole")
    return blocks


def _gaps(verdict: Verdict) -> list[Block]:
    rows = [
        (row["service"], row["side"], _time(gap["begin"]), _time(gap["end"]))
        for row in verdict.spans
        for gap in row["gaps"]
    ]
    title = "gaps: rows of these times are in no lake, and the database has dropped them"
    return [Table(title, ("service", "side", "from", "until"), rows)] if rows else []


def _examples(kind: str, rows: Sequence[Mapping[str, Any]], total: int) -> Table:
    title = kind if len(rows) == total else f"{kind}, the oldest {len(rows)} of {total:,}"
    cells = [
        (row["id"], row["message_type"], row["source"], row["address"], _time(row["sent_at"]), row["detail"])
        for row in rows
    ]
    return Table(title, ("id", "message type", "source", "address", "sent", ""), cells)


def _time(moment: datetime | None) -> str:
    return "the beginning" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"
