"""The pictures of the benchmarks, as far as they need no browser: what is drawn of which results."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plotly.graph_objects import Figure

from tests.benchmarks.plots import of_latencies, of_ratios

ROW = {"name": "store", "floor_name": "asyncpg", "ratio": 0.4, "statements_per_message": 1.0}
SPREAD = {"name": "here", "floor_name": "asyncpg", "p50": 0.002, "p99": 0.004, "p999": 0.01}
FLOOR = {"floor_p50": 0.001, "floor_p99": 0.003}


def traces(figure: Figure | None) -> list[dict[str, Any]]:
    """What is drawn, as plotly.js takes it."""
    assert figure is not None
    drawn: list[dict[str, Any]] = json.loads(figure.to_json() or "{}")["data"]
    return drawn


def test_ratio_of_each_floor_is_a_bar_under_the_name_of_its_work() -> None:
    same = {**ROW, "name": "the same", "floor_name": "session", "ratio": 0.8}

    (bars,) = traces(of_ratios([ROW, same]))

    assert bars["x"] == [0.4, 0.8]
    assert [name.split("<")[0] for name in bars["y"]] == ["store", "store"]


def test_floors_of_two_works_may_have_the_same_name() -> None:
    same = {**ROW, "name": "the same", "floor_name": "session"}
    (bars,) = traces(of_ratios([ROW, {**same, "ratio": 0.5}, {**ROW, "name": "handle"}, {**same, "ratio": 1.8}]))

    assert bars["x"] == [0.4, 0.5, 0.4, 1.8]


def test_later_result_of_the_same_row_counts() -> None:
    (bars,) = traces(of_ratios([ROW, {**ROW, "ratio": 0.5}]))

    assert bars["x"] == [0.5]


def test_spread_of_each_road_goes_from_the_median_to_the_thousandth() -> None:
    road, floor = traces(of_latencies([{**SPREAD, **FLOOR, "pace": pace} for pace in ("in turn", "10 a second")]))

    assert road["x"] == ["in turn", "10 a second"]
    assert road["y"] == pytest.approx([2.0, 2.0])
    assert road["error_y"]["array"] == pytest.approx([8.0, 8.0])
    assert floor["error_y"]["array"] == pytest.approx([2.0, 2.0])


def test_no_figure_is_drawn_without_its_results() -> None:
    assert of_latencies([ROW]) is None
    assert of_ratios([SPREAD]) is None
