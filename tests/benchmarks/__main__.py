"""Runs the benchmarks and prints them: `make bench`, or `python -m tests.benchmarks --json`.

Every row is the best of three rounds; in each round floor and durable take turns on the same servers, so a ratio holds
when the machine's speed drifts. Statements and commits are counted per message on the engines of the part that the
row is about: a unit of work's for storing, the agents' for sending, the handlers' for handling.

    local        storing what is sent, handling what has arrived       durable and floor in this process
    onion        what four components of middleware add                durable in this process
    contests     a row for each transport and each of its floors       each as a sender and a receiver process
    calls        beside grpc.aio and plain streams                     each provider a process of its own
    bulk         archiving, publishing and auditing                    one warm Spark session, millions of rows

When asked for:

    latency      from commit to effect at several rates                a sender and a receiver process, beside asyncpg
    backlogs     handling beside a million waiting rows                durable in this process
    nodes        2, 4 and 8 nodes of one database                      each node a process of its own
    memory       the peak of nodes that a million messages pass        each node a process of its own
    broker       128 publishes at once, and a prefetch of 10           durable and aio-pika in this process
    peers        beside other libraries                                each in an environment and processes of its own
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from durable.embedded import postgres, rabbitmq
from durable.errors import InvalidSetting
from tests.benchmarks import backlogs, broker, bulk, calls, contests, floor, latency, memory, nodes
from tests.benchmarks.databases import Databases
from tests.benchmarks.local import Local
from tests.benchmarks.onion import Onions
from tests.benchmarks.peers.contest import run_contest
from tests.benchmarks.peers.sides import sides_without
from tests.benchmarks.peers.standings import Standing, as_markdown
from tests.benchmarks.racing import Processes
from tests.benchmarks.rows import (
    Cost,
    Latency,
    Relation,
    Row,
    Speed,
    Timing,
    show,
    show_costs,
    show_latencies,
    show_relations,
    show_speeds,
    show_timings,
)

Measured: TypeAlias = Row | Cost | Speed | Timing | Latency | Relation | Standing

ROUNDS = 3
MESSAGES = ("local", "tcp", "http", "rabbitmq")
PARTS = (*MESSAGES, "onion", "calls", *bulk.PARTS)
ASKED_FOR = ("latency", "backlogs", "nodes", "memory", "broker", "peers")
"""Parts that run only when they are named: they take long, or need the environments that scripts/peers.sh makes."""
CALL_ROUNDS = 7  # short ones
_PASSES = 100_000  # through the onion: a thing of microseconds


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    parts: Sequence[str]
    count: int
    """Messages, or jobs, in each round."""
    rows: int | None
    """Rows of the other parts; None: as many as each has by itself."""
    rounds: int
    without: Sequence[str]
    """Peers that are left out."""


def run_onions(rounds: int) -> list[Cost]:
    """The costs of the onions."""
    onions = Onions(_PASSES)
    for _ in range(rounds):
        onions.run_round()
    return onions.costs


def run(count: int, parts: Sequence[str], rounds: int) -> list[Row]:
    """The rows of these parts."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        databases = Databases(stack.enter_context(postgres(folder)))
        local = Local(databases, count)
        broker = stack.enter_context(rabbitmq(folder / "rabbitmq")) if "rabbitmq" in parts else None
        processes = stack.enter_context(Processes())
        transports = [contests.of(name, broker) for name in parts if name != "local"]
        for _ in range(rounds):
            if "local" in parts:
                asyncio.run(local.run_round())
            for contest in transports:
                contest.run_round(databases, processes, count)
    rows = [row for contest in transports for row in contest.rows]
    return [*local.storing, *rows, *local.handling] if "local" in parts else rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=(*PARTS, *ASKED_FOR), help="run this part; may be given several times"
    )
    parser.add_argument("--count", type=int, default=10_000, help="messages in each round")
    parser.add_argument("--rows", type=int, help="rows of each part but messages, in place of its own number")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of each part; {ROUNDS} without this")
    parser.add_argument(
        "--without", action="append", default=[], help="leave this peer out; may be given several times"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds: give 1 or more")
    plan = Plan(arguments.only or PARTS, arguments.count, arguments.rows, arguments.rounds, arguments.without)
    warnings.simplefilter("ignore")
    told: list[dict[str, Any]] = []
    try:
        for measured, title in _measured(plan):
            told += [_as_json(each) | {"of": title} for each in measured]
            if not arguments.json:
                _show(measured, title)
    except InvalidSetting as error:
        print(f"error: {error}; or choose parts with --only", file=sys.stderr)
        return 2
    if arguments.json:
        json.dump(told, sys.stdout, indent=2)
    return 0


def _measured(plan: Plan) -> Iterator[tuple[Sequence[Measured], str]]:
    """What was measured, and of what: each as soon as it is there."""
    parts, count, rows, rounds = plan.parts, plan.count, plan.rows, plan.rounds
    best = "one round" if rounds == 1 else f"best of {rounds} rounds"
    messages = [name for name in MESSAGES if name in parts]
    if messages:
        yield run(count, messages, rounds), f"{count:,} messages of {len(floor.BODY)} bytes, {best}"
    if "onion" in parts:
        yield run_onions(rounds), "microseconds for each message"
    if "calls" in parts:
        with tempfile.TemporaryDirectory() as folder:
            yield calls.run(Path(folder), CALL_ROUNDS), f"each call, best of {CALL_ROUNDS} rounds"
    for title, timings in bulk.run([name for name in bulk.PARTS if name in parts], rounds, rows):
        yield timings, f"{title}, {best}"
    if "latency" in parts:
        for pace, latencies in latency.run(rounds):
            yield latencies, f"from commit to effect, {pace}, {best}"
    if "backlogs" in parts:
        yield backlogs.run(rounds, rows), f"backlogs, {best}"
    if "nodes" in parts:
        yield nodes.run(rounds, rows), f"{nodes.title(rows)}, {best}"
    if "memory" in parts:
        yield memory.run(rows), f"memory of nodes through which {rows or memory.ROWS:,} messages pass"
    if "broker" in parts:
        published, consumed = broker.run(rounds, rows)
        yield published, f"RabbitMQ, {best}"
        yield consumed, f"{rows or broker.CONSUMED:,} messages of a full queue, {best}"
    if "peers" in parts:
        yield run_contest(sides_without(list(plan.without)), rounds, count), f"{count:,} jobs, {best}"


def _as_json(measured: Measured) -> dict[str, Any]:
    """The figures, and null for those that were not measured."""
    derived: dict[str, float] = {}
    if not isinstance(measured, Standing):
        derived = {"added": measured.added} if isinstance(measured, Cost) else {"ratio": measured.ratio}
    return {name: None if value == math.inf else value for name, value in {**asdict(measured), **derived}.items()}


def _show(measured: Sequence[Measured], title: str) -> None:
    show([each for each in measured if isinstance(each, Row)], title)
    show_costs([each for each in measured if isinstance(each, Cost)], title)
    show_speeds([each for each in measured if isinstance(each, Speed)], title)
    show_timings([each for each in measured if isinstance(each, Timing)], title)
    show_latencies([each for each in measured if isinstance(each, Latency)], title)
    show_relations([each for each in measured if isinstance(each, Relation)], title)
    if standings := [each for each in measured if isinstance(each, Standing)]:
        print(f"{title}\n\n{as_markdown(standings)}")


if __name__ == "__main__":
    sys.exit(main())
