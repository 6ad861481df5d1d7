"""The report: what it computes once and merges, and a page that carries everything it needs."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from durable.errors import InvalidSetting
from durable.pipeline.lake import Lake
from durable.pipeline.page import render
from durable.pipeline.report import Mark, Report, report
from tests.support.lakes import BEGAN, at, fill, handled, letter, sent, table

DAY = 86_400
EVIL = "</script><script>alert(1)</script><b>&"
TEMPLATES = ["%PLOTLY%", "{{ plotly }}", "{% include 'report.html' %}", "{{ 7 * 7 }}", "{# gone #}"]


def history(*numbers: int, **changes: Any) -> Any:
    return table([row(n, **changes) for n in numbers for row in (sent, handled)])


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return fill(Lake(str(tmp_path / "lake")), history(1, 2, 3), history(DAY, DAY + 600))


def test_days_are_computed_once_and_again_after_new_rows(spark: SparkSession, lake: Lake) -> None:
    first = report(spark, lake)
    assert (first.days_computed, first.totals["sent"], first.totals["handled"]) == (2, 5, 5)
    again = report(spark, lake)
    assert (again.days_computed, again.totals) == (0, first.totals)
    fill(lake, history(DAY + 7))
    more = report(spark, lake)
    assert (more.days_computed, more.totals["handled"]) == (1, 6)
    assert [row["total"] for row in more.nodes] == [6, 6]


def test_report_forgets_days_when_the_history_was_restored(spark: SparkSession, tmp_path: Path) -> None:
    lake = fill(Lake(str(tmp_path / "lake")), history(1, 2, 3))
    before = shutil.copytree(lake.table_url("history"), tmp_path / "before")
    fill(lake, history(DAY, DAY + 600))
    assert report(spark, lake).totals["handled"] == 5
    shutil.rmtree(lake.table_url("history"))
    before.rename(lake.table_url("history"))
    back = report(spark, lake)
    assert (back.days_computed, back.totals["handled"]) == (1, 3)
    assert sum(row["total"] for row in back.throughput if row["side"] == "incoming") == 3
    assert report(spark, lake).days_computed == 0


def test_report_counts_only_the_chosen_days(spark: SparkSession, lake: Lake) -> None:
    second = report(spark, lake, since=(BEGAN + timedelta(days=1)).date())
    assert (second.totals["handled"], second.days_computed) == (2, 1)
    first = report(spark, lake, until=(BEGAN + timedelta(days=1)).date())
    assert (first.totals["handled"], first.days_computed) == (3, 1)
    with pytest.raises(InvalidSetting, match="no history of these days"):
        report(spark, lake, since=(BEGAN + timedelta(days=9)).date())


def test_windows_have_a_width_suited_to_a_plot(spark: SparkSession, lake: Lake, tmp_path: Path) -> None:
    assert report(spark, lake).window_seconds == 600
    short = report(spark, fill(Lake(str(tmp_path / "short")), history(1, 2, 3)))
    assert short.window_seconds == 1
    assert [row["window"] for row in short.throughput if row["side"] == "incoming"] == [at(1), at(2), at(3)]
    assert short.last == at(4)  # rather than the end of the minute


def test_report_marks_starts_of_nodes_interruptions_and_given_marks(spark: SparkSession, lake: Lake) -> None:
    fill(lake, history(DAY + 1_200, interruptions=1, node_id=2))
    found = report(spark, lake).marked([Mark(at(30), "release 7")])
    assert [mark.label for mark in found.marks] == [
        "release 7",
        "billing: 1 envelope had lost their node",
        "shop: 1 envelope had lost their node",
        "shop: node 2 begins",
        "billing: node 2 begins",
    ]
    plot = rendered(found)[1][0]
    assert len(plot["layout"]["shapes"]) == 1  # a line for what was told
    assert [len(trace["x"]) for trace in plot["data"] if trace.get("yaxis") == "y2"] == [1, 4]


def test_volume_is_grouped_by_columns_and_by_fields_of_bodies(spark: SparkSession, lake: Lake) -> None:
    if "body" not in table([]).column_names:
        raise AssertionError("the history has bodies")
    fill(lake, history(DAY + 9, partition_key="UA", body=b'{"flight": {"carrier": "AA"}}'))
    volumes = report(spark, lake, dimensions=["partition_key", "body.flight.carrier"]).volumes
    found = {name: {row["value"]: row["handled"] for row in rows} for name, rows in volumes.items()}
    assert found == {"partition_key": {None: 5, "UA": 1}, "body.flight.carrier": {None: 5, "AA": 1}}
    for unknown in ("carrier", "body", "partition_key.x"):
        with pytest.raises(InvalidSetting, match="is no dimension; name a column"):
            report(spark, lake, dimensions=[unknown])


# ---------------------------------------------------------------- the page


class Page(HTMLParser):
    """What a browser would load and show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def rendered(found: Report) -> tuple[Page, list[Any]]:
    page = Page(render(found))
    return page, json.loads(page.scripts[0])


def test_page_needs_no_network(spark: SparkSession, lake: Lake) -> None:
    page, plots = rendered(report(spark, lake, dimensions=["message_type"]))
    loads = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert loads == []
    assert page.count("script") == 3
    assert "plotly.js" in page.scripts[1][:100]
    assert len(plots) == sum(attributes.get("class") == "plot" for _, attributes in page.tags) == 6
    assert [trace["name"] for trace in plots[0]["data"]] == ["billing", "sent, by all"]


def test_the_page_of_a_sender_alone_has_no_latencies(spark: SparkSession, tmp_path: Path) -> None:
    page, plots = rendered(report(spark, fill(Lake(str(tmp_path / "lake")), table([sent(1)]))))
    assert len(plots) == 2
    assert "Latency" not in page.text


@pytest.mark.parametrize("name", TEMPLATES)
def test_message_type_resembling_a_template_is_shown_unchanged(spark: SparkSession, tmp_path: Path, name: str) -> None:
    lake = fill(Lake(str(tmp_path / "lake")), table([handled(1, message_type=name)]))
    found = report(spark, lake)
    page, _ = rendered(found)
    assert name in page.text
    assert len(render(found)) < 6_000_000, "the library of the plots is there once"


def test_names_from_peers_are_text_in_the_page(spark: SparkSession, tmp_path: Path) -> None:
    rows = [handled(1, message_type=EVIL, service=EVIL, partition_key=EVIL)]
    lake = fill(Lake(str(tmp_path / "lake")), table(rows))
    fill(lake, table([letter(1, reason=EVIL, exception_type=EVIL)], "dead_letters"), of="dead_letters")
    page, plots = rendered(report(spark, lake, dimensions=["partition_key"]).marked([Mark(at(1), EVIL)]))
    assert page.count("script") == 3
    assert page.text.count(EVIL) >= 4
    assert "<" not in page.scripts[0]
    assert "<b>" not in json.dumps(plots)
