"""One run of some tests in a private tree, and the verdict on the mutant that is in it.

    killed          a test has failed in its own body
    survived        all tests have passed
    could not run   anything else: an import that fails, a fixture that fails, no tests, a process that ended without
                    telling, a timeout of a mutant that is not said to hang

A mutant that makes durable no program at all is found by any test, and says nothing of them: so an error of a name or
of an import is no kill.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.mutants.mutant import SIMULATION, Mutant
from tests.mutants.trees import Tree
from tests.mutants.witness import FILE

_NO_PROGRAM: Final = frozenset({"NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError"})
_SEEDS: Final = 100
_RUN_SECONDS: Final = 420


class Verdict(StrEnum):
    KILLED = "killed"
    SURVIVED = "survived"
    COULD_NOT_RUN = "could not run"


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of a mutant, or of a tree without one."""

    verdict: Verdict
    by: str = ""
    """The test that has failed."""
    said: str = ""
    seconds: float = 0.0


class Bounds(NamedTuple):
    """Bounds of a run of tests."""

    run_seconds: float = _RUN_SECONDS
    test_seconds: int = 90
    hypothesis_profile: str = "unhurried"


_BOUNDS: Final = Bounds()


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended; `code` is None if it was ended here, after its time."""

    code: int | None
    output: str


def tried(tree: Tree, mutant: Mutant, servers: Mapping[str, str]) -> Trial:
    """Run the tests of a mutant in the tree, until one fails."""
    text = (tree.folder / mutant.file).read_text()
    began = time.monotonic()
    with tree.changed(mutant.file, mutant.applied(text)):
        trial = run(tree, mutant.killed_by, servers, hangs=mutant.hangs)
    return Trial(trial.verdict, trial.by, trial.said, time.monotonic() - began)


def run(tree: Tree, tests: Sequence[str], servers: Mapping[str, str], *, hangs: bool = False) -> Trial:
    """Run these tests, and the simulation if it is among them, until one fails."""
    trial = Trial(Verdict.SURVIVED)
    if named := [test for test in tests if test != SIMULATION]:
        trial = run_tests(tree, named, servers, hangs=hangs)
    if SIMULATION in tests and trial.verdict is Verdict.SURVIVED:
        return simulated(tree, _SEEDS)
    return trial


def run_tests(
    tree: Tree, tests: Sequence[str], servers: Mapping[str, str], *, hangs: bool = False, bounds: Bounds = _BOUNDS
) -> Trial:
    with tempfile.TemporaryDirectory(prefix="durable-witness-") as folder:
        told = Path(folder) / "told.json"
        options = ["-x", "-q", "-p", "tests.mutants.witness", "-p", "no:cacheprovider", "-p", "no:randomly"]
        options += ["-o", f"timeout={bounds.test_seconds}", "--hypothesis-profile", bounds.hypothesis_profile]
        ended = ended_in(tree, ["-m", "pytest", *options, *tests], {**servers, FILE: str(told)}, bounds.run_seconds)
        if ended.code is None:
            return _of_timeout(hangs, bounds.run_seconds)
        if not told.exists():
            return Trial(Verdict.COULD_NOT_RUN, said=_last_line(ended.output) or f"exit code {ended.code}")
        return _judged(json.loads(told.read_text()), ended.output, hangs=hangs)


def ended_in(tree: Tree, arguments: Sequence[str], environment: Mapping[str, str], seconds: float) -> Ended:
    """Run Python in the tree, which is where it finds durable and the tests; no process outlives its time."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DURABLE_")}
    whole = {**inherited, "PYTHONPATH": str(tree.folder), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=tree.folder, env=whole, stdout=said, stderr=said, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return Ended(code, said.read())


def _judged(told: Mapping[str, Any], output: str, *, hangs: bool) -> Trial:
    failed = [report for report in told["reports"] if report["outcome"] == "failed"]
    if told["exit"] == 0 and any(report["when"] == "call" for report in told["reports"]):
        return Trial(Verdict.SURVIVED)
    if told["exit"] != 1 or not failed:
        return Trial(Verdict.COULD_NOT_RUN, said=_last_line(output))
    first = failed[0]
    said = f"{first['error'] or ''} {first['said']}".strip()
    if first["when"] != "call":
        return Trial(Verdict.COULD_NOT_RUN, first["test"], f"in {first['when']}: {said}")
    if first["error"] in _NO_PROGRAM:
        return Trial(Verdict.COULD_NOT_RUN, first["test"], said)
    if "Timeout (>" in said and not hangs:
        return Trial(Verdict.COULD_NOT_RUN, first["test"], said)
    return Trial(Verdict.KILLED, first["test"], said)


def simulated(tree: Tree, seeds: int) -> Trial:
    """Run this many seeds of the simulation, until one fails."""
    arguments = ["-m", "tests.simulation", "--seeds", str(seeds), "--failures", "1", "--whole"]
    ended = ended_in(tree, arguments, {"PYTHONHASHSEED": "0"}, _RUN_SECONDS)
    if ended.code == 0:
        return Trial(Verdict.SURVIVED)
    if ended.code == 1 and "violations: 1 seeds" in ended.output:
        found = [line.strip() for line in ended.output.splitlines() if " fails, with " in line]
        return Trial(Verdict.KILLED, SIMULATION, found[0] if found else "")
    return Trial(Verdict.COULD_NOT_RUN, SIMULATION, _last_line(ended.output))


def _of_timeout(hangs: bool, seconds: float) -> Trial:
    said = f"not ended after {seconds} s"
    return Trial(Verdict.KILLED if hangs else Verdict.COULD_NOT_RUN, "timeout", said)


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
