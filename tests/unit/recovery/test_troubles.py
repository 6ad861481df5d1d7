"""What recovery says of a database that is away, and of other troubles."""

from __future__ import annotations

import logging

import pytest

from durable.errors import StorageUnavailable
from durable.recovery.troubles import Troubles
from durable.storage.outages import Lack

TEXTS = ["[Errno 104] Connection reset by peer", "unexpected connection_lost() call"]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "durable")
    return caplog


def fail(troubles: Troubles, name: str, times: int = 1) -> None:
    for number in range(times):
        troubles.meet(name, StorageUnavailable(TEXTS[number % 2]))


def test_outage_is_told_once_and_so_is_its_end(said: pytest.LogCaptureFixture) -> None:
    troubles = Troubles(often=["claim", "promote"])
    for _ in range(3):
        said.clear()
        for _ in range(5):
            fail(troubles, "claim", 3)
            fail(troubles, "promote", 2)
            fail(troubles, "sweep")
        troubles.overcome("claim")
        assert [record.levelname for record in said.records] == ["WARNING"]
        troubles.overcome("promote")
        troubles.overcome("claim")
        troubles.overcome("sweep")
        assert [record.levelname for record in said.records] == ["WARNING", "INFO"]


def test_story_failing_repeatedly_alone_is_told_once(said: pytest.LogCaptureFixture) -> None:
    troubles = Troubles(often=["claim"])
    for _ in range(5):
        fail(troubles, "sweep")
        troubles.overcome("claim")
    assert [record.levelname for record in said.records] == ["WARNING", "INFO"]


def test_another_failure_is_told_each_time_and_traced_once(said: pytest.LogCaptureFixture) -> None:
    troubles = Troubles(often=["claim"])
    for _ in range(3):
        troubles.meet("claim", ValueError("wrong"))
    assert [record.levelname for record in said.records] == ["ERROR"] * 3
    assert [record.exc_info is not None for record in said.records] == [True, False, False]


def test_lack_is_told_once_for_all_stories_and_so_is_its_end(
    said: pytest.LogCaptureFixture,
) -> None:
    troubles = Troubles(often=["claim", "promote"])
    for _ in range(3):
        for name, missing in [("claim", "inbox"), ("promote", "inbox"), ("sweep", "nodes")]:
            troubles.meet(name, Lack(f"no {missing}"))
        troubles.overcome("look")
    assert [record.levelname for record in said.records] == ["WARNING", "WARNING"]
    assert not any(record.exc_info for record in said.records)
    for name in ("claim", "promote", "sweep", "sweep"):
        troubles.overcome(name)
    assert [record.levelname for record in said.records[2:]] == ["INFO", "INFO"]
