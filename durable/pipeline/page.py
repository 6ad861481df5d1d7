"""The page of a report: one HTML file that carries everything it needs, for light and dark, for desks and phones."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, Final

import msgspec

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


def render(report: Report, title: str = "What became of the messages") -> str:
    """The whole page."""
    with needs_spark():
        from plotly.offline import get_plotlyjs
    plots: list[Figure] = []
    body = "\n".join(_sections(report, plots))
    parts = {
        "TITLE": html.escape(title),
        "SPAN": f"{_time(report.first)} to {_time(report.last)} UTC",
        "LAKE": html.escape(report.lake),
        "VERSION": __version__,
        "BODY": body,
        "PLOTS": _script(plots),
        "PLOTLY": get_plotlyjs(),
    }
    page = (files("durable.pipeline") / "report.html").read_text()
    for name, text in parts.items():  # plotly.js comes last: nothing is replaced in it
        page = page.replace(f"%{name}%", text)
    return page


def _script(plots: Sequence[Figure]) -> str:
    """As a script may hold it: what looks like markup could end the script."""
    return msgspec.json.encode(plots).decode().replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _sections(report: Report, plots: list[Figure]) -> Iterator[str]:
    def plot(figure: Figure) -> str:
        plots.append(figure)
        return f'<div class="plot" style="height:{figure["layout"]["height"]}px"></div>'

    yield _tiles(report)
    events = _list_of_marks(report)
    yield _section("Throughput", plot(figures.throughput(report)) + events, f"in windows of {_seconds(report)}")
    if any(row["commit_to_handled_count"] for row in report.message_types):
        whole, *parts = (
            f"<figure><figcaption>{label}</figcaption>{plot(figures.latency(report, name))}</figure>"
            for name, label in _LATENCIES.items()
        )
        legend = "by message type: the median, the 95th and the 99th percentile of what was handled"
        yield _section("Latency", f'{whole}<div class="pair">{"".join(parts)}</div>', legend)
    yield _section("Failures", plot(figures.rates(report)), "of everything that came to an end in a window")
    for name, rows in report.volumes.items():
        yield _section(f"Volume by {name}", plot(figures.volume(rows)), "messages, the largest first")
    yield _section("Dead letters by cause", _table(_CAUSES, report.causes, "There are none."))
    yield _section("Slowest conversations", _table(_CONVERSATIONS, report.conversations, "There are none."))
    yield _section("Every destination and message type", _table(_SERIES, report.series, "There are none."))


def _section(title: str, content: str, legend: str = "") -> str:
    said = f"<p>{html.escape(legend)}</p>" if legend else ""
    return f"<section><h2>{html.escape(title)}</h2>{said}{content}</section>"


def _tiles(report: Report) -> str:
    totals = report.totals
    p95 = totals["commit_to_handled_p95"]
    tiles = {
        "sent": f"{totals['sent']:,}",
        "handled": f"{totals['handled']:,}",
        "dead-lettered": f"{totals['dead_lettered']:,}",
        "expired": f"{totals['expired']:,}",
        "retried": _percent(totals["retry_rate"]),
        "until handled, p95": "-" if p95 is None else duration(p95),
    }
    cells = "".join(f"<div><dd>{value}</dd><dt>{name}</dt></div>" for name, value in tiles.items())
    return f'<dl class="tiles">{cells}</dl>'


def _list_of_marks(report: Report) -> str:
    """What the triangles say, for those who cannot hover."""
    items = "".join(
        f"<li><time>{_time(mark.time)}</time> {html.escape(mark.label)}</li>" for mark in report.marks[:_MOST_ROWS]
    )
    return f"<details><summary>{len(report.marks):,} events</summary><ul>{items}</ul></details>" if items else ""


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


def _table(columns: Mapping[str, tuple[str, Show]], rows: Sequence[Record], otherwise: str) -> str:
    if not rows:
        return f"<p>{otherwise}</p>"
    head = "".join(f"<th{_aligned(show)}>{html.escape(title)}</th>" for title, show in columns.values())
    lines = "".join(
        "<tr>"
        + "".join(
            f"<td{_aligned(show)}>{html.escape('' if row[name] is None else show(row[name]))}</td>"
            for name, (_, show) in columns.items()
        )
        + "</tr>"
        for row in rows[:_MOST_ROWS]
    )
    more = f"<p>and {len(rows) - _MOST_ROWS:,} more: --json shows all</p>" if len(rows) > _MOST_ROWS else ""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>{more}'


def _aligned(show: Show) -> str:
    return ' class="number"' if show in _NUMERIC else ""


def _seconds(report: Report) -> str:
    return duration(report.window_seconds * 1_000)
