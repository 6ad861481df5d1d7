"""A process that is the bus's own: it ends when it is told to, and never by itself without a word.

SIGTERM, SIGINT    drain and leave, within a bound that a watchdog keeps; a second one ends the process at once,
                   also after the node has left; within 0.3 s it is an echo of the first, for shells and
                   wrappers such as npm pass on what the process has from its terminal already
the bus ended      raise what has ended it
"""

from __future__ import annotations

import asyncio
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from types import FrameType, TracebackType
from typing import Any, Final

from durable.errors import WiringError
from durable.process.last_resort import EXIT_STUCK, end_process
from durable.process.life import Life
from durable.tasks.crew import end
from durable.telemetry import log

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_THREAD_SECONDS: Final = 1.0
_ECHO_SECONDS: Final = 0.3


class SecondSignal:
    """The signal that ends the process at once: any but the first, and its echoes; and one that comes before the bus
    is there to be asked.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._echoes_until = 0.0
        self._has_begun = False

    def begin(self) -> None:
        """Leave the first signal to the bus from now on."""
        self._has_begun = True

    def first_came(self) -> None:
        """Take the signals that follow at once for echoes of the first."""
        self._echoes_until = self._clock() + _ECHO_SECONDS

    def let_echoes_pass(self) -> None:
        """Wait until no echo can come: the interpreter that ends gives up the handlers of signals before it is gone."""
        time.sleep(max(0.0, self._echoes_until - self._clock()))

    def heard(self, number: int, _: FrameType | None) -> None:
        """End the process, unless the signal is an echo."""
        if not self._has_begun:
            end_process(0, "the process ends: %s has come before the bus began", signal.Signals(number).name)
        elif self._clock() >= self._echoes_until:
            end_process(1, "the process ends at once: a second %s has come", signal.Signals(number).name)


class Signals:
    """Inside the block, the first of SIGINT and SIGTERM sets `asked`.

    By handlers of Python's own, which also run while the event loop stands: `first` is called at once.
    """

    def __init__(self, first: Callable[[], None], second: SecondSignal) -> None:
        self.asked = asyncio.Event()
        self._first = first
        self._second = second
        self._loop = asyncio.get_running_loop()
        self._has_asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> asyncio.Event:
        self._before = {number: signal.signal(number, self._heard) for number in _SIGNALS}
        self._second.begin()
        return self.asked

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._has_asked:
            self._second.heard(number, frame)
            return
        self._second.first_came()
        self._has_asked = True
        self._first()
        self._loop.call_soon_threadsafe(self.asked.set)


async def serve(bus: AbstractAsyncContextManager[Any], life: Life, second: SecondSignal | None = None) -> None:
    """Run the bus until a signal asks for its end. Raises the error that has ended it by itself."""
    life.owns_process = True
    with Signals(life.bind, second or SecondSignal()) as asked:
        starting = asyncio.create_task(bus.__aenter__(), name="start the bus")
        asking = asyncio.create_task(asked.wait(), name="wait for a signal")
        try:
            await asyncio.wait([starting, asking], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
                await _until(asking, bus, life)
        finally:
            asking.cancel()
            await end([starting], within=life.stop_seconds)  # a bus that does not start closes what it has opened


async def _until(asking: asyncio.Task[Any], bus: AbstractAsyncContextManager[Any], life: Life) -> None:
    ended = asyncio.create_task(life.ended(), name="watch the bus")
    try:
        await asyncio.wait([asking, ended], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            await ended
    finally:
        ended.cancel()
        await bus.__aexit__(None, None, None)


def run(bus: AbstractAsyncContextManager[Any], life: Life) -> None:
    """serve() as a whole process: threads of handlers that never end do not keep it, and it may have as many open files
    as the system allows, since each destination takes a connection. Raises WiringError inside a running event loop."""
    if asyncio._get_running_loop() is not None:
        raise WiringError(
            "run() starts an event loop, and one runs already: write `await bus.serve()`, or `async with bus`"
        )
    _raise_limit_of_open_files()
    second = SecondSignal()
    for number in _SIGNALS:  # for the time outside Signals, to the end of the process
        signal.signal(number, second.heard)
    try:
        asyncio.run(serve(bus, life, second))
    except SystemExit as error:
        log.critical("the process ends: a task has raised SystemExit(%s)", error.code)
        raise
    finally:
        life.end_watch()
        if hung := _hung_threads():
            end_process(EXIT_STUCK, "the process ends: threads of handlers go on: %s", ", ".join(hung))
        second.let_echoes_pass()


def _raise_limit_of_open_files() -> None:
    """Raise the soft limit to the hard one. Many systems start processes with 1,024, for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS refuses what it calls unlimited
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _hung_threads() -> list[str]:
    """The threads of handlers that do not end."""
    ours = [each for each in threading.enumerate() if each.name.startswith("durable ") and not each.daemon]
    for thread in ours:
        thread.join(_THREAD_SECONDS)
    return [thread.name for thread in ours if thread.is_alive()]
