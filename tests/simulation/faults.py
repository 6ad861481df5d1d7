"""The faults of a run: made from the seed, each one a value, so that a run can be repeated with some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

from durable.errors import DurableError
from tests.simulation.loop import State
from tests.simulation.network import Weather
from tests.simulation.process import Process
from tests.simulation.server import CommitFault, Server
from tests.simulation.workload import CLASSES, A, B

if TYPE_CHECKING:
    from tests.simulation.world import World

SLOTS: Final = 2
_MOST_STEPS: Final = 150
_LINKS: Final = ((A, B), (B, A))


@dataclass(frozen=True)
class Fault:
    """A fault: from when on, of what, for how long, and how much of it."""

    kind: str
    at: float
    target: str
    seconds: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        told = f"{self.at:7.3f} s  {self.kind} {self.target}"
        told += f", for {self.seconds:.3g} s" if self.seconds else ""
        return told + (f" ({self.amount:.3g})" if self.amount else "")


def plan(rng: Random, seconds: float) -> list[Fault]:
    """Choose the faults of a run of so many seconds."""
    chosen = [_choose(rng, seconds) for _ in range(rng.randint(1, 7))]
    return sorted(chosen, key=lambda fault: fault.at)


def _choose(rng: Random, seconds: float) -> Fault:
    kind = rng.choice(
        ("kill", "kill", "kill", "freeze", "freeze", "stop", "outage", "commits", "commits", "breaks", "slow", "drops",
         "doubles", "delays", "silence", "pause")
    )  # fmt: skip
    at = rng.uniform(0, seconds)
    slot = f"{rng.choice((A, B))}{rng.randrange(SLOTS)}"
    service = rng.choice((A, B))
    link = "->".join(rng.choice(_LINKS))
    match kind:
        case "kill":
            return Fault(kind, at, slot, rng.choice((0.0, 0.01, 3.0, 11.0)), rng.randrange(_MOST_STEPS))
        case "freeze":
            return Fault(kind, at, slot, rng.choice((0.3, 3.0, 12.0, 30.0, 60.0)), rng.randrange(_MOST_STEPS))
        case "stop":
            return Fault(kind, at, slot)
        case "outage":
            return Fault(kind, at, service, rng.choice((0.05, 1.0, 5.0, 12.0)))
        case "commits":
            how = rng.choice(list(CommitFault)).name
            return Fault(kind, at, f"{service} {how}", rng.choice((1.0, 5.0, 15.0)), rng.choice((0.1, 0.5, 1.0)))
        case "breaks":
            return Fault(kind, at, service, rng.choice((1.0, 5.0, 15.0)), rng.choice((0.02, 0.1, 0.5)))
        case "slow":
            return Fault(kind, at, service, rng.choice((1.0, 5.0, 15.0)), rng.choice((20.0, 200.0, 1_000.0)))
        case "pause":
            target = rng.choice(
                ("handler sim.plain", "handler sim.keyed", "key k0", "destination sim://b", "listener b")
            )
            return Fault(kind, at, target, rng.choice((0.5, 3.0, 10.0)))
        case "silence":
            return Fault(kind, at, link, rng.choice((1.0, 12.0, 30.0)))
        case _:
            return Fault(kind, at, link, rng.choice((1.0, 5.0, 20.0)), rng.choice((0.1, 0.3, 0.8)))


class Injector:
    """Makes the faults of one run happen, and ends them all when it is calm."""

    def __init__(self, world: World, faults: Sequence[Fault]) -> None:
        self._world = world
        self._loop = world.loop
        self._faults = faults
        self._is_calm = False
        self._endings: list[Callable[[], None]] = []

    def start(self) -> None:
        for fault in self._faults:
            self._later(fault.at, self._strike, fault)

    def calm(self) -> None:
        """End every fault."""
        self._is_calm = True
        for end in self._endings:
            end()
        for process in self._world.slots.values():
            process.steps_left = None
            if process.state is State.FROZEN:
                self._loop.resume(process)

    def _later(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        self._loop.call_later(seconds, function, *args, context=self._world.outside)

    def _strike(self, fault: Fault) -> None:
        if self._is_calm:
            return
        self._world.note(str(fault))
        kind, target = fault.kind, fault.target
        if kind in ("kill", "freeze"):
            process = self._world.slots[target]
            process.steps_left = int(fault.amount)
            process.struck = lambda: self._hit(process, fault)
        elif kind == "stop":
            self._stop(self._world.slots[target])
        elif kind in ("outage", "breaks", "slow", "commits"):
            self._trouble(self._world.servers[target.split()[0]], fault)
        elif kind == "clock":
            self._set_clock(self._world.servers[target], fault)
        elif kind == "pause":
            self._pause(fault)
        else:
            self._shake(fault)

    def _hit(self, process: Process, fault: Fault) -> None:
        """The process has come to its last step."""
        self._world.cover(fault.kind, process)
        if fault.kind == "kill":
            process.kill(fault.seconds)
            self._world.gone(process)
        else:
            process.freeze(fault.seconds, loses_lock=int(fault.amount) % 2 == 0)

    def _stop(self, process: Process) -> None:
        if process.is_ready and process.state is State.RUNNING:
            self._world.cover("stop", process)
            self._loop.start(process.stop(), process.context.copy(), f"stop {process}")

    def _pause(self, fault: Fault) -> None:
        kind, name = fault.target.split(" ", 1)
        process = self._world.process_of(A if kind == "destination" else B)
        if process is None:
            return
        bus, named = process.bus, {} if kind == "handler" else {kind: name}
        cls = CLASSES[name.removeprefix("sim.")] if kind == "handler" else None

        async def pause() -> None:
            with suppress(DurableError):
                await bus.pause(cls, for_=fault.seconds, **named)

        self._loop.start(pause(), process.context.copy(), "an operator pauses")

    # ------------------------------------------------------------------ for a time

    def _during(self, fault: Fault, end: Callable[[], None]) -> None:
        self._endings.append(end)
        self._later(fault.seconds, end)

    def _trouble(self, server: Server, fault: Fault) -> None:
        world = self._world
        world.outages += 1
        for process in world.slots.values():
            if process.server is server:
                world.cover(fault.kind, process)
        match fault.kind:
            case "outage":
                server.stop()
                self._during(fault, server.start)
            case "breaks":
                server.break_share = fault.amount
                self._during(fault, lambda: setattr(server, "break_share", 0.0))
            case "slow":
                server.slowness = fault.amount
                self._during(fault, lambda: setattr(server, "slowness", 1.0))
            case _:
                server.commit_fault, server.commit_share = CommitFault[fault.target.split()[1]], fault.amount
                self._during(fault, lambda: setattr(server, "commit_share", 0.0))

    def _set_clock(self, server: Server, fault: Fault) -> None:
        server.clock_error = fault.amount
        if fault.seconds:
            self._during(fault, lambda: setattr(server, "clock_error", 0.0))

    def _shake(self, fault: Fault) -> None:
        network, world = self._world.network, self._world
        origin, target = fault.target.split("->")
        link = origin, target
        for process in world.slots.values():
            if process.service == origin:
                world.cover(fault.kind, process)
        if fault.kind == "silence":
            network.silent.add(link)
            self._during(fault, lambda: network.silent.discard(link))
        else:
            shares = {fault.kind: fault.amount, "longest_delay": 15.0}
            network.weather[link] = Weather(**shares)
            self._during(fault, lambda: network.weather.pop(link, None) and None)
