"""Statistics of a process, now and since its start, as plain values. Reading them costs the agents nothing.

    bus.statistics() --> Statistics
                           sending     each destination's agent       handling   each handler's agent
                           receiving   what waits to be stored        listeners  each bound address
                           pools       database connections           tallies    events and durations by subject
                           calls       of methods, by side and outcome

What agents are doing is theirs, and gone with their node; what was counted belongs to the process. Durations are
seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from durable.telemetry import Distribution, Subject, Tally


@dataclass(frozen=True, slots=True)
class SendingStatistics:
    """Statistics of a sending agent. `waiting` and the fields below count envelopes in its memory."""

    waiting: int
    in_flight: int
    """Sent, and not answered yet."""
    batches_in_flight: int
    acknowledged: int
    """Stored by the peer, and not deleted here yet."""
    buffer_bytes: int
    latched: bool
    paused: bool
    oldest_sent_at: datetime | None
    """The time at which the application sent the first of the waiting messages."""


@dataclass(frozen=True, slots=True)
class HandlingStatistics:
    """Statistics of a handling agent. `waiting` and `running` are messages in its memory."""

    waiting: int
    running: int
    buffer_bytes: int
    paused: bool
    """True if the handler is paused, or its circuit open."""
    oldest_sent_at: datetime | None
    """The time at which the application sent the first of the waiting messages."""
    stuck_threads: int
    """Threads whose handler has overrun its timeout and not returned."""


@dataclass(frozen=True, slots=True)
class ReceivingStatistics:
    """The receiving agent: what has arrived and is not stored yet."""

    waiting: int
    waiting_bytes: int


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Statistics of a pool of database connections; `size` is its limit."""

    size: int
    in_use: int


class CallSide(StrEnum):
    """The end of a call."""

    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class CallStatistics:
    """Calls of one method that came in, or were made: how many ended how, and their durations."""

    side: CallSide
    service: str
    method: str
    outcomes: Mapping[str, int]
    durations: Distribution


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a process. `node_id` is None while it is no node."""

    service: str
    node_id: int | None
    sending: Mapping[str, SendingStatistics]
    handling: Mapping[str, HandlingStatistics]
    receiving: ReceivingStatistics | None
    listeners: Mapping[str, Mapping[str, int]]
    """The counts of each listener since it was bound, by its address."""
    pools: Mapping[str, PoolStatistics]
    tallies: Mapping[Subject, Mapping[str, Tally]]
    loop_lag: Distribution
    """The delay of the event loop, measured four times a second."""
    calls: Sequence[CallStatistics] = ()
