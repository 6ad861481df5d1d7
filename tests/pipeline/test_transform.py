"""What is computed from history, each transform on a few rows."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from durable.pipeline import transform
from durable.pipeline.rows import records
from tests.support.lakes import at, frame, handled, letter, message_id, sent

DAY = 86_400


def only(rows: DataFrame) -> dict[str, Any]:
    (row,) = records(rows)
    return row


def test_minutes_count_outcomes_retries_and_interruptions(spark: SparkSession) -> None:
    rows = [
        handled(1),
        handled(2, attempts=1),
        handled(3, outcome="dead-lettered", attempts=1, interruptions=1),
        handled(4, outcome="expired"),
    ]
    counts = only(transform.minutes(frame(spark, rows)))
    assert {name: counts[name] for name in ("total", *transform.COUNTS)} == {
        "total": 4,
        "sent": 0,
        "handled": 2,
        "dead_lettered": 1,
        "expired": 1,
        "retried": 1,
        "interrupted": 1,
    }


def test_windows_begin_at_whole_minutes_and_can_be_added_up(spark: SparkSession) -> None:
    history = frame(spark, [handled(n) for n in (0, 59, 60, 3_599, 3_600)])
    minutes = transform.minutes(history)
    assert {row["window"] for row in records(minutes)} == {at(0), at(60), at(3_540), at(3_600)}
    hours = records(transform.throughput(minutes, 3_600))
    assert [(row["window"], row["total"]) for row in hours] == [(at(0), 4), (at(3_600), 1)]
    seconds = records(transform.throughput(transform.minutes(history, 10), 10))
    assert [row["window"] for row in seconds] == [at(0), at(50), at(60), at(3_590), at(3_600)]


def test_latencies_cover_handled_messages_only(spark: SparkSession) -> None:
    rows = [sent(1), handled(1), handled(2, outcome="dead-lettered", finished_at=at(99))]
    summed = only(transform.summed(transform.daily(frame(spark, rows))))
    assert [summed[f"{name}_count"] for name in transform.LATENCIES] == [1, 1, 1]
    assert [summed[f"{name}_p50"] for name in transform.LATENCIES] == pytest.approx([5.0, 20.0, 25.0])


def test_local_message_has_no_latency_to_its_store(spark: SparkSession) -> None:
    local = handled(1, address="local", received_at=at(0.9))
    summed = only(transform.summed(transform.daily(frame(spark, [local]))))
    assert (summed["commit_to_stored_count"], summed["commit_to_stored_p99"]) == (0, None)
    assert summed["commit_to_handled_p99"] == pytest.approx(25.0)


def test_percentiles_of_many_days_are_those_of_all_rows(spark: SparkSession) -> None:
    """Each day has latencies of its own: an average of daily percentiles would be far off."""
    took = [n if n < 500 else n * 10 for n in range(1_000)]  # milliseconds; the second half on another day
    rows = [
        handled(n, sent_at=at(n // 500 * DAY), finished_at=at(n // 500 * DAY + milliseconds / 1_000))
        for n, milliseconds in enumerate(took)
    ]
    daily = transform.daily(frame(spark, rows))
    assert daily.count() == 2
    summed = only(transform.summed(daily))
    assert summed["commit_to_handled_count"] == 1_000
    for label, rank in transform.QUANTILES.items():
        found = summed[f"commit_to_handled_{label}"]
        assert sum(value <= found for value in took) / len(took) == pytest.approx(rank, abs=0.0165)


def test_rates_divide_by_all_finished_messages(spark: SparkSession) -> None:
    rows = [handled(1), handled(2, attempts=1), handled(3), handled(4, outcome="dead-lettered")]
    summed = only(transform.summed(transform.daily(frame(spark, rows)), "message_type"))
    assert (summed["retry_rate"], summed["dead_letter_rate"]) == (0.25, 0.25)


def test_nodes_live_from_their_first_to_their_last_finished_message(spark: SparkSession) -> None:
    rows = [handled(1, node_id=7), handled(DAY, node_id=7), handled(5, node_id=8), handled(6, node_id=0)]
    lives = records(transform.lifetimes(transform.nodes(frame(spark, rows))))
    assert [(row["node_id"], row["first"], row["last"], row["total"]) for row in lives] == [
        (7, at(1.025), at(DAY + 0.025), 2),
        (8, at(5.025), at(5.025), 1),
    ]


def test_conversation_running_over_midnight_is_measured_as_a_whole(spark: SparkSession) -> None:
    conversation = message_id(1)
    rows = [
        handled(1, correlation_id=conversation),
        handled(2, correlation_id=conversation, sent_at=at(2), finished_at=at(DAY + 9)),
        handled(50, finished_at=at(90)),
    ]
    longest, other = records(transform.slowest(transform.threads(frame(spark, rows)), 5))
    assert (longest["correlation_id"], longest["total"], longest["seconds"]) == (str(conversation), 2, DAY + 8)
    assert other["seconds"] == 40


KEY = UUID("6fa459ea-ee8a-5ca4-894e-db77e160355e")


@pytest.mark.parametrize(
    ("days", "window", "lasting"),
    [([0, 28], 7, [40, 40]), ([0, 6, 28], 7, [6 * DAY + 40, 40]), ([0, 28], 30, [28 * DAY + 40])],
    ids=["freed", "sent again", "within a longer window"],
)
def test_each_use_of_a_key_is_a_conversation(
    spark: SparkSession, days: list[int], window: int, lasting: list[float]
) -> None:
    rows = [
        each
        for number, day in enumerate(days)
        for each in (
            handled(1, id=KEY, correlation_id=KEY, sent_at=at(day * DAY), finished_at=at(day * DAY + 1)),
            handled(number + 2, correlation_id=KEY, sent_at=at(day * DAY + 1), finished_at=at(day * DAY + 40)),
        )
    ]
    found = records(transform.slowest(transform.threads(frame(spark, rows)), 5, timedelta(days=window)))
    assert [(row["correlation_id"], row["seconds"]) for row in found] == [(str(KEY), each) for each in lasting]
    assert sum(row["total"] for row in found) == len(rows)


def test_uses_of_a_key_within_a_day_are_told_apart(spark: SparkSession) -> None:
    """A late message of the first use ends beside the second one."""
    rows = [
        handled(1, id=KEY, correlation_id=KEY, sent_at=at(0), finished_at=at(1)),
        handled(2, correlation_id=KEY, sent_at=at(2), finished_at=at(7_203)),
        handled(1, id=KEY, correlation_id=KEY, sent_at=at(7_200), finished_at=at(7_201)),
    ]
    found = records(transform.slowest(transform.threads(frame(spark, rows)), 5, timedelta(hours=1)))
    assert [(row["seconds"], row["total"]) for row in found] == [(7_203, 2), (1, 1)]


def test_volume_is_grouped_by_any_dimension_from_the_largest(spark: SparkSession) -> None:
    rows = [handled(1, partition_key="UA"), handled(2, partition_key="UA"), handled(3, partition_key="AA"), handled(4)]
    found = records(transform.volume(frame(spark, rows), F.col("partition_key"), 2))
    assert [(row["value"], row["total"]) for row in found] == [("UA", 2), (None, 1)]


def test_letter_is_counted_once_in_its_final_state(spark: SparkSession) -> None:
    letters = [letter(1), letter(1, resolved_at=at(60), resolution="replayed", xid=2), letter(2, reason="no such town")]
    found = only(transform.causes(frame(spark, letters, "dead_letters")))
    assert (found["total"], found["unresolved"], found["example"]) == (2, 1, "no such town")


def test_ids_are_written_in_the_usual_form(spark: SparkSession) -> None:
    row = frame(spark, [sent(0x1234)]).select(transform.uuid_text("id").alias("id")).first()
    assert row is not None
    assert row.id == str(message_id(0x1234))
