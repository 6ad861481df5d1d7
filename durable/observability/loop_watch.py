"""Lag of the event loop, and what keeps it: a blocking call in a handler delays every agent of the process.

A task ticks four times a second. A thread looks at the loop only when a tick is overdue: see
durable.observability.standstill. The warning is written when the loop goes on; for one that never does, the watchdog
asks where it stands.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any, Final, NamedTuple

from durable.agents.handling import HandlingAgent
from durable.application.handlers import Handler
from durable.errors import place_in
from durable.observability.standstill import Standstill, Unseen
from durable.telemetry import Counters, Event, Histogram, Subject, log

_INTERVAL: Final = 0.25  # seconds: a block that is shorter is found now and then, one that is longer every time
_LOOKS: Final = 0.1  # seconds between looks at a loop that is overdue
_LATER_LOOKS: Final = 0.4  # seconds, at one that may never go on
_SILENCE: Final = 60.0  # seconds between warnings of one handler


class Step(NamedTuple):
    """The step of a task that the loop is in. `in_handler`: an async handler is being called in it."""

    task: asyncio.Task[Any]
    in_handler: bool


class LoopWatch:
    """Sleeps, counts by how much it overslept, tells each time that the loop is alive, and what has kept it."""

    def __init__(
        self, alive: Callable[[], None], handling: Callable[[], Collection[HandlingAgent]], counters: Counters
    ) -> None:
        """`handling` returns the handlers of the node that the process is now."""
        self.lag = Histogram()
        self._alive = alive
        self._handling = handling
        self._counters = counters
        self._told: dict[str, float] = {}
        self._thread: _Observer | None = None

    async def run(self) -> None:
        """Watch the event loop until the task is cancelled."""
        self._thread = thread = _Observer(asyncio.get_running_loop())
        thread.start()
        try:
            while True:
                due = thread.due = time.monotonic() + _INTERVAL
                computed = time.thread_time()
                await asyncio.sleep(_INTERVAL)
                self.lag.observe(max(0.0, time.monotonic() - due))
                self._alive()
                self._tell(thread, time.thread_time() - computed)
        finally:
            thread.ended.set()

    def place(self) -> str:
        """Return where the loop stands now, such as `handle orders.placed 0 at orders.py:16`; empty while it turns."""
        return "" if self._thread is None else self._thread.place()

    def _tell(self, thread: _Observer, computed: float) -> None:
        now, standstill, places = thread.take()
        for step, seconds in standstill.found(now, computed).items():
            if step is Unseen.COMPUTATION:
                self._tell_computation(seconds)
                continue
            place = places.get(step)
            handler = self._handler_of(step)
            if handler is None and place is not None:  # else it is no code that the reader could change
                self._tell_task(step.task, seconds, place)
            elif handler is not None:
                self._counters.of(Subject.MESSAGE_TYPE, handler.message_type).add(Event.LOOP_BLOCKED)
                self._tell_handler(handler, seconds, place or "a place outside of the application's code")

    def _handler_of(self, step: Step) -> Handler | None:
        if not step.in_handler:
            return None
        return next((agent.handler for agent in self._handling() if agent.works_in(step.task)), None)

    def _tell_handler(self, handler: Handler, seconds: float, place: str) -> None:
        if self._is_new(handler.message_type):
            log.warning(
                "handler %s of %s blocked the event loop for at least %.1f s, at %s: nothing else ran meanwhile, "
                "heartbeats included; make it a plain def, which runs in a thread, or await asyncio.to_thread()",
                handler.name,
                handler.message_type,
                seconds,
                place,
            )

    def _tell_task(self, task: asyncio.Task[Any], seconds: float, place: str) -> None:
        if self._is_new(place):
            log.warning(
                "task %s blocked the event loop for at least %.1f s, at %s: nothing else ran meanwhile, heartbeats "
                "included; await asyncio.to_thread() for the part that blocks",
                task.get_name(),
                seconds,
                place,
            )

    def _tell_computation(self, seconds: float) -> None:
        working = [each.handler for each in self._handling() if each.handler.is_async and each.statistics().running]
        names = ", ".join(f"{handler.name} of {handler.message_type}" for handler in working)
        if names and self._is_new(names):
            log.warning(
                "a computation blocked the event loop, and all threads, for at least %.1f s; async handlers at work "
                "then: %s; compute in another process, or in shorter steps",
                seconds,
                names,
            )

    def _is_new(self, name: str) -> bool:
        now = time.monotonic()
        self._told = {each: at for each, at in self._told.items() if now - at < _SILENCE}
        return self._told.setdefault(name, now) == now


class _Observer(threading.Thread):
    """A thread that looks at what the loop is in, once its tick is overdue."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="durable loop watch", daemon=True)
        self.due = time.monotonic() + _INTERVAL
        """The time of the next tick, which the loop writes."""
        self.ended = threading.Event()
        self._loop = loop
        self._of_loop = threading.get_ident()
        self._lock = threading.Lock()
        self._standstill: Standstill[Step] | None = None
        self._places: dict[Step, str] = {}
        self._last: Step | None = None

    def run(self) -> None:
        planned = time.monotonic()
        while not self._loop.is_closed():
            now = time.monotonic()
            if self._look(now, now - planned):
                pause = _LOOKS if now - self.due < 10 * _LOOKS else _LATER_LOOKS
            else:
                pause = max(self.due + _LOOKS - now, _LOOKS)
            planned = now + pause
            if self.ended.wait(pause):
                return

    def take(self) -> tuple[float, Standstill[Step], dict[Step, str]]:
        """Return the time, and what was seen since the last tick, and begin anew."""
        with self._lock:
            now, found, places = time.monotonic(), self._standstill or Standstill(self.due), self._places
            self.due = now + _INTERVAL
            self._standstill, self._places, self._last = None, {}, None
            return now, found, places

    def place(self) -> str:
        with self._lock:
            if self._last is None:
                return ""
            place = self._places.get(self._last)
            return self._last.task.get_name() + (f" at {place}" if place else "")

    def _look(self, now: float, late_by: float) -> bool:
        """Note what the loop is in. False when it is not overdue."""
        with self._lock:
            if now <= self.due:
                return False
            if self._standstill is None:
                self._standstill = Standstill(self.due)
            self._last = step = self._step()
            self._standstill.look(now, step, late_by=late_by)
            return True

    def _step(self) -> Step | None:
        task = asyncio.current_task(self._loop)
        if task is None:
            return None
        in_handler, place = _seen(sys._current_frames().get(self._of_loop))
        step = Step(task, in_handler)
        if place is not None:
            self._places.setdefault(step, place)
        return step


def _seen(frame: FrameType | None) -> tuple[bool, str | None]:
    """Tell whether these frames are within a handler's call, and where in the application's code."""
    place, each = place_in(frame), frame
    while each is not None:
        if each.f_code is Handler.run.__code__:
            return True, place
        each = each.f_back
    return False, place
