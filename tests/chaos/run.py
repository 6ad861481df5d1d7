"""One run: warm up, let the faults happen, be calm until everything is finished, stop, and read what there is.

start ── warm ── faults ─────────────── calm ─────────────── stop ── history
                 several at once        bounded; producers end
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psycopg

from tests.chaos.faults import FAULTS, NotBegun
from tests.chaos.history import History, read
from tests.chaos.plan import Fault, Plan, plan
from tests.chaos.profiles import Profile
from tests.chaos.stage import Stage, staged
from tests.chaos.watch import Happened, Watch

START_SECONDS = 90.0
LONGEST_CALM_SECONDS = 1_800.0
LOOK_SECONDS = 1.0
REST_SECONDS = 0.5
"""The shortest time between two faults of a lane."""

Tell = Callable[[str], None]


@dataclass
class Outcome:
    """What a run came to, as times of the epoch, seconds and bytes."""

    plan: Plan
    profile: str
    transport: str
    folder: Path
    began: float = 0.0
    calm_at: float = 0.0
    settled_at: float = 0.0
    """The time at which everything was finished; 0 when it was not in time."""
    ended: float = 0.0
    happened: list[Happened] = field(default_factory=list)
    history: History = field(default_factory=History)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    false_deaths: list[str] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)
    """Processes that ended by themselves and were started again."""


async def run(seed: int, profile: Profile, transport: str, folder: Path, tell: Tell) -> Outcome:
    made = plan(seed, profile, transport)
    outcome = Outcome(made, profile.name, transport, folder)
    await asyncio.to_thread(partial(folder.mkdir, parents=True, exist_ok=True))
    async with staged(made, profile, transport, folder) as stage:
        watch = Watch(stage)
        watching = asyncio.create_task(watch.run(), name="watch")
        try:
            await _in_time(_has_begun, stage, START_SECONDS)
            outcome.began = time.time()
            tell(f"warm for {profile.warm_seconds:g} s, then {len(made.faults)} faults")
            await asyncio.sleep(profile.warm_seconds)
            await _let_happen(stage, made, profile.faults_seconds, watch, tell)
            stage.calm.touch()
            outcome.calm_at = time.time()
            tell(f"calm, until nothing has ended for {profile.calm_seconds:g} s")
            if await _settled(stage, profile.calm_seconds):
                outcome.settled_at = time.time()
                tell(f"everything is finished {outcome.settled_at - outcome.calm_at:.1f} s later")
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        circuits = (await asyncio.to_thread(_read, stage)).circuits  # a stopped node leaves none
        complaints = await asyncio.to_thread(stage.fleet.stop)
        outcome.history = await asyncio.to_thread(_read, stage)
        outcome.history.circuits = circuits
        outcome.history.complaints += complaints
    outcome.ended = time.time()
    outcome.happened, outcome.peak_bytes = watch.happened, watch.peak_bytes
    outcome.false_deaths = watch.false_deaths
    outcome.restarts = [*stage.fleet.ended_by_themselves, *watch.poolers_ended]
    return outcome


async def _let_happen(stage: Stage, made: Plan, faults_seconds: float, watch: Watch, tell: Tell) -> None:
    """Carry out each lane; a fault that would begin after the time of faults, since others took longer, is left out."""
    began = time.monotonic()

    async def happen(lane: Sequence[Fault]) -> None:
        for fault in lane:
            await asyncio.sleep(max(REST_SECONDS, began + fault.at - time.monotonic()))
            second = time.monotonic() - began
            if second > faults_seconds:
                return
            seen = Happened(fault, time.time())
            watch.happened.append(seen)
            tell(f"{second:6.1f} s  {fault} for {fault.seconds:g} s")
            try:
                async with FAULTS[fault.kind](stage, fault):
                    await asyncio.sleep(fault.seconds)
            except NotBegun:
                tell(f"{time.monotonic() - began:6.1f} s  {fault} could not be begun, and is left out")
            seen.ended = time.time()

    async with asyncio.TaskGroup() as group:
        for number, lane in enumerate(made.lanes):
            group.create_task(happen(lane), name=f"lane {number}")
    stage.restore()


async def _settled(stage: Stage, seconds: float) -> bool:
    """Look until everything is finished, and return True; False when nothing has come to its end for so long."""
    loop = asyncio.get_running_loop()
    last, ended = loop.time() + LONGEST_CALM_SECONDS, -1
    deadline = loop.time() + seconds
    while True:
        with contextlib.suppress(psycopg.OperationalError):
            history = await asyncio.to_thread(_read, stage)
            if _is_settled(history):
                return True
            if history.progress() > ended:
                ended, deadline = history.progress(), loop.time() + seconds
        if loop.time() > min(deadline, last):
            return False
        await asyncio.sleep(LOOK_SECONDS)


async def _in_time(condition: Callable[[History], bool], stage: Stage, seconds: float) -> bool:
    """Look until the condition is true, and return True; False when it is not in time."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(psycopg.OperationalError):
            if condition(await asyncio.to_thread(_read, stage)):
                return True
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(LOOK_SECONDS)


def _read(stage: Stage) -> History:
    return read(lambda service: stage.server_of(service).connect(service))


def _has_begun(history: History) -> bool:
    """Both services have handled what the other has sent."""
    return {"order", "receipt", "tick"} <= {effect.kind for effect in history.effects}


def _is_settled(history: History) -> bool:
    return not history.missing() and not history.unfinished() and not history.circuits
