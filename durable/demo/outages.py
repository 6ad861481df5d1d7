"""Outages of the broker: killed, away for a moment, and started again on its files.

All of it takes seconds, and happens in a thread of its own while the nodes are watched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from durable.demo.events import Events
from durable.embedded.rabbitmq import Broker

AWAY_SECONDS = 1.5
"""Time before the broker starts again: long enough for the nodes to notice and to latch."""
SETTLED_SECONDS = 3.0
"""After which RabbitMQ has written down that there is a queue; it takes two, and a kill before that would lose it."""


class Outages:
    """Outages of the broker between the services, one at a time; none where there is no broker."""

    def __init__(self, broker: Broker | None, thread: ThreadPoolExecutor, events: Events) -> None:
        self._broker = broker
        self._thread = thread
        self._events = events
        self._outages: list[Future[float]] = []
        self._flowing_since: float | None = None

    @property
    def is_over(self) -> bool:
        return all(outage.done() for outage in self._outages)

    @property
    def seconds(self) -> list[float]:
        """Seconds that the broker was away, each time that it was killed."""
        return [outage.result() for outage in self._outages]

    def advance(self, *, is_flowing: bool) -> None:
        """Note since when messages go through the broker. Raises what kept it from starting again."""
        if is_flowing and self._flowing_since is None:
            self._flowing_since = time.monotonic()
        for outage in self._outages:
            if outage.done():
                outage.result()

    def begin(self) -> bool:
        """Let the broker be killed; False when it cannot be, now or at all."""
        if self._broker is None or not self.is_over or not self._is_settled:
            return False
        self._outages.append(self._thread.submit(self._befall, self._broker))
        return True

    @property
    def _is_settled(self) -> bool:
        return self._flowing_since is not None and time.monotonic() - self._flowing_since > SETTLED_SECONDS

    def _befall(self, broker: Broker) -> float:
        broker.kill()
        began = time.monotonic()
        self._events.happened("killed the broker")
        time.sleep(AWAY_SECONDS)
        broker.start()
        away = time.monotonic() - began
        self._events.happened("the broker serves again", f"; it was away for {away:.1f} s")
        return round(away, 1)


@contextmanager
def outages_of(broker: Broker | None, events: Events) -> Iterator[Outages]:
    """Cause outages in this block; at its end none is under way."""
    with ThreadPoolExecutor(1, thread_name_prefix="broker") as thread:
        yield Outages(broker, thread, events)
