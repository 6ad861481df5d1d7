"""The warning about an event loop that was kept: by whom, how often, and when there is none."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from durable import Bus, message
from durable.observability.loop_watch import LoopWatch
from durable.telemetry import Counters, Event, Subject
from durable.testing import eventually

ROOT = Path(__file__).parents[3]
MARK = "blocked the event loop"


@message("watched.placed")
class Placed(msgspec.Struct):
    number: int


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if MARK in each.getMessage()]


def blocked(bus: Bus) -> int:
    tally = bus.statistics().tallies[Subject.MESSAGE_TYPE].get("watched.placed")
    return tally.counts.get(Event.LOOP_BLOCKED, 0) if tally else 0


async def send(bus: Bus, number: int) -> None:
    async with bus.unit_of_work():
        bus.send(Placed(number))


async def test_blocking_handler_is_named_once_a_minute(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    bus = Bus("shop", database_url)
    handled: list[int] = []

    @bus.handles(Placed)
    async def block(placed: Placed) -> None:
        handled.append(placed.number)
        time.sleep(1.2)  # noqa: ASYNC251

    async with bus:
        await send(bus, 1)
        await eventually(lambda: blocked(bus) == 1, within=20, what="the loop goes on")
        await send(bus, 2)
        await eventually(lambda: blocked(bus) == 2, within=20, what="the loop goes on")
    (line,) = lines(caplog)
    assert f"handler {__name__}.test_blocking_handler_is_named_once_a_minute.<locals>.block of watched.placed" in line
    assert "test_loop_watch.py:" in line
    assert "asyncio.to_thread()" in line
    assert handled == [1, 2]


async def test_computation_in_one_call_is_told_with_the_handlers_at_work(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    bus = Bus("shop", database_url)

    @bus.handles(Placed)
    async def compute(placed: Placed) -> None:
        pow(3, 6_000_000)  # two seconds, in one call of C

    async with bus:
        await send(bus, 1)
        await eventually(lambda: lines(caplog), within=60, what="the loop goes on")
    assert "compute of watched.placed" in lines(caplog)[0]


async def test_handler_in_a_thread_is_not_named(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    bus = Bus("shop", database_url)
    handled: list[int] = []

    @bus.handles(Placed)
    def wait(placed: Placed) -> None:
        time.sleep(1.2)
        handled.append(placed.number)

    async with bus:
        await send(bus, 1)
        await eventually(lambda: handled == [1], within=20)
        assert blocked(bus) == 0
    assert lines(caplog) == []


@asynccontextmanager
async def watched() -> AsyncIterator[LoopWatch]:
    watch = LoopWatch(lambda: None, lambda: (), Counters())
    running = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    yield watch
    running.cancel()
    await asyncio.wait([running])


async def test_blocking_task_outside_of_handlers_is_named_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    async def report() -> None:
        time.sleep(1.2)  # noqa: ASYNC251

    async with watched():
        await asyncio.create_task(report(), name="the report")
        await eventually(lambda: lines(caplog), within=20)
    (line,) = lines(caplog)
    assert "task the report blocked" in line
    assert "test_loop_watch.py:" in line


async def test_place_of_a_blocked_loop_is_told_meanwhile() -> None:
    async with watched() as watch:
        assert watch.place() == ""
        asyncio.current_task().set_name("this test")  # type: ignore[union-attr]
        end = time.monotonic() + 20
        while not watch.place() and time.monotonic() < end:
            time.sleep(0.01)  # noqa: ASYNC251
        assert watch.place().startswith("this test at ")
        await asyncio.sleep(0.3)
        assert watch.place() == ""


@pytest.mark.parametrize("task", ["busy", "idle"])
def test_suspended_process_blames_no_task(task: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"""
import asyncio, logging, sys
from durable.observability.loop_watch import LoopWatch
from durable.telemetry import Counters

async def busy():
    while True:
        await asyncio.sleep(0)

async def idle():
    await asyncio.sleep(60)

async def main():
    watch = LoopWatch(lambda: None, lambda: (), Counters())
    tasks = [asyncio.create_task(watch.run()), asyncio.create_task({task}(), name="{task}")]
    await asyncio.sleep(1)
    print("begun", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.sleep(1)
    print("lag", watch.lag.snapshot().total_seconds > 1.5, flush=True)

logging.basicConfig(level="DEBUG", stream=sys.stdout)
asyncio.run(main())
""")
    with subprocess.Popen(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        while (line := process.stdout.readline().strip()) != "begun":
            assert process.poll() is None, line
        process.send_signal(signal.SIGSTOP)
        time.sleep(2)
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate("\n", timeout=60)
    assert "lag True" in said
    assert MARK not in said
