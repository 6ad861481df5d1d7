"""The launch of Spark's JVM, which a Ctrl-C or a SIGTERM ends whole: no JVM stays, and no folder.

pyspark waits for a file in which the JVM writes its port. Whoever is interrupted there removes the folder of that file,
and the JVM, which can write it no more, goes on for ever without anybody that could reach it.

    signal during the launch     the JVM is asked to end, and the signal is passed on when it has ended
    signal before or after       passed on at once: a JVM that was launched ends with this process

A handler of the application's own decides what a signal means: it is called when the launch is over. In other threads
than the main one no signal is handled, and nothing changes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import Popen, TimeoutExpired
from types import CodeType, FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_ENDING_SECONDS: Final = 10
_ENDS_THE_PROCESS: Final = (signal.SIG_DFL, signal.default_int_handler)


@contextmanager
def whole_launch() -> Iterator[None]:
    """Let a signal end the launch of a JVM whole, by whatever pyspark does in this block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from pyspark.java_gateway import launch_gateway

    launch = _Launch(launch_gateway.__code__)
    launch.begin()
    try:
        yield
    finally:
        launch.end()


class _Launch:
    """Handles signals in place of their handlers, for as long as a launch may be under way."""

    def __init__(self, code: CodeType) -> None:
        self._code = code
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int] = {}
        self._heard: list[int] = []
        self._jvm: Popen[Any] | None = None

    def begin(self) -> None:
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before is not None and before is not signal.SIG_IGN:  # None: a handler that Python cannot put back
                self._before[number] = before
                signal.signal(number, self._hear)

    def end(self) -> None:
        """Put the handlers back, and pass on what was heard."""
        if self._jvm is not None:
            _wait(self._jvm)
        for number, before in self._before.items():
            signal.signal(number, before)
        for heard in self._heard[:1]:
            signal.raise_signal(heard)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        launching = self._launching(frame)
        if launching is None:
            self._pass_on(number, frame)
            return
        if self._heard and self._jvm is not None:
            self._jvm.kill()  # asked for the second time
        self._heard.append(number)
        if self._before[signal.Signals(number)] in _ENDS_THE_PROCESS:
            self._jvm = launching.f_locals.get("proc")  # none yet: it is launched whole, and ends with this process
            if self._jvm is not None:
                self._jvm.terminate()

    def _launching(self, frame: FrameType | None) -> FrameType | None:
        while frame is not None and frame.f_code is not self._code:
            frame = frame.f_back
        return frame

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        before = self._before[signal.Signals(number)]
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, before)
            signal.raise_signal(number)


def _wait(jvm: Popen[Any]) -> None:
    try:
        jvm.wait(_ENDING_SECONDS)
    except TimeoutExpired:
        jvm.kill()
        jvm.wait()
