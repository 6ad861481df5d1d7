"""One side at work in a database of its own."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import count as counter
from typing import Final

import psycopg

from durable.embedded import Embedded
from durable.embedded.ports import free_port
from tests.benchmarks.peers import commits
from tests.benchmarks.peers.processes import Process, run
from tests.benchmarks.peers.program import Order
from tests.benchmarks.peers.sides import Side

_LONGEST_START: Final = 60.0
_LONGEST_JOB: Final = 30.0
_PAUSE: Final = 0.02  # seconds after each job: the side is idle again
_LOOKING: Final = 0.005
_numbers = counter(1)


def prepare(side: Side, server: Embedded, broker_url: str) -> Order:
    """A fresh database with the tables of this side."""
    name = f"peers_{next(_numbers)}"
    url = server.url(name)
    commits.make_business(url)
    address = f"rabbitmq://default/queue/{name}"
    if side.variant != "rabbitmq":
        address = f"{'http' if side.variant == 'http' else 'tcp'}://127.0.0.1:{free_port()}"
    order = Order("install", url, name, side.variant, broker_url if side.needs_broker else "", address)
    run(side, order)
    return order


def latencies_in_turn(side: Side, order: Order, count: int, warm_up: int) -> list[float]:
    """The seconds from commit to effect of jobs that are enlisted one after the other, with a pause after each."""
    worker = nullcontext() if side.is_one_process else Process(side, replace(order, work="handle"))
    enlisting = Process(side, replace(order, work="pace"))
    with worker as handling, enlisting, psycopg.connect(order.url, autocommit=True) as connection:
        processes = [process for process in (handling, enlisting) if process]
        for number in range(1, warm_up + count + 1):
            enlisting.write(str(number))
            longest = _LONGEST_START if number == 1 else _LONGEST_JOB
            _wait_for_effect(connection, number, longest, processes)
    return commits.latencies(order.url, warm_up)


def latencies_at_rate(side: Side, order: Order, count: int, warm_up: int, rate: float) -> list[float]:
    """The seconds from commit to effect of jobs that are enlisted at this rate, without those of the warm-up."""
    worker = nullcontext() if side.is_one_process else Process(side, replace(order, work="handle"))
    enlisting = Process(side, replace(order, work="flow", count=warm_up + count, rate=rate))
    with worker as handling, enlisting:

        def check() -> None:
            for process in (handling, enlisting):
                if process:
                    process.check()

        commits.wait_for_effects(side.name, order.url, warm_up + count, check)
    return commits.latencies(order.url, warm_up)


def _wait_for_effect(connection: psycopg.Connection, number: int, longest: float, processes: list[Process]) -> None:
    """Wait for the effect of this number, without hurry: looking is work for Postgres."""
    deadline = time.monotonic() + longest
    time.sleep(_PAUSE)
    while not connection.execute("SELECT 1 FROM business WHERE number = %s", (-number,)).fetchone():
        for process in processes:
            process.check()
        if time.monotonic() > deadline:
            raise processes[0].failure(f"did not handle job {number} in {longest:g} seconds")
        time.sleep(_LOOKING)
