"""`python -m tests.mutants`: take each guard away, and see a named test fail.

Exits with 1 when a mutant survives, or could not be tried. The checkout is only read.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.mutants.guards import GUARDS
from tests.mutants.mutant import SIMULATION, Mutant
from tests.mutants.report import as_json, table
from tests.mutants.trees import ROOT, Tree, copied
from tests.mutants.trials import Bounds, Trial, Verdict, run_tests, tried
from tests.support.servers import bare_postgres

_WHOLE_SECONDS = 1_800


class Bench(NamedTuple):
    """What one trial at a time needs: a tree of its own, and the environment that names its servers."""

    tree: Tree
    servers: Mapping[str, str]


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    rows = [row for row in GUARDS if all(word in f"{row.room}: {row.name}" for word in options.only)]
    if not rows:
        print(f"no mutant is called {' '.join(options.only)!r}; python -m tests.mutants --list names all")
        return 2
    if options.list:
        print(*(f"{row.room}: {row.name}" for row in rows), sep="\n")
        return 0
    began = time.monotonic()
    trials = _tried(rows, options.jobs)
    if trials is None:
        return 1
    print("\n" + table(rows, trials, time.monotonic() - began))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(as_json(rows, trials), indent=2) + "\n")
    return int(any(trial.verdict is not Verdict.KILLED for trial in trials.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("only", nargs="*", help="words that the room and name of a mutant must contain (default: all)")
    parser.add_argument(
        "--jobs", type=int, default=2, help="trials at once, each with a server and a tree (default: 2)"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    parser.add_argument("--list", action="store_true", help="name the mutants, and end")
    return parser


def _tried(rows: Sequence[Mutant], jobs: int) -> Mapping[Mutant, Trial] | None:
    """Try all mutants. None when a test fails without any: then no failure would tell anything."""
    waiting, trials, lock = deque(rows), dict[Mutant, Trial](), threading.Lock()
    sound = threading.Event()

    def work(number: int) -> None:
        with copied() as tree, bare_postgres() as server:
            bench = Bench(tree, {"DURABLE_TEST_DATABASE_URL": server.uri()})
            if number == 0 and not _is_sound(bench, rows):
                waiting.clear()
            sound.set()
            while row := _next(waiting, lock):
                trials[row] = trial = tried(bench.tree, row, bench.servers)
                print(f"{len(trials)} of {len(rows)}  {trial.verdict:13}  {row.room}: {row.name}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        first = pool.submit(work, 0)
        sound.wait()
        others = [pool.submit(work, number) for number in range(1, jobs)] if waiting else []
        for each in (first, *others):
            each.result()
    return trials if len(trials) == len(rows) else None


def _next(waiting: deque[Mutant], lock: threading.Lock) -> Mutant | None:
    with lock:
        return waiting.popleft() if waiting else None


def _is_sound(bench: Bench, rows: Sequence[Mutant]) -> bool:
    """Run all named tests without a mutant; once more when one fails, which a busy machine may have kept waiting."""
    named = sorted({test for row in rows for test in row.killed_by if test != SIMULATION})
    print(f"{len(named)} tests without a mutant", flush=True)
    for _ in range(2):
        trial = run_tests(bench.tree, named, bench.servers, bounds=Bounds(_WHOLE_SECONDS))
        if trial.verdict is Verdict.SURVIVED:
            return True
        print(f"{trial.by or 'the tests'} failed without a mutant, in {ROOT.name}: {trial.said}", flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
