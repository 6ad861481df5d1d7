"""The plots of the console."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.console.plots import plot

SERIES = st.lists(st.none() | st.floats(0, 1e12), max_size=80)


def drawn(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def points(text: str, name: str) -> list[tuple[float, float]]:
    found = re.findall(rf'<polyline class="{name}" points="([^"]+)"', text)
    return [(float(x), float(y)) for line in found for x, y in (each.split(",") for each in line.split())]


def test_largest_value_is_below_the_top_and_zero_is_at_the_floor() -> None:
    line = points(plot("Messages", {"sent": [0, 50, 100]}, "60 min ago"), "s0")
    assert [y for _, y in line] == [102.0, 55.0, 8.0]
    assert line[0][0] < line[1][0] < line[2][0] == 356.0


def test_gap_parts_a_line_and_a_value_alone_is_a_dot() -> None:
    text = plot("Seconds", {"p50": [1.0, 2.0, None, 1.0, None, 3.0, 3.0]}, "60 min ago")
    assert (text.count("<polyline"), text.count("<circle")) == (2, 1)


def test_text_for_screen_readers_has_the_last_and_the_largest_value() -> None:
    text = plot("Seconds", {"p50": [0.5, 2.25, 1.0], "p99": [None]}, "60 min ago")
    label = drawn(text).find("svg")
    assert label is not None
    assert label.get("aria-label") == "Seconds. p50: last 1, at most 2.25; p99: no values"


@pytest.mark.parametrize("name", ['"><script>alert(1)</script>', "a & b"])
def test_names_are_escaped(name: str) -> None:
    assert "<script" not in plot(name, {name: [1.0]}, name)
    drawn(plot(name, {name: [1.0]}, name))


@given(st.lists(SERIES, min_size=1, max_size=3))
def test_plot_of_any_values_is_whole_and_stays_within_its_frame(series: list[list[float | None]]) -> None:
    text = plot("Any", {f"line {number}": values for number, values in enumerate(series)}, "1 h ago")
    drawn(text)
    assert "style" not in text  # which the Content-Security-Policy would refuse
    for number in range(len(series)):
        assert all(46 <= x <= 356.01 and 7.99 <= y <= 102.01 for x, y in points(text, f"s{number}"))
