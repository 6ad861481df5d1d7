"""The table of guards fits the code and the tests, and a trial tells kills, survivors and broken programs apart."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from tests.mutants.guards import GUARDS
from tests.mutants.mutant import SIMULATION, Mutant, Unusable
from tests.mutants.trees import ROOT, copied
from tests.mutants.trials import Verdict, tried

_LATCH = "tests/unit/agents/test_latch.py"
_COUNTED = Mutant(
    "sending",
    "failures are not counted",
    "durable/agents/latch.py",
    "        self.failures_in_a_row += 1\n",
    "",
    (_LATCH,),
)


@pytest.mark.parametrize("row", GUARDS, ids=lambda row: row.name)
def test_mutant_changes_one_place_and_is_a_program(row: Mutant) -> None:
    changed = row.applied((ROOT / row.file).read_text())
    ast.parse(changed)


@pytest.mark.parametrize("row", GUARDS, ids=lambda row: row.name)
def test_killing_tests_exist(row: Mutant) -> None:
    assert row.killed_by
    for test in row.killed_by:
        if test != SIMULATION:
            file, *inner = test.partition("[")[0].split("::")
            assert inner[-1] in _functions(file)


@cache
def _functions(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def test_mutants_have_names_of_their_own() -> None:
    assert len(GUARDS) >= 60
    assert [name for name, count in Counter((row.room, row.name) for row in GUARDS).items() if count > 1] == []


def test_row_of_another_text_is_refused() -> None:
    with pytest.raises(Unusable, match="has its text 0 times"):
        replace(_COUNTED, before="no such text").applied("some text")


@pytest.mark.parametrize(
    ("mutant", "verdict"),
    [
        (_COUNTED, Verdict.KILLED),
        (replace(_COUNTED, after="        self.failures_in_a_row += 0 + 1\n"), Verdict.SURVIVED),
        (replace(_COUNTED, after="        self.failures_in_a_row += no_such_name\n"), Verdict.COULD_NOT_RUN),
        (replace(_COUNTED, after="    not a program\n"), Verdict.COULD_NOT_RUN),
        (replace(_COUNTED, killed_by=(f"{_LATCH}::test_no_such",)), Verdict.COULD_NOT_RUN),
    ],
    ids=["guard", "harmless", "name", "syntax", "test"],
)
def test_trial_tells_kills_from_survivors_and_broken_programs(mutant: Mutant, verdict: Verdict) -> None:
    with copied() as tree:
        before = (ROOT / mutant.file).read_text()
        trial = tried(tree, mutant, {})
        assert trial.verdict is verdict, trial
        assert (tree.folder / mutant.file).read_text() == before == (ROOT / mutant.file).read_text()
