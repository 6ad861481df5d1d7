"""Patience with a Spark Connect server that does not answer."""

from __future__ import annotations

import grpc
import pytest

from durable.errors import DurableError
from durable.pipeline.remote import Patience


class Away(grpc.RpcError):  # type: ignore[misc]
    """As grpc raises it where a server cannot be reached."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "connection refused"

    def trailing_metadata(self) -> tuple[()]:
        return ()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_silent_server_is_waited_for_a_minute_over_all_calls() -> None:
    clock = Clock()
    policy = Patience("host:15002", now=clock)
    for clock.now in range(0, 60, 5):
        assert policy.can_retry(Away())
    for clock.now in (60.0, 60.1, 65.0):
        with pytest.raises(DurableError, match="server at host:15002 has not answered for 60 seconds"):
            policy.can_retry(Away())


def test_next_outage_is_waited_for_anew() -> None:
    clock = Clock()
    policy = Patience("host:15002", now=clock)
    for clock.now in (0.0, 25.0, 50.0, 81.0, 100.0, 130.0):
        assert policy.can_retry(Away())


def test_other_errors_are_not_repeated() -> None:
    assert not Patience("host:15002").can_retry(ValueError())


def test_pauses_are_short() -> None:
    state = Patience("host:15002").to_state()
    pauses = [state.next_attempt(Away()) or 0 for _ in range(30)]
    assert max(pauses) <= 5_500
