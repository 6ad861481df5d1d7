"""Figures of a run, all from the ledger, the times of the faults and the logs of the nodes.

    latency    from the commit's moment (or the time at which a message was due) to its effect
    recovery   from the end of a fault until every message of before has taken effect: of kinds that neither fail by
               design nor wait behind others that do
    stall      the longest time without any effect, from the beginning of a fault until it is recovered from

Faults overlap: what one costs is counted with each that was there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tests.chaos.history import History, Sent
from tests.chaos.run import Outcome
from tests.chaos.watch import Happened

PLAIN_KINDS = {"reminder", "receipt", "note"}


class Second(NamedTuple):
    """Effects of one second of a run, and the latencies (seconds) of their messages."""

    second: int
    effects: int
    p50: float
    p99: float


@dataclass(frozen=True)
class Cost:
    """What the faults of one kind have cost, in seconds; and lines of log while they lasted, on average."""

    kind: str
    count: int
    recovery_p50: float
    recovery_p99: float
    longest_stall: float
    log_lines: float


def seconds(outcome: Outcome) -> list[Second]:
    """Each second of the run, those without effects included."""
    latencies: dict[int, list[float]] = {}
    for effect in outcome.history.effects:
        sent = outcome.history.sent.get(effect.id)
        latency = effect.at.timestamp() - _ready(sent) if sent else 0.0
        latencies.setdefault(int(effect.at.timestamp() - outcome.began), []).append(max(0.0, latency))
    ends = max(latencies, default=0)
    return [_second(number, sorted(latencies.get(number, []))) for number in range(ends + 1)]


def costs(outcome: Outcome) -> list[Cost]:
    effects = sorted(effect.at.timestamp() for effect in outcome.history.effects)
    first = _first_effects(outcome.history)
    lines = log_times(outcome.folder)
    by_kind: dict[str, list[tuple[float, float, int]]] = {}
    for happened in outcome.happened:
        recovery = _recovery(happened, outcome.history, first)
        recovered = happened.ended + recovery
        logged = bisect_right(lines, recovered) - bisect_left(lines, happened.began)
        stall = longest_gap(effects, happened.began, recovered)
        by_kind.setdefault(happened.fault.kind, []).append((recovery, stall, logged))
    return [_cost(kind, found) for kind, found in sorted(by_kind.items())]


def _cost(kind: str, found: Sequence[tuple[float, float, int]]) -> Cost:
    recoveries = sorted(recovery for recovery, _, _ in found)
    return Cost(
        kind,
        len(found),
        round(percentile(recoveries, 0.5), 2),
        round(percentile(recoveries, 0.99), 2),
        round(max(stall for _, stall, _ in found), 2),
        round(sum(logged for *_, logged in found) / len(found), 1),
    )


def last_effects(outcome: Outcome, count: int = 20) -> list[str]:
    """The messages that took longest after the faults had ended, the last first."""
    late = sorted(outcome.history.effects, key=lambda effect: effect.at, reverse=True)[:count]
    found = []
    for effect in late:
        sent = outcome.history.sent.get(effect.id)
        ready = f", ready at {_ready(sent) - outcome.calm_at:.1f} s: {sent.behaviour or 'plain'}" if sent else ""
        found.append(f"{effect.kind} {effect.key} at {effect.at.timestamp() - outcome.calm_at:.1f} s{ready}")
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The value at this share of sorted values; 0 without any."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def longest_gap(moments: Sequence[float], begin: float, end: float) -> float:
    """The longest time between two of these sorted moments, from `begin` to `end`."""
    within = [begin, *moments[bisect_left(moments, begin) : bisect_right(moments, end)], max(begin, end)]
    return max(after - before for before, after in pairwise(within))


def log_times(folder: Path) -> list[float]:
    """The time of each line that nodes have logged; a line of a traceback has that of the line before."""
    found: list[float] = []
    for log in folder.glob("*.log"):
        moment = 0.0
        for line in log.read_text(errors="replace").splitlines():
            word = line.partition(" ")[0]
            if word.replace(".", "", 1).isdigit() and "." in word:
                moment = float(word)
            found.append(moment)
    return sorted(found)


def _recovery(happened: Happened, history: History, first: dict[object, float]) -> float:
    late = [
        first[id] - happened.ended
        for id, sent in history.sent.items()
        if _is_plain(sent) and id in first and happened.began - 60 < _ready(sent) <= happened.ended
    ]
    return max([0.0, *late])


def _is_plain(sent: Sent) -> bool:
    return sent.kind in PLAIN_KINDS and not sent.behaviour


def _ready(sent: Sent) -> float:
    return max(sent.at, sent.due_at or sent.at).timestamp()


def _first_effects(history: History) -> dict[object, float]:
    first: dict[object, float] = {}
    for effect in history.effects:
        first.setdefault(effect.id, effect.at.timestamp())
    return first


def _second(number: int, latencies: list[float]) -> Second:
    return Second(number, len(latencies), percentile(latencies, 0.5), percentile(latencies, 0.99))
