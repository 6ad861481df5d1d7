"""Metrics as they are named and labelled, without a database."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from prometheus_client.parser import text_string_to_metric_families

from durable.observability.metrics import process
from durable.observability.metrics.families import Declared, bounded, gauge, merged
from durable.observability.metrics.prometheus import expose
from durable.statistics import Statistics
from durable.telemetry import BOUNDS, Counters, Distribution, Event, Histogram, Subject

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
DECLARED = Declared({"tcp://a:1"}, {"orders.placed"}, {"shop"})


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
