"""The page of a report: one HTML file that carries everything it needs, for light and dark, for desks and phones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal, NamedTuple

import msgspec

from durable.grammar import several
from durable.pipeline import figures
from durable.pipeline.figures import Figure, duration
from durable.pipeline.report import Record, Report
from durable.pipeline.session import needs_spark
from durable.version import __version__

Show = Callable[[Any], str]

_LATENCIES: Final = {
    "commit_to_handled": "Commit to handled",
    "commit_to_stored": "Commit to stored",
    "stored_to_handled": "Stored to handled",
}
_MOST_ROWS: Final = 100


class Block(NamedTuple):
    """A part of a section, as the template shows it: `kind` names its macro."""

    kind: Literal["plot", "pair", "table", "marks"]
    content: Any
    caption: str = ""


class Section(NamedTuple):
    """A card of the page."""

    title: str
    legend: str
    blocks: Sequence[Block]


def render(report: Report, title: str = "What became of the messages") -> str:
    """The whole page. Every text is escaped by the template, whoever has named it."""
    with needs_spark():
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    plots: list[Figure] = []
    sections = list(_sections(report, plots))
    templates = Environment(
        loader=PackageLoader("durable.pipeline", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return templates.get_template("report.html").render(
        title=title,
        span=f"{_time(report.first)} to {_time(report.last)} UTC",
        lake=report.lake,
        version=__version__,
        tiles=_tiles(report),
        sections=sections,
        plots=Markup(_script(plots)),
        plotly=Markup(get_plotlyjs()),
    )


def _script(plots: Sequence[Figure]) -> str:
    """Escape text for a script: markup in it could end the script."""
    return msgspec.json.encode(plots).decode().replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _sections(report: Report, plots: list[Figure]) -> Iterator[Section]:
    def plot(figure: Figure, caption: str = "") -> Block:
        plots.append(figure)
        return Block("plot", figure["layout"]["height"], caption)

    marks = [(_time(mark.time), mark.label) for mark in report.marks[:_MOST_ROWS]]
    events = [Block("marks", marks, f"{several(len(report.marks), 'events')}")] if marks else []
    yield Section("Throughput", f"in windows of {_seconds(report)}", [plot(figures.throughput(report)), *events])
    if any(row["commit_to_handled_count"] for row in report.message_types):
        whole, *parts = (plot(figures.latency(report, name), label) for name, label in _LATENCIES.items())
        legend = "by message type: the median, the 95th and the 99th percentile of what was handled"
        yield Section("Latency", legend, [whole, Block("pair", parts)])
    yield Section("Failures", "of everything that came to an end in a window", [plot(figures.rates(report))])
    for name, rows in report.volumes.items():
        yield Section(f"Volume by {name}", "messages, the largest first", [plot(figures.volume(rows))])
    yield Section("Dead letters by cause", "", [_table(_CAUSES, report.causes)])
    yield Section("Slowest conversations", "", [_table(_CONVERSATIONS, report.conversations)])
    yield Section("Every destination and message type", "", [_table(_SERIES, report.series)])


def _tiles(report: Report) -> Mapping[str, str]:
    totals = report.totals
    p95 = totals["commit_to_handled_p95"]
    return {
        "sent": f"{totals['sent']:,}",
        "handled": f"{totals['handled']:,}",
        "dead-lettered": f"{totals['dead_lettered']:,}",
        "expired": f"{totals['expired']:,}",
        "retried": _percent(totals["retry_rate"]),
        "until handled, p95": "-" if p95 is None else duration(p95),
    }


# ---------------------------------------------------------------- tables


def _time(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def _percent(rate: float) -> str:
    return "0" if not rate else f"{100 * rate:.2g} %"


def _count(value: int) -> str:
    return f"{value:,}"


def _latency(value: float | None) -> str:
    return "" if value is None else duration(value)


_CAUSES: Final[Mapping[str, tuple[str, Show]]] = {
    "total": ("letters", _count),
    "unresolved": ("unresolved", _count),
    "exception_type": ("exception", str),
    "example": ("such as", str),
    "message_type": ("message type", str),
    "service": ("service", str),
    "last": ("last", _time),
    "fingerprint": ("fingerprint", str),
}
_CONVERSATIONS: Final[Mapping[str, tuple[str, Show]]] = {
    "seconds": ("took", lambda seconds: duration(seconds * 1_000)),
    "total": ("rows", _count),
    "began": ("began", _time),
    "correlation_id": ("conversation", str),
}
_SERIES: Final[Mapping[str, tuple[str, Show]]] = {
    "service": ("service", str),
    "side": ("side", str),
    "address": ("address", str),
    "message_type": ("message type", str),
    "total": ("messages", _count),
    "retry_rate": ("retried", _percent),
    "dead_letter_rate": ("dead-lettered", _percent),
    "expired": ("expired", _count),
    "commit_to_stored_p95": ("stored, p95", _latency),
    "commit_to_handled_p50": ("handled, p50", _latency),
    "commit_to_handled_p95": ("p95", _latency),
    "commit_to_handled_p99": ("p99", _latency),
}
_NUMERIC: Final = (_count, _percent, _latency)


def _table(columns: Mapping[str, tuple[str, Show]], rows: Sequence[Record]) -> Block:
    """Each cell with whether it is a number."""
    head = [(title, show in _NUMERIC) for title, show in columns.values()]
    lines = [
        [("" if row[name] is None else show(row[name]), show in _NUMERIC) for name, (_, show) in columns.items()]
        for row in rows[:_MOST_ROWS]
    ]
    more = f"and {len(rows) - _MOST_ROWS:,} more: --json shows all" if len(rows) > _MOST_ROWS else ""
    return Block("table", {"head": head, "rows": lines}, more)


def _seconds(report: Report) -> str:
    return duration(report.window_seconds * 1_000)
