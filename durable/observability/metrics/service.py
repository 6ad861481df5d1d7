"""The metrics of a service as its database has it: every process tells the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from datetime import timedelta

from durable.observability.health import NodeState, node_states
from durable.observability.metrics.families import (
    PREFIX,
    Declared,
    Family,
    MetricKind,
    Sample,
    bounded,
    gauge,
    gauges,
)
from durable.observability.monitor import Reading
from durable.storage.circuits import CircuitKind
from durable.storage.gauges import Gauges, Side
from durable.telemetry import OTHER


def families(reading: Reading, declared: Declared, stale: timedelta) -> Iterator[Family]:
    """`stale` is the setting heartbeat_stale."""
    yield gauge("healthy", "1 when /health finds nothing wrong", not reading.problems)
    yield gauge("database_up", "1 when the database could be read", reading.gauges is not None)
    if reading.gauges is not None:
        yield from _tables(reading.gauges, declared, stale)


def _tables(found: Gauges, declared: Declared, stale: timedelta) -> Iterator[Family]:
    for side, label, known in (
        (Side.OUTGOING, "destination", declared.destinations),
        (Side.INCOMING, "message_type", declared.message_types),
    ):
        counts = {group.name: group.waiting for group in found.unowned[side]}
        ages = {group.name: group.oldest_age.total_seconds() for group in found.unowned[side]}
        text = "messages that no node owns, counted up to 1000"
        yield gauges(f"{side}_unowned_messages", text, label, bounded(counts, known, sum, 0))
        text = "since the oldest message that no node owns was sent"
        yield gauges(f"{side}_oldest_unowned_seconds", text, label, bounded(ages, known, max, 0.0))
    yield gauges("scheduled_messages", "put off, counted up to 1000", "side", found.scheduled)
    overdue = found.overdue or timedelta(0)
    yield gauge("scheduled_overdue_seconds", "by which the first of what is put off is late", overdue.total_seconds())
    late = max((each.late for each in found.late_schedules), default=timedelta(0))
    yield gauge("schedules_late_seconds", "since the first occurrence that has not run", late.total_seconds())
    yield gauge("dead_letters", "that are unresolved, counted up to 1000", found.dead_letters)
    text = "that no node takes, for the database refuses to change them, counted up to 1000"
    yield gauges("refused_messages", text, "side", found.refused)
    parked = {group.key_id: group.waiting for group in found.parked}
    yield gauges("parked_messages", "that wait for an encryption key, counted up to 1000", "key", parked)
    yield _circuits(found, declared)
    states = list(node_states(found, stale).values())
    yield gauges("nodes", "of the service, by state", "state", {state: states.count(state) for state in NodeState})
    tables = found.estimates.items()
    yield gauges("table_rows", "as Postgres estimates them", "table", {name: table.rows for name, table in tables})
    yield gauges("table_bytes", "with its indexes", "table", {name: table.size_bytes for name, table in tables})
    yield gauge("partitions_ahead_days", "for which partitions are there, after today", found.partitioned_days - 1)


def _circuits(found: Gauges, declared: Declared) -> Family:
    """Return for how long each circuit is open; of those without a declared name, the longest."""
    known: Mapping[str, Set[str]] = {
        CircuitKind.DESTINATION: declared.destinations,
        CircuitKind.HANDLER: declared.message_types,
        CircuitKind.LISTENER: declared.endpoints,
        CircuitKind.SCHEDULE: declared.schedules,
    }
    ages: dict[tuple[str, str, bool], float] = {}
    for circuit in found.circuits:
        name = circuit.key if circuit.key in known.get(circuit.kind, ()) else OTHER
        key = circuit.kind, name, circuit.parked
        ages[key] = max(ages.get(key, 0.0), (found.now - circuit.since).total_seconds())
    samples = [
        Sample({"kind": kind, "key": key, "parked": "true" if parked else "false"}, age)
        for (kind, key, parked), age in ages.items()
    ]
    text = "since it was latched, opened, paused or parked"
    return Family(f"{PREFIX}circuit_open_seconds", MetricKind.GAUGE, text, samples)
