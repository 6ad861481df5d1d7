"""The launch of Spark's JVM, interrupted: neither the JVM nor a folder stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.root import ROOT

_PLAIN = "spark_session(master='local[1]')"
_HEARD = """import signal
signal.signal(signal.SIGINT, lambda *_: print('heard'))
session = spark_session(master='local[1]')
print('rows', session.range(3).count())
session.stop()"""
_IN_A_THREAD = """import threading
thread = threading.Thread(target=lambda: spark_session(master='local[1]').stop())
thread.start()
thread.join()
print('ended')"""


class Launch:
    """A process with a session of its own, which starts Spark."""

    def __init__(self, code: str, folder: Path) -> None:
        (folder / "tmp").mkdir()
        self.folder = folder / "tmp"
        environment = os.environ | {
            "TMPDIR": str(self.folder),
            "SPARK_SUBMIT_OPTS": f"-Djava.io.tmpdir={self.folder} -XX:-UsePerfData",
            "PYTHONPATH": str(ROOT),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from durable.pipeline.session import spark_session\n{code}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def others(self) -> list[int]:
        """The processes of this session besides the first."""
        listed = subprocess.run(["ps", "-eo", "pid=,sess=,stat="], capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in listed.splitlines()]
        mine = str(self.process.pid)
        return [int(pid) for pid, session, state in rows if session == mine != pid and state[0] != "Z"]

    def wait_for_spark(self) -> None:
        """Wait until pyspark has begun to launch its JVM, which it makes a folder for."""
        end = time.monotonic() + 60
        while not (any(self.folder.iterdir()) and self.others()):
            assert time.monotonic() < end
            assert self.process.poll() is None
            time.sleep(0.02)

    def ended(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=90)
        return self.process.returncode, out, err


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[list[Launch]]:
    made: list[Launch] = []
    yield made
    for each in made:
        for pid in [*each.others(), *([each.process.pid] if each.process.poll() is None else [])]:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("seconds", [0, 0.3, 0.7, 1.2, 2.5])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_launch_leaves_no_process_and_no_folder(
    launches: list[Launch], tmp_path: Path, number: signal.Signals, seconds: float
) -> None:
    launch = Launch(_PLAIN + "\nimport time; time.sleep(60)", tmp_path)
    launches.append(launch)
    launch.wait_for_spark()
    time.sleep(seconds)
    if number == signal.SIGINT:  # as a terminal does
        os.killpg(launch.process.pid, number)
    else:
        launch.process.send_signal(number)
    code, _, err = launch.ended()  # the JVM had held the standard error open
    assert code == -number, err
    end = time.monotonic() + 20
    while (launch.others() or any(launch.folder.iterdir())) and time.monotonic() < end:
        time.sleep(0.1)
    assert (launch.others(), [*launch.folder.iterdir()]) == ([], [])


def test_handler_of_the_application_is_called_and_the_session_starts(launches: list[Launch], tmp_path: Path) -> None:
    launch = Launch(_HEARD, tmp_path)
    launches.append(launch)
    launch.wait_for_spark()
    launch.process.send_signal(signal.SIGINT)
    code, out, err = launch.ended()
    assert (code, out.split()) == (0, ["heard", "rows", "3"]), err


def test_session_starts_in_another_thread(launches: list[Launch], tmp_path: Path) -> None:
    launch = Launch(_IN_A_THREAD, tmp_path)
    launches.append(launch)
    code, out, err = launch.ended()
    assert (code, out.split()) == (0, ["ended"]), err
