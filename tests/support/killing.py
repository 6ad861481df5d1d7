"""Processes that die by SIGKILL: a worker amid its task, or a session whole, with its driver, JVM and workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext

from durable import failpoints
from durable.pipeline import copying
from tests.support.root import ROOT


def dies_at(failpoint: str, module: str, *arguments: str) -> None:
    """Run this module of tests.support as a program, in a session of its own that must die at this failpoint."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DURABLE_FAILPOINT": failpoint}
    died = subprocess.run(
        [sys.executable, "-m", f"tests.support.{module}", *arguments],
        env=environment,
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr


def is_first_attempt() -> bool:
    """Of the task that this worker is at."""
    context = TaskContext.get()
    assert context is not None
    return context.attemptNumber() == 0


def arm_session() -> None:
    """From here on the failpoint of DURABLE_FAILPOINT kills the session, and not only the process that is there."""
    failpoints._die_when_due = _kill_session


def copy_in_small_batches() -> None:
    """From here on in this process, so that it can be killed between two of them."""
    copying._BATCH_BYTES = 1 << 14


def until_killed(batches: Iterator[pa.RecordBatch], rows: int, died: Path) -> Iterator[pa.RecordBatch]:
    """At least so many rows; then this process is killed, and the file `died` says how many there were."""
    count = 0
    for batch in batches:
        yield batch
        count += batch.num_rows
        if count >= rows:
            died.write_text(str(count))
            os.kill(os.getpid(), signal.SIGKILL)


def _kill_session() -> None:
    """This process last."""
    mine = os.getsid(0)
    others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    for pid in (*filter(lambda pid: _session_of(pid) == mine, others), os.getpid()):
        os.kill(pid, signal.SIGKILL)


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0
