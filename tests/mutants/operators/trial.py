"""The trial of one mutant: the tests that execute its line from the cheapest on, and the simulation between them.

killed       a test fails, or does not end in time; so does a seed of the simulation
survived     all of them pass, or no test executes the line
incompetent  the module is no program any more: it cannot be imported. Such mutants are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from tests.mutants.mutant import SIMULATION
from tests.mutants.operators.places import Mutation
from tests.mutants.operators.reach import Reach
from tests.mutants.trees import Tree
from tests.mutants.trials import Bounds, Trial, Verdict, run_tests, simulated

_CHEAP_SECONDS: Final = 8.0
"""Seconds of tests that run before the simulation."""
_MOST_SECONDS: Final = 120.0
"""Seconds of tests in all, as they were recorded: the dearest of a line that many tests execute are left out."""
_SEEDS: Final = 60
_TEST_SECONDS: Final = 30
_SPARE_SECONDS: Final = 60.0
_NO_PROGRAM: Final = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError")


class Fate(StrEnum):
    KILLED = "killed"
    SURVIVED = "survived"
    INCOMPETENT = "incompetent"


class Tried(NamedTuple):
    """What became of a mutant."""

    mutation: Mutation
    fate: Fate
    by: str
    said: str
    tests: int
    """The number of tests that execute the line."""
    seconds: float


def tried(tree: Tree, mutation: Mutation, reach: Reach, servers: Mapping[str, str]) -> Tried:
    """Run the tests of this mutant in the tree, until one fails."""
    began = time.monotonic()
    tests = reach.of(tree, mutation.file, mutation.line)
    fate, by, said = Fate.SURVIVED, "", "" if tests else "no test executes the line"
    with tree.changed(mutation.file, mutation.text):
        for step in _steps(tests, reach.seconds):
            trial = simulated(tree, _SEEDS) if step == [SIMULATION] else _tests(tree, step, reach.seconds, servers)
            fate, by, said = _fate(trial), trial.by, trial.said
            if fate is not Fate.SURVIVED:
                break
    return Tried(mutation, fate, by, said, len(tests), time.monotonic() - began)


def _tests(tree: Tree, tests: Sequence[str], seconds: Mapping[str, float], servers: Mapping[str, str]) -> Trial:
    most = _SPARE_SECONDS + 2 * sum(seconds.get(test, 0.0) for test in tests)
    bounds = Bounds(most, _TEST_SECONDS, hypothesis_profile="quick")
    return run_tests(tree, tests, servers, hangs=True, bounds=bounds)


def _steps(tests: Sequence[str], seconds: Mapping[str, float]) -> Iterator[list[str]]:
    """Cheap tests, the simulation, the other tests: those of them that there are."""
    cheap: list[str] = []
    dear: list[str] = []
    total = 0.0
    for test in tests:
        if test != SIMULATION:
            total += seconds.get(test, 0.0)
            if total <= _CHEAP_SECONDS or not cheap:
                cheap.append(test)
            elif total <= _MOST_SECONDS:
                dear.append(test)
    yield from (step for step in (cheap, [SIMULATION] if SIMULATION in tests else [], dear) if step)


def _fate(trial: Trial) -> Fate:
    if trial.verdict is Verdict.SURVIVED:
        return Fate.SURVIVED
    if trial.by and not trial.said.startswith(_NO_PROGRAM):
        return Fate.KILLED
    return Fate.INCOMPETENT
