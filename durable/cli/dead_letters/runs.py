"""Runs over dead letters: resolved, or rehearsed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from durable.bus import Bus
from durable.cli.output import progress
from durable.cli.runs import change_until_done
from durable.dead_letters.bulk import Resolution, Run
from durable.dead_letters.rehearsal import Rehearsed, rehearsal
from durable.settings import Settings
from durable.storage import dead_letters
from durable.storage.database import Database
from durable.storage.dead_letters import DeadLetter, LetterRange, Selection

_READ_AT_ONCE = 10  # whole letters, of up to some MiB each


async def resolve_all(
    settings: Settings,
    resolution: Resolution,
    selection: Selection,
    *,
    verb: str,
    replayable: bool = False,
    rate: float | None = None,
    limit: int | None = None,
) -> Run:
    """resolve(), until it is done or interrupted. Raises StorageUnavailable, which says how far it came."""
    return await change_until_done(
        settings,
        dead_letters.survey,
        resolution,
        selection,
        verb=verb,
        what="letters",
        replayable=replayable,
        rate=rate,
        limit=limit,
    )


async def rehearse_all(
    bus: Bus, selection: Selection, *, limit: int | None = None, body: bytes | None = None
) -> list[Rehearsed]:
    """What would become of these letters, each in turn; with another body if one is given."""
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
    """The oldest first."""
    after = 0
    while letters := await database.transaction(
        dead_letters.read, selection, LetterRange(after, newest, _READ_AT_ONCE)
    ):
        for letter in letters:
            yield letter
        after = letters[-1].summary.letter_id
