"""The plots of a report, each as plotly.js takes it: a list of traces and a layout, without colours of the page.

What is drawn comes from peers (names of services, types, keys), and plotly.js reads markup in labels: all of it is
escaped here.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from durable.pipeline.report import Mark, Record, Report
from durable.pipeline.transform import QUANTILES

Figure = Mapping[str, Any]

_COLOURS: Final = ("#3b82f6", "#10b981", "#f59e0b", "#8b5cf6", "#06b6d4", "#ec4899", "#84cc16", "#f97316")
_GREY, _RED, _AMBER, _GREEN, _BLUE = "#94a3b8", "#ef4444", "#f59e0b", "#10b981", "#3b82f6"
_TICKS: Final = (0.1, 1, 10, 100, 1_000, 10_000, 60_000, 600_000, 3_600_000, 36_000_000, 86_400_000)  # milliseconds
_FINE_TICKS: Final = tuple(digit * 10**power for power in range(-1, 9) for digit in (1, 2, 5))
_NARROW: Final = 50  # times the fastest: less than that has hardly any of the coarse ticks
_MOST_TYPES: Final = 15
_MOST_MARKS: Final = 60
_LONGEST_LABEL: Final = 28
_ROW_HEIGHT, _FRAME_HEIGHT = 30, 90  # pixels


def throughput(report: Report) -> Figure:
    """Draw the messages that each service finished over time, the sent ones as a line, and marks."""
    windows = list(_windows(report))
    unit, factor = _unit(report)
    handled = _over_time(report, "incoming", "total")
    sent = _over_time(report, "outgoing", "total")
    traces = [
        _area(_label(service), windows, [rates.get(window, 0) * factor for window in windows], colour)
        for (service, rates), colour in zip(_largest(handled, len(_COLOURS)), _COLOURS, strict=False)
    ]
    everything = [sum(rates.get(window, 0) for rates in sent.values()) * factor for window in windows]
    if sent:
        traces.append(_line("sent, by all", windows, everything, _GREY) | {"line": {"color": _GREY, "dash": "dot"}})
    layout = {"yaxis": {"title": {"text": f"messages / {unit}"}, "rangemode": "tozero"}, "height": 380}
    return {"data": [*traces, *_marks(report.marks)], "layout": layout | _with_marks(report.marks)}


def rates(report: Report) -> Figure:
    """Draw the shares of retried, dead-lettered and expired messages, in percent of all that came to their end."""
    windows = list(_windows(report))
    totals = _sums(report, "total")
    traces = []
    kinds = (("retried", _AMBER), ("dead_lettered", _RED), ("expired", _GREY), ("interrupted", _COLOURS[3]))
    for name, colour in kinds:
        found = _sums(report, name)
        percent = [100 * found.get(window, 0) / totals[window] if totals.get(window) else None for window in windows]
        traces.append(_line(name.replace("_", "-"), windows, percent, colour))
    layout = {"yaxis": {"title": {"text": "percent"}, "rangemode": "tozero", "ticksuffix": " %"}, "height": 300}
    return {"data": traces, "layout": layout}


def latency(report: Report, name: str) -> Figure:
    """Draw the latency of each message type, from the median to the 99th percentile, on a logarithmic axis."""
    rows = [row for row in report.message_types if row[f"{name}_count"]][:_MOST_TYPES][::-1]
    labels = [_label(row["message_type"]) for row in rows]
    bars = {label: [max(row[f"{name}_{label}"], 0.1) for row in rows] for label in QUANTILES}
    spans: list[Any] = []
    for label, low, high in zip(labels, bars["p50"], bars["p99"], strict=True):
        spans += [(low, label), (high, label), (None, None)]
    line = {
        "x": [x for x, _ in spans],
        "y": [y for _, y in spans],
        "mode": "lines",
        "line": {"color": _GREY, "width": 3},
        "hoverinfo": "skip",
        "showlegend": False,
    }
    colours = dict(zip(QUANTILES, (_GREEN, _AMBER, _RED), strict=True))
    dots = [
        {
            "x": values,
            "y": labels,
            "name": label,
            "mode": "markers",
            "marker": {"color": colours[label], "size": 11},
            "customdata": [duration(value) for value in values],
            "hovertemplate": "%{y}<br>" + label + " %{customdata}<extra></extra>",
        }
        for label, values in bars.items()
    ]
    is_narrow = max(bars["p99"], default=0) < _NARROW * min(bars["p50"], default=0)
    ticks = _FINE_TICKS if is_narrow else _TICKS
    axis = {"type": "log", "tickvals": ticks, "ticktext": [duration(tick) for tick in ticks]}
    layout = {"xaxis": axis, "yaxis": {"automargin": True}, "hovermode": "closest", "height": _height(len(rows))}
    return {"data": [line, *dots], "layout": layout}


def volume(rows: Sequence[Record]) -> Figure:
    """The values of a dimension, the largest on top, by what became of their messages."""
    rows = rows[::-1]
    labels = [_label("none" if row["value"] is None else row["value"]) for row in rows]
    kinds = (("sent", _BLUE), ("handled", _GREEN), ("dead_lettered", _RED), ("expired", _GREY))
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name.replace("_", "-"),
            "x": [row[name] for row in rows],
            "y": labels,
            "marker": {"color": colour},
            "hovertemplate": "%{y}: %{x:,} " + name.replace("_", "-") + "<extra></extra>",
        }
        for name, colour in kinds
        if any(row[name] for row in rows)
    ]
    axis = {"type": "category", "automargin": True}
    layout = {"barmode": "stack", "yaxis": axis, "hovermode": "closest", "height": _height(len(rows))}
    return {"data": bars, "layout": layout}


def duration(milliseconds: float) -> str:
    """Write a duration in its largest unit, with three digits."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if milliseconds >= size:
            return f"{milliseconds / size:.3g} {unit}"
    return f"{milliseconds:.3g} ms"


