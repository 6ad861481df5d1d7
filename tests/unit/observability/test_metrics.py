"""Metrics as they are named and labelled, without a database."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from durable.calls import telemetry
from durable.calls.telemetry import CallTelemetry
from durable.observability.metrics import process
from durable.observability.metrics.families import Declared, bounded, gauge, merged
from durable.observability.metrics.prometheus import expose
from durable.statistics import CallSide, Statistics
from durable.telemetry import BOUNDS, Counters, Distribution, Event, Histogram, Subject
from durable.transports.frames import Call

NOTHING = Statistics(
    service="shop",
    node_id=None,
    sending={},
    handling={},
    receiving=None,
    listeners={},
    pools={},
    tallies={subject: {} for subject in Subject},
    loop_lag=Histogram().snapshot(),
)
DECLARED = Declared({"tcp://a:1"}, {"orders.placed"}, {"orders.placed"}, {"shop"}, set())


def test_unknown_names_share_one_label_and_known_ones_are_always_present() -> None:
    assert bounded({"a": 1, "x": 2, "y": 3}, {"a", "b"}, sum, 0) == {"a": 1, "b": 0, "other": 5}
    assert bounded({"a": 1.0, "x": 2.0, "y": 3.0}, {"a"}, max, 0.0) == {"a": 1.0, "other": 3.0}
    assert bounded({}, {"a"}, sum, 0) == {"a": 0}


def test_distributions_are_merged_bucket_by_bucket() -> None:
    assert merged([Distribution((1, 0, 2), 4.0), Distribution((0, 5, 1), 3.0)]) == Distribution([1, 5, 3], 7.0)


def test_duration_counts_in_every_bucket_above() -> None:
    counters = Counters()
    handling = counters.of(Subject.MESSAGE_TYPE, "orders.placed")
    for seconds in (0.001, 0.002, 3.0, 1_000.0):
        handling.durations.observe(seconds)
    tallies = {**NOTHING.tallies, Subject.MESSAGE_TYPE: counters.tallies(Subject.MESSAGE_TYPE)}
    statistics = replace(NOTHING, tallies=tallies)

    exposed = expose(process.families(statistics, DECLARED, datetime.now(UTC)), "")

    families = {family.name: family for family in text_string_to_metric_families(exposed.body.decode())}
    samples = families["durable_handler_duration_seconds"].samples
    buckets = {sample.labels["le"]: sample.value for sample in samples if sample.name.endswith("_bucket")}
    assert (buckets["0.001"], buckets["0.0025"], buckets["2.5"], buckets["5.0"], buckets["+Inf"]) == (1, 2, 2, 3, 4)
    assert len(buckets) == len(BOUNDS) + 1
    assert {sample.name: sample.value for sample in samples if "le" not in sample.labels} == {
        "durable_handler_duration_seconds_count": 4,
        "durable_handler_duration_seconds_sum": 1_003.003,
    }


def test_declared_counters_are_present_at_zero() -> None:
    exposed = expose(process.families(NOTHING, DECLARED, datetime.now(UTC)), "").body.decode().splitlines()
    assert 'durable_messages_sent_total{destination="tcp://a:1"} 0.0' in exposed
    assert 'durable_messages_handled_total{message_type="orders.placed"} 0.0' in exposed
    assert 'durable_messages_received_total{endpoint="shop"} 0.0' in exposed
    assert "durable_recovery_claimed_total 0.0" in exposed


def test_labels_are_escaped() -> None:
    exposed = expose([gauge("info", "x", 1, service='a "quoted"\nname')], "")
    assert r'durable_info{service="a \"quoted\"\nname"} 1.0' in exposed.body.decode()


def test_event_of_a_part_counts_for_the_whole() -> None:
    counters = Counters()
    counters.of(Subject.DESTINATION, "tcp://a:1").add(Event.SENT, 3)
    counters.of(Subject.DESTINATION, "tcp://a:2").add(Event.SENT, 4)
    counters.add(Event.SENT)
    assert (counters[Event.SENT], counters.snapshot()["sent"]) == (8, 8)
    assert {name: dict(tally.counts) for name, tally in counters.tallies(Subject.DESTINATION).items()} == {
        "tcp://a:1": {Event.SENT: 3},
        "tcp://a:2": {Event.SENT: 4},
    }
    assert counters.tallies(Subject.MESSAGE_TYPE) == {}


def test_calls_are_shown_by_method_and_outcome() -> None:
    calls = CallTelemetry()
    asked = calls.of(CallSide.SERVER, "inventory", "reserve")
    calls.ended(asked, time.monotonic(), "ok")
    calls.ended(asked, time.monotonic(), "raised")
    calls.of(CallSide.CLIENT, "prices", "of")
    statistics = replace(NOTHING, calls=calls.statistics())
    page = expose(process.families(statistics, DECLARED, datetime.now(UTC)), "").body.decode()
    samples = {
        (sample.name, sample.labels.get("rpc_service"), sample.labels.get("outcome")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert samples["durable_rpc_server_calls_total", "inventory", "ok"] == 1
    assert samples["durable_rpc_server_calls_total", "inventory", "raised"] == 1
    assert samples["durable_rpc_server_duration_seconds_count", "inventory", None] == 2
    assert samples["durable_rpc_client_calls_total", "prices", "ok"] == 0


def test_methods_beyond_a_bound_share_one_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_MOST_METHODS", 2)
    calls = CallTelemetry()
    for number in range(9):
        calls.ended(calls.of(CallSide.SERVER, "inventory", f"method{number}"), time.monotonic(), "ok")
    assert {each.method: each.outcomes["ok"] for each in calls.statistics()} == {"method0": 1, "method1": 1, "other": 7}


def test_traffic_covers_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    calls = CallTelemetry()
    asked = calls.of(CallSide.SERVER, "inventory", "reserve")
    told: list[tuple[int, float]] = []
    for seconds in (0, 20, 20, 29, 31, 200):
        now += seconds
        calls.ended(asked, now - 0.01, "ok")
        answer = calls.told(Call(telemetry.TRAFFIC, "recent", b""))
        assert answer is not None
        (traffic,) = msgspec.msgpack.decode(answer.body, type=list[telemetry.Traffic])
        told.append((traffic.calls, traffic.seconds))
    assert told == [(1, 1.0), (2, 20.0), (3, 40.0), (2, 39.0), (2, 40.0), (1, 30.0)]


@pytest.mark.parametrize(
    ("counts", "expected"), [([0] * 16, None), ([99, 1] + [0] * 14, 0.001), ([9, 1] + [0] * 14, 0.0025)]
)
def test_percentile_is_the_end_of_a_bucket(counts: list[int], expected: float | None) -> None:
    assert telemetry.percentile(counts, 0.99) == expected
