"""The parts that run on Spark, in one warm session, each on a private Postgres that listens on loopback."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psycopg

from durable.embedded import Embedded, postgres
from durable.embedded.ports import free_port
from durable.embedded.processes import postmaster
from durable.errors import InvalidSetting
from durable.pipeline.session import spark_session
from tests.benchmarks import archiving, auditing, publishing
from tests.benchmarks.databases import Databases
from tests.benchmarks.processors import Meter, Place
from tests.benchmarks.rows import Timing

JDBC = Path("/usr/share/java/postgresql.jar")
MEMORY = "4g"  # of the JVM: Spark's gigabyte leaves little beside the buffers of two Parquet writers

Run = Callable[[Place, int, int], Sequence[Timing]]
"""With how many rows, and how many rounds."""


class Part(NamedTuple):
    run: Run
    rows: int
    title: str


PARTS: Mapping[str, Part] = {
    "archiving": Part(archiving.run, 3_000_000, "{:,} rows of history with bodies of 320 bytes"),
    "publishing": Part(publishing.run, 1_000_000, "{:,} messages of about 300 bytes"),
    "auditing": Part(auditing.run, 5_000_000, "{:,} messages sent, and as many handled"),
}


def run(names: Sequence[str], rounds: int, rows: int | None = None) -> Iterator[tuple[str, Sequence[Timing]]]:
    """Each part's title and timings, as soon as it is done. `rows` takes the place of the number of each part."""
    if not names:
        return
    if not JDBC.is_file():
        raise InvalidSetting(f"the JDBC driver of Postgres is not at {JDBC}; run: scripts/jdbc.sh")
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--driver-memory {MEMORY} --jars {JDBC} pyspark-shell"
    spark = spark_session(app_name="durable bench")
    try:
        for name in names:
            part = PARTS[name]
            count = rows or part.rows
            with tempfile.TemporaryDirectory() as folder, _on_loopback(Path(folder)) as (url, meter):
                work = Path(folder) / "work"
                work.mkdir()
                yield part.title.format(count), part.run(Place(spark, url, work, meter), count, rounds)
    finally:
        spark.stop()


@contextmanager
def _on_loopback(folder: Path) -> Iterator[tuple[str, Meter]]:
    """The URL of a database on a private server that listens on TCP as well: a JVM speaks nothing else."""
    with postgres(folder) as embedded:
        database = urlsplit(Databases(embedded).fresh()).path
        port = free_port()
        _listen(embedded, port)
        running = postmaster(folder / "data")
        assert running is not None, folder
        yield f"postgresql://postgres@127.0.0.1:{port}{database}", Meter(running.pid)


def _listen(embedded: Embedded, port: int) -> None:
    """Start it again on this port of the loopback interface."""
    with psycopg.connect(embedded.uri(), autocommit=True) as conn:
        for setting in ("listen_addresses = '127.0.0.1'", f"port = {port}"):
            conn.execute(f"ALTER SYSTEM SET {setting}".encode())
    embedded.restart()
