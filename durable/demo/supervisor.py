"""The demo from its first server to its verdict.

    databases -> nodes -> until every flight is handled: watch, kill, pause, replace -> stop -> compare

Everything lies in one folder: the server's data, the flights as the airline reads them, the nodes' logs and counts.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from sqlalchemy import MetaData, create_engine

from durable.demo import airline, fleet, observer, punctuality, report
from durable.demo.fleet import SERVICES, SLOTS, Fleet
from durable.demo.flights import FLIGHT_COUNT, data_folder, write_flights
from durable.demo.mishaps import Misfortune, plan
from durable.demo.observer import Observer
from durable.demo.screen import Screen, screen_for
from durable.embedded import Embedded, postgres
from durable.errors import DurableError, InvalidSetting
from durable.storage.migrator import upgrade

DEFAULT_FLIGHTS = 20_000
LOOK_SECONDS = 0.1
STALL_SECONDS = 45.0
"""Without any progress for this long the demo gives up and says what is missing."""
SHORTEST_SECONDS = 6.0
"""A few flights are recorded slowly, so that there is time for all that is to happen."""
TABLES: Mapping[str, MetaData] = {"airline": airline.metadata, "punctuality": punctuality.metadata}


class DemoFailed(DurableError):
    """The demo did not come to its end."""


def run_demo(*, flights: int | None, all_flights: bool, json_output: bool, seed: int | None, keep: Path | None) -> int:
    """Run the demo and return its exit code: 0 when every total is right, 1 when one is not or it got stuck.

    `flights` (default 20,000) or `all_flights` of the data set are sent. With `json_output` one document is printed
    and nothing else. `seed` repeats the choices of an earlier run (not its timing). `keep` names a folder, not there
    yet or empty, for the databases and the logs; otherwise they are removed, unless the demo fails. Raises
    InvalidSetting for values that cannot be, and when the embedded Postgres or the flights are not installed.
    """
    count = _how_many(flights, all_flights)
    data_folder()  # before anything is started
    chosen = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    console = Console()
    folder = _make_folder(keep)
    succeeded = False
    try:
        with _interrupted_by_sigterm(), screen_for(console, count, silent=json_output) as screen:
            evidence = _run(folder, count, chosen, screen)
        if json_output:
            print(report.as_json(evidence))
        else:
            report.show(evidence, console)
        succeeded = not evidence.differences
    except DurableError as error:
        if isinstance(error, InvalidSetting):
            raise
        print(f"the demo failed: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("the demo was interrupted", file=sys.stderr)
    finally:
        _leave_folder(folder, keep is not None or not succeeded, silent=json_output)
    return 0 if succeeded else 1


def _how_many(flights: int | None, all_flights: bool) -> int:
    if all_flights and flights is not None:
        raise InvalidSetting("--flights and --all: give one of them")
    count = FLIGHT_COUNT if all_flights else DEFAULT_FLIGHTS if flights is None else flights
    if not 1 <= count <= FLIGHT_COUNT:
        raise InvalidSetting(f"--flights: {count} is not between 1 and {FLIGHT_COUNT:,}")
    return count


def _make_folder(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="durable-demo-"))
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise InvalidSetting(f"--keep: {keep} is there already; name a new or an empty folder")
    keep.mkdir(parents=True, exist_ok=True)
    return keep.resolve()


def _leave_folder(folder: Path, keep: bool, *, silent: bool) -> None:
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    elif not silent:
        print(f"databases and logs are in {folder}")


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does: with its children and its server."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(folder: Path, flights: int, seed: int, screen: Screen) -> report.Evidence:
    for name in ("logs", "counts"):
        (folder / name).mkdir()
    file = folder / "flights.jsonl"
    write_flights(flights, file)
    with postgres(folder) as server:
        screen.tell(f"Postgres runs, {flights:,} flights are ready, the seed is {seed}")
        urls = {service: _make_database(server, service) for service in SERVICES}
        environments = _environments(folder, urls, file, flights)
        with observer.observing(urls) as watch:
            with fleet.running(folder / "logs", environments) as nodes:
                return _Run(nodes, watch, screen, flights, seed, folder / "counts").to_the_end()


def _make_database(server: Embedded, service: str) -> str:
    """Durable's tables and the service's own; returns the URL."""
    url = server.url(service)
    sync_url = url.replace("postgresql://", "postgresql+psycopg://", 1)
    upgrade(sync_url, "durable")
    engine = create_engine(sync_url)
    TABLES[service].create_all(engine)
    engine.dispose()
    return url


def _environments(
    folder: Path, urls: Mapping[str, str], file: Path, flights: int
) -> dict[str, dict[str, str]]:
    port = _free_port()
    workers = SLOTS * airline.AT_ONCE
    pause = max(0.0, workers * SHORTEST_SECONDS / flights - 0.01)
    own = {
        "airline": {
            "PUNCTUALITY_ADDRESS": f"tcp://127.0.0.1:{port}",
            "AIRLINE_FLIGHTS": str(file),
            "AIRLINE_PAUSE_SECONDS": str(pause),
        },
        "punctuality": {"PUNCTUALITY_LISTENS_ON": f"tcp://127.0.0.1:{port}?reuse_port=1"},
    }
    common = {"COUNTS_FOLDER": str(folder / "counts")}
    return {service: {"DURABLE_DATABASE_URL": urls[service], **common, **own[service]} for service in SERVICES}


def _free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
