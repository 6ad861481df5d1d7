"""One run: services, their databases, the network, messages and faults, all from one seed.

0 ......... _SENDING ... _FAULTY ............... all done ........ the end
messages are sent          |  calm: no faults        |  the agents hold nothing, and stop in good order
faults strike              |  all must be done within _BOUND seconds
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from random import Random
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncEngine

from durable.settings import Settings
from tests.simulation.checks import Checks
from tests.simulation.driver import make_engine
from tests.simulation.faults import SLOTS, Fault, Injector, plan
from tests.simulation.loop import State, VirtualLoop
from tests.simulation.network import Network
from tests.simulation.process import Process
from tests.simulation.seams import left_behind, virtual
from tests.simulation.server import Server
from tests.simulation.sql import UnknownStatement, take_unknown
from tests.simulation.workload import A, B, Workload

MESSAGES: Final = 40
_SENDING: Final = 20.0
_FAULTY: Final = 30.0
_BOUND: Final = 200.0  # seconds from calm on; the longest pauses and timeouts add up to less
_STOPPING: Final = 40.0
_SETTLING: Final = 30.0  # for batches without an answer, and deletions that linger


@cache
def settings() -> Settings:
    """Small buffers and short timeouts; all else as by default."""
    five = timedelta(seconds=5)
    return Settings(
        buffer_size=16, batch_size=4, concurrency=3, handler_timeout=five, settling_time=five, drain_timeout=five
    )


@cache
def _engine() -> AsyncEngine:
    return make_engine()


@dataclass
class Outcome:
    """What came of a run."""

    seed: int
    faults: Sequence[Fault]
    violations: list[str]
    covered: set[tuple[str, str]] = field(default_factory=set)
    trace: int = 0
    steps: int = 0
    seconds: float = 0.0
    effects: int = 0
    told: list[str] = field(default_factory=list)


class World:
    """All that is in one run."""

    def __init__(self, seed: int, faults: Sequence[Fault] | None = None, *, tells: bool = False) -> None:
        self.seed = seed
        rng = Random(seed)
        self.loop = VirtualLoop()
        self.outside = Context()
        self.settings = settings()
        self.engine = _engine()
        planned = plan(Random(rng.random()), _SENDING)  # in any case: what is drawn next is the same
        self.faults = planned if faults is None else list(faults)
        self.servers = {name: Server(name, self.loop, Random(rng.random())) for name in (A, B)}
        self.network = Network(self.loop, Random(rng.random()))
        self.workload = Workload(self, Random(rng.random()), MESSAGES, _SENDING)
        self.checks = Checks(self)
        self.slots: dict[str, Process] = {}
        self.outages = 0
        self._rng = Random(rng.random())
        self._skewed = self._rng.random() < 0.25
        self._injector = Injector(self, self.faults)
        self._violations: list[str] = []
        self._covered: set[tuple[str, str]] = set()
        self._trace = 0
        self._told: list[str] | None = [] if tells else None
        self._is_ending = False

    # ------------------------------------------------------------------ what its parts tell

    def violation(self, text: str) -> None:
        if self.loop.is_closed():
            return
        told = f"{self.loop.time():.3f} s: {text}"
        self._violations.append(told)
        self.note(told)

    def note(self, text: str) -> None:
        """Note an event: the trace of two runs is the same."""
        self._trace = zlib.crc32(f"{self.loop.time()!r} {text}".encode(), self._trace)
        if self._told is not None:
            self._told.append(f"{self.loop.time():9.4f}  {text}")

    def cover(self, kind: str, process: Process) -> None:
        self._covered.add((kind, process.place))
        self.note(f"{kind} {process} at: {process.place}")

    @property
    def is_troubled(self) -> bool:
        return any(server.is_troubled for server in self.servers.values())

    # ------------------------------------------------------------------ processes

    def process_of(self, service: str) -> Process | None:
        """One of the processes of a service that run."""
        found = [
            each
            for each in self.slots.values()
            if each.service == service and each.is_ready and each.state is State.RUNNING
        ]
        return self._rng.choice(found) if found else None

    def gone(self, process: Process) -> None:
        """A process has ended: another one takes its slot, after a moment."""
        process.state, process.is_ready = State.DEAD, False
        name = str(process)
        if self.slots.get(name) is process and not self._is_ending:
            after = self._rng.uniform(0.1, 3)
            self.loop.call_later(after, self._boot, process.service, process.slot, context=self.outside)

    def _boot(self, service: str, slot: int) -> None:
        offset = timedelta(hours=self._rng.choice((-1, 0, 1))) if self._skewed else timedelta(0)
        process = Process(self, service, slot, offset)
        self.slots[str(process)] = process
        process.boot()

    # ------------------------------------------------------------------ the run

    def run(self) -> Outcome:
        with left_behind(), virtual(self, self.seed), self.loop:
            with suppress(UnknownStatement):
                self._run()
            for sql in take_unknown():
                self.violation(f"the simulation does not know this statement:\n{sql}")
        effects = sum(len(server.store.tables["effects"].rows) for server in self.servers.values())
        return Outcome(
            self.seed,
            self.faults,
            self._violations,
            self._covered,
            self._trace,
            self.loop.steps,
            self.loop.time(),
            effects,
            self._told or [],
        )

    def _run(self) -> None:
        loop = self.loop
        for service in (A, B):
            for slot in range(SLOTS):
                self._boot(service, slot)
        self.workload.start()
        self._injector.start()
        self._run_to(_FAULTY)
        self._injector.calm()
        self.note("calm")
        deadline = loop.time() + _BOUND
        while not self._is_done() and loop.time() < deadline:
            self._run_to(loop.time() + 0.5)
        if not self._is_done():
            unfinished = self.checks.unfinished()
            self.violation(f"I10: {len(unfinished)} left {_BOUND:g} s after calm, such as {unfinished[:3]}")
            return
        deadline = loop.time() + _SETTLING
        while self.checks.idle() and loop.time() < deadline:
            self._run_to(loop.time() + 0.5)
        for text in self.checks.idle():
            self.violation(f"I6: with nothing to do, {text}")
        self.checks.fates()
        self._stop()

    def _run_to(self, time: float) -> None:
        """Run until this time, and look at the agents at each second."""
        while self.loop.time() < time:
            self.loop.run(lambda: False, limit=min(time, self.loop.time() + 1))
            self.checks.held()
        for failure in self.loop.failures:
            self.violation(f"an exception that no task has taken: {failure}")
        self.loop.failures.clear()

    def _is_done(self) -> bool:
        return self.workload.left == 0 and not self.checks.unfinished()

    def _stop(self) -> None:
        """Stop all processes in good order."""
        self._is_ending = True
        stopping: list[Any] = [
            self.loop.start(process.stop(), process.context.copy(), f"stop {process}")
            for process in self.slots.values()
            if process.is_ready
        ]
        self.loop.run(lambda: all(task.done() for task in stopping), limit=self.loop.time() + _STOPPING)
        left = [task.get_name() for task in stopping if not task.done()]
        if left:
            self.violation(f"I9: not done within {_STOPPING:g} s: {', '.join(left)}")


def run(seed: int, faults: Sequence[Fault] | None = None, *, tells: bool = False) -> Outcome:
    """Run a seed, with its own faults or with these."""
    return World(seed, faults, tells=tells).run()
