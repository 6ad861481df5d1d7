"""A short chaos: two services, two nodes each, a quarter of a minute of faults; and then every promise was kept.

`make chaos` runs longer ones, with more kinds of faults.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.profiles import PROFILES
from tests.chaos.run import run
from tests.chaos.summary import summarize

SEEDS = {"plain": 2, "secured": 1}


@pytest.mark.parametrize("way", SEEDS)
async def test_every_promise_is_kept_under_several_faults_at_once(tmp_path: Path, way: str) -> None:
    told: list[str] = [f"seed {SEEDS[way]}"]
    outcome = await run(SEEDS[way], PROFILES["short"], "tcp", tmp_path / "run", told.append)
    summary = summarize(outcome)
    assert summary.named == [], "\n".join(told)
    assert summary.is_right
    assert outcome.plan.is_secured == (way == "secured")
    assert len(outcome.happened) >= 5
    assert summary.messages > 50
    assert {sent.kind for sent in outcome.history.sent.values()} >= {"order", "charge", "reminder", "note", "receipt"}
