"""Profiles of a run: how long, how hard, and which faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

HURRIED: Mapping[str, str] = MappingProxyType(
    {
        "DURABLE_HEARTBEAT_INTERVAL": "1",
        "DURABLE_HEARTBEAT_STALE": "6",
        "DURABLE_DORMANT_GRACE": "1",
        "DURABLE_SWEEP_INTERVAL": "0.5",
        "DURABLE_POLL_INTERVAL": "0.3",
        "DURABLE_FORGOTTEN_AFTER": "6",
        "DURABLE_CONNECT_TIMEOUT": "3",
        "DURABLE_SEND_TIMEOUT": "4",
        "DURABLE_IDLE_TIMEOUT": "10",
        "DURABLE_FRAME_TIMEOUT": "4",
        "DURABLE_PING_INTERVAL": "0.3",
        "DURABLE_STATEMENT_TIMEOUT": "5",
        "DURABLE_HANDLER_TIMEOUT": "10",
        "DURABLE_UNIT_OF_WORK_TIMEOUT": "10",
        "DURABLE_POOL_TIMEOUT": "10",
        "DURABLE_DRAIN_TIMEOUT": "5",
        "DURABLE_STEP_TIMEOUT": "30",
    }
)
"""Shorter times than the defaults, so that a short run sees what comes after them."""

COMMON = {"DURABLE_POOL_SIZE": "5", "DURABLE_AGENT_POOL_SIZE": "3", "DURABLE_BUFFER_SIZE": "500"}

POSTGRES = ("terminate", "restart", "crash", "away", "disk full", "read-only", "connections", "fail over")
WIRES = ("cut", "hole up", "hole down", "delay", "slice", "lost answer")
"""The last is of wires to a database."""
BROKER = ("broker kill", "broker stop", "broker pause", "broker alarm")


@dataclass(frozen=True)
class Profile:
    """Profile: `faults_seconds` of faults after `warm_seconds` without, then calm, until everything is finished,
    or nothing has come to its end for `calm_seconds`.
    """

    name: str
    warm_seconds: float
    faults_seconds: float
    calm_seconds: float
    longest_pause: float
    producer_pause: float = 0.1
    """Mean pause between the transactions of one of four producers."""
    retry_delays: str = "0.2 1 4"
    own_servers: bool = True
    """A server for each service, instead of one for both."""
    may_pool: bool = True
    """One of the services is behind PgBouncer, if the seed says so."""
    postgres: tuple[str, ...] = POSTGRES
    settings: Mapping[str, str] = field(default_factory=lambda: HURRIED)

    @property
    def environment(self) -> dict[str, str]:
        return {**COMMON, **self.settings}


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            "short",
            warm_seconds=2,
            faults_seconds=14,
            calm_seconds=90,
            longest_pause=4,
            own_servers=False,
            may_pool=False,
            postgres=("terminate", "restart", "crash"),
        ),
        Profile("pr", warm_seconds=5, faults_seconds=100, calm_seconds=90, longest_pause=20, producer_pause=0.15),
        Profile("nightly", warm_seconds=10, faults_seconds=3_300, calm_seconds=240, longest_pause=60),
        Profile("release", warm_seconds=30, faults_seconds=4 * 3_600, calm_seconds=600, longest_pause=60, settings={}),
    )
}
"""`short` is part of the tests; `release` runs with the default settings of durable."""
