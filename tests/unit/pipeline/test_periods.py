"""Periods of commands: nothing is found between two times that are exchanged, and a command says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import Agent

DATABASE = ("--database", "postgresql://nowhere.invalid/shop")
LAKE = ("--lake", "nowhere")
COMMANDS: dict[str, tuple[str, ...]] = {
    "dead-letters list": DATABASE,
    "dead-letters replay": (*DATABASE, "--all"),
    "actions": DATABASE,
    "pipeline audit": ("--sender", "nowhere", "--receiver", "nowhere"),
    "pipeline replay": (*DATABASE, *LAKE, "--name", "again"),
    "pipeline report": LAKE,
    "pipeline conversations": LAKE,
}


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("until", ["2030-01-01", "2030-01-02"], ids=["exchanged", "equal"])
@pytest.mark.parametrize("command", COMMANDS)
def test_period_without_any_time_is_refused(agent: Agent, command: str, until: str) -> None:
    moment = "" if command in ("pipeline report", "pipeline conversations") else "T00:00Z"
    period = ("--since", f"2030-01-02{moment}", "--until", f"{until}{moment}")
    code, _, told = agent(*command.split(), *COMMANDS[command], *period)
    assert (code, "nothing is between them" in told) == (2, True), told
