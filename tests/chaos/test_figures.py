"""The figures of a run, and its page: from a history that is written down here."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID
from xml.etree import ElementTree

import pytest

from tests.chaos.chart import chart
from tests.chaos.figures import costs, log_times, longest_gap, percentile, seconds
from tests.chaos.history import Effect, History, Sent
from tests.chaos.plan import Fault, Plan
from tests.chaos.report import page
from tests.chaos.run import Outcome
from tests.chaos.summary import summarize
from tests.chaos.watch import Happened

START = datetime(2026, 1, 1, tzinfo=UTC)
BEGAN = START.timestamp()


def note(number: int, at: float) -> Sent:
    return Sent(UUID(int=number), "note", "", number, "", None, None, START + timedelta(seconds=at))


def effect(of: Sent, at: float) -> Effect:
    return Effect(of.id, of.kind, of.key, of.number, START + timedelta(seconds=at), of.number)


@pytest.fixture
def outcome(tmp_path: Path) -> Outcome:
    """A kill from second 10 to 12; a message of second 11 is handled at 15, and none from 10 to 14."""
    messages = [note(number, number) for number in range(1, 12)]
    effects = [effect(each, each.number + 0.5) for each in messages[:9]]
    effects += [effect(messages[9], 14), effect(messages[10], 15)]
    (tmp_path / "orders-0.log").write_text(
        f"{BEGAN + 1:.3f} 7 INFO durable joined\n{BEGAN + 11:.3f} 7 ERROR durable it failed\nTraceback\n"
    )
    kill = Fault(10, 2, "kill", "orders/0")
    return Outcome(
        Plan(7, ((kill,),), "", is_secured=False),
        "pr",
        "tcp",
        tmp_path,
        began=BEGAN,
        calm_at=BEGAN + 16,
        settled_at=BEGAN + 18,
        ended=BEGAN + 20,
        happened=[Happened(kill, BEGAN + 10, BEGAN + 12)],
        history=History(sent={each.id: each for each in messages}, effects=effects, ended=Counter()),
        peak_bytes={"orders/0": 100 << 20},
    )


def test_recovery_lasts_until_every_message_of_before_is_handled(outcome: Outcome) -> None:
    (cost,) = costs(outcome)
    assert (cost.kind, cost.count, cost.recovery_p50, cost.recovery_p99) == ("kill", 1, 3.0, 3.0)
    assert cost.longest_stall == 4.0
    assert cost.log_lines == 2


def test_seconds_have_the_effects_and_latencies_of_their_messages(outcome: Outcome) -> None:
    found = seconds(outcome)
    assert [each.effects for each in found] == [0, *[1] * 9, 0, 0, 0, 0, 1, 1]
    assert (found[1].p50, found[14].p99) == (0.5, 4.0)


def test_lines_of_a_traceback_have_the_time_of_their_first(outcome: Outcome) -> None:
    assert log_times(outcome.folder) == [pytest.approx(BEGAN + at) for at in (1, 11, 11)]


def test_gap_reaches_from_the_beginning_to_the_end() -> None:
    assert longest_gap([], 3, 8) == 5
    assert longest_gap([4, 7], 3, 8) == 3
    assert longest_gap([1, 4, 4.5, 20], 3, 8) == 3.5


def test_percentile_is_one_of_the_values() -> None:
    assert percentile([], 0.5) == 0
    assert percentile([1, 2, 3, 4], 0.5) == 3
    assert percentile([1, 2, 3, 4], 0.99) == 4


def test_summary_counts_violations_by_rule(outcome: Outcome) -> None:
    assert summarize(outcome).is_right
    outcome.history.effects.append(outcome.history.effects[0])
    outcome.settled_at = 0
    summary = summarize(outcome)
    assert not summary.is_right
    assert {rule: count for rule, count in summary.violations.items() if count} == {"twice": 1, "stuck": 1}
    assert json.loads(json.dumps(summary.as_json()))["is_right"] is False


def test_chart_is_an_image_of_every_fault(outcome: Outcome) -> None:
    drawn = ElementTree.fromstring(chart(summarize(outcome)))
    titles = [title.text for title in drawn.iter("title")]
    assert "kill of orders/0, second 10 to 12" in titles


def test_page_loads_nothing_and_escapes_its_texts(outcome: Outcome) -> None:
    outcome.history.complaints.append("<script>alert(1)</script>")
    text = page(summarize(outcome))
    assert "<script>alert" not in text
    assert "&lt;script&gt;" in text
    assert "src=" not in text
    assert "http://" not in text
    assert "https://" not in text
