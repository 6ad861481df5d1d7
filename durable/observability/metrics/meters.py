"""The metrics as OpenTelemetry has them, by opentelemetry-api (`pip install 'durable-bus[tracing]'`).

    reader of the provider --collects--> one look at the process and its service, in the bus's event loop
                                         '--> an observation for each sample of each instrument

The durations of calls are histograms of OpenTelemetry's own, `rpc.server.duration` and `rpc.client.duration`, recorded
call by call. The other families are those that /metrics shows, under the same names. OpenTelemetry has no instrument
for a distribution that was counted elsewhere, so a histogram is three counters: `_bucket` (with `le`), `_count` and
`_sum`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from datetime import UTC, datetime
from itertools import accumulate
from threading import Lock
from typing import Final, NamedTuple

from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation, get_meter

from durable.application.application import Application
from durable.observability.metrics import process, service
from durable.observability.metrics.families import PREFIX, Family, MetricKind, declared
from durable.observability.monitor import Monitor, Reading
from durable.statistics import CallSide, ReceivingStatistics, Statistics
from durable.storage.gauges import Gauges, Side
from durable.telemetry import BOUNDS, Distribution, Subject
from durable.version import __version__

_FRESH: Final = 0.5  # seconds: the instruments of one collection share a look
_PATIENCE: Final = 5.0  # seconds for the event loop, and the database behind it, to answer
_ENDS: Final = [*map(str, BOUNDS), "+Inf"]
_RECORDED: Final = {f"{PREFIX}rpc_{side}_duration_seconds" for side in CallSide}
"""Families for which there are histograms of OpenTelemetry's own."""
_LISTENER_COUNTS: Final = ("connections", "dropped", "batches", "envelopes", "calls", "refused", "down")

Observed = Mapping[str, Sequence[Observation]]


class Source(NamedTuple):
    """Source of observations. `loop` is None while the bus does not run: then there are none."""

    monitor: Monitor
    loop: asyncio.AbstractEventLoop | None


class Meters:
    """Instruments of this provider, or of the global one, over what `find` returns at the time."""

    def __init__(self, find: Callable[[], Source], provider: MeterProvider | None = None) -> None:
        self._find = find
        self._looking = Lock()
        self._seen: Observed = {}
        self._seen_at = float("-inf")
        meter = get_meter("durable", __version__, provider)
        self._calls = {
            side: meter.create_histogram(f"rpc.{side}.duration", unit="ms", description="duration of calls")
            for side in CallSide
        }
        for family in _catalogue():
            for name, kind in _instruments(family):
                self._create(meter, name, kind, family.help)

    def record_call(self, side: CallSide, service: str, method: str, outcome: str, seconds: float) -> None:
        """Record the duration of a call, after OpenTelemetry's conventions for RPC."""
        attributes = {"rpc.system": "durable", "rpc.service": service, "rpc.method": method}
        if outcome != "ok":
            attributes["error.type"] = outcome
        self._calls[side].record(seconds * 1_000, attributes)

    def _create(self, meter: Meter, name: str, kind: MetricKind, text: str) -> None:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            return self._read().get(name, ())

        if kind is MetricKind.COUNTER:
            meter.create_observable_counter(name, [observe], description=text)
        else:
            meter.create_observable_gauge(name, [observe], description=text)

    def _read(self) -> Observed:
        """Read the observations, in the thread of the collector."""
        with self._looking:
            if time.monotonic() - self._seen_at >= _FRESH:
                self._seen = _observed(_collected(self._find()))
                self._seen_at = time.monotonic()
            return self._seen


def _collected(source: Source) -> list[Family]:
    monitor, loop = source
    if loop is None or loop.is_closed():
        return []
    if asyncio._get_running_loop() is loop:  # nobody could wait for the database here: what was read last will do
        return _families(monitor, monitor.last)
    looking = monitor.read()
    try:
        reading = asyncio.run_coroutine_threadsafe(looking, loop)
    except RuntimeError:  # it was closed just now
        looking.close()
        return []
    try:
        return _families(monitor, reading.result(_PATIENCE))
    except (TimeoutError, CancelledError):
        reading.cancel()
        return []


def _families(monitor: Monitor, reading: Reading | None) -> list[Family]:
    known = declared(monitor.application)
    of_process = process.families(monitor.statistics(), known, datetime.now(UTC))
    found = [family for family in of_process if family.name not in _RECORDED]
    return found if reading is None else [*found, *service.families(reading, known, monitor.settings.heartbeat_stale)]


def _observed(families: Iterable[Family]) -> Observed:
    found: dict[str, list[Observation]] = {}
    for family in families:
        for labels, value in family.samples:
            if isinstance(value, Distribution):
                counts = list(accumulate(value.counts))
                found.setdefault(f"{family.name}_bucket", []).extend(
                    Observation(count, {**labels, "le": end}) for end, count in zip(_ENDS, counts, strict=True)
                )
                found.setdefault(f"{family.name}_count", []).append(Observation(counts[-1], labels))
                found.setdefault(f"{family.name}_sum", []).append(Observation(value.total_seconds, labels))
            else:
                found.setdefault(family.name, []).append(Observation(value, labels))
    return found


def _instruments(family: Family) -> Iterator[tuple[str, MetricKind]]:
    if family.kind is MetricKind.HISTOGRAM:
        yield from ((f"{family.name}_{part}", MetricKind.COUNTER) for part in ("bucket", "count", "sum"))
    else:
        yield family.name, family.kind


def _catalogue() -> Iterator[Family]:
    """Every family that there can be: those of a process and a service in which everything is, and nothing happens."""
    known = declared(Application(""))
    yield from (family for family in process.families(_NOBODY, known, _NOW) if family.name not in _RECORDED)
    yield from service.families(Reading(_NOTHING, ()), known, _NOW - _NOW)


_NOW: Final = datetime(2000, 1, 1, tzinfo=UTC)
_NOBODY: Final = Statistics(
    service="",
    node_id=None,
    sending={},
    handling={},
    receiving=ReceivingStatistics(0, 0),
    listeners={"": dict.fromkeys(_LISTENER_COUNTS, 0)},
    pools={},
    tallies={subject: {} for subject in Subject},
    loop_lag=Distribution((0,) * (len(BOUNDS) + 1), 0.0),
)
_NOTHING: Final = Gauges(
    now=_NOW,
    server_started_at=_NOW,
    unowned=dict.fromkeys(Side, ()),
    owned={side: {} for side in Side},
    refused={},
    scheduled={},
    overdue=None,
    late_schedules=(),
    dead_letters=0,
    parked=(),
    behind={},
    parked_types={},
    circuits=(),
    open_circuits={},
    nodes=(),
    locked=set(),
    partitioned_days=1,
    estimates={},
)
