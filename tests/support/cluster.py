"""A Spark cluster of one master and one worker, and a Spark Connect server, all on loopback.

Each is a process of its own whose log tells its address. They find durable nowhere: it comes with the job.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from durable.pipeline.session import find_java
from tests.failure.waiting import eventually
from tests.support.quick_spark import java_options
from tests.support.root import ROOT
from tests.support.warm_workers import plain_python

SPARK = Path(pyspark.__file__).parent
_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"
_CONNECT = "org.apache.spark.sql.connect.service.SparkConnectServer"
_LOOPBACK = ["--host", "127.0.0.1"]


def environment(folder: Path) -> dict[str, str]:
    """Of a machine on which Java and the libraries are installed, and durable is not."""
    hidden = {"PYTHONPATH", "DURABLE_DATABASE_URL", "SPARK_HOME"}
    return {name: value for name, value in os.environ.items() if name not in hidden} | {
        "JAVA_HOME": str(find_java()),
        "JDK_JAVA_OPTIONS": java_options(),
        "PYSPARK_PYTHON": str(plain_python(folder)),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_NO_DAEMONIZE": "1",
    }


@contextmanager
def standalone(folder: Path) -> Iterator[str]:
    """The URL of a master with one worker of two cores."""
    with _master(folder) as url, _worker(folder, url, "127.0.0.1", cores=2):
        yield url


@contextmanager
def two_workers(folder: Path) -> Iterator[str]:
    """The URL of a master with two workers of one core, on two hosts: no task is run twice at once on one."""
    with _master(folder) as url, _worker(folder, url, "127.0.0.1", cores=1), _worker(folder, url, "127.0.0.2", cores=1):
        yield url


@contextmanager
def _master(folder: Path) -> Iterator[str]:
    with _logged(folder / "master.log", "spark-class", _MASTER, *_LOOPBACK, "--port", "0", "--webui-port", "0") as log:
        yield _said(log, r"Starting Spark master at (spark://\S+)")


@contextmanager
def _worker(folder: Path, master: str, host: str, *, cores: int) -> Iterator[None]:
    where = ["--host", host, "--webui-port", "0", "--work-dir", str(folder / f"work {host}")]
    sizes = ["--cores", str(cores), "--memory", "1g"]
    with _logged(folder / f"worker {host}.log", "spark-class", _WORKER, *where, *sizes, master) as worker:
        _said(worker, r"(Successfully registered with master)")
        yield


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """The URL of a Spark Connect server that runs jobs by itself, with durable beside it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.executorEnv.PYTHONPATH": str(packed(folder)),
    }
    options = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    arguments = ["--class", _CONNECT, "--master", "local[2]", *options, "spark-internal"]
    with _logged(folder / "connect.log", "spark-submit", *arguments, PYTHONPATH=str(packed(folder))) as log:
        _said(log, r"(Spark Connect server started)")
        yield f"sc://127.0.0.1:{port}"


def packed(folder: Path) -> Path:
    """durable as one file, for --py-files."""
    package = folder / "package"
    if not package.exists():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "durable", package / "durable", ignore=ignored)  # through its symlinks
        shutil.make_archive(str(folder / "durable"), "zip", package)
    return folder / "durable.zip"


def submit(script: Path, *arguments: str, master: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python program by spark-submit, with durable shipped to the executors."""
    settings = ["--conf", "spark.ui.enabled=false", "--conf", "spark.driver.host=127.0.0.1"]
    command = ["--master", master, *settings, "--py-files", str(packed(folder)), str(script), *arguments]
    return subprocess.run(
        [SPARK / "bin" / "spark-submit", *command],
        env=environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )


@contextmanager
def _logged(log: Path, program: str, *arguments: str, **variables: str) -> Iterator[Path]:
    """A process of Spark's whose output goes into this file, and that is ended with the context."""
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [SPARK / "bin" / program, *arguments],
            env=environment(log.parent) | variables,
            cwd=log.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            yield log
        finally:
            process.terminate()


def _said(log: Path, pattern: str) -> str:
    """What the log says, as soon as it does."""

    def look() -> str:
        text = log.read_text()
        found = re.search(pattern, text)
        assert found, text
        return found.group(1)

    return asyncio.run(eventually(look, within=90))
