"""Runs over many rows: with a progress bar on a terminal, and an orderly stop at the first Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import getpass
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Generic, NamedTuple, TypeVar

import typer

from durable.cli.output import is_json, progress
from durable.dead_letters.bulk import Change, Count, Run, run_in_batches
from durable.errors import InvalidSetting, StorageUnavailable
from durable.settings import Settings
from durable.storage.connection_names import OF_COMMANDS
from durable.storage.database import Database
from durable.storage.readiness import check_ready

S = TypeVar("S")

All = Annotated[bool, typer.Option("--all", help="select everything when no filter is given")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="largest number to change")]
Yes = Annotated[bool, typer.Option("--yes", help="do not ask")]
By = Annotated[str | None, typer.Option("--by", metavar="NAME", help="name to record; default: USER@HOST")]


class Work(NamedTuple):
    """The extent of a run, and the name it is recorded under."""

    everything: bool
    limit: int | None
    actor: str


@dataclass(frozen=True, slots=True)
class Job(Generic[S]):
    """One change of many rows, and the words that tell of it: `replayed` `letters`."""

    count: Count[S]
    change: Change[S]
    verb: str
    noun: str
    replayable: bool = False


def actor_name(by: By = None) -> str:
    """Name the operator: as given, else the user and host of this process."""
    if by:
        return by
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def confirm(question: str, refusal: str | None, *, yes: bool) -> None:
    """Ask on a terminal. Raises InvalidSetting off a terminal if there is a refusal, and Abort for the answer no."""
    if yes:
        return
    if not is_json() and sys.stdin.isatty():
        typer.confirm(question, abort=True, err=True)
    elif refusal is not None:
        raise InvalidSetting(refusal)


def work_options(every: All = False, limit: Limit = None, by: By = None) -> Work:
    """Read the options that every run takes."""
    return Work(every, limit, actor_name(by))


async def run_job(
    settings: Settings, job: Job[S], selection: S, *, rate: float | None = None, limit: int | None = None
) -> Run:
    """Change rows in batches until done or interrupted. Raises StorageUnavailable, with the number changed so far."""
    database, stopping, done = Database(settings, OF_COMMANDS), asyncio.Event(), 0
    try:
        await database.transaction(check_ready)
        with stopped_by_signals(stopping), progress(job.verb) as show:

            def tell(run: Run) -> None:
                nonlocal done
                done = run.done
                show(run.done, run.total)

            return await run_in_batches(
                database,
                job.count,
                job.change,
                selection,
                replayable=job.replayable,
                rate=rate,
                limit=limit,
                stopping=stopping,
                tell=tell,
            )
    except StorageUnavailable as error:
        raise StorageUnavailable(
            f"{error}; {done:,} {job.noun} were {job.verb}: run the command again for the rest"
        ) from error
    finally:
        await database.close()


@contextmanager
def stopped_by_signals(stopping: asyncio.Event) -> Iterator[None]:
    """Set the event at the first SIGINT or SIGTERM; a second one ends the process."""
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
