"""A sender and a receiver in two processes of their own: the same layout for durable and for every floor.

    parent ── Race ──> receiver     ready; all messages are there at t2
           ── Race ──> sender       some messages to warm up; the others from t0; all of them settled at t1

    messages per second = count / (the later of t1 and t2 - t0)

The processes live as long as the benchmarks, so that imports are in no measurement. The times are of CLOCK_MONOTONIC,
which is one for the whole machine.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple, Self

from tests.benchmarks.rows import Counts

WARM_UP = 200
LONGEST_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Race:
    """What both sides need to know. The database of the receiver is fresh, and so is the sender's."""

    count: int
    destination: str
    sender_url: str
    receiver_url: str
    settings: Mapping[str, str]
    """Of durable, and whatever else the plain clients read from it."""


Start = Callable[[], None]
"""To be called when everything is in place and the first message is about to leave."""
Ship = Callable[[int, Start], Awaitable[Counts]]
"""Ships so many messages, and returns when all of them are settled on the sender's side."""
Arrived = Callable[[], int]
"""How many messages are at the receiver, and stored when they are to be."""


class Contender(NamedTuple):
    """Both sides of something that ships messages. Both functions are of a module, because they are pickled."""

    sender: Callable[[Race], AbstractAsyncContextManager[Ship]]
    receiver: Callable[[Race], AbstractAsyncContextManager[Arrived]]


class Result(NamedTuple):
    rate: float
    counts: Counts


class Processes:
    """The two processes. To be used as a context manager."""

    def __enter__(self) -> Self:
        self._sender, self._sending = _process("sender")
        self._receiver, self._receiving = _process("receiver")
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._sender, self._receiver):
            process.kill()
            process.join()

    def race(self, contender: Contender, race: Race) -> Result:
        """Raises EOFError when one of them fails, which has printed why."""
        self._receiving.send(partial(_receive, contender, race))
        self._receiving.recv()
        self._sending.send(partial(_send, contender, race))
        began, settled, counts = self._sending.recv()
        arrived = self._receiving.recv()
        return Result(race.count / (max(settled, arrived) - began), counts)


def _process(name: str) -> tuple[BaseProcess, Connection]:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_obey, args=(theirs,), name=name, daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _obey(pipe: Connection) -> None:
    """Run each coroutine function that comes through the pipe."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    while True:
        asyncio.run(pipe.recv()(pipe))


async def _receive(contender: Contender, race: Race, pipe: Connection) -> None:
    async with contender.receiver(race) as arrived:
        pipe.send("ready")
        await until(lambda: arrived() >= WARM_UP + race.count)
        pipe.send(time.monotonic())


async def _send(contender: Contender, race: Race, pipe: Connection) -> None:
    began: list[float] = []
    async with contender.sender(race) as ship:
        await ship(WARM_UP, lambda: None)
        counts = await ship(race.count, lambda: began.append(time.monotonic()))
        pipe.send((began[0], time.monotonic(), counts))


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONGEST_SECONDS):
        while not reached():  # noqa: ASYNC110  counters have no event, and an event would be work that is measured
            await asyncio.sleep(0.005)
