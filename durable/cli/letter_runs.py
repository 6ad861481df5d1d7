"""Runs over dead letters: with a progress bar on a terminal, and ended in good order by the first Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import getpass
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import msgspec

from durable.bus import Bus
from durable.cli.output import progress
from durable.errors import StorageUnavailable
from durable.rehearsing import Rehearsed, rehearsal
from durable.resolving import Resolution, Run, resolve
from durable.settings import Settings
from durable.storage import dead_letters, migrator
from durable.storage.database import Database
from durable.storage.dead_letters import DeadLetter, Selection, Stretch

_READ_AT_ONCE = 10  # whole letters, of up to some MiB each


def actor_name() -> str:
    """Who is at work here, as well as the machine knows."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


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
    database, stopping, done = Database(settings), asyncio.Event(), 0
    try:
        await database.transaction(migrator.check_version)
        with _stopped_by_signals(stopping), progress(verb) as show:

            def tell(run: Run) -> None:
                nonlocal done
                done = run.done
                show(run.done, run.total)

            return await resolve(
                database,
                resolution,
                selection,
                replayable=replayable,
                rate=rate,
                limit=limit,
                stopping=stopping,
                tell=tell,
            )
    except StorageUnavailable as error:
        raise StorageUnavailable(f"{error}; {done:,} letters were {verb} before, run it again to go on") from error
    finally:
        await database.close()


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
    while letters := await database.transaction(dead_letters.read, selection, Stretch(after, newest, _READ_AT_ONCE)):
        for letter in letters:
            yield letter
        after = letters[-1].summary.letter_id


@contextmanager
def _stopped_by_signals(stopping: asyncio.Event) -> Iterator[None]:
    """The first asks for an end, the second is not caught any more."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        stopping.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
