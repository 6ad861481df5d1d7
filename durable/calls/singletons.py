"""Singletons of this process: services of which one provider over all nodes runs.

    wanted --> held, not sure --> sure --> not sure --> sure        while its lock is seen again and again
                                   |
                                   +--> gone: the lock is lost, or given up

A holder is sure for a short time after it has seen its lock, by a clock that no pause of the process stops. A new
holder begins when the last one cannot be sure any more: for so long two of them would run. So a process that was
paused, or cut off from its database, refuses calls before another one takes them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

Now = Callable[[], float]


def now() -> float:
    """Return the seconds of a clock that goes on while the process, or the machine, is suspended."""
    return time.clock_gettime(_CLOCK) if _CLOCK is not None else time.monotonic()


_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", None)
FOREVER: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Holding:
    """A singleton that this process holds, in this epoch. It is sure of that from a time until a time."""

    epoch: int
    sure_from: float
    sure_until: float

    def is_sure(self, at: float) -> bool:
        return self.sure_from <= at < self.sure_until


class Singletons:
    """Singletons that this process wants, by their versions, and those that it holds. For any thread."""

    def __init__(self, clock: Now = now) -> None:
        self._clock = clock
        self._wanted: Mapping[str, str] = {}
        self._held: dict[str, Holding] = {}
        self._lock = threading.Lock()
        self.is_open = True
        """False while the node ends: what is held is not to be seen again, and nothing more is to be taken."""
        self.is_idle = False
        """True when no call of a singleton runs after close(): then they can be given up in good order."""
        self.on_change: Callable[[], None] = _nothing
        """Told of each singleton that is held, or not any more, in the thread that learns of it."""
        self.everything_is_held = False
        """True where there is one process only, such as in memory."""

    @property
    def wanted(self) -> Mapping[str, str]:
        return self._wanted

    def want(self, versions: Mapping[str, str]) -> None:
        """Take these as all that are wanted."""
        self._wanted = dict(versions)

    def known_epoch(self, service: str) -> int:
        """Return the epoch in which the process holds the service, if perhaps not for sure; 0: it does not."""
        holding = self._held.get(service)
        return holding.epoch if holding is not None else int(self.everything_is_held)

    def epoch_of(self, service: str) -> int:
        """Return the epoch in which the process is sure that it holds the service; 0: it does not, or is not sure."""
        if self.everything_is_held:
            return 1
        holding = self._held.get(service)
        return holding.epoch if holding is not None and holding.is_sure(self._clock()) else 0

    def open(self) -> None:
        """Begin with a new node, which holds nothing yet."""
        self._held.clear()
        self.is_open, self.is_idle = True, False

    def close(self) -> None:
        """Be sure of nothing any more, until open()."""
        self.is_open = False
        with self._lock:
            self._held.clear()
        self.on_change()

    def hold(self, service: str, holding: Holding) -> None:
        """Learn that the lock was taken."""
        with self._lock:
            if self.is_open:
                self._held[service] = holding
        self.on_change()

    def confirm(self, service: str, until: float) -> None:
        """Learn that the lock was seen, which is worth something until then."""
        with self._lock:
            if (holding := self._held.get(service)) is not None:
                self._held[service] = replace(holding, sure_until=until)

    def drop(self, service: str) -> None:
        """Be sure of this one no longer."""
        with self._lock:
            self._held.pop(service, None)
        self.on_change()


def _nothing() -> None:
    pass
