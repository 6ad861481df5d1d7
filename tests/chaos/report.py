from __future__ import annotations
from pathlib import Path
from tests.chaos.checker import check
from tests.chaos.run import Outcome


def write(outcome: Outcome, path: Path) -> int:
    found = check(outcome.history)
    h = outcome.history
    print(len(h.sent), len(h.effects), len(h.dead), outcome.restarts, outcome.false_deaths, outcome.peak_bytes)
    for v in found[:30]:
        print(v)
    print(len(found))
    return 1 if found else 0
