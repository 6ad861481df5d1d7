"""Resolutions of many dead letters, which go on in this process while their pages are looked at."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from durable.dead_letters.bulk import Resolution, Run, RunOptions, resolve
from durable.errors import DurableError
from durable.redaction import shown
from durable.storage.database import Database
from durable.storage.dead_letters import Selection
from durable.telemetry import log

_MOST: Final = 100
_LONGEST_ERROR: Final = 1_000


@dataclass
class Progress:
    """A run, as far as it is."""

    name: str
    what: str
    verb: str
    actor: str
    run: Run = field(default_factory=lambda: Run(0))
    error: str = ""
    is_over: bool = False
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def percent(self) -> int:
        return 100 if self.is_over else 100 * self.run.done // max(1, self.run.total)


class Runs:
    """The last runs of this process."""

    def __init__(self) -> None:
        self._runs: dict[str, Progress] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, name: str) -> Progress | None:
        return self._runs.get(name)

    def begin(
        self,
        database: Callable[[], Database],
        change: Resolution,
        selection: Selection,
        progress: Progress,
        rate: float | None = None,
    ) -> Progress:
        """Begin a run, which is found under its name from now on."""
        while len(self._runs) >= _MOST and (over := next((n for n, p in self._runs.items() if p.is_over), None)):
            del self._runs[over]
        self._runs[progress.name] = progress
        task = asyncio.create_task(
            self._go_on(database(), change, selection, progress, rate), name=f"console: {progress.what}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return progress

    async def _go_on(
        self, database: Database, change: Resolution, selection: Selection, progress: Progress, rate: float | None
    ) -> None:
        def tell(run: Run) -> None:
            progress.run = run

        options: RunOptions = {"stopping": progress.stopping, "tell": tell, "rate": rate}
        options["replayable"] = progress.verb == "replayed"
        try:
            progress.run = await resolve(database, change, selection, **options)
        except DurableError as error:
            progress.error = f"{type(error).__name__}: {error}"
            log.warning("console: %s ended early: %s", progress.what, error)
        except Exception as error:
            progress.error = shown(f"{type(error).__name__}: {error}", _LONGEST_ERROR)
            log.exception("console: %s ended early", progress.what)
        finally:
            progress.is_over = True


def new_name() -> str:
    """A name that nobody guesses."""
    return secrets.token_urlsafe(12)
