"""The plan of faults: a pure function of seed, profile and transport.

Faults are in lanes, one after another in each, with a rest between; the lanes run at once. What would undo another
fault, or hide it, is in the lane of that: two faults never meet at one place.

    nodes of orders · nodes of billing · each Postgres · snapshots · storm · pooler · wires to Postgres
    other wires · broker
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.chaos.fleet import SERVICES, SLOTS
from tests.chaos.profiles import BROKER, WIRES, Profile

TRANSPORTS = ("tcp", "http", "rabbitmq")
REST = (2.0, 7.0)  # seconds between two faults of a lane

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
    "pooler kill": (0.5, 5),
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
"""The shortest and longest time of each kind of fault."""

BESIDES = {
    "kill": 2,
    "restart": 1,
    "crash": 1,
    "away": 1,
    "fail over": 6,
    "connections": 1,
    "broker kill": 5,
    "broker stop": 6,
    "broker alarm": 2,
    "pooler kill": 12,
}
"""What it takes besides to begin and to end it."""

DATABASE_WIRES = ("pool", "lock")


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
    lanes: tuple[tuple[Fault, ...], ...]
    pooled: str
    """The service behind PgBouncer, or nothing."""
    is_secured: bool
    """True when tcp and http carry TLS and prove a secret."""

    @property
    def faults(self) -> list[Fault]:
        """The faults of all lanes, by their times."""
        return sorted((fault for lane in self.lanes for fault in lane), key=lambda fault: fault.at)


def plan(seed: int, profile: Profile, transport: str) -> Plan:
    rng = random.Random(f"{seed} {profile.name} {transport}")
    pooled = rng.choice(["", *SERVICES]) if profile.may_pool else ""
    lanes = tuple(tuple(lane(random.Random(rng.random()))) for lane in _lanes(profile, transport, pooled))
    return Plan(seed, lanes, pooled, is_secured=transport != "rabbitmq" and rng.random() < 0.5)


def _lanes(profile: Profile, transport: str, pooled: str) -> Iterator[Callable[[random.Random], Iterator[Fault]]]:
    def lane(kinds: tuple[str, ...], *places: str) -> Callable[[random.Random], Iterator[Fault]]:
        return lambda rng: _in_a_row(rng, profile, kinds, places)

    for service in SERVICES:
        yield lane(("kill", "pause", "kill"), *(f"{service}/{slot}" for slot in range(SLOTS)))
    for server in server_names(profile):
        yield lane(profile.postgres, server)
    yield lane(("snapshot",), *SERVICES)
    yield lane(("storm",), "billing")
    if pooled:
        yield lane(("pooler kill",), f"{pooled} pooler")
    ways = ways_of(transport)
    yield lane(WIRES, *(f"{service} {what}" for service in SERVICES for what in DATABASE_WIRES))
    yield lane(WIRES[:-1], *(f"{service} {ways}" for service in SERVICES))
    if transport == "rabbitmq":
        yield lane(BROKER, "broker")


def server_names(profile: Profile) -> tuple[str, ...]:
    return SERVICES if profile.own_servers else ("both",)


def ways_of(transport: str) -> str:
    """Name of the proxies at the way of a service to the other, or to the broker."""
    return "broker" if transport == "rabbitmq" else "peer"


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
            moment += seconds + BESIDES.get(kind, 0) + rng.uniform(*REST)
