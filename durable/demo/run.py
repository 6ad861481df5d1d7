"""`durable-agent demo`: arguments in, exit code out."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from rich.console import Console

from durable.demo import operators, report, roads, stage, supervisor
from durable.demo.flights import FLIGHT_COUNT, data_folder
from durable.demo.screen import screen_for
from durable.demo.verdict import Evidence
from durable.errors import DurableError, InvalidSetting
from durable.grammar import several

DEFAULT_FLIGHTS = 20_000
WIDTH = 120
"""The width of the report without a terminal."""


class Wish(NamedTuple):
    """Options of a run."""

    flights: int
    seed: int
    transport: str


def run_demo(
    *,
    flights: int | None,
    all_flights: bool,
    json_output: bool,
    seed: int | None,
    keep: Path | None,
    transport: str = "tcp",
    shows_console: bool = False,
) -> int:
    """Run the demo and return its exit code: 0 when every total is right, 1 when one is not or it got stuck.

    `flights` (default 20,000) or `all_flights` of the data set are sent, over the `transport` tcp, http or rabbitmq.
    With `json_output` one document is printed and nothing else. `seed` repeats the choices of an earlier run (not its
    timing). `keep` names a folder, not there yet or empty, for the databases and the logs; otherwise they are removed,
    unless the demo fails. With `shows_console` a console of both services is served meanwhile, and on a terminal until
    Ctrl-C. Raises InvalidSetting for values that cannot be, and when something that the demo needs is
    not installed.
    """
    wish = wish_for(flights, all_flights, seed, transport)
    folder = stage.make_folder(keep)
    succeeded, is_kept = False, True
    try:
        with interrupted_by_sigterm():
            evidence = play(folder, wish, silent=json_output, shows_console=shows_console)
        if json_output:
            print(report.as_json(evidence))
        succeeded = not evidence.differences
        is_kept = keep is not None or not succeeded
    except (InvalidSetting, KeyboardInterrupt):
        is_kept = keep is not None
        raise
    except DurableError as error:
        print(f"the demo failed: {error}", file=sys.stderr)
    finally:
        if is_kept:
            print(f"databases, logs and counts are in {folder}", file=sys.stderr)
        else:
            stage.remove_folder(folder)
    return 0 if succeeded else 1


def wish_for(flights: int | None, all_flights: bool, seed: int | None, transport: str) -> Wish:
    """Build the wish. Raises InvalidSetting for impossible values and missing packages, before any process starts."""
    count = _how_many(flights, all_flights)
    roads.check(transport)
    data_folder()
    return Wish(count, random.SystemRandom().randrange(1_000_000) if seed is None else seed, transport)


def play(folder: Path, wish: Wish, *, silent: bool, bodies: bool = False, shows_console: bool = False) -> Evidence:
    """Run in this folder, show what happens and what it came to, and leave that there."""
    console = console_of_some_width()
    with stage.prepared(folder, wish.flights, wish.transport, bodies=bodies) as ready, ExitStack() as stack:
        with screen_for(console, wish.flights, silent=silent) as screen:
            screen.tell(
                f"Postgres is running; {several(wish.flights, 'flights')} over {wish.transport}; seed {wish.seed}"
            )
            shown = stack.enter_context(operators.console(ready)) if shows_console else None
            if shown is not None:
                screen.tell(f"console: {shown.url} token: {shown.token}")
            evidence = supervisor.run(ready, wish.seed, screen)
        ready.result.write_text(report.as_json(evidence))
        if not silent:
            report.show(evidence, console)
        if shown is not None and sys.stdin.isatty():
            console.print(f"the console at {shown.url} stays until Ctrl-C; its token: {shown.token}")
            with suppress(KeyboardInterrupt):
                shown.wait()
    return evidence


def console_of_some_width() -> Console:
    """Return a console for a terminal, or for any other output."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    return console


def _how_many(flights: int | None, all_flights: bool) -> int:
    if all_flights and flights is not None:
        raise InvalidSetting("--flights and --all: give one of them")
    count = FLIGHT_COUNT if all_flights else DEFAULT_FLIGHTS if flights is None else flights
    if not 1 <= count <= FLIGHT_COUNT:
        raise InvalidSetting(f"--flights: {count} is not between 1 and {FLIGHT_COUNT:,}")
    return count


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does: with its nodes and its servers."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
