"""The results: of each side the best and the median of the rounds, and durable beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

JOBS_PER_SECOND = "jobs a second"
MILLISECONDS = "ms"


@dataclass
class Standing:
    """One figure of one side, and what each side of durable does in its place."""

    work: str
    name: str
    unit: str
    best: float
    median: float
    ratios: dict[str, float] = field(default_factory=dict)
    """durable's best divided by this one's: above 1 durable is faster in jobs a second, and slower in milliseconds."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of these values that is not below this share of them (0.5, 0.99).

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def standings(work: str, unit: str, rounds: Mapping[str, Sequence[float]], ours: Sequence[str]) -> list[Standing]:
    """The standings of a work, from what was measured of each side in each round."""
    best = min if unit == MILLISECONDS else max
    made = [Standing(work, name, unit, best(values), median(values)) for name, values in rounds.items()]
    durables = {standing.name: standing.best for standing in made if standing.name in ours}
    for standing in made:
        if standing.name not in ours:
            standing.ratios = {name: value / standing.best for name, value in durables.items()}
    return made


def as_markdown(made: Sequence[Standing]) -> str:
    """The tables of these standings, one for each work, as docs/performance.md has them."""
    works = dict.fromkeys(standing.work for standing in made)
    return "\n\n".join(_table([standing for standing in made if standing.work == work]) for work in works)


def _table(made: Sequence[Standing]) -> str:
    durables = list(dict.fromkeys(name for standing in made for name in standing.ratios))
    head = [made[0].work, f"best, {made[0].unit}", "median", *(f"{name} / this" for name in durables)]
    rule = ["---"] * len(head)
    rows = [
        [
            standing.name,
            _shown(standing.best, standing.unit),
            _shown(standing.median, standing.unit),
            *(f"{standing.ratios[name]:.2f}" if name in standing.ratios else "" for name in durables),
        ]
        for standing in made
    ]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in (head, rule, *rows))


def _shown(value: float, unit: str) -> str:
    return f"{value:,.1f}" if unit == MILLISECONDS else f"{value:,.0f}"
