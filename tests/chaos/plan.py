"""The plan of faults: a pure function of seed, profile and transport.

Faults are in lanes, one after another in each, with a rest between; the lanes run at once. What would undo another
fault, or hide it, is in the lane of that: two faults never meet at one place.

    nodes of orders · nodes of billing · each Postgres · snapshots · wires · storm · broker
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.chaos.fleet import SERVICES, SLOTS
from tests.chaos.profiles import EVERY_BROKER, EVERY_WIRE, Profile

TRANSPORTS = ("tcp", "http", "rabbitmq")
REST = (1.5, 5.0)  # seconds between two faults of a lane

SECONDS = {
    "kill": (0.5, 4),
    "terminate": (0, 0),
    "restart": (0, 0),
    "crash": (0, 0),
    "away": (10, 10),
    "disk full": (2, 8),
    "read-only": (10, 10),
    "connections": (3, 8),
    "fail over": (0.5, 3),
    "snapshot": (10, 30),
    "storm": (4, 8),
    "cut": (0, 0),
    "hole up": (2, 9),
    "hole down": (2, 9),
    "delay": (3, 8),
    "slice": (3, 8),
    "lost answer": (2, 5),
    "broker kill": (0.5, 3),
    "broker stop": (0.5, 3),
    "broker pause": (2, 10),
    "broker alarm": (3, 8),
}
"""The shortest and longest time of each kind of fault, without what it takes to begin and to end it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault at `at` seconds after the faults began, for so many seconds, at a place."""

    at: float
    seconds: float
    kind: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.place})"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a run that the seed decides."""

    seed: int
    faults: tuple[Fault, ...]
    pooled: str
    """The service behind PgBouncer, or nothing."""


Choose = Callable[[random.Random], str]


def plan(seed: int, profile: Profile, transport: str) -> Plan:
    rng = random.Random(f"{seed} {profile.name} {transport}")
    pooled = rng.choice(["", *SERVICES]) if profile.may_pool else ""
    faults = [fault for lane in _lanes(profile, transport) for fault in lane(random.Random(rng.random()))]
    return Plan(seed, tuple(sorted(faults, key=lambda fault: (fault.at, fault.place))), pooled)


def _lanes(profile: Profile, transport: str) -> Iterator[Callable[[random.Random], Iterator[Fault]]]:
    def lane(kinds: tuple[str, ...], *places: str) -> Callable[[random.Random], Iterator[Fault]]:
        return lambda rng: _in_a_row(rng, profile, kinds, places)

    for service in SERVICES:
        yield lane(("kill", "pause", "kill"), *(f"{service}/{slot}" for slot in range(SLOTS)))
    for server in server_names(profile):
        yield lane(profile.postgres, server)
    yield lane(("snapshot",), *SERVICES)
    yield lane(("storm",), "billing")
    yield lane(EVERY_WIRE, *wire_names(transport))
    if transport == "rabbitmq":
        yield lane(EVERY_BROKER, "broker")


def server_names(profile: Profile) -> tuple[str, ...]:
    return SERVICES if profile.own_servers else ("both",)


def wire_names(transport: str) -> tuple[str, ...]:
    """The proxies: at the pool and at the lock of each service, and at its way to the other or to the broker."""
    way = "broker" if transport == "rabbitmq" else "peer"
    return tuple(f"{service} {what}" for service in SERVICES for what in ("pool", "lock", way))


def _in_a_row(rng: random.Random, profile: Profile, kinds: tuple[str, ...], places: tuple[str, ...]) -> Iterator[Fault]:
    """Every kind once in a random order, and again, until the time is over."""
    moment = rng.uniform(0, REST[1])
    while True:
        for kind in rng.sample(kinds, len(kinds)):
            shortest, longest = SECONDS.get(kind, (1, profile.longest_pause))
            seconds = rng.uniform(shortest, longest)
            if moment + seconds > profile.faults_seconds:
                return
            yield Fault(round(moment, 2), round(seconds, 2), kind, rng.choice(places))
            moment += seconds + rng.uniform(*REST)
