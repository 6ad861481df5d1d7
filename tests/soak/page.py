"""The report of a long run as one page that loads nothing from elsewhere: a plot of each gauge, with the faults."""

from __future__ import annotations

from html import escape
from itertools import groupby

from tests.soak.gauges import Gauge
from tests.soak.run import Outcome

_WIDTH, _HEIGHT, _LEFT = 1000, 110, 60
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1060px; padding: 0 1rem; color: #1c2833; }
svg { width: 100%; font: 11px system-ui, sans-serif; } svg text { fill: #808b96; }
.fault { stroke: #e6b0aa; } .value { fill: none; stroke: #2471a3; stroke-width: 1.5; }
.bad { color: #c0392b; font-weight: 600; } .good { color: #1e8449; font-weight: 600; }
h2 { font-size: 1rem; margin: 1.2rem 0 0; }
"""


def page(outcome: Outcome) -> str:
    """Return the page."""
    right = outcome.is_right
    verdict = "Nothing grows, and nothing was lost." if right else "Promises were broken."
    plots = "".join(_section(gauge, outcome) for gauge in outcome.gauges)
    complaints = "".join(f'<li class="bad">{escape(text)}</li>' for text in outcome.complaints)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Soak: {outcome.seconds / 3_600:g} h, seed {outcome.seed}</title><style>{_STYLE}</style>"
        f"<h1>Soak: {outcome.seconds / 3_600:g} h, seed {outcome.seed}</h1>"
        f'<p class="{"good" if right else "bad"}">{verdict}</p><ul>{complaints}</ul>'
        f"<p>{outcome.sent:,} messages: {outcome.lost:,} lost, {outcome.twice:,} twice. {len(outcome.faults)} faults,"
        f" each a line in the plots. Days that ended: {escape(', '.join(outcome.days))}.</p>{plots}</html>\n"
    )


def _section(gauge: Gauge, outcome: Outcome) -> str:
    middle, last = gauge.thirds()
    verdict = '<span class="bad">grows</span>' if gauge.grows() else "flat"
    told = f"{gauge.shown(middle)} in the middle third, {gauge.shown(last)} in the last: {verdict}"
    return f"<h2>{escape(gauge.name)}</h2><div>{told}</div>{_plot(gauge, outcome)}"


def _plot(gauge: Gauge, outcome: Outcome) -> str:
    highest = max([each.value for each in gauge.readings], default=0) or 1
    ends = max([outcome.seconds, *(each.at for each in gauge.readings)])

    def x(at: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT) * at / ends, 1)

    def y(value: float) -> float:
        return round(_HEIGHT - 14 - (_HEIGHT - 24) * value / highest, 1)

    faults = "".join(
        f'<line class="fault" x1="{x(at)}" x2="{x(at)}" y1="4" y2="{_HEIGHT - 14}"><title>{escape(kind)}</title></line>'
        for at, kind in outcome.faults
    )
    lines = "".join(
        f'<polyline class="value" points="{" ".join(f"{x(each.at)},{y(each.value)}" for each in life)}"/>'
        for _, life in groupby(gauge.readings, lambda each: each.life)
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(gauge.name)}">{faults}{lines}'
        f'<text x="0" y="14">{gauge.shown(highest)}</text><text x="0" y="{_HEIGHT - 16}">0</text>'
        f'<text x="{_WIDTH - 50}" y="{_HEIGHT - 2}">{ends / 60:.0f} min</text></svg>'
    )
