"""Screen of a running demo: bars on a terminal, lines elsewhere, nothing for --json."""

from __future__ import annotations

import time
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

LINE_SECONDS = 2.0
"""Seconds between lines of progress without a terminal."""


class Screen(Protocol):
    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def tell(self, event: str) -> None:
        """Tell of an event."""
        ...

    def advance(self, recorded: int, handled: int) -> None:
        """Show the number of flights that are done on each side."""
        ...


class Bars:
    """Two bars, with the events above them."""

    def __init__(self, console: Console, flights: int) -> None:
        self._bars = Progress(
            TextColumn("{task.description:>11}"),
            BarColumn(None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._recorded: TaskID = self._bars.add_task("recorded", total=flights)
        self._handled: TaskID = self._bars.add_task("handled", total=flights)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def tell(self, event: str) -> None:
        self._bars.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {event}", highlight=False)

    def advance(self, recorded: int, handled: int) -> None:
        self._bars.update(self._recorded, completed=recorded)
        self._bars.update(self._handled, completed=handled)


class Lines:
    """Plain lines, also for progress now and then."""

    def __init__(self, flights: int) -> None:
        self._flights = flights
        self._began = self._said = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def tell(self, event: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {event}", flush=True)

    def advance(self, recorded: int, handled: int) -> None:
        if time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            self.tell(f"{recorded:,} of {self._flights:,} recorded, {handled:,} handled")


class Silence:
    """Show nothing, for --json."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def tell(self, event: str) -> None: ...

    def advance(self, recorded: int, handled: int) -> None: ...


def screen_for(console: Console, flights: int, *, silent: bool) -> Screen:
    if silent:
        return Silence()
    return Bars(console, flights) if console.is_terminal else Lines(flights)