# ---------------------------------------------------------------- over time


def _windows(report: Report) -> Iterator[datetime]:
    """Every window of the span: one in which nothing happened has a rate too."""
    step = timedelta(seconds=report.window_seconds)
    first = min((row["window"] for row in report.throughput), default=report.first)
    for number in range(-((first - report.last) // step)):
        yield first + number * step


def _over_time(report: Report, side: str, name: str) -> dict[str, dict[datetime, int]]:
    """Group the counts by service and window."""
    found: dict[str, dict[datetime, int]] = {}
    for row in report.throughput:
        if row["side"] == side:
            found.setdefault(row["service"], {})[row["window"]] = row[name]
    return found


def _sums(report: Report, name: str) -> dict[datetime, int]:
    found: dict[datetime, int] = {}
    for row in report.throughput:
        found[row["window"]] = found.get(row["window"], 0) + row[name]
    return found


def _largest(series: Mapping[str, dict[datetime, int]], count: int) -> list[tuple[str, dict[datetime, int]]]:
    """The largest ones, and the others as one."""
    ranked = sorted(series.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    if len(ranked) <= count:
        return ranked
    others: dict[datetime, int] = {}
    for _, values in ranked[count - 1 :]:
        for window, value in values.items():
            others[window] = others.get(window, 0) + value
    return [*ranked[: count - 1], ("others", others)]


def _unit(report: Report) -> tuple[str, float]:
    """The unit in which the busiest window has at least one message, and what a count is multiplied with."""
    busiest = max(_sums(report, "total").values(), default=0) / report.window_seconds
    unit, seconds = next(
        ((unit, size) for unit, size in (("s", 1), ("min", 60), ("h", 3_600)) if busiest * size >= 1), ("day", 86_400)
    )
    return unit, seconds / report.window_seconds


def _line(name: str, times: Sequence[datetime], values: Sequence[float | None], colour: str) -> dict[str, Any]:
    return {
        "name": name,
        "x": times,
        "y": values,
        "mode": "lines",
        "line": {"color": colour, "width": 2},
        "hovertemplate": "%{y:,.3~g}",
    }


def _area(name: str, times: Sequence[datetime], values: Sequence[float], colour: str) -> dict[str, Any]:
    line = {"color": colour, "width": 1.5}
    return _line(name, times, values, colour) | {"stackgroup": "services", "line": line}


# ---------------------------------------------------------------- marks


def _marks(marks: Sequence[Mark]) -> list[dict[str, Any]]:
    """A triangle above the plot for each, which tells what happened; what was told from outside stands out."""
    kinds = (("events", _RED, 11, _told(marks)), ("seen in the history", _GREY, 8, _seen(marks)))
    return [
        {
            "x": [mark.time for mark in shown],
            "y": [1.0] * len(shown),
            "yaxis": "y2",
            "mode": "markers",
            "marker": {"symbol": "triangle-down", "size": size, "color": colour},
            "name": name,
            "text": [html.escape(mark.label) for mark in shown],
            "hovertemplate": "%{text}<extra></extra>",
        }
        for name, colour, size, shown in kinds
        if shown
    ]


def _with_marks(marks: Sequence[Mark]) -> dict[str, Any]:
    """A line for each that was told."""
    line = {"color": _RED, "width": 1, "dash": "dot"}
    shapes = [
        {"type": "line", "xref": "x", "yref": "paper", "x0": mark.time, "x1": mark.time, "y0": 0, "y1": 1, "line": line}
        for mark in _told(marks)
    ]
    above = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    return {"shapes": shapes, "yaxis2": above} if marks else {}


def _told(marks: Sequence[Mark]) -> Sequence[Mark]:
    return [mark for mark in marks if mark.is_told][:_MOST_MARKS]


def _seen(marks: Sequence[Mark]) -> Sequence[Mark]:
    return [mark for mark in marks if not mark.is_told][:_MOST_MARKS]


# ---------------------------------------------------------------- labels


def _label(text: object) -> str:
    name = str(text)
    short = name if len(name) <= _LONGEST_LABEL else f"\N{HORIZONTAL ELLIPSIS}{name[1 - _LONGEST_LABEL :]}"
    return html.escape(short)


def _height(rows: int) -> int:
    return _FRAME_HEIGHT + _ROW_HEIGHT * max(rows, 2)
