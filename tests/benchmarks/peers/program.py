"""The frame of every program: `python -m tests.benchmarks.peers.on_dbos '{"work": "install", "url": ...}'`.

    install    make the peer's tables
    enlist     commit a business row with a job, for each number from 1 to `count`, AT_ONCE at once
    pace       the same for each number on a line of standard input, one after the other
    flow       the same, `rate` numbers a second, whether those before are done or not; lives until its input ends
    handle     handle the jobs until SIGTERM: the job of a number inserts the negative number, and commits

All but the last print one line of JSON: {"package": "dbos", "version": "3.4.0", "done": 500}. No program measures: the
parent reads the times of the commits from Postgres.

This module is run by the Python of each peer, so it imports the standard library only.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import sys
import warnings
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

AT_ONCE = 8
"""Transactions of `enlist` at once, and effects at once."""
POOL: Final[dict[str, Any]] = {"pool_size": AT_ONCE, "max_overflow": 0, "pool_timeout": 900}
"""Of the engine for these: it bounds the effects of peers that begin more jobs at once, which may wait long."""
TEXT = "x" * 256
INSERT = "INSERT INTO business (number) VALUES (:number)"


@dataclass(frozen=True, slots=True)
class Order:
    """What a program is to do, and where."""

    work: str
    url: str
    """postgresql://..., of a database with the table business."""
    queue: str
    """A name that no other run uses, for queues that are not in the database."""
    variant: str = ""
    broker: str = ""
    """The URL of RabbitMQ, for a peer that needs it."""
    address: str = ""
    """tcp://..., where the second service listens."""
    count: int = 0
    rate: float = 0.0
    """Numbers a second of `flow`."""

    def url_for(self, driver: str) -> str:
        """The URL as SQLAlchemy reads it, with this driver."""
        return self.url.replace("postgresql://", f"postgresql+{driver}://", 1)


Enlist = Callable[[int], Any]
"""Commits the business row and the job of a number: a coroutine function, or a function that runs in threads."""


@dataclass(frozen=True, slots=True)
class Program:
    """One peer: what its program does for each work."""

    package: str
    install: Callable[[Order], Awaitable[None]]
    enlisting: Callable[[Order], AbstractAsyncContextManager[Enlist]]
    handle: Callable[[Order], Any]
    """Blocks until the process ends; a coroutine function or a plain one."""


def main(program: Program) -> None:
    """Run the order of the command line."""
    order = Order(**json.loads(sys.argv[1]))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if order.work == "handle" and not inspect.iscoroutinefunction(program.handle):
        program.handle(order)
        return
    done = asyncio.run(_obey(program, order))
    print(json.dumps({"package": program.package, "version": version(program.package), "done": done}), flush=True)


async def _obey(program: Program, order: Order) -> int:
    if order.work == "install":
        await program.install(order)
        return 0
    if order.work == "handle":
        await program.handle(order)
        return 0
    async with program.enlisting(order) as enlist:
        if order.work == "flow":
            return await _enlist_at_rate(enlist, order.count, order.rate)
        return await (_enlist_at_once(enlist, order.count) if order.work == "enlist" else _enlist_in_turn(enlist))


async def _enlist_at_once(enlist: Enlist, count: int) -> int:
    numbers = iter(range(1, count + 1))

    async def work() -> None:
        for number in numbers:
            await enlist(number)

    def work_in_thread() -> None:
        for number in numbers:
            enlist(number)

    if inspect.iscoroutinefunction(enlist):
        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    else:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(AT_ONCE) as threads:
            await asyncio.gather(*(loop.run_in_executor(threads, work_in_thread) for _ in range(AT_ONCE)))
    return count


async def _enlist_at_rate(enlist: Enlist, count: int, rate: float) -> int:
    loop = asyncio.get_running_loop()
    began, running = loop.time(), set[asyncio.Task[None]]()
    for number in range(1, count + 1):
        await asyncio.sleep(began + number / rate - loop.time())
        running.add(asyncio.create_task(enlist(number)))
        running = {task for task in running if not task.done() or task.result()}
    await asyncio.gather(*running)
    await asyncio.to_thread(sys.stdin.read)  # what was enlisted may still have to leave this process
    return count


async def _enlist_in_turn(enlist: Enlist) -> int:
    done = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        if inspect.iscoroutinefunction(enlist):
            await enlist(int(line))
        else:
            await asyncio.to_thread(enlist, int(line))
        done += 1
    return done
