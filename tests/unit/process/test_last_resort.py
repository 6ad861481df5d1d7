"""The watchdog, the pace of agents, and hooks that fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from durable.agents.pace import Pace
from durable.process import last_resort
from durable.process.last_resort import Watchdog
from durable.recovery.policy import RejoinPolicy
from durable.tasks.forgiving import forgiving


class Panic(BaseException):
    pass


def test_watchdog_bites_after_silence() -> None:
    bitten = threading.Event()
    reasons: list[str] = []

    def bite(reason: str) -> None:
        reasons.append(reason)
        bitten.set()

    watchdog = Watchdog(0.05, "silence", bite)
    watchdog.watch()
    assert bitten.wait(20)
    watchdog.end()
    assert reasons[0] == "silence"


def test_watchdog_bites_when_bound_without_a_beginning() -> None:
    bitten = threading.Event()
    watchdog = Watchdog(3_600, "silence", lambda reason: bitten.set() if reason == "too slow" else None)
    watchdog.bind(0.05, "too slow")
    assert bitten.wait(20)
    watchdog.end()


def test_bound_watchdog_ignores_heartbeats() -> None:
    bitten = threading.Event()
    watchdog = Watchdog(3_600, "silence", lambda reason: bitten.set() if reason == "too slow" else None)
    watchdog.bind(0.05, "too slow")
    watchdog.bind(3_600, "later")
    watchdog.watch()
    while not bitten.wait(0.01):
        watchdog.hear()
    watchdog.end()


def test_watchdog_does_not_count_a_standstill_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, bitten, passed = threading.Semaphore(0), list[str](), [0.0]

    def monotonic() -> float:
        looks.release()
        return passed[0]

    monkeypatch.setattr(last_resort, "time", SimpleNamespace(monotonic=monotonic))
    watchdog = Watchdog(100, "silence", bitten.append)
    watchdog.watch()
    for now in (0.0, 3_600.0, 3_600.2, 3_600.4):
        passed[0] = now
        assert looks.acquire(timeout=20)
    watchdog.end()
    assert bitten == []


def test_pause_before_joining_again_is_short_and_reset_by_success() -> None:
    policy = RejoinPolicy()
    for _ in range(100):
        policy.failed()
        assert 0 < policy.pause() <= 2
    assert len({policy.pause() for _ in range(20)}) > 1
    policy.ended_well()
    assert policy.pause() <= RejoinPolicy.SHORTEST


def test_pace_names_the_step_nearest_to_its_bound() -> None:
    pace = Pace("sending", 1_000_000)
    assert pace.slowest() is None
    with pace.step("slow", 0.000_001), pace.step("quick"):
        slowest = pace.slowest()
        assert slowest is not None
        assert slowest.name == "sending: slow"
        assert slowest.share >= 1
    assert pace.slowest() is None


@pytest.mark.parametrize("moment", ["made", "entered", "left"])
def test_failing_hook_changes_nothing(moment: str, caplog: pytest.LogCaptureFixture) -> None:
    @contextmanager
    def hook() -> Iterator[None]:
        if moment == "entered":
            raise Panic
        yield
        if moment == "left":
            raise Panic

    def make() -> object:
        if moment == "made":
            raise Panic
        return hook()

    result = []
    with forgiving(make):  # type: ignore[arg-type]
        result.append(1)
    assert result == [1]
    assert "a hook for spans failed" in caplog.text


def test_hook_observes_the_error_of_the_work() -> None:
    heard: list[BaseException] = []

    @contextmanager
    def hook() -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            heard.append(error)
            raise

    with pytest.raises(ValueError, match="observed"), forgiving(hook):
        raise ValueError("observed")
    assert len(heard) == 1
