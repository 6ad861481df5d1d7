"""The summary of a run: what the report says, as values that JSON knows."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from tests.chaos.checker import RULES, Violation, check
from tests.chaos.figures import Cost, Second, costs, last_effects, log_times, percentile, seconds
from tests.chaos.run import Outcome

MOST_NAMED = 200


@dataclass(frozen=True)
class Summary:
    """Summary: times are seconds since the first message was handled."""

    seed: int
    profile: str
    transport: str
    pooled: str
    is_secured: bool
    messages: int
    handled: int
    occurrences: int
    """Occurrences of the schedule."""
    dead: dict[str, int]
    """Dead letters by the reason; those whose handlers fail by design included."""
    expired: int
    faults: dict[str, int]
    violations: dict[str, int]
    named: list[str]
    """The violations, the first of many."""
    false_deaths: list[str]
    restarts: list[str]
    p50_seconds: float
    p99_seconds: float
    calm_seconds: float
    """The time at which the faults ended."""
    settled_seconds: float
    """The time that everything took to finish then; -1 when it was not in time."""
    last_effects: list[str]
    """The messages that were handled last, and when: seconds after the end of the faults."""
    peak_mebibytes: dict[str, int]
    log_lines_per_fault: float
    costs: list[Cost]
    seconds: list[Second]
    events: list[tuple[str, str, float, float]]
    """Each fault: its kind, its place, its beginning and its end."""

    @property
    def is_right(self) -> bool:
        return not any(self.violations.values())

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_right": self.is_right}


def summarize(outcome: Outcome) -> Summary:
    found, history = check(outcome.history), outcome.history
    if not outcome.settled_at:
        found.append(Violation("stuck", "not everything was finished when the time of calm was over"))
    latencies = sorted(
        max(0.0, (effect.at - max(sent.at, sent.due_at or sent.at)).total_seconds())
        for effect in history.effects
        if (sent := history.sent.get(effect.id))
    )
    named = Counter(violation.rule for violation in found)
    return Summary(
        seed=outcome.plan.seed,
        profile=outcome.profile,
        transport=outcome.transport,
        pooled=outcome.plan.pooled,
        is_secured=outcome.plan.is_secured,
        messages=len(history.sent),
        handled=len({effect.id for effect in history.effects} & set(history.sent)),
        occurrences=len({effect.number for effect in history.effects if effect.kind == "tick"}),
        dead=dict(Counter(history.reasons.values()).most_common()),
        expired=len({id for (_, outcome, id) in history.ended if outcome == "expired"}),
        faults=dict(Counter(happened.fault.kind for happened in outcome.happened).most_common()),
        violations={rule: named[rule] for rule in RULES},
        named=[f"{rule}: {text}" for rule, text in found[:MOST_NAMED]],
        false_deaths=outcome.false_deaths,
        restarts=outcome.restarts,
        p50_seconds=round(percentile(latencies, 0.5), 3),
        p99_seconds=round(percentile(latencies, 0.99), 3),
        calm_seconds=round(outcome.calm_at - outcome.began, 1),
        settled_seconds=round(outcome.settled_at - outcome.calm_at, 1) if outcome.settled_at else -1,
        last_effects=last_effects(outcome),
        peak_mebibytes={name: peak >> 20 for name, peak in sorted(outcome.peak_bytes.items())},
        log_lines_per_fault=round(len(log_times(outcome.folder)) / max(1, len(outcome.happened)), 1),
        costs=costs(outcome),
        seconds=seconds(outcome),
        events=[
            (
                each.fault.kind,
                each.fault.place,
                round(each.began - outcome.began, 2),
                round(each.ended - outcome.began, 2),
            )
            for each in outcome.happened
        ],
    )
