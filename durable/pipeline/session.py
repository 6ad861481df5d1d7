"""The Spark session that the pipeline's jobs run on.

spark_session()                                local[*]: in this process
spark_session(master="spark://host:7077")      on a cluster
spark_session(remote="sc://host:15002")        over Spark Connect: no Java here
under spark-submit, or where one exists        the session that is there
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from durable import errors
from durable.errors import DurableError, InvalidSetting, needs
from durable.pipeline.launching import whole_launch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.client.retries import RetryPolicy

__all__ = ["spark_session"]

OLDEST_JAVA = 17
_JVMS = Path("/usr/lib/jvm")
_ANSWER_SECONDS = 10
_LOCAL_PARTITIONS = 4  # of a shuffle: Spark's 200 are for a cluster

_NO_CONNECTOR = re.compile(r"Class org\.apache\.hadoop\.fs\.\S+ not found|No FileSystem for scheme")

_EXCEPTION = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(\S.*)")
"""The last line of a traceback of Python's, which is the exception."""
_QUOTED = re.compile(r"""(?<!\w)(["'])(?:\\.|(?!\1(?!\w)).)*(?:\1|$)""")
"""A text in quotes, or the rest of a line after a quote that is not closed; apostrophes are no quotes."""

_DATA_FILE = re.compile(r"""(["'])\S*part-[\w.-]+\.parquet\1""")
"""A quoted path of a file of data, which is no value of a row."""
_UNREADABLE = re.compile(r"Encountered error while reading file (\S+\.parquet)")
_CAUSE = re.compile(r"^Caused by: [\w.$]+: (.+)$", re.MULTILINE)

_EVERYWHERE = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
_LOCAL = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": str(_LOCAL_PARTITIONS),
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",  # throughput: nobody waits for a pause to end
}

FEW_ROWS: Final[Mapping[str, str]] = {
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC -XX:TieredStopAtLevel=1",
    "spark.sql.codegen.wholeStage": "false",
}
"""Settings of a session for few rows: it spends no seconds on compiling what then runs for milliseconds."""


def spark_session(
    *,
    master: str | None = None,
    remote: str | None = None,
    app_name: str = "durable",
    settings: Mapping[str, str] = MappingProxyType({}),
) -> SparkSession:
    """Return the existing session, or a new one. Times are UTC in either.

    `settings` are for a new one in this process, such as FEW_ROWS. Raises InvalidSetting when pyspark is not installed,
    Java is missing or too old, both places are given, or no server answers at `remote`.
    """
    check_session(master, remote)
    from pyspark.sql import SparkSession

    existing = SparkSession.getActiveSession()
    if existing is not None:
        return _configured(existing)
    builder = SparkSession.builder.appName(app_name)
    if remote is not None:
        _must_answer(remote)
        session = builder.remote(remote).getOrCreate()
        session.client.set_retry_policies([_patience(remote)])
        return _configured(session)
    if not _is_submitted():
        os.environ["JAVA_HOME"] = str(find_java())
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        where = master or "local[*]"
        here = _LOCAL | dict(settings) if where.startswith("local") else {}
        builder = builder.master(where)
        for name, value in (_EVERYWHERE | here).items():
            builder = builder.config(name, value)
    elif master is not None:
        raise InvalidSetting("--master: spark-submit has chosen it already; give it to spark-submit")
    with whole_launch():
        return _configured(builder.getOrCreate())


def check_session(master: str | None, remote: str | None) -> None:
    """Raise InvalidSetting, as spark_session() does, for what can be known before Spark is started."""
    if master is not None and remote is not None:
        raise InvalidSetting("--master and --remote: give one of them; a Spark Connect server has its own master")
    for option, place in (("--master", master), ("--remote", remote)):
        if place is not None and not place.strip():
            raise InvalidSetting(f"{option}: names no place; give a URL, or leave it out")
    with needs_spark():
        from pyspark.sql import SparkSession
    if remote is None and not _is_submitted() and SparkSession.getActiveSession() is None:
        find_java()


