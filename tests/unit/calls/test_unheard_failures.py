"""Failures of calls for whose results nobody waits: one line for each method and interval, and none is left out."""

from __future__ import annotations

import asyncio
import re

import pytest

from durable.calls.unheard_failures import Unheard
from durable.testing import eventually

MORE = re.compile(r"calls of (\S+) failed, .*: (\d+) more")


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int]]:
    """Return method and number of each line of several failures."""
    found = (MORE.search(each.getMessage()) for each in caplog.records)
    return [(each[1], int(each[2])) for each in found if each]


async def test_flood_is_one_line_at_once_and_one_with_its_number(caplog: pytest.LogCaptureFixture) -> None:
    unheard = Unheard(interval=30)
    for number in range(1_000):
        unheard.tell("stock.note", ValueError(f"no {number}"))
        unheard.tell("stock.other", ValueError(f"no {number}"))
    assert [each.getMessage()[-4:] for each in caplog.records] == ["no 0"] * 2
    unheard.flush()
    assert told(caplog) == [("stock.note", 999), ("stock.other", 999)]
    assert len(caplog.records) == 4
    assert "no 999" in caplog.text


async def test_number_is_told_at_the_end_of_the_interval(caplog: pytest.LogCaptureFixture) -> None:
    unheard = Unheard(interval=0.05)
    for _ in range(3):
        unheard.tell("stock.note", ValueError("no"))
    await eventually(lambda: told(caplog) == [("stock.note", 2)])


async def test_lone_failure_is_told_once_and_at_once(caplog: pytest.LogCaptureFixture) -> None:
    unheard = Unheard()
    unheard.tell("stock.note", ValueError("no"))
    unheard.flush()
    unheard.tell("stock.note", ValueError("no"))
    unheard.flush()
    assert [each.getMessage() for each in caplog.records] == ["call failed, for whose result nobody waits: no"] * 2


def test_failures_are_told_when_the_loop_of_the_last_ones_was_closed(caplog: pytest.LogCaptureFixture) -> None:
    unheard = Unheard(interval=0.0)

    async def tell() -> None:
        unheard.tell("stock.note", ValueError("no"))

    for _ in range(2):
        asyncio.run(tell())
    assert len(caplog.records) == 2
