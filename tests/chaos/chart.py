"""The timeline of a run as one inline SVG: throughput, latency, and below them a lane of faults for each place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape

from tests.chaos.figures import Second
from tests.chaos.fleet import SERVICES
from tests.chaos.summary import Summary

WIDTH, LEFT, PLOT = 1100, 130, 120
LANE, GAP = 18, 26
MOST_COLUMNS = 500
COLOURS = ("#c0392b", "#2471a3", "#b9770e", "#1e8449", "#7d3c98", "#616a6b", "#a04000", "#117a65")


def chart(summary: Summary) -> str:
    """The picture; what a mark means is its title, which browsers show at the pointer."""
    columns = _columns(summary.seconds)
    ends = 1.02 * max([1.0, *(end for *_, end in summary.events), len(summary.seconds)])

    def x(moment: float) -> float:
        return round(LEFT + (WIDTH - LEFT - 10) * max(0.0, moment) / ends, 1)

    places = sorted({_lane(kind, place) for kind, place, _, _ in summary.events})
    top_of_lanes = 2 * (PLOT + GAP) + GAP
    height = top_of_lanes + LANE * len(places) + 30
    parts = [
        *_plot(columns, x, GAP, "handled a second", [lambda each: each.effects], ("#2471a3",)),
        *_plot(columns, x, 2 * GAP + PLOT, "latency, s (p50, p99)", [_p99, _p50], ("#e59866", "#a04000")),
        *_lanes(summary, places, x, top_of_lanes),
        *_axis(ends, x, height),
        f'<line x1="{x(summary.calm_seconds)}" x2="{x(summary.calm_seconds)}" y1="10" y2="{height - 20}" '
        'class="calm"><title>calm</title></line>',
    ]
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="timeline">{"".join(parts)}</svg>'


def _columns(seconds: Sequence[Second]) -> list[Second]:
    """At most so many: those of a long run stand for several seconds each, by their mean and their worst."""
    step = -(-len(seconds) // MOST_COLUMNS) or 1
    groups = [seconds[start : start + step] for start in range(0, len(seconds), step)]
    return [
        Second(
            group[0].second,
            round(sum(each.effects for each in group) / len(group)),
            max(each.p50 for each in group),
            max(each.p99 for each in group),
        )
        for group in groups
    ]


def _plot(
    columns: Sequence[Second],
    x: Callable[[float], float],
    top: int,
    name: str,
    values: Sequence[Callable[[Second], float]],
    colours: Sequence[str],
) -> Iterator[str]:
    highest = max([1.0, *(value(each) for each in columns for value in values)])
    width = max(0.6, x(columns[1].second) - x(columns[0].second) - 0.3) if len(columns) > 1 else 4
    yield f'<text x="4" y="{top + 12}">{escape(name)}</text>'
    yield f'<text x="4" y="{top + 28}" class="dim">most {highest:.3g}</text>'
    for value, colour in zip(values, colours, strict=True):
        for each in columns:
            high = PLOT * value(each) / highest
            if high > 0:
                yield (
                    f'<rect x="{x(each.second)}" y="{top + PLOT - high:.1f}" width="{width:.1f}" height="{high:.1f}" '
                    f'fill="{colour}"><title>second {each.second}: {value(each):.3g}</title></rect>'
                )
    yield f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{top + PLOT}" y2="{top + PLOT}" class="rule"/>'


def _p50(second: Second) -> float:
    return second.p50


def _p99(second: Second) -> float:
    return second.p99


def _lanes(summary: Summary, places: Sequence[str], x: Callable[[float], float], top: int) -> Iterator[str]:
    kinds = sorted(summary.faults)
    for number, place in enumerate(places):
        yield f'<text x="4" y="{top + LANE * number + 12}">{escape(place)}</text>'
    for kind, place, begin, end in summary.events:
        y = top + LANE * places.index(_lane(kind, place))
        width = max(2.0, x(end) - x(begin))
        colour = COLOURS[kinds.index(kind) % len(COLOURS)]
        title = f"{kind} of {place}, second {begin:g} to {end:g}"
        yield (
            f'<rect x="{x(begin)}" y="{y}" width="{width:.1f}" height="{LANE - 4}" fill="{colour}" rx="2">'
            f"<title>{escape(title)}</title></rect>"
        )
        if width > 6 * len(kind):
            yield f'<text x="{x(begin) + 3}" y="{y + 11}" class="on">{escape(kind)}</text>'


def _lane(kind: str, place: str) -> str:
    """Storms and snapshots are there beside the faults of a server."""
    if kind in ("storm", "snapshot"):
        return f"{place} {kind}s"
    return f"{place} Postgres" if place in (*SERVICES, "both") else place


def _axis(ends: float, x: Callable[[float], float], height: int) -> Iterator[str]:
    step = next(step for step in (5, 10, 20, 60, 300, 600, 1800, 3600) if ends / step <= 20 or step == 3600)
    for moment in range(0, int(ends) + 1, step):
        yield f'<text x="{x(moment)}" y="{height - 6}" class="dim">{moment} s</text>'
