"""One long run: constant load, a fault a minute, two ends of a day; then calm, and the ledger is compared.

start ── load, and a fault each minute ── calm: all is finished ── stop ── compare
             |                   |
             end of a day        end of a day
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg

from durable.embedded.ports import free_port
from durable.testing.transports.proxy import ChaosProxy
from tests.chaos.faults import FAULTS
from tests.chaos.fleet import SERVICES, SLOTS
from tests.chaos.plan import DATABASE_WIRES, SECONDS, Fault, Plan
from tests.chaos.profiles import Profile
from tests.chaos.stage import Stage, staged
from tests.soak.gauges import WAITING, Gauge, Gauges
from tests.soak.rollover import end_day, is_over

READ_SECONDS: Final = 10.0
FAULT_SECONDS: Final = 60.0
CALM_SECONDS: Final = 300.0
DAY_SECONDS: Final = 120.0
"""Time in which the nodes drop a past day and make the next; maintenance is done every 30 s here."""
OF_NODES: Final = ("kill", "pause")
OF_POSTGRES: Final = ("terminate", "restart", "crash", "away", "read-only", "connections")
OF_WIRES: Final = ("cut", "hole up", "hole down", "delay", "slice", "lost answer")
LONGEST_PAUSE: Final = 20.0

Tell = Callable[[str], None]


@dataclass
class Outcome:
    """What a run came to."""

    seed: int
    seconds: float
    sent: int = 0
    lost: int = 0
    twice: int = 0
    faults: list[tuple[float, str]] = field(default_factory=list)
    days: list[str] = field(default_factory=list)
    gauges: list[Gauge] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @property
    def growing(self) -> list[str]:
        return [gauge.name for gauge in self.gauges if gauge.grows()]

    @property
    def is_right(self) -> bool:
        return not (self.lost or self.twice or self.growing or self.complaints)


def profile(pace: float, port: int) -> Profile:
    settings = {
        "SOAK_PACE": str(pace),
        "SOAK_PORT": str(port),
        "DURABLE_MAINTENANCE_INTERVAL": "30",
        "DURABLE_ADDRESS_IDLE": "30",
        "DURABLE_TCP_CONNECTIONS": "20000",
        "DURABLE_CONNECTIONS_PER_ADDRESS": "20000",
    }
    return Profile("soak", 0, 0, CALM_SECONDS, LONGEST_PAUSE, own_servers=False, may_pool=False, settings=settings)


async def run(seed: int, hours: float, pace: float, folder: Path, tell: Tell) -> Outcome:
    outcome = Outcome(seed, hours * 3_600)
    await asyncio.to_thread(lambda: folder.mkdir(parents=True, exist_ok=True))
    plan = Plan(seed, (), "", is_secured=False)
    port = free_port()
    async with (
        staged(plan, profile(pace, port), "tcp", folder, "tests.soak.node") as stage,
        ChaosProxy(_place_of_billing(stage), at=f"tcp://0.0.0.0:{port}"),
    ):
        gauges = Gauges(stage)
        others = [_read_gauges(stage, gauges), _strike(stage, random.Random(seed), outcome, tell)]
        working = [asyncio.create_task(each) for each in others]
        try:
            for number in range(3):
                await asyncio.sleep(outcome.seconds / 3)
                if number < 2:
                    await _end_day(stage, outcome, tell)
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
        stage.restore()
        stage.calm.touch()
        tell("calm")
        if not await _comes_true(stage, _is_idle, CALM_SECONDS):
            outcome.complaints.append(f"work is left {CALM_SECONDS:g} s after calm")
        if not await _comes_true(stage, is_over, DAY_SECONDS):
            outcome.complaints.append("a past day was not dropped, or the next one was not made")
        outcome.complaints += await asyncio.to_thread(stage.fleet.stop)
        await asyncio.to_thread(_compare, stage, outcome)
        outcome.gauges = list(gauges.all.values())
    return outcome


def _place_of_billing(stage: Stage) -> str:
    return stage.road.environments["billing"]["CHAOS_LISTEN"].partition("?")[0]


async def _read_gauges(stage: Stage, gauges: Gauges) -> None:
    while True:
        stage.fleet.replace_ended()
        await asyncio.to_thread(gauges.read)
        await asyncio.sleep(READ_SECONDS)


async def _strike(stage: Stage, rng: random.Random, outcome: Outcome, tell: Tell) -> None:
    """A fault a minute, of any kind at any place."""
    began = time.monotonic()
    while True:
        await asyncio.sleep(FAULT_SECONDS)
        kind, place = rng.choice(
            [
                *((kind, f"{rng.choice(SERVICES)}/{rng.randrange(SLOTS)}") for kind in OF_NODES),
                *((kind, "both") for kind in OF_POSTGRES),
                *((kind, f"{rng.choice(SERVICES)} {rng.choice(DATABASE_WIRES)}") for kind in OF_WIRES),
            ]
        )
        shortest, longest = SECONDS.get(kind, (1, LONGEST_PAUSE))
        fault = Fault(time.monotonic() - began, rng.uniform(shortest, longest), kind, place)
        outcome.faults.append((fault.at, str(fault)))
        tell(f"{fault.at:8.0f} s  {fault} for {fault.seconds:.0f} s")
        async with FAULTS[kind](stage, fault):
            await asyncio.sleep(fault.seconds)


async def _end_day(stage: Stage, outcome: Outcome, tell: Tell) -> None:
    for service in SERVICES:
        while True:
            try:
                copied = await asyncio.to_thread(_in_database, stage, service, end_day)
            except psycopg.Error:  # a fault; as much of the day as was copied is copied no second time
                await asyncio.sleep(1)
            else:
                outcome.days.append(f"{service}: {copied:,} rows")
                break
    tell(f"          a day ends: {', '.join(outcome.days[-2:])}")


def _in_database(stage: Stage, service: str, work: Callable[[psycopg.Connection[Any]], Any]) -> Any:
    with stage.server_of(service).connect(service) as conn:
        return work(conn)


def _is_idle(conn: psycopg.Connection[Any]) -> bool:
    return conn.execute(WAITING).fetchone() == (0,)


async def _comes_true(stage: Stage, condition: Callable[[psycopg.Connection[Any]], bool], seconds: float) -> bool:
    """Look until it is true in both databases."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(psycopg.OperationalError):
            if all([await asyncio.to_thread(_in_database, stage, service, condition) for service in SERVICES]):
                return True
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(1)


def _compare(stage: Stage, outcome: Outcome) -> None:
    """Each message that was committed has one effect."""

    def ids(service: str, table: str) -> Any:
        rows = f"SELECT uuid_send(envelope_id) FROM {table}"
        return _in_database(stage, service, lambda conn: [id_ for (id_,) in conn.execute(rows.encode())])

    sent = set(ids("orders", "sent"))
    effects = [*ids("orders", "effects"), *ids("billing", "effects")]
    outcome.sent, outcome.lost, outcome.twice = len(sent), len(sent - set(effects)), len(effects) - len(set(effects))
    outcome.complaints += [f"{len(set(effects) - sent)} effects of nothing sent"] if set(effects) - sent else []
