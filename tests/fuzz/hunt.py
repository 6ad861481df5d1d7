"""Hunt: one target, with fresh inputs by hypothesis and those of its corpus, until a check fails.

The corpus is a database of hypothesis's: the smallest input for each word that a check has returned, and the inputs
that failed, which the next hunt tries first. A failing input is also written to a file, with how to run it again.
"""

from __future__ import annotations

import ast
import re
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import hypothesis
from hypothesis import HealthCheck, Phase, given, reproduce_failure, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase
from hypothesis.errors import DidNotReproduce, HypothesisWarning

from tests.fuzz.targets import Check, Target

CORPUS: Final = "corpus"
FAILURES: Final = "failures"

_BLOB: Final = re.compile(r"@reproduce_failure\(['\"]([^'\"]+)['\"], (b['\"][^'\"]*['\"])\)")


@dataclass
class Hunt:
    """Inputs of one target, and what became of them."""

    target: Target
    check: Check
    corpus: ExampleDatabase | None = None
    executions: int = 0
    words: set[str] = field(default_factory=set)
    failures: list[Path] = field(default_factory=list)
    tried: object = None
    """The last input: of a hunt that has failed, the smallest one that fails."""

    def go(self, examples: int) -> None:
        """Try so many inputs. Raises what the check raises for the smallest one that fails."""
        self._tried(examples, lambda fuzzed: fuzzed)

    def again(self, version: str, blob: bytes) -> None:
        """Try the one input that hypothesis wrote so."""
        self._tried(1, reproduce_failure(version, blob))

    def _tried(self, examples: int, how: Callable[[Any], Any]) -> None:
        @how
        @settings(
            max_examples=examples,
            database=self.corpus,
            deadline=None,
            phases=[Phase.reuse, Phase.generate] + ([] if self.target.keeps_state else [Phase.shrink]),
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        )
        @given(self.target.inputs)
        def fuzzed(value: object) -> None:
            self.executions += 1
            self.tried = value
            word = self.check(value)
            self.words.add(word)
            hypothesis.target(1.0, label=word)

        with warnings.catch_warnings():  # of `random`, which a node uses meanwhile; of long inputs
            warnings.simplefilter("ignore", HypothesisWarning)
            fuzzed()


def hunt_for(seconds: float, hunt: Hunt, folder: Path) -> None:
    """Try inputs for so long; a failure is written down, and is the end of it."""
    hunt.corpus = DirectoryBasedExampleDatabase(folder / CORPUS / hunt.target.name)
    until = time.monotonic() + seconds
    while not hunt.failures and (time.monotonic() < until or not hunt.executions):
        try:
            hunt.go(hunt.target.examples)
        except (Exception, BaseExceptionGroup) as error:
            hunt.failures.append(_write_down(error, hunt, folder / FAILURES))


def run_again(file: Path, target: Target, check: Check) -> bool:
    """Try the input in this file; True when it passes now. Raises what the check raises."""
    found = _BLOB.search(file.read_text())
    if found is None:
        raise ValueError(f"{file}: no input in it; run its target again, with the corpus")
    try:
        Hunt(target, check).again(found[1], ast.literal_eval(found[2]))
    except DidNotReproduce:
        return True
    return False


def target_of(file: Path) -> str:
    """Return the name of the target that failed."""
    return file.name.rpartition(".")[0].rpartition("-")[0]


def _write_down(error: BaseException, hunt: Hunt, folder: Path) -> Path:
    """Write the input, as text and as hypothesis reads it, with what it met."""
    text = "".join(traceback.format_exception(error))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{hunt.target.name}-{sha256(text.encode(errors='backslashreplace')).hexdigest()[:12]}.txt"
    file.write_text(f"run it again: {command_for(file)}\ninput: {hunt.tried!r}\n\n{text}", errors="backslashreplace")
    return file


def command_for(file: Path) -> str:
    """Return the command that runs the input in this file again."""
    return f".venv/bin/python -m tests.fuzz again {file}"
