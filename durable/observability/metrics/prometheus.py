"""The text that Prometheus scrapes, by prometheus-client (`pip install 'durable-bus[metrics]'`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from durable.observability.metrics.families import Family, MetricKind
from durable.telemetry import BOUNDS, Distribution

_ENDS = [*map(str, BOUNDS), "+Inf"]


class Exposition(NamedTuple):
    content_type: str
    body: bytes


def expose(families: Iterable[Family], accept: str, others: Collector | None = None) -> Exposition:
    """Return Prometheus's text or OpenMetrics, as the Accept header asks; with the metrics of `others`."""
    encode, content_type = choose_encoder(accept)
    return Exposition(content_type, encode(Snapshot(families, others)))


class Snapshot(Collector):
    """A collector of what was read already."""

    def __init__(self, families: Iterable[Family], others: Collector | None = None) -> None:
        self._families = families
        self._others = others

    def collect(self) -> Iterator[Metric]:
        yield from map(_metric, self._families)
        if self._others is not None:
            yield from self._others.collect()


def _metric(family: Family) -> Metric:
    labels = list(family.samples[0].labels) if family.samples else []
    match family.kind:
        case MetricKind.COUNTER:
            counter = CounterMetricFamily(family.name, family.help, labels=labels)
            for sample in family.samples:
                counter.add_metric(list(sample.labels.values()), _number(sample.value))
            return counter
        case MetricKind.GAUGE:
            gauge = GaugeMetricFamily(family.name, family.help, labels=labels)
            for sample in family.samples:
                gauge.add_metric(list(sample.labels.values()), _number(sample.value))
            return gauge
        case MetricKind.HISTOGRAM:
            histogram = HistogramMetricFamily(family.name, family.help, labels=labels)
            for sample in family.samples:
                assert isinstance(sample.value, Distribution)
                buckets = list(zip(_ENDS, accumulate(sample.value.counts), strict=True))
                histogram.add_metric(list(sample.labels.values()), buckets, sample.value.total_seconds)
            return histogram


def _number(value: float | Distribution) -> float:
    assert not isinstance(value, Distribution)
    return float(value)
