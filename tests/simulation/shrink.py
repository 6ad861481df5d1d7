"""The fewest faults with which a seed still fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.simulation.faults import Fault
from tests.simulation.world import Outcome

Run = Callable[[int, Sequence[Fault]], Outcome]


def kinds(outcome: Outcome) -> set[str]:
    """The invariants that a run breaks."""
    return {text.partition(" s: ")[2].partition(":")[0] for text in outcome.violations}


def shrink(failed: Outcome, run: Run) -> Outcome:
    """Leave out faults, the halves first, as long as one of the same invariants is broken."""
    wanted, best = kinds(failed), failed
    size = len(best.faults) // 2
    while size:
        start = 0
        while start < len(best.faults):
            fewer = [*best.faults[:start], *best.faults[start + size :]]
            tried = run(failed.seed, fewer)
            if kinds(tried) & wanted:
                best = tried
            else:
                start += size
        size //= 2
    return best


def numbers(outcome: Outcome, planned: Sequence[Fault]) -> list[int]:
    """The places of the faults of a run in the plan of its seed."""
    return [number for number, fault in enumerate(planned) if fault in outcome.faults]
