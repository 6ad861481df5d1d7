"""The processor time of a contender: of this process, of Spark's JVM and its workers of Python, and of Postgres."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import psutil

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ENDING_SECONDS = 0.3  # in which the backends of a contender end, and count for the server
_Result = TypeVar("_Result")

HERE, JVM, WORKERS, POSTGRES = "this process", "JVM", "workers", "Postgres"


@dataclass(frozen=True)
class Taken:
    """Seconds by the clock, and those of the processors by what computed."""

    seconds: float
    processor: Mapping[str, float] = field(default_factory=dict)


class Place(NamedTuple):
    """Where contenders run: an empty folder, and a fresh database."""

    spark: SparkSession
    url: str
    folder: Path
    meter: Meter


class Meter:
    """Measures one contender after the other."""

    def __init__(self, postmaster: int) -> None:
        """`postmaster`: the pid of the server that they use."""
        self._postmaster = postmaster

    def taken(self, contender: Callable[[], _Result]) -> tuple[Taken, _Result]:
        """Run a contender."""
        before = Counter(dict(self._processor()))
        began = time.monotonic()
        result = contender()
        seconds = time.monotonic() - began
        time.sleep(_ENDING_SECONDS)
        after = dict(self._processor())
        return Taken(seconds, {of: after[of] - before[of] for of in after}), result

    def _processor(self) -> Iterator[tuple[str, float]]:
        """Seconds so far, with those of children that have ended."""
        here = os.times()
        yield HERE, here.user + here.system
        found = psutil.Process().children(recursive=True)
        jvms = [each for each in found if each.name() == "java"]
        python = [each for jvm in jvms for each in jvm.children(recursive=True)]
        server = psutil.Process(self._postmaster)
        yield JVM, sum(_alone(each) for each in jvms)
        yield WORKERS, sum(_whole(each) for each in python)
        yield POSTGRES, sum(_whole(each) for each in [server, *server.children()])


def _alone(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _whole(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(sum(times[:4]))
