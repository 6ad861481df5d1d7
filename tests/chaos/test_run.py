"""The calm at the end of a run: it lasts for as long as messages come to their ends."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, cast
from uuid import UUID

import pytest

from tests.chaos import run
from tests.chaos.history import Effect, History, Sent

NOW = datetime.now(UTC)
COUNT = 20


def history(done: int) -> History:
    """A history of messages of which some have taken effect."""
    ids = [UUID(int=number) for number in range(COUNT)]
    return History(
        sent={each: Sent(each, "charge", "", each.int, "", None, None, NOW) for each in ids},
        effects=[Effect(each, "charge", "", each.int, NOW, each.int) for each in ids[:done]],
    )


@pytest.mark.parametrize(
    ("effects", "is_settled"),
    [
        (range(COUNT + 1), True),
        ([number // 2 for number in range(2 * COUNT + 2)], True),
        ([*range(COUNT), *[COUNT - 1] * 100], False),
        ([0] * 100, False),
    ],
    ids=["steadily", "slowly", "not to the end", "not at all"],
)
async def test_calm_lasts_for_as_long_as_messages_end(
    monkeypatch: pytest.MonkeyPatch, effects: Any, is_settled: bool
) -> None:
    read: Iterator[int] = iter(effects)
    monkeypatch.setattr(run, "_read", lambda stage: history(next(read)))
    monkeypatch.setattr(run, "LOOK_SECONDS", 0.02)
    assert await run._settled(cast(Any, None), 0.1) is is_settled


async def test_calm_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter(range(10_000))
    endless = history(0)
    monkeypatch.setattr(History, "progress", lambda self: next(counts))
    monkeypatch.setattr(run, "_read", lambda stage: endless)
    monkeypatch.setattr(run, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(run, "LONGEST_CALM_SECONDS", 0.3)
    assert not await run._settled(cast(Any, None), 0.2)
