"""Run many workloads: `python -m tests.differential --examples 200 --seed 1`, or one again: `--again FILE`.

Exits with 1 when a world differs from the one in memory. Each difference is shrunk, printed and kept as a file.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from durable.embedded import Embedded
from tests.differential.hunting import WAYS, Worlds, compare, leaving_at_once, report
from tests.differential.workload import Workload, drawn
from tests.support.servers import Names, older_servers, shared_broker, shared_postgres

_MOST_FAILURES = 5


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    logging.getLogger("durable").setLevel(logging.CRITICAL)
    with ExitStack() as stack:
        stack.enter_context(leaving_at_once())
        servers: dict[int, Embedded] = {}

        def server(version: int) -> Embedded:
            if version not in servers:
                servers[version] = stack.enter_context(shared_postgres(version))
            return servers[version]

        worlds = Worlds(server, lambda: stack.enter_context(shared_broker(Names())).url)
        if options.again is not None:
            workloads = [msgspec.json.decode(options.again.read_bytes(), type=Workload)]
        else:
            workloads = [drawn(options.seed + number, options.length) for number in range(options.examples)]
        with closing(worlds):
            return _hunt(worlds, options.world or all_worlds(), workloads, in_turn=options.in_turn)


def all_worlds() -> list[str]:
    return [*WAYS, *(f"postgres {version}" for version in older_servers())]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--examples", type=int, default=50, help="number of workloads, each run in every world")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first workload; the next ones follow")
    parser.add_argument("--length", type=int, default=12, help="steps of a workload, about")
    parser.add_argument("--world", action="append", help=f"one of: {', '.join(all_worlds())} (default: all)")
    parser.add_argument("--in-turn", action="store_true", help="run each workload in one of the worlds, in turn")
    parser.add_argument("--again", type=Path, help="file with a workload to run again")
    return parser


def _hunt(worlds: Worlds, names: Sequence[str], workloads: Sequence[Workload], *, in_turn: bool) -> int:
    makers = [worlds.maker(name) for name in names]
    began, runs, failures = time.monotonic(), 0, 0
    told = began
    for number, workload in enumerate(workloads):
        for make in [makers[number % len(makers)]] if in_turn else makers:
            lines = asyncio.run(compare(workload, make))
            runs += 1
            if lines:
                failures += 1
                print(f"seed {workload.seed} differs, to be shrunk:", *lines[:5], sep="\n  ", flush=True)
                print(asyncio.run(report(workload, make, lines)), flush=True)
            if failures >= _MOST_FAILURES:
                break
        if time.monotonic() - told > 20:
            told = time.monotonic()
            print(f"{runs} runs in {time.monotonic() - began:.0f} s, {failures} differences", flush=True)
        if failures >= _MOST_FAILURES:
            break
    print(f"{runs} runs in {time.monotonic() - began:.0f} s, {failures} differences")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
