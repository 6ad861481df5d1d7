"""The time from the commit of a business row to the commit of the effect of its message, at several paces.

    in turn       a message, its effect, a pause of 20 ms, the next message
    n a second    a message each 1/n s, whether those before are handled or not

Every road of a message is a side of its own, in a fresh database, and all take turns at each pace. The times are those
of the commits, which Postgres keeps; each figure is the best of the rounds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from durable.embedded import Embedded, postgres, rabbitmq
from tests.benchmarks.peers import commits
from tests.benchmarks.peers.sides import FLOOR, OURS, Side
from tests.benchmarks.peers.standings import percentile
from tests.benchmarks.peers.trial import latencies_at_rate, latencies_in_turn, prepare
from tests.benchmarks.rows import Latency

_WARM_UP: Final = 50


class Pace(NamedTuple):
    """How fast messages are sent, and how many are measured."""

    rate: float
    """A second; 0: in turn."""
    jobs: int

    def __str__(self) -> str:
        return f"{self.rate:,.0f} a second" if self.rate else "in turn"


class Spread(NamedTuple):
    """Seconds that half, 99 % and 99.9 % of the messages do not exceed."""

    p50: float
    p99: float
    p999: float


PACES: Final = (Pace(0, 300), Pace(10, 200), Pace(100, 1_500), Pace(1_000, 10_000))
BESIDE: Final = Side("asyncpg: LISTEN and NOTIFY", FLOOR, ())
ROADS: Final = (
    Side("in one process", OURS, (), "here", is_one_process=True),
    Side("another process of the service", OURS, (), "default"),
    Side("another service over TCP", OURS, (), "tcp"),
    Side("another service over HTTP", OURS, (), "http"),
    Side("another service over RabbitMQ", OURS, (), "rabbitmq", needs_broker=True),
)


def run(rounds: int, paces: Sequence[Pace] = PACES) -> Iterator[tuple[Pace, Sequence[Latency]]]:
    """The latencies of all roads at each pace, as soon as they are measured."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(postgres(folder))
        commits.keep_times(server)
        broker_url = stack.enter_context(rabbitmq(folder / "rabbitmq")).url
        for pace in paces:
            measured: dict[str, list[Spread]] = {side.name: [] for side in (BESIDE, *ROADS)}
            for _ in range(rounds):
                for side in (BESIDE, *ROADS):
                    measured[side.name].append(_measure(side, server, broker_url, pace))
            best = {name: Spread(*map(min, zip(*spreads, strict=True))) for name, spreads in measured.items()}
            floor = best[BESIDE.name]
            yield (
                pace,
                [
                    Latency(road.name, str(pace), BESIDE.name, pace.jobs, *best[road.name], floor.p50, floor.p99)
                    for road in ROADS
                ],
            )


def _measure(side: Side, server: Embedded, broker_url: str, pace: Pace) -> Spread:
    order = prepare(side, server, broker_url)
    if pace.rate:
        seconds = latencies_at_rate(side, order, pace.jobs, max(_WARM_UP, int(pace.rate)), pace.rate)
    else:
        seconds = latencies_in_turn(side, order, pace.jobs, _WARM_UP)
    return Spread(*(percentile(seconds, share) for share in (0.5, 0.99, 0.999)))
