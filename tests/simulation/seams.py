"""What is put in the place of time, chance, threads and logs while a run lasts: the only reach into durable.

Everything of durable that asks the module `time` gets virtual time, its ids are numbered, and what it logs as an
internal error is a violation.
"""

from __future__ import annotations

import gc
import logging
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from uuid import UUID

import durable.application.retry
import durable.node
import durable.recovery.agent
import durable.recovery.floors
from durable.recovery.floors import SLOW
from durable.settings import Settings
from durable.storage import circuits
from durable.storage.database import Database
from durable.telemetry import log
from tests.simulation.loop import CURRENT
from tests.simulation.membership import SimulatedMembership
from tests.simulation.process import Process
from tests.simulation.server import EPOCH

if TYPE_CHECKING:
    from tests.simulation.world import World


async def _maintain(database: Database, settings: Settings) -> None:
    """The part of maintenance that other agents feel; partitions and purges are not simulated."""
    await database.transaction(circuits.close_ended)


_chance = SimpleNamespace(Random=lambda: random.Random(random.random()))
"""The module `random`, whose generators are seeded by the global one."""


class _Reporter(logging.Handler):
    """Takes errors that durable did not expect: those that are logged with a traceback."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._tell(f"logged: {record.getMessage()}: {record.exc_info[1]!r}")


@contextmanager
def left_behind() -> Iterator[None]:
    """Let the coroutines and connections of dead processes end without a word: they complain that nobody awaits, or
    gives back, them any more.
    """
    before, pools = sys.unraisablehook, logging.getLogger("sqlalchemy.pool")
    sys.unraisablehook, level = (lambda _: None), pools.level
    pools.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
            gc.collect()
    finally:
        sys.unraisablehook = before
        pools.setLevel(level)


def _ids(seconds: Callable[[], float]) -> Callable[[], UUID]:
    """Ids of version 7 by the clock of the process, and otherwise numbered."""
    count = 0

    def new() -> UUID:
        nonlocal count
        count += 1
        process = CURRENT.get()
        offset = process.offset.total_seconds() if isinstance(process, Process) else 0.0
        at = int((EPOCH.timestamp() + seconds() + offset) * 1_000)
        return UUID(int=at << 80 | 7 << 76 | (count >> 62 & 0xFFF) << 64 | 2 << 62 | count & (1 << 62) - 1)

    return new


@contextmanager
def virtual(world: World, seed: int) -> Iterator[None]:
    """Put the world's time, ids and chance in place; put everything back at the end."""
    clock = SimpleNamespace(monotonic=world.loop.time, perf_counter=world.loop.time, time=world.loop.time)
    state = random.getstate()
    random.seed(seed)
    reporter = _Reporter(world.violation)
    before = log.level, log.propagate
    log.addHandler(reporter)
    log.setLevel(logging.ERROR)
    log.propagate = False
    timed = [each for name, each in _modules() if getattr(each, "time", None) is time]
    try:
        with (
            patch.object(durable.node, "Membership", SimulatedMembership),
            patch.object(durable.recovery.agent, "maintain", _maintain),
            patch.object(durable.application.retry, "random", _chance),
            # Half of the runs look as if handled rows lay in the way: most of their looks are short.
            patch.object(durable.recovery.floors, "SLOW", 0.0 if seed % 2 else SLOW),
            patch.object(durable.recovery.floors, "_TIMES", 200),
            patch("uuid_utils.compat.uuid7", _ids(world.loop.time)),
        ):
            for module in timed:
                module.time = clock
            yield
    finally:
        for module in timed:
            module.time = time
        log.removeHandler(reporter)
        log.level, log.propagate = before
        random.setstate(state)


def _modules() -> list[tuple[str, Any]]:
    return [(name, each) for name, each in list(sys.modules.items()) if name.split(".")[0] == "durable"]
