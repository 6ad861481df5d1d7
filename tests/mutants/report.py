"""The results of all trials, as a table for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tests.mutants.mutant import Mutant
from tests.mutants.trees import ROOT
from tests.mutants.trials import Trial, Verdict

_MARK = {Verdict.KILLED: " ", Verdict.SURVIVED: "S", Verdict.COULD_NOT_RUN: "?"}


def table(rows: Sequence[Mutant], trials: Mapping[Mutant, Trial], seconds: float) -> str:
    """One line for each mutant, those that were not killed with what was said, and the sums."""
    width = max(len(row.name) for row in rows)
    lines = []
    for row in rows:
        trial = trials[row]
        told = trial.by.rpartition("/")[2] if trial.verdict is Verdict.KILLED else trial.said
        lines.append(f"{_MARK[trial.verdict]} {row.room:9} {row.name:{width}} {trial.seconds:6.1f} s  {told}")
    counts = Counter(trials[row].verdict for row in rows)
    sums = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)
    return "\n".join([*lines, "", f"{len(rows)} mutants in {seconds:.0f} s: {sums}"])


def as_json(rows: Sequence[Mutant], trials: Mapping[Mutant, Trial]) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        path, line = row.place(ROOT)
        trial = trials[row]
        found.append(
            {
                "room": row.room,
                "mutant": row.name,
                "file": str(path.relative_to(ROOT)),
                "line": line,
                "verdict": str(trial.verdict),
                "killed_by": trial.by,
                "said": trial.said,
                "seconds": round(trial.seconds, 1),
            }
        )
    return found
