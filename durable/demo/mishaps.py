"""Mishaps of the nodes and the broker: kills, and a pause long enough to be taken for dead.

    paused --struck off by the others--> dormant --a moment--> resumed --its work is refused--> joins again

Planned by progress, not by time, so that something happens at every stage however fast the machine is.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import NamedTuple
from uuid import UUID

from durable.demo.events import Events
from durable.demo.fleet import SERVICES, Fleet, Member
from durable.demo.observer import Observer
from durable.demo.outages import Outages
from durable.grammar import several

KILLS = 2
"""Kills on each side; one more for every FLIGHTS_PER_KILL."""
OUTAGES = 1
"""Kills of the broker; one more for every FLIGHTS_PER_KILL."""
FLIGHTS_PER_KILL = 60_000
PATIENCE = 0.1
"""The share of all flights for which a kill waits for a victim with work in hand."""
COMMIT_SECONDS = 0.2
"""Time for statements of a stopped node that the database had begun."""
LATE_SECONDS = 0.5
"""Time for which a paused node stays paused after its registration was removed."""


class MishapKind(Enum):
    KILL = "kill"
    PAUSE = "pause"
    OUTAGE = "outage"
    """The broker between the services is killed, and started again."""


class Mishap(NamedTuple):
    """Mishap at `at`, the share of all flights that the service has recorded, or handled, when it happens."""

    at: float
    service: str
    kind: MishapKind


def plan(flights: int, rng: random.Random, *, has_broker: bool) -> list[Mishap]:
    """Spread kills and outages over the first three quarters, each somewhere in its part of them, with one pause."""
    more = flights // FLIGHTS_PER_KILL
    kills = [
        Mishap(at, service, MishapKind.KILL)
        for service in ("airline", "punctuality")
        for at in _moments(KILLS + more, rng)
    ]
    pause = Mishap(rng.uniform(0.35, 0.55), "punctuality", MishapKind.PAUSE)
    outages = (
        [Mishap(at, "punctuality", MishapKind.OUTAGE) for at in _moments(OUTAGES + more, rng)] if has_broker else []
    )
    return sorted([*kills, pause, *outages], key=lambda mishap: mishap.at)


def _moments(count: int, rng: random.Random) -> list[float]:
    return [0.1 + 0.65 * (number + rng.uniform(0.1, 0.7)) / count for number in range(count)]


@dataclass
class Pause:
    """Pause of a node, and its end."""

    member: Member
    node_id: int
    owned: list[UUID]
    began: float
    dormant_at: datetime | None = None
    """The time at which the removed registration was seen, by the database's clock."""
    dormant_seconds: float = 0.0
    seconds: float = 0.0
    is_resumed: bool = False

    @property
    def is_over(self) -> bool:
        """True when the node was resumed and has joined again, under another id."""
        return self.is_resumed and self.member.node_id is not None


class Misfortune:
    """Carries out the plan on a fleet, puts a new process into the place of each that was killed, and keeps count."""

    def __init__(
        self,
        mishaps: list[Mishap],
        rng: random.Random,
        fleet: Fleet,
        outages: Outages,
        observer: Observer,
        events: Events,
    ) -> None:
        self.kills: dict[str, int] = dict.fromkeys(SERVICES, 0)
        self.in_hand: dict[str, int] = dict.fromkeys(SERVICES, 0)
        """The messages in the memory of the victims, for other nodes to take."""
        self.pauses: list[Pause] = []
        self._waiting = mishaps
        self._rng = rng
        self._fleet = fleet
        self._outages = outages
        self._observer = observer
        self._events = events

    @property
    def is_over(self) -> bool:
        """True when the broker and every paused node are back. A mishap that found no victim in time is left out."""
        return all(pause.is_over for pause in self.pauses) and self._outages.is_over

    def advance(self, progress: dict[str, float]) -> None:
        """Start the mishaps that are due by this progress, as far as they find a victim."""
        self._outages.advance(is_flowing=progress["punctuality"] > 0)
        for pause in self.pauses:
            if not pause.is_resumed:
                self._follow(pause)
        if min(progress.values()) >= 1:
            return  # nothing is left that could go wrong
        for mishap in list(self._waiting):
            reached = progress[mishap.service]
            if reached >= mishap.at and self._happens(mishap, reached):
                self._waiting.remove(mishap)

    def _happens(self, mishap: Mishap, progress: float) -> bool:
        """Let it happen, unless nobody is there now that it can happen to."""
        if mishap.kind is MishapKind.OUTAGE:
            return self._outages.begin()
        working = self._fleet.working(mishap.service)
        busy = [member for member in working if self._owned(member)]
        is_late = mishap.kind is MishapKind.KILL and progress >= mishap.at + PATIENCE
        victims = busy or (working if is_late else [])
        if not victims:
            return False
        victim = self._rng.choice(victims)
        in_hand = self._stop(victim)
        if not in_hand and not is_late:
            self._fleet.resume(victim)
            return False
        befall = self._kill if mishap.kind is MishapKind.KILL else self._pause
        befall(victim, in_hand)
        return True

    def _owned(self, member: Member) -> list[UUID]:
        return self._observer.owned(member.service, member.node_id) if member.node_id is not None else []

    def _stop(self, member: Member) -> list[UUID]:
        """Stop a node. Returns the messages in its hand, which others must take if it stays stopped; it may have
        finished them a moment before.
        """
        assert member.node_id is not None
        self._fleet.pause(member)
        time.sleep(COMMIT_SECONDS)
        return self._observer.recoverable(member.service, member.node_id)

    def _kill(self, member: Member, in_hand: list[UUID]) -> None:
        self._fleet.kill(member)
        self.kills[member.service] += 1
        self.in_hand[member.service] += len(in_hand)
        replacement = self._fleet.start(member.service, member.slot)
        details = f" with {several(len(in_hand), 'messages')} in hand; pid {replacement.pid} takes its place"
        self._events.happened(f"killed {member}", details)

    def _pause(self, member: Member, in_hand: list[UUID]) -> None:
        assert member.node_id is not None
        self.in_hand[member.service] += len(in_hand)
        self.pauses.append(Pause(member, member.node_id, in_hand, time.monotonic()))
        self._events.happened(f"paused {member}", f" with {several(len(in_hand), 'messages')} in hand")

    def _follow(self, pause: Pause) -> None:
        silence = time.monotonic() - pause.began
        if pause.dormant_at is None:
            if self._is_relieved(pause):
                pause.dormant_at, pause.dormant_seconds = self._observer.now(), silence
                self._events.happened(
                    f"node {pause.node_id} is silent for {silence:.1f} s", ": the others take its work"
                )
        elif silence >= pause.dormant_seconds + LATE_SECONDS:
            pause.seconds, pause.is_resumed = silence, True
            pause.member.node_id = None
            self._fleet.resume(pause.member)
            self._events.happened(
                f"resumed pid {pause.member.pid}", f": what node {pause.node_id} still has in hand comes too late"
            )

    def _is_relieved(self, pause: Pause) -> bool:
        """True when the node's registration is removed, and its work handed over."""
        if pause.member.pid in self._observer.nodes("punctuality"):
            return False
        return not set(pause.owned) & set(self._observer.owned("punctuality", pause.node_id))
