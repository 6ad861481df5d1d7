"""Many rows changed in one run, as dead letters are resolved: in batches, at a rate, until done or stopped.

    survey --> [ batch: one statement, one transaction ] --> pause --> next batch, from the last row on
                          |
                stopped, or dead: what was committed is done, the rest is as it was, and another run goes on with it

A run ends at the newest row that there was when it began: what it replays may fail again meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypedDict, TypeVar, Unpack

from sqlalchemy import Connection

from durable.storage import dead_letters
from durable.storage.database import Database
from durable.storage.dead_letters import LetterRange, Resolved, Selection, Survey
from durable.tasks.waiting import is_set_within

BATCH_SIZE: Final = 100
_BATCHES_A_SECOND = 4  # at a rate, so that it is even and a stop is prompt


S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)


class Change(Protocol[S_contra]):
    """Change of a range of the selected letters: one statement."""

    def __call__(self, conn: Connection, schema: str, selection: S_contra, stretch: LetterRange, /) -> Resolved: ...


class Count(Protocol[S_contra]):
    """Count of the selected letters."""

    def __call__(self, conn: Connection, schema: str, selection: S_contra) -> Survey: ...


Resolution = Change[Selection]
"""The resolution of letters: dead_letters.replay or discard, with the rest of their arguments."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Pace of a run: at most `rate` letters a second; None: as fast as the database takes them."""

    rate: float | None = None

    @property
    def batch_size(self) -> int:
        return BATCH_SIZE if self.rate is None else min(BATCH_SIZE, math.ceil(self.rate / _BATCHES_A_SECOND))

    def pause(self, done: int, elapsed: float) -> float:
        """Return the seconds to wait after `done` letters in `elapsed` seconds."""
        return 0.0 if self.rate is None else max(0.0, done / self.rate - elapsed)


@dataclass(frozen=True, slots=True)
class Run:
    """Progress of a run."""

    total: int
    """Letters that there were when it began, or that it was limited to."""
    done: int = 0
    waiting: int = 0
    """Letters that are left because their message waits already."""
    taken: int = 0
    """Letters that are left because their ids were used meanwhile."""
    refused: int = 0
    """Letters that the database refuses to change; the log has each with the reason."""
    unfit: int = 0
    """Letters that are no whole envelopes, and cannot be replayed."""
    stopped: bool = False


class RunOptions(TypedDict, total=False):
    """Options of a run, apart from the change that it makes."""

    replayable: bool
    """Only what can be replayed counts."""
    rate: float | None
    """The bound of letters a second."""
    limit: int | None
    stopping: asyncio.Event | None
    tell: Callable[[Run], None]
    """The function called after each batch."""


async def resolve(
    database: Database, resolution: Resolution, selection: Selection, **options: Unpack[RunOptions]
) -> Run:
    """Resolve what is selected, the oldest first, up to the limit; return how far it came.

    Raises StorageUnavailable: the batches before it are done, and so may be the one that it happened in.
    """
    return await run_in_batches(database, dead_letters.survey, resolution, selection, **options)


async def run_in_batches(
    database: Database, count: Count[S], change: Change[S], selection: S, **options: Unpack[RunOptions]
) -> Run:
    """resolve(), for rows of any kind."""
    limit, tell = options.get("limit"), options.get("tell", _tell_nobody)
    stopping, pace = options.get("stopping") or asyncio.Event(), Pace(options.get("rate"))
    survey = await database.transaction(count, selection)
    total, unfit = (
        (survey.replayable, survey.total - survey.replayable) if options.get("replayable") else (survey.total, 0)
    )
    run = Run(total if limit is None else min(total, limit), unfit=unfit)
    after, began = 0, time.monotonic()
    tell(run)
    while run.done < run.total and not stopping.is_set():
        stretch = LetterRange(after, survey.newest, min(pace.batch_size, run.total - run.done))
        resolved = await database.transaction(change, selection, stretch)
        if not resolved.done and not resolved.left:
            break
        after = max(resolved.done + resolved.left)
        taken, refused = len(resolved.taken), len(resolved.refused)
        run = replace(
            run,
            done=run.done + len(resolved.done),
            waiting=run.waiting + len(resolved.left) - taken - refused,
            taken=run.taken + taken,
            refused=run.refused + refused,
        )
        tell(run)
        await is_set_within(stopping, pace.pause(run.done, time.monotonic() - began) if run.done < run.total else 0.0)
    return replace(run, stopped=stopping.is_set() and run.done < run.total)


def _tell_nobody(run: Run) -> None:
    """Show no progress."""
