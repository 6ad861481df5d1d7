"""Monitor: state of a process and of its service, for metrics and health checks.

    statistics    the agents of this process, read each time              durable.statistics
    gauges        the tables, read at most every few seconds              durable.storage.gauges
    problems      by the rules that `durable-agent status` judges by      durable.observability.health

Nothing is read while nobody asks. When the database does not answer in time, that is the answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from durable.application.application import Application
from durable.clock import Clock
from durable.errors import DurableError
from durable.observability import health
from durable.recovery.policy import DormancyPolicy
from durable.settings import Settings
from durable.statistics import Statistics
from durable.storage import gauges
from durable.storage.database import Database
from durable.storage.gauges import Gauges, Side

_FRESH: Final = 5.0  # seconds for which the tables are not read again
_PATIENCE: Final = 3.0  # seconds for the database to answer; Prometheus waits for 10


class Reading(NamedTuple):
    """Reading of the gauges. Without gauges the database did not answer, and `problems` says why."""

    gauges: Gauges | None
    problems: Sequence[str]


class Monitor:
    """Looks at one process and its service."""

    def __init__(
        self,
        statistics: Callable[[], Statistics],
        database: Callable[[], Database],
        application: Application,
        settings: Settings,
        clock: Clock,
        *,
        is_to_be_node: Callable[[], bool],
        troubles: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        self.statistics = statistics
        self.application = application
        self.settings = settings
        self._database = database
        self._clock = clock
        self._is_to_be_node = is_to_be_node
        self._troubles = troubles
        self._policy = DormancyPolicy(grace=settings.dormant_grace, stale=settings.heartbeat_stale)
        self._looking = asyncio.Lock()
        self.last: Reading | None = None
        """The gauges of the last look."""
        self._read_at = 0.0

    async def read(self) -> Reading:
        """The state of the service, a few seconds old at most."""
        async with self._looking:
            if self.last is None or time.monotonic() - self._read_at >= _FRESH:
                self.last = await self._read()
                self._read_at = time.monotonic()
            return self.last

    async def _read(self) -> Reading:
        try:
            async with asyncio.timeout(_PATIENCE):
                found = await self._database().transaction(gauges.read)
        except (DurableError, TimeoutError) as error:
            reason = str(error) or "it did not answer in time"
            return Reading(None, [f"the database cannot be read: {reason}", *self._troubles()])
        dormant = health.dormant(self._policy, found, time.monotonic())
        problems = health.problems(found, dormant, self._waits(found), self.settings)
        return Reading(found, [*self._missing(), *self._troubles(), *problems])

    def _missing(self) -> list[str]:
        if self._is_to_be_node() and self.statistics().node_id is None:
            return ["this process is no node now: see its log for why it cannot join the nodes"]
        return []

    def _waits(self, found: Gauges) -> health.Waits:
        """Return the unowned rows, and those in the memory of this process."""
        statistics, now = self.statistics(), self._clock.now()
        waits = dict(health.unowned_waits(found))
        for side, agents in ((Side.OUTGOING, statistics.sending), (Side.INCOMING, statistics.handling)):
            for name, agent in agents.items():
                if agent.oldest_sent_at is not None:
                    age = now - agent.oldest_sent_at
                    waits[side, name] = max(age, waits.get((side, name), age))
        return waits
