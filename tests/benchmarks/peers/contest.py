"""Rounds in which every side does every work, in turn, each time in a database of its own on the same server.

enlist     a process commits `count` business rows, each with its job, AT_ONCE at once
handle     then another process handles them: from the commit of the first effect to that of the last
latency    a worker waits, and jobs are enlisted one after the other: from the commit of each to that of its effect
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from durable.embedded import Embedded, postgres, rabbitmq
from tests.benchmarks.peers import commits
from tests.benchmarks.peers.processes import Process, run
from tests.benchmarks.peers.program import Order
from tests.benchmarks.peers.sides import ENLIST, HANDLE, LATENCY, OURS, Side, python_of
from tests.benchmarks.peers.standings import JOBS_PER_SECOND, MILLISECONDS, Standing, percentile, standings
from tests.benchmarks.peers.trial import latencies_in_turn, prepare

PACED = 200
WARM_UP = 20

TITLES = {
    ENLIST: ("enlist, 8 at once", JOBS_PER_SECOND),
    HANDLE: ("handle a backlog, 8 at once", JOBS_PER_SECOND),
    "p50": ("from commit to effect, p50", MILLISECONDS),
    "p99": ("from commit to effect, p99", MILLISECONDS),
}


class Contest:
    """What was measured, by figure and side, a value for each round."""

    def __init__(self, server: Embedded, broker_url: str, sides: Sequence[Side], count: int) -> None:
        self._server = server
        self._broker_url = broker_url
        self._sides = list(sides)
        self._count = count
        self._versions: dict[str, str] = {}
        self._measured: dict[str, dict[str, list[float]]] = {
            figure: {side.name: [] for side in sides if _work_of(figure) in side.works} for figure in TITLES
        }

    def run_round(self) -> None:
        """Let every side do its work; the next round begins with another side."""
        for side in self._sides:
            if HANDLE in side.works:
                self._run_backlog(side)
        for side in self._sides:
            if LATENCY in side.works:
                self._run_paced(side)
        self._sides.append(self._sides.pop(0))

    @property
    def standings(self) -> list[Standing]:
        """The standings of all figures, with the version of each peer."""
        ours = [side.name for side in self._sides if side.peer == OURS]
        made = [
            standing
            for figure, (title, unit) in TITLES.items()
            for standing in standings(title, unit, self._measured[figure], ours)
        ]
        return [replace(standing, name=self._with_version(standing.name)) for standing in made]

    def _with_version(self, name: str) -> str:
        peer, comma, variant = name.partition(",")
        return f"{peer} {self._versions[peer]}{comma}{variant}" if peer in self._versions else name

    def _run_backlog(self, side: Side) -> None:
        order = self._prepare(side)
        report = run(side, replace(order, work="enlist", count=self._count))
        if side.peer != OURS:
            self._versions[side.peer] = report.version
        if ENLIST in side.works:
            self._measured[ENLIST][side.name].append(commits.rate(order.url, commits.JOBS, self._count))
        with Process(side, replace(order, work="handle")) as worker:
            commits.wait_for_effects(side.name, order.url, self._count, worker.check)
        self._measured[HANDLE][side.name].append(commits.rate(order.url, commits.EFFECTS, self._count))

    def _run_paced(self, side: Side) -> None:
        seconds = latencies_in_turn(side, self._prepare(side), PACED, WARM_UP)
        for figure, share in (("p50", 0.5), ("p99", 0.99)):
            self._measured[figure][side.name].append(percentile(seconds, share) * 1000)

    def _prepare(self, side: Side) -> Order:
        return prepare(side, self._server, self._broker_url)


def _work_of(figure: str) -> str:
    return figure if figure in (ENLIST, HANDLE) else LATENCY


def run_contest(sides: Sequence[Side], rounds: int, count: int) -> list[Standing]:
    """The standings after so many rounds.

    Raises InvalidSetting when an environment is missing, or a program fails.
    """
    for side in sides:
        python_of(side.peer)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(postgres(folder))
        commits.keep_times(server)
        needs_broker = any(side.needs_broker for side in sides)
        broker_url = stack.enter_context(rabbitmq(folder / "rabbitmq")).url if needs_broker else ""
        contest = Contest(server, broker_url, sides, count)
        for _ in range(rounds):
            contest.run_round()
        return contest.standings
