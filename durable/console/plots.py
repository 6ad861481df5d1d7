"""Plots as SVG: lines over time, drawn here, so that the page needs no script and no style of its own."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from markupsafe import Markup

Values = Sequence[float | None]

_WIDTH: Final = 360
_HEIGHT: Final = 120
_LEFT: Final = 46
_TOP: Final = 8
_BOTTOM: Final = 18


def plot(title: str, series: Mapping[str, Values], ago: str) -> Markup:
    """Draw lines over a common time, the last value at the right edge; None is a gap.

    `ago` tells when the time begins, such as "60 min ago". The text for screen readers has the last and largest values.
    """
    most = _round_up(max((value for values in series.values() for value in values if value is not None), default=0))
    told = "; ".join(f"{name}: {_told(values)}" for name, values in series.items())
    lines = Markup("").join(_line(number, values, most, name) for number, (name, values) in enumerate(series.items()))
    right, floor = _WIDTH - 4, _HEIGHT - _BOTTOM
    legend = Markup("").join(
        Markup('<text class="legend s{}" x="{}" y="{}">{}</text>').format(
            number, _LEFT + 6 + 90 * number, _TOP + 8, name
        )
        for number, name in enumerate(series)
    )
    return Markup(
        '<figure class="plot"><figcaption>{title}</figcaption>'
        '<svg viewBox="0 0 {width} {height}" role="img" aria-label="{title}. {told}">'
        '<line class="axis" x1="{left}" y1="{floor}" x2="{right}" y2="{floor}"/>'
        '<line class="grid" x1="{left}" y1="{top}" x2="{right}" y2="{top}"/>'
        '<text class="tick" x="{tick}" y="{top_text}">{most}</text><text class="tick" x="{tick}" y="{floor}">0</text>'
        '<text class="when" x="{left}" y="{when}">{ago}</text><text class="when end" x="{right}" y="{when}">now</text>'
        "{lines}{legend}</svg></figure>"
    ).format(
        title=title,
        told=told,
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=right,
        top=_TOP,
        floor=floor,
        tick=_LEFT - 5,
        top_text=_TOP + 6,
        when=_HEIGHT - 4,
        most=_number(most),
        ago=ago,
        lines=lines,
        legend=legend,
    )


def _line(number: int, values: Values, most: float, name: str) -> Markup:
    """Draw one line, in parts between its gaps; a value between two gaps is a dot."""
    floor, height = _HEIGHT - _BOTTOM, _HEIGHT - _BOTTOM - _TOP
    step = (_WIDTH - 4 - _LEFT) / max(1, len(values) - 1)
    parts: list[list[str]] = [[]]
    for place, value in enumerate(values):
        if value is None:
            parts.append([])
        else:
            y = floor - height * min(1.0, value / most if most else 0.0)
            parts[-1].append(f"{_LEFT + place * step:.1f},{y:.1f}")
    drawn = Markup("")
    for part in parts:
        if len(part) > 1:
            drawn += Markup('<polyline class="s{}" points="{}"/>').format(number, " ".join(part))
        elif part:
            across, _, down = part[0].partition(",")
            drawn += Markup('<circle class="s{}" cx="{}" cy="{}" r="1.6"/>').format(number, across, down)
    return Markup("<g><title>{}</title>{}</g>").format(name, drawn)


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, ...: the upper end of the axis."""
    if value < sys.float_info.min:  # below that a power of ten is none
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(each * power for each in (1, 2, 5, 10) if each * power >= value * 0.999999)


def _told(values: Values) -> str:
    known = [value for value in values if value is not None]
    return f"last {_number(known[-1])}, at most {_number(max(known))}" if known else "no values"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.3g}"
