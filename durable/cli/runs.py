"""Runs over many rows: with a progress bar on a terminal, and ended in good order by the first Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import getpass
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from durable.cli.output import progress
from durable.dead_letters.bulk import Change, Count, Run, run_in_batches
from durable.errors import StorageUnavailable
from durable.settings import Settings
from durable.storage import migrator
from durable.storage.database import Database

S = TypeVar("S")


def actor_name() -> str:
    """Who is at work here, as well as the machine knows."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


async def change_until_done(
    settings: Settings,
    count: Count[S],
    change: Change[S],
    selection: S,
    *,
    verb: str,
    what: str = "messages",
    replayable: bool = False,
    rate: float | None = None,
    limit: int | None = None,
) -> Run:
    """run_in_batches(), until it is done or interrupted. Raises StorageUnavailable, which says how far it came."""
    database, stopping, done = Database(settings), asyncio.Event(), 0
    try:
        await database.transaction(migrator.check_version)
        with stopped_by_signals(stopping), progress(verb) as show:

            def tell(run: Run) -> None:
                nonlocal done
                done = run.done
                show(run.done, run.total)

            return await run_in_batches(
                database,
                count,
                change,
                selection,
                replayable=replayable,
                rate=rate,
                limit=limit,
                stopping=stopping,
                tell=tell,
            )
    except StorageUnavailable as error:
        raise StorageUnavailable(f"{error}; {done:,} {what} were {verb} before, run it again to go on") from error
    finally:
        await database.close()


@contextmanager
def stopped_by_signals(stopping: asyncio.Event) -> Iterator[None]:
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
