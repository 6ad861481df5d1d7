"""`durable-agent pipeline report|audit|conversations`: what they print, write and end with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from pyspark.sql import SparkSession

from durable.pipeline import session
from durable.pipeline.lake import Lake
from tests.support.command import Agent
from tests.support.lakes import fill, handled, message_id, sent, table


@pytest.fixture
def agent(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Agent:
    """Commands use the session that is there, and a lake with a lost message."""
    fill(Lake(str(tmp_path / "lake")), table([handled(0), sent(1), handled(1), sent(2)]))
    monkeypatch.setenv("DURABLE_LAKE", str(tmp_path / "lake"))
    return Agent(tmp_path, monkeypatch, capsys)


def document(agent: Agent, *arguments: str, code: int = 0) -> Any:
    ended = agent("pipeline", *arguments, "--json")
    assert (ended.code, ended.err) == (code, "")
    return json.loads(ended.out)


def audited(agent: Agent, *arguments: str) -> list[str]:
    lake = str(agent.folder / "lake")
    return ["audit", "--sender", lake, "--receiver", lake, *arguments]


def test_audit_exits_with_1_when_a_message_is_lost(agent: Agent) -> None:
    ended = agent("pipeline", *audited(agent, "--since", "2026-01-01T00:00:01Z"))
    assert ended.code == 1
    assert "FAILED" in ended.out
    assert str(message_id(2)) in ended.out
    found = document(agent, *audited(agent, "--since", "2026-01-01T00:00:01Z", "--out", "findings"), code=1)
    assert (found["failed"], found["counts"]["lost"], found["counts"]["alien"]) == (True, 1, 0)
    assert list((agent.folder / "findings").glob("*.parquet"))


def test_audit_exits_with_0_when_no_message_is_lost(agent: Agent) -> None:
    within = ["--since", "2026-01-01T00:00:01Z", "--until", "2026-01-01T00:00:02Z"]
    assert document(agent, *audited(agent, *within))["counts"]["lost"] == 0


def test_message_sent_after_the_lakes_were_archived_is_open(agent: Agent) -> None:
    within = ["--since", "2026-01-01T00:00:01Z", "--archived-until", "2026-01-01T00:15:01Z"]
    assert document(agent, *audited(agent, *within))["counts"]["open"] == 1


def test_report_command_writes_a_page_and_its_tables(agent: Agent) -> None:
    found = document(agent, "report", "--out", "r.html", "--by", "message_type", "--mark", "2026-01-01T00:00Z=release")
    assert (found["totals"]["sent"], found["marks"][0]["label"]) == (2, "release")
    assert (agent.folder / "r.html").stat().st_size > 4_000_000
    assert "4 rows of history, 0 days computed anew" in agent("pipeline", "report").out


def test_conversation_is_printed_as_a_tree(agent: Agent) -> None:
    tree = agent("pipeline", "conversations", "--id", str(message_id(1)))
    assert tree.code == 0
    assert "* orders.placed  +0.0 ms, took 25.0 ms  (sent shop tcp://billing:2302, handled billing main)" in tree.out
    found = document(agent, "conversations", "--id", str(message_id(1)))
    assert (found["depth"], found["messages"][0]["level"]) == (1, 1)
    listed = document(agent, "conversations", "--sort", "largest", "--count", "1")
    assert (listed["conversations"], len(listed["chosen"])) == (3, 1)
    assert "3 conversations of 3 messages" in agent("pipeline", "conversations").out


@pytest.mark.parametrize("arguments", [[], ["--id", str(message_id(1))]])
def test_conversations_of_few_rows_need_no_java(
    agent: Agent, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(agent.folder))
    monkeypatch.setenv("JAVA_HOME", str(agent.folder))
    monkeypatch.setattr(session, "_JVMS", agent.folder)
    monkeypatch.setattr(SparkSession, "getActiveSession", classmethod(lambda cls: None))
    assert document(agent, "conversations", *arguments)
    monkeypatch.setenv("DURABLE_PIPELINE_LOCAL_ROWS", "3")
    assert "Spark needs Java 17" in agent("pipeline", "conversations", *arguments).err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report", "--since", "yesterday"], "--since: 'yesterday' is no day; write 2030-12-31, or 7d"),
        (["report", "--mark", "noon"], "--mark: 'noon' is no mark; write it like"),
        (["report", "--mark", "noon=x"], "--mark: 'noon' is not a time"),
        (["report", "--by", "colour"], "--by: 'colour' is no dimension; name a column"),
        (["report", "--out", "nowhere/r.html"], "--out: there is no folder nowhere"),
        (["report", "--out", "."], "--out: . is a folder; name a file in it"),
        (["report", "--lake", "empty"], "no history; fill it with"),
        (["report", "--since", "2030-01-01"], "no history of these days"),
        (["conversations", "--lake", "empty"], "no history; fill it with"),
        (["conversations", "--id", "7"], "--id: '7' is no UUID"),
        (["audit", "--sender", "lake"], "missing option '--receiver'"),
        (["audit", "--sender", "lake", "--receiver", "lake", "--settle", "soon"], "--settle: 'soon' is no duration"),
        (["audit", "--sender", "lake", "--receiver", "lake", "--out", "lake"], "--out: lake is there already"),
        (["audit", "--sender", "", "--receiver", "lake"], "--sender: the text is empty"),
        (["audit", "--sender", "lake", "--receiver", ""], "--receiver: the text is empty"),
        (["audit", "--sender", "lake", "--receiver", "empty"], "empty: no history; fill it with"),
    ],
)
def test_wrong_argument_is_told_in_one_line(agent: Agent, arguments: list[str], said: str) -> None:
    ended = agent("pipeline", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err.lower() if said.islower() else said in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "--lake", "new", "--out", "new.html"],
        ["conversations", "--lake", "new"],
        ["audit", "--sender", "new", "--receiver", "new"],
        ["replay", "--lake", "new", "--name", "again", "--all", "--dry-run"],
    ],
    ids=lambda arguments: str(arguments[0]),
)
def test_command_ends_well_when_a_lake_has_no_row_yet(
    agent: Agent, arguments: list[str], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DURABLE_DATABASE_URL", database_url)
    assert agent("pipeline", "archive", "--service", "shop", "--lake", "new").code == 0
    ended = agent("pipeline", *arguments)
    assert (ended.code, ended.err) == (0, "")
    assert document(agent, *arguments)
    assert not (agent.folder / "new.html").exists()


@pytest.mark.parametrize(
    "name",
    [("--type", "orders.placed"), ("--address", "local"), ("--service", "shop", "--all"), ("--id", str(UUID(int=1)))],
    ids=lambda name: str(name[0]),
)
def test_replay_takes_any_name_when_a_lake_has_no_row_yet(
    agent: Agent, name: tuple[str, ...], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DURABLE_DATABASE_URL", database_url)
    assert agent("pipeline", "archive", "--service", "shop", "--lake", "new").code == 0
    ended = agent("pipeline", "replay", "--lake", "new", "--name", "again", *name)
    assert (ended.code, ended.err) == (0, "")
    assert "0 messages replayed, 0 of them added" in ended.out


@pytest.mark.parametrize(
    "arguments",
    [["report", "--out", "/proc/1/r.html"], ["audit", "--sender", "lake", "--receiver", "lake", "--out", "/proc/1/x"]],
    ids=lambda arguments: str(arguments[0]),
)
def test_unwritable_place_of_results_is_told(agent: Agent, arguments: list[str]) -> None:
    ended = agent("pipeline", *arguments)
    assert (ended.code, ended.out) == (1, "")
    assert f"--out: {arguments[-1]} cannot be written: No such file or directory; run the same command" in ended.err
