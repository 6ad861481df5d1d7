"""The metrics of one process: what its agents are doing, and what they have done since it started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from typing import Any, Final

from durable.observability.metrics.families import (
    PREFIX,
    Declared,
    Family,
    MetricKind,
    Sample,
    bounded,
    gauge,
    gauges,
    labelled,
    merged,
)
from durable.statistics import CallSide, CallStatistics, HandlingStatistics, SendingStatistics, Statistics
from durable.telemetry import BOUNDS, Distribution, Event, Subject, Tally
from durable.version import __version__

_EVENTS: Final[Mapping[Subject, Mapping[Event, tuple[str, str]]]] = {
    Subject.DESTINATION: {
        Event.SENT: ("messages_sent", "messages that the peer has stored"),
        Event.SEND_FAILED: ("messages_send_failed", "messages in batches that failed, counted each time"),
        Event.BUSY: ("messages_busy", "messages that the peer had no room for, counted each time"),
        Event.REJECTED: ("messages_rejected", "messages that the peer refused: they are dead letters here"),
        Event.EXPIRED: ("messages_expired_unsent", "messages that were too late to be sent"),
        Event.LATCHED: ("destination_latches", "how often this process has latched the destination"),
    },
    Subject.MESSAGE_TYPE: {
        Event.HANDLED: ("messages_handled", "messages whose handler has committed"),
        Event.ATTEMPT_FAILED: ("handler_failures", "attempts of the handler that failed"),
        Event.RETRIED: ("messages_retried", "messages put off to a later attempt"),
        Event.DEAD_LETTERED: ("messages_dead_lettered", "messages that became dead letters when they were handled"),
        Event.EXPIRED: ("messages_expired", "messages that were too late to be handled"),
        Event.CIRCUIT_OPENED: ("handler_circuit_opened", "how often this process has opened the handler's circuit"),
        Event.LEASE_LOST: ("handler_leases_lost", "attempts rolled back because another node owned the message"),
        Event.LOOP_BLOCKED: ("handler_loop_blocked", "how often the async handler blocked the event loop"),
    },
    Subject.ENDPOINT: {
        Event.RECEIVED: ("messages_received", "messages stored for the first time"),
        Event.DUPLICATE: ("messages_duplicate", "messages that were known already"),
        Event.QUARANTINED: ("messages_quarantined", "messages that are dead letters because of what they are like"),
    },
    Subject.RECOVERY: {
        Event.CLAIMED: ("recovery_claimed", "messages claimed that no node owned"),
        Event.RECOVERED: ("recovery_recovered", "messages taken from dead nodes"),
        Event.PROMOTED: ("recovery_promoted", "scheduled messages that became due"),
        Event.RECURRED: ("recovery_recurred", "messages that recurring schedules have sent"),
        Event.FORGOTTEN: ("recovery_forgotten", "messages released that this node owned and did not work on"),
        Event.EXPIRED: ("recovery_expired", "messages that expired while they waited"),
        Event.DEAD_LETTERED: ("recovery_dead_lettered", "messages of types that no node handles"),
    },
}
_DURATIONS: Final[Mapping[Subject, tuple[str, str]]] = {
    Subject.DESTINATION: ("send_duration_seconds", "from sending a batch to the peer's answer"),
    Subject.MESSAGE_TYPE: ("handler_duration_seconds", "of an attempt with its transaction; a group is one attempt"),
}
_SENDING: Final[Mapping[str, tuple[str, Callable[[SendingStatistics], float]]]] = {
    "send_waiting_messages": ("in memory, to be sent", lambda agent: agent.waiting),
    "send_in_flight_messages": ("sent, and not answered yet", lambda agent: agent.in_flight),
    "send_undeleted_messages": ("stored by the peer, and not deleted here yet", lambda agent: agent.acknowledged),
    "send_buffer_bytes": ("memory that messages to it take", lambda agent: agent.buffer_bytes),
    "destination_latched": ("1 while this process holds it latched", lambda agent: agent.latched),
    "destination_paused": ("1 while it is paused", lambda agent: agent.paused),
}
_HANDLING: Final[Mapping[str, tuple[str, Callable[[HandlingStatistics], float]]]] = {
    "handler_waiting_messages": ("in memory, to be handled", lambda agent: agent.waiting),
    "handler_running_messages": ("being handled", lambda agent: agent.running),
    "handler_buffer_bytes": ("memory that messages of this type take", lambda agent: agent.buffer_bytes),
    "handler_stuck_threads": ("threads whose handler overran its timeout, still", lambda agent: agent.stuck_threads),
    "handler_paused": ("1 while the handler is paused, or its circuit open", lambda agent: agent.paused),
}
_SIDES: Final = {
    CallSide.SERVER: "calls that came in, from arrival to answer",
    CallSide.CLIENT: "calls that were made, from beginning to result",
}
_LISTENER_GAUGES: Final = {"down"}
_NO_DURATIONS: Final = Distribution((0,) * (len(BOUNDS) + 1), 0.0)


def families(statistics: Statistics, declared: Declared, now: datetime) -> Iterator[Family]:
    yield gauge("info", "what runs here", 1, service=statistics.service, version=__version__)
    yield gauge("node_alive", "1 while this process is a node", statistics.node_id is not None)
    yield gauge("node_id", "the id of the node; 0 while it is none", statistics.node_id or 0)
    yield _histogram("event_loop_lag_seconds", "how late the event loop was", [Sample({}, statistics.loop_lag)])
    known = {
        Subject.DESTINATION: declared.destinations,
        Subject.MESSAGE_TYPE: declared.handlers,
        Subject.ENDPOINT: declared.endpoints,
        Subject.RECOVERY: {"recovery"},
    }
    for subject in Subject:
        yield from _counted(subject, statistics.tallies[subject], known[subject])
    sending, handling = Subject.DESTINATION, Subject.MESSAGE_TYPE
    yield from _states(sending, statistics.sending, _SENDING, known[sending])
    yield _ages("send_oldest_seconds", sending, statistics.sending, known[sending], now)
    yield from _states(handling, statistics.handling, _HANDLING, known[handling])
    yield _ages("handler_oldest_seconds", handling, statistics.handling, known[handling], now)
    if statistics.receiving is not None:
        yield gauge("receive_waiting_messages", "arrived, to be stored", statistics.receiving.waiting)
        yield gauge("receive_waiting_bytes", "of what is to be stored", statistics.receiving.waiting_bytes)
    yield from _listeners(statistics.listeners)
    yield from _calls(statistics.calls)
    pools = statistics.pools.items()
    yield gauges("pool_connections", "database connections in use", "pool", {name: p.in_use for name, p in pools})
    yield gauges("pool_size", "database connections that are kept", "pool", {name: p.size for name, p in pools})


def _counted(subject: Subject, tallies: Mapping[str, Tally], known: Set[str]) -> Iterator[Family]:
    for event, (name, text) in _EVENTS[subject].items():
        counts = bounded({key: tally.counts.get(event, 0) for key, tally in tallies.items()}, known, sum, 0)
        samples = labelled(subject, counts) if subject is not Subject.RECOVERY else [Sample({}, counts["recovery"])]
        yield Family(PREFIX + name, MetricKind.COUNTER, text, samples)
    if subject in _DURATIONS:
        name, text = _DURATIONS[subject]
        durations = {key: tally.durations for key, tally in tallies.items()}
        yield _histogram(name, text, labelled(subject, bounded(durations, known, merged, _NO_DURATIONS)))


def _states(
    subject: Subject,
    agents: Mapping[str, Any],
    states: Mapping[str, tuple[str, Callable[[Any], float]]],
    known: Set[str],
) -> Iterator[Family]:
    for name, (text, value) in states.items():
        values = {key: value(agent) for key, agent in agents.items()}
        yield gauges(name, text, subject, bounded(values, known, sum, 0))


def _ages(
    name: str,
    subject: Subject,
    agents: Mapping[str, SendingStatistics] | Mapping[str, HandlingStatistics],
    known: Set[str],
    now: datetime,
) -> Family:
    ages = {
        key: (now - agent.oldest_sent_at).total_seconds() if agent.oldest_sent_at else 0.0
        for key, agent in agents.items()
    }
    text = "since the first of what waits in memory was sent"
    return gauges(name, text, subject, bounded(ages, known, max, 0.0))


def _listeners(listeners: Mapping[str, Mapping[str, int]]) -> Iterator[Family]:
    for key in sorted({key for counts in listeners.values() for key in counts}):
        values = {address: counts[key] for address, counts in listeners.items() if key in counts}
        kind = MetricKind.GAUGE if key in _LISTENER_GAUGES else MetricKind.COUNTER
        yield Family(f"{PREFIX}listener_{key}", kind, f"{key}, by listener", labelled("listener", values))


def _calls(calls: Sequence[CallStatistics]) -> Iterator[Family]:
    """The calls of methods, which the application declares, under the names of OpenTelemetry's attributes."""
    for side, text in _SIDES.items():
        found = [(_labels_of(each.service, each.method), each) for each in calls if each.side is side]
        counts = [
            Sample({**labels, "outcome": outcome}, count)
            for labels, each in found
            for outcome, count in ({"ok": 0} | dict(each.outcomes)).items()
        ]
        yield Family(f"{PREFIX}rpc_{side}_calls", MetricKind.COUNTER, f"{text}, by outcome", counts)
        durations = [Sample(labels, each.durations) for labels, each in found]
        yield _histogram(f"rpc_{side}_duration_seconds", text, durations)


def _labels_of(service: str, method: str) -> dict[str, str]:
    return {"rpc_system": "durable", "rpc_service": service, "rpc_method": method}


def _histogram(name: str, text: str, samples: Iterable[Sample]) -> Family:
    return Family(PREFIX + name, MetricKind.HISTOGRAM, text, list(samples))