def _must_answer(remote: str) -> None:
    """Spark itself would try for ten minutes."""
    from pyspark.sql.connect.client import DefaultChannelBuilder

    try:
        host, _, port = DefaultChannelBuilder(remote).endpoint.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except (ValueError, OSError) as error:
        raise InvalidSetting(
            f"--remote {remote}: no Spark Connect server answers there ({error}); give sc://host:port"
        ) from error


def _patience(remote: str) -> RetryPolicy:
    from pyspark.sql.connect.client import DefaultChannelBuilder

    from durable.pipeline.remote import Patience

    return Patience(DefaultChannelBuilder(remote).endpoint)  # the URL may hold a token


def needs_spark() -> AbstractContextManager[None]:
    """Raise InvalidSetting, which says what to install, when an import in this block fails."""
    return needs("the pipeline", extra="spark")


@contextmanager
def spark_errors() -> Iterator[None]:
    """Translate a failure of a task to the error that was raised there, or to one line of Spark's own."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise _raised_in_task(str(error)) from error


def _raised_in_task(said: str) -> DurableError:
    """Find the error in the text of a traceback; only text crosses processes. Values of rows are not repeated."""
    for name, message in re.findall(r"^(?:durable\.errors\.)(\w+): (.+)$", said, re.MULTILINE):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, DurableError):
            return kind(message)
    if _NO_CONNECTOR.search(said):
        return InvalidSetting(
            "Spark has no connector for this object store; set PYSPARK_SUBMIT_ARGS='--packages "
            "org.apache.hadoop:hadoop-aws:VERSION pyspark-shell', or hadoop-azure, of the version of Spark's own Hadoop"
        )
    if raised := _EXCEPTION.findall(said):  # the last one was raised because of the others
        exception = _QUOTED.sub(lambda found: found[0] if _DATA_FILE.fullmatch(found[0]) else "'...'", raised[-1])
        return DurableError(f"Spark failed: {exception} (in a Python worker)")
    if unreadable := _UNREADABLE.search(said):
        why = _QUOTED.sub("'...'", (_CAUSE.findall(said) or ["its cause is not known"])[-1])
        return DurableError(f"Spark failed: file {unreadable[1]} cannot be read: {why}")
    lines = [line for line in said.splitlines() if line.strip()] or ["it said nothing"]
    of_the_jvm = [line.removeprefix(": ") for line in lines if line.startswith(": ")]
    return DurableError(f"Spark failed: {(of_the_jvm or lines)[0]}")


def find_java() -> Path:
    """The home of the first Java that is new enough: JAVA_HOME, that on the PATH, those installed in /usr/lib/jvm.

    Raises InvalidSetting, which says how to get one.
    """
    found: dict[Path, int] = {}
    for home in _java_homes():
        if home not in found:
            found[home] = java_version(home)
            if found[home] >= OLDEST_JAVA:
                return home
    older = "; ".join(f"{home} is version {version}" for home, version in found.items() if version)
    raise InvalidSetting(
        f"Spark needs Java {OLDEST_JAVA} or newer, and there is none{f' ({older})' if older else ''}; "
        "run: apt-get install openjdk-17-jre-headless, or set JAVA_HOME, or use --remote sc://HOST:15002"
    )


def _java_homes() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home)
    if on_path := shutil.which("java"):
        yield Path(on_path).resolve().parent.parent
    if _JVMS.is_dir():
        yield from sorted(_JVMS.iterdir())


@cache
def java_version(home: Path) -> int:
    """Return the major version of Java; 0 when no Java runs."""
    try:
        said = subprocess.run([home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    version = re.search(r'version "(?:1\.)?(\d+)', said.stderr)
    return int(version.group(1)) if version else 0


def _is_submitted() -> bool:
    """Did spark-submit start this process, with a JVM beside it?"""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _configured(session: SparkSession) -> SparkSession:
    """Set the configuration that the jobs rely on, also in a session that the caller has made."""
    for name, value in _EVERYWHERE.items():
        session.conf.set(name, value)
    return session
