"""A process that is the bus's own, run as one."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from typing import Any

import pytest

from durable import Bus
from durable.process import serving
from durable.process.serving import SecondSignal

PROCESS = """
import os, resource, signal
from durable import Bus
from durable.process import serving

class Ends:
    async def __aenter__(self):
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        os.kill(os.getpid(), signal.SIGTERM)

    async def __aexit__(self, *_): ...

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
serving.run(Ends(), Bus("shop", "postgresql://nowhere/shop").runtime.life)
"""


def test_process_may_have_as_many_open_files_as_the_system_allows() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True, timeout=60)
    assert int(told.stdout) == hard > 256


def test_second_signal_ends_the_process_unless_an_echo_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    now = [100.0]
    monkeypatch.setattr(serving, "end_process", lambda code, *_: ended.append(code))
    second = SecondSignal(lambda: now[0])
    second.begin()

    second.first_came()
    for passed in (0.0, 0.001, 0.2):
        now[0] = 100.0 + passed
        second.heard(signal.SIGINT, None)
    assert ended == []
    now[0] = 100.4
    second.heard(signal.SIGINT, None)
    assert ended == [1]


@pytest.mark.parametrize(("has_begun", "code"), [(False, 0), (True, 1)])
def test_signal_without_a_first_one_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, has_begun: bool, code: int
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(serving, "end_process", lambda code, *_: ended.append(code))
    second = SecondSignal()
    if has_begun:
        second.begin()
    second.heard(signal.SIGTERM, None)
    assert ended == [code]


def test_process_lives_until_no_echo_can_come() -> None:
    """The interpreter that ends gives up its handlers of signals: an echo would end it with another code."""
    clock = "\nimport time\nprint(time.monotonic() - asked)"
    program = (
        PROCESS.replace("        os.kill", "        global asked; asked = time.monotonic()\n        os.kill") + clock
    )
    told = subprocess.run(
        [sys.executable, "-c", "import time\n" + program], capture_output=True, text=True, check=True, timeout=60
    )
    assert float(told.stdout.splitlines()[-1]) >= 0.3


@pytest.mark.parametrize(("mode", "is_told"), [("send-only", True), ("full", False)])
async def test_process_without_agents_tells_at_its_start(
    mode: Any, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def ends_at_once(*_: object) -> None: ...

    monkeypatch.setattr(serving, "serve", ends_at_once)
    await Bus("shop", "postgresql://nowhere/shop", mode=mode).serve()
    assert ("this process sends and handles nothing" in caplog.text) is is_told
