"""Run seeds: `python -m tests.simulation --seeds 200`, or one of them again: `--seed 336 --faults 0,3`.

Exits with 1 when a seed breaks an invariant. A plan of faults, and with it the run, does not depend on the machine.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext

from tests.simulation.bugs import BUGS, planted
from tests.simulation.faults import Fault
from tests.simulation.shrink import numbers, shrink
from tests.simulation.world import Outcome, World, run

_HASHES = "PYTHONHASHSEED"
_MOST_SHRUNK = 5


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if os.environ.get(_HASHES) != "0":  # sets of names are in the order of their hashes
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *arguments], {**os.environ, _HASHES: "0"})
    with planted(options.bug) if options.bug else nullcontext():
        if options.seed is not None:
            return _replay(options.seed, options.faults)
        gc.collect()
        gc.freeze()  # what is loaded now is not looked through after each run
        most_shrunk = 0 if options.whole else _MOST_SHRUNK
        seeds = range(options.first, options.first + options.seeds)
        return _hunt(_outcomes(seeds, options.jobs), len(seeds), options.bug, options.failures, most_shrunk)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run seeds side by side")
    parser.add_argument("--failures", type=int, default=20, help="failing seeds after which to end")
    parser.add_argument("--seed", type=int, help="run this seed, and print what happens")
    parser.add_argument("--faults", help="with these of its faults, by number; 'none' for none (default: all)")
    parser.add_argument("--whole", action="store_true", help="do not look for the fewest faults of a failure")
    parser.add_argument("--bug", choices=sorted(BUGS), help="plant a bug")
    return parser


def _replay(seed: int, wanted: str | None) -> int:
    planned = World(seed).faults
    chosen = planned
    if wanted is not None:
        chosen = [] if wanted == "none" else [planned[int(each)] for each in wanted.split(",")]
    outcome = run(seed, chosen, tells=True)
    print(*outcome.told, sep="\n")
    print(f"\nseed {seed}, {outcome.seconds:.1f} s, {outcome.effects} effects, trace {outcome.trace:08x}")
    _print_faults(outcome.faults, planned)
    print(*(f"  VIOLATION  {text}" for text in outcome.violations), sep="\n")
    return int(bool(outcome.violations))


def _outcomes(seeds: Sequence[int], jobs: int) -> Iterator[Outcome]:
    """Run each seed; what comes of one does not depend on the others, nor on the process that runs it."""
    if jobs == 1:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:  # with the bug that is planted
        yield from pool.map(run, seeds)


def _hunt(outcomes: Iterator[Outcome], seeds: int, bug: str | None, most_failures: int, most_shrunk: int) -> int:
    began = told = time.monotonic()
    covered: set[tuple[str, str]] = set()
    faults: Counter[str] = Counter()
    failed: list[Outcome] = []
    effects = done = 0
    for outcome in outcomes:
        done += 1
        covered |= outcome.covered
        faults.update(fault.kind for fault in outcome.faults)
        effects += outcome.effects
        if outcome.violations:
            failed.append(outcome)
            _tell_failure(outcome, bug, is_shrunk=len(failed) <= most_shrunk)
            if len(failed) >= most_failures:
                break
        if time.monotonic() - told >= 1:
            told = time.monotonic()
            rate = done / (told - began)
            print(f"{done} of {seeds} seeds, {rate:.1f} a second, {len(covered)} states", flush=True)
    seconds = time.monotonic() - began
    print(f"\n{done} seeds in {seconds:.1f} s, {done / seconds:.1f} a second; {effects} effects")
    print("faults:", ", ".join(f"{count} {kind}" for kind, count in sorted(faults.items())))
    print(f"states covered (pairs of fault and place): {len(covered)}")
    print(f"violations: {len(failed)} seeds" + "".join(f" {outcome.seed}" for outcome in failed))
    return int(bool(failed))


def _tell_failure(outcome: Outcome, bug: str | None, *, is_shrunk: bool) -> None:
    planned = World(outcome.seed).faults
    shrunk = shrink(outcome, run) if is_shrunk else outcome
    print(f"\nseed {outcome.seed} fails, with {len(shrunk.faults)} of its {len(planned)} faults:")
    _print_faults(shrunk.faults, planned)
    print(*(f"  {text}" for text in shrunk.violations[:3]), sep="\n")
    these = ",".join(map(str, numbers(shrunk, planned))) or "none"
    planting = f' --bug "{bug}"' if bug else ""
    print(
        f"  replay: .venv/bin/python -m tests.simulation --seed {outcome.seed} --faults {these}{planting}\n", flush=True
    )


def _print_faults(faults: Sequence[Fault], planned: Sequence[Fault]) -> None:
    print(*(f"  fault {number}: {fault}" for number, fault in enumerate(planned) if fault in faults), sep="\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
