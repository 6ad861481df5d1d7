"""Metric families: samples under one name that differ by their labels.

    Family("messages_sent", COUNTER, "messages that ...", [Sample({"destination": "tcp://..."}, 17), ...])

Names follow the conventions of Prometheus: units in the name, seconds and bytes, and durable_ before each. The values
of labels are bounded: destinations and types that the application has not declared are summed up under "other".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from enum import StrEnum
from typing import Final, NamedTuple, TypeVar

from durable.application.application import Application
from durable.telemetry import OTHER, Distribution

PREFIX: Final = "durable_"

K = TypeVar("K", bound=str)
V = TypeVar("V")


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float | Distribution


class Family(NamedTuple):
    """All samples of one name. A counter is named without `_total`, which the exposition adds."""

    name: str
    kind: MetricKind
    help: str
    samples: list[Sample]


class Declared(NamedTuple):
    """Declared names of the application: the values that labels may have."""

    destinations: Set[str]
    handlers: Set[str]
    """The message types under which handlers count."""
    message_types: Set[str]
    """The message types that wait for these handlers: theirs, and older versions."""
    endpoints: Set[str]
    schedules: Set[str]


def declared(application: Application) -> Declared:
    return Declared(
        set(application.destinations()),
        set(application.handlers),
        set(application.by_type()),
        application.endpoints,
        set(application.schedules),
    )


def gauge(name: str, text: str, value: float, **labels: str) -> Family:
    """Make a gauge of one sample."""
    return Family(PREFIX + name, MetricKind.GAUGE, text, [Sample(labels, value)])


def gauges(name: str, text: str, label: str, values: Mapping[K, float]) -> Family:
    """Make gauges, one sample for each value of the label."""
    return Family(PREFIX + name, MetricKind.GAUGE, text, labelled(label, values))


def labelled(label: str, values: Mapping[K, float] | Mapping[K, Distribution]) -> list[Sample]:
    return [Sample({label: name}, value) for name, value in values.items()]


def bounded(values: Mapping[str, V], known: Set[str], combined: Callable[[Iterable[V]], V], nothing: V) -> dict[str, V]:
    """The values of every known name, `nothing` where there is none; those of all other names combined into one."""
    found = {name: values.get(name, nothing) for name in sorted(known)}
    others = [value for name, value in values.items() if name not in known]
    return {**found, OTHER: combined(others)} if others else found


def merged(distributions: Iterable[Distribution]) -> Distribution:
    counts, totals = zip(*distributions, strict=True)
    return Distribution([sum(bucket) for bucket in zip(*counts, strict=True)], sum(totals))
