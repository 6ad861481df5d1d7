"""Supervisor of a run: watches, kills, pauses and replaces nodes until every flight is handled; then stops them.

It ends when all flights are in the sums, nothing waits in any outbox or inbox, and whoever was paused is back; or, as
a failure, when nothing has moved for STALL_SECONDS.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter

from durable.demo import fleet, observer, verdict
from durable.demo.events import Events
from durable.demo.fleet import SERVICES, Fleet
from durable.demo.latches import Latches
from durable.demo.mishaps import Misfortune, Pause, plan
from durable.demo.observer import Observer
from durable.demo.outages import outages_of
from durable.demo.screen import Screen
from durable.demo.stage import Stage
from durable.errors import DurableError

LOOK_SECONDS = 0.1
STALL_SECONDS = 45.0


class Stalled(DurableError):
    """The demo stalls before every flight is handled."""


def run(stage: Stage, seed: int, screen: Screen) -> verdict.Evidence:
    """Run to the end and return what it came to. Raises Stalled, or NodeEnded when a node ends by itself."""
    rng = random.Random(seed)
    broker, events = stage.road.broker, Events(screen.tell)
    with observer.observing(stage.urls) as watch:
        latches = Latches(watch, SERVICES)
        with outages_of(broker, events) as outages, fleet.running(stage.logs, stage.environments) as nodes:
            planned = plan(stage.flights, rng, has_broker=broker is not None)
            misfortune = Misfortune(planned, rng, nodes, outages, watch, events)
            Supervisor(stage.flights, nodes, watch, latches, misfortune, screen).watch_to_the_end()
            screen.tell("every flight is handled; the nodes are told to stop")
        return verdict.gather(
            watch,
            transport=stage.road.transport,
            flights=stage.flights,
            seed=seed,
            counts=_counts(stage),
            kills=misfortune.kills,
            in_hand=misfortune.in_hand,
            pauses=[_facts(pause, watch) for pause in misfortune.pauses],
            broker_away_seconds=outages.seconds,
            latched=latches.seen,
            events=events.seen,
        )


def _facts(pause: Pause, watch: Observer) -> verdict.PauseFacts:
    late = watch.finished_after(pause.node_id, pause.dormant_at, pause.owned) if pause.dormant_at else 0
    return verdict.PauseFacts(
        node_id=pause.node_id,
        owned=len(pause.owned),
        dormant_after_seconds=round(pause.dormant_seconds, 1),
        seconds=round(pause.seconds, 1),
        finished_late=late,
    )


class Supervisor:
    """Looks at everything every LOOK_SECONDS."""

    def __init__(
        self, flights: int, nodes: Fleet, watch: Observer, latches: Latches, misfortune: Misfortune, screen: Screen
    ) -> None:
        self._flights = flights
        self._fleet = nodes
        self._watch = watch
        self._latches = latches
        self._misfortune = misfortune
        self._screen = screen
        self._recorded = self._handled = 0
        self._moved = time.monotonic()

    def watch_to_the_end(self) -> None:
        while not self._is_over():
            self._fleet.check()
            began = time.monotonic()
            self._welcome()
            self._poll()
            self._latches.poll()
            looking = time.monotonic() - began
            self._misfortune.advance(
                {"airline": self._recorded / self._flights, "punctuality": self._handled / self._flights}
            )
            # Counting takes longer the more there is: it must not take the time of those who work.
            time.sleep(max(LOOK_SECONDS, 10 * looking))

    def _is_over(self) -> bool:
        return self._handled >= self._flights and self._misfortune.is_over and self._watch.is_settled()

    def _welcome(self) -> None:
        """Note who has joined."""
        for service in SERVICES:
            by_pid = self._watch.nodes(service)
            for member in self._fleet.members:
                if member.service == service and member.node_id is None and member.pid in by_pid:
                    member.node_id = by_pid[member.pid]
                    self._screen.tell(f"{member} joined")

    def _poll(self) -> None:
        recorded, handled = self._watch.recorded(), self._watch.handled()
        if (recorded, handled) != (self._recorded, self._handled):
            self._moved = time.monotonic()
        elif time.monotonic() - self._moved > STALL_SECONDS:
            raise Stalled("; ".join(self._what_is_missing()))
        self._recorded, self._handled = recorded, handled
        self._screen.advance(recorded, handled)

    def _what_is_missing(self) -> list[str]:
        return [
            f"nothing moved for {STALL_SECONDS:g} s",
            f"not recorded: {self._flights - self._recorded:,} of {self._flights:,}",
            f"recorded and not handled: {self._recorded - self._handled:,}",
            *(f"{member} is paused" for member in self._fleet.members if member.paused),
            *self._watch.what_waits(),
        ]


def _counts(stage: Stage) -> Counter[str]:
    """Return the counts of all nodes, each as long as it lived."""
    total: Counter[str] = Counter()
    for file in stage.counts.glob("*.json"):
        total.update(json.loads(file.read_text()))
    return total
