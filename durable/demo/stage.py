"""Stage of a run: a folder, the flights, a server, two databases, a road between them.

FOLDER/data             the server's data
FOLDER/rabbitmq         the broker's data and its log, if there is a broker
FOLDER/flights.jsonl    the flights as the airline reads them
FOLDER/logs, counts     what each node writes
FOLDER/result.json      what it came to, in the end
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import MetaData, create_engine

from durable.demo import airline, punctuality, roads
from durable.demo.fleet import SERVICES, SLOTS
from durable.demo.flights import write_flights
from durable.demo.roads import Road
from durable.embedded import Embedded, postgres
from durable.errors import InvalidSetting
from durable.storage.migrator import upgrade

SHORTEST_SECONDS = 5.0
"""A few flights are recorded slowly, so that there is time for all that is to happen."""
BUSY = 0.6
"""And are handled slowly, so that who is to be hit has work in hand: receivers are busy for this share of that time."""
RESULT = "result.json"
TABLES: Mapping[str, MetaData] = {"airline": airline.metadata, "punctuality": punctuality.metadata}


@dataclass(frozen=True, slots=True)
class Stage:
    """`urls` of the databases by service; `environments` of their nodes."""

    folder: Path
    flights: int
    road: Road
    urls: Mapping[str, str]
    environments: Mapping[str, dict[str, str]]

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def counts(self) -> Path:
        return self.folder / "counts"

    @property
    def result(self) -> Path:
        return self.folder / RESULT


def make_folder(keep: Path | None) -> Path:
    """The folder to keep, or a temporary one. Raises InvalidSetting when there is something in it."""
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="durable-demo-"))
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise InvalidSetting(f"--keep: {keep} is there already; name a new or an empty folder")
    keep.mkdir(parents=True, exist_ok=True)
    return keep.resolve()


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def prepared(folder: Path, flights: int, transport: str, *, bodies: bool = False) -> Iterator[Stage]:
    """Prepare a run and start its servers; they are stopped at the end, and the folder stays.

    With `bodies` both services keep the messages themselves in their history, so that they can be replayed from there.
    """
    for name in ("logs", "counts"):
        (folder / name).mkdir()
    file = folder / "flights.jsonl"
    write_flights(flights, file)
    with roads.opened(transport, folder) as road, postgres(folder) as server:
        urls = {service: make_database(server, service) for service in SERVICES}
        yield Stage(folder, flights, road, urls, _environments(folder, road, urls, file, flights, bodies))


def make_database(server: Embedded, service: str) -> str:
    """A database with durable's tables and the service's own; returns its URL."""
    url = server.url(service)
    sync_url = url.replace("postgresql://", "postgresql+psycopg://", 1)
    upgrade(sync_url, "durable")
    engine = create_engine(sync_url)
    TABLES[service].create_all(engine)
    engine.dispose()
    return url


def _environments(
    folder: Path, road: Road, urls: Mapping[str, str], file: Path, flights: int, bodies: bool
) -> dict[str, dict[str, str]]:
    pause_seconds = _pause_seconds(flights)
    own = {
        "airline": {
            "PUNCTUALITY_ADDRESS": road.sends_to,
            "AIRLINE_FLIGHTS": str(file),
            "AIRLINE_PAUSE_SECONDS": str(pause_seconds * airline.AT_ONCE),
        },
        "punctuality": {
            "PUNCTUALITY_LISTENS_ON": road.listens_on,
            "PUNCTUALITY_PAUSE_SECONDS": str(pause_seconds * BUSY),
        },
    }
    shared = {
        "COUNTS_FOLDER": str(folder / "counts"),
        "DURABLE_HISTORY_BODIES": str(bodies).lower(),
        **road.settings,
    }
    return {service: {"DURABLE_DATABASE_URL": urls[service], **shared, **own[service]} for service in SERVICES}


def _pause_seconds(flights: int) -> float:
    """Return the pause of a node after each flight, so that a run takes SHORTEST_SECONDS; 0 when it does anyway."""
    pause = SHORTEST_SECONDS * SLOTS / flights
    return pause if pause > 0.001 else 0.0
