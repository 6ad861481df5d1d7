"""A flood of dropped connections is counted one by one, and logged in few lines."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest

from durable.testing import eventually
from durable.transports.drops import Drops


async def test_first_drop_is_logged_at_once_and_the_others_together(caplog: pytest.LogCaptureFixture) -> None:
    counts: Counter[str] = Counter()
    drops = Drops("tcp://here", counts)
    with caplog.at_level(logging.WARNING):
        for number in range(1_000):
            drops.tell(f"peer {number}", "it is rude")
            if number == 500:
                await asyncio.sleep(0)
        assert [record.getMessage() for record in caplog.records] == [
            "listener tcp://here dropped the connection of peer 0: it is rude"
        ]
        await eventually(lambda: len(caplog.records) == 2)
        assert caplog.records[1].getMessage() == (
            "listener tcp://here dropped 999 more connections; the last, of peer 999: it is rude"
        )
    assert counts["dropped"] == 1_000


async def test_closing_logs_the_remaining_drops(caplog: pytest.LogCaptureFixture) -> None:
    drops = Drops("tcp://here", Counter())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            drops.tell("a stranger", "it is rude")
        drops.close()
        drops.close()
    assert "dropped 2 more connections" in caplog.text
    assert len(caplog.records) == 2
