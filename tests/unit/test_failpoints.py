"""Failpoints: nothing without being asked for, and then the end, at the right time."""

from __future__ import annotations

import os

import pytest

from durable import failpoints
from durable.failpoints import EXIT_STATUS, failpoint, is_armed


class Died(BaseException):
    """Instead of the end of the process."""


@pytest.fixture(autouse=True)
def _mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(status: int) -> None:
        raise Died(status)

    monkeypatch.setattr(os, "_exit", die)


def arm(monkeypatch: pytest.MonkeyPatch, name: str, count: int = 1) -> None:
    monkeypatch.setattr(failpoints, "_name", name)
    monkeypatch.setattr(failpoints, "_remaining", count)


def test_unarmed_failpoint_does_nothing() -> None:
    for number in range(22):
        failpoint(f"C{number}")


def test_armed_failpoint_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    arm(monkeypatch, "C5")
    failpoint("C4")
    failpoint("C55")
    with pytest.raises(Died, match=str(EXIT_STATUS)):
        failpoint("C5")


def test_process_ends_at_the_third_passage_when_armed_so(monkeypatch: pytest.MonkeyPatch) -> None:
    arm(monkeypatch, "C5", 3)
    failpoint("C5")
    failpoint("C5")
    with pytest.raises(Died):
        failpoint("C5")


def test_failpoint_is_armed_only_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    arm(monkeypatch, "C6")
    assert (is_armed("C6"), is_armed("C5")) == (True, False)
