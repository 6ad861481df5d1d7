"""Which tests this machine runs, and which of them each worker of xdist begins with.

xdist gives each worker one part of the list, and who is done takes from the ends of the others' parts.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple, Self
from zlib import crc32

import pytest

_WITH_SPARK: Final = 2
"""So many workers have a JVM for all their tests: it takes long to start and to become fast, and much memory."""


class Part(NamedTuple):
    """One of several parts of about the same work: each test is in one of them, the same one everywhere."""

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `2/4`; raise ArgumentTypeError for anything else."""
        found = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)
        if found is None or (part := cls(*map(int, found.groups()))).number > part.parts:
            raise ArgumentTypeError(f"{text!r} is no part of the tests; 2/4 is the second of four")
        return part

    def includes(self, nodeid: str) -> bool:
        return crc32(nodeid.encode()) % self.parts == self.number - 1


def shared_out(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Begin with the tests that may take minutes, and end with those that take milliseconds.

    Those that need the session of Spark are for two workers, each file for one of them. Neighbours stay together, as
    they share fixtures.
    """
    slow_first = sorted(items, key=lambda item: item.get_closest_marker("timeout") is None)
    spark = [item for item in slow_first if _needs_spark(item)]
    others = [item for item in slow_first if not _needs_spark(item)]
    slow = [item for item in others if item.get_closest_marker("timeout")]
    rest = sorted(others[len(slow) :], key=_is_unit)
    jvms = min(workers, _WITH_SPARK)
    without = workers - jvms or workers
    parts = [*_by_file(spark, jvms), *([] for _ in range(workers - jvms))]
    for number, item in enumerate(slow):
        parts[-1 - number % without].append(item)
    sizes = list(_sizes(len(items), workers))
    for part in reversed(range(workers)):
        room = max(sizes[part] - len(parts[part]), 0)
        parts[part] += rest[:room]
        del rest[:room]
    return [item for part in parts for item in part] + rest


def _by_file(items: Sequence[pytest.Item], parts: int) -> list[list[pytest.Item]]:
    """Each file goes to the part with the fewest tests so far."""
    found: list[list[pytest.Item]] = [[] for _ in range(parts)]
    for _, of_file in groupby(items, key=lambda item: item.path):
        min(found, key=len).extend(of_file)
    return found


def _sizes(count: int, workers: int) -> Iterator[int]:
    """As xdist deals them."""
    for left in range(workers, 0, -1):
        yield count // left
        count -= count // left


def _needs_spark(item: pytest.Item) -> bool:
    return "spark" in getattr(item, "fixturenames", ())


def _is_unit(item: pytest.Item) -> bool:
    return item.nodeid.startswith("tests/unit/")
