"""Runs over dead letters: resolution and rehearsal."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from durable.bus import Bus
from durable.cli.dead_letters.selection import Chosen
from durable.cli.output import progress
from durable.cli.runs import Job, run_job
from durable.dead_letters.bulk import Resolution, Run
from durable.dead_letters.rehearsal import Rehearsed, rehearsal
from durable.storage import dead_letters
from durable.storage.database import Database
from durable.storage.dead_letters import DeadLetter, LetterRange, Selection

_READ_AT_ONCE = 10  # whole letters, of up to some MiB each


async def resolve_all(
    chosen: Chosen,
    change: Resolution,
    *,
    verb: str,
    replayable: bool = False,
    rate: float | None = None,
    limit: int | None = None,
) -> Run:
    """Resolve letters until done or interrupted. Raises StorageUnavailable, with the number resolved so far."""
    job = Job(dead_letters.survey, change, verb, "letters", replayable)
    return await run_job(chosen.settings, job, chosen.selection, rate=rate, limit=limit)


async def rehearse_all(
    bus: Bus, selection: Selection, *, limit: int | None = None, body: bytes | None = None
) -> list[Rehearsed]:
    """Rehearse these letters in turn; with another body if one is given."""
    runtime = bus.runtime
    rehearsed: list[Rehearsed] = []
    try:
        await runtime.check()
        survey = await runtime.database.transaction(dead_letters.survey, selection)
        total = survey.total if limit is None else min(limit, survey.total)
        async with rehearsal(bus) as stage:
            with progress("rehearsed") as show:
                async for letter in _letters(runtime.database, selection, survey.newest):
                    if len(rehearsed) == total:
                        break
                    rehearsed.append(await stage.run(letter if body is None else _edited(letter, body)))
                    show(len(rehearsed), total)
    finally:
        await runtime.stop()
    return rehearsed


def _edited(letter: DeadLetter, body: bytes) -> DeadLetter:
    return msgspec.structs.replace(letter, body=body)


async def _letters(database: Database, selection: Selection, newest: int) -> AsyncIterator[DeadLetter]:
    """Read whole letters, the oldest first."""
    after = 0
    while letters := await database.transaction(
        dead_letters.read, selection, LetterRange(after, newest, _READ_AT_ONCE)
    ):
        for letter in letters:
            yield letter
        after = letters[-1].summary.letter_id
