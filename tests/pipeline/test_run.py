"""`durable-agent pipeline run`: several steps in one session, checked before the first, until one of them fails."""

from __future__ import annotations

import json
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from durable.cli.pipeline.commands import app
from durable.cli.pipeline.plan import STEPS
from durable.pipeline.lake import Lake
from durable.pipeline.session import find_java
from tests.support.command import Agent
from tests.support.history import add_history, add_letters
from tests.support.lakes import fill, handled, sent, table
from tests.support.root import ROOT

PIPELINE = ROOT / "docs" / "pipeline.md"
SINCE = "2026-01-01T00:00:01Z"


@pytest.fixture
def history(conn: psycopg.Connection[Any]) -> None:
    """Ten messages, sent and handled by one service, and two letters."""
    add_history(conn, 10, age=timedelta(hours=2))
    conn.execute(
        "INSERT INTO durable.envelope_history (id, side, message_type, source, address, outcome, correlation_id, "
        "sent_at, finished_at, attempts, interruptions, node_id) SELECT id, 'outgoing', message_type, source, "
        "'tcp://here:1', 'sent', correlation_id, sent_at, finished_at, attempts, interruptions, node_id "
        "FROM durable.envelope_history"
    )
    conn.execute("INSERT INTO durable.nodes (service, description, version) VALUES ('shop', '', '')")


def lake_with_a_loss(agent: Agent) -> None:
    fill(Lake(str(agent.folder / "lake")), table([handled(0), sent(1), handled(1), sent(2)]))


def steps_file(agent: Agent, text: str) -> str:
    (agent.folder / "steps.toml").write_text(text)
    return "steps.toml"


def document(agent: Agent, *arguments: str, code: int = 0) -> Any:
    ended = agent("pipeline", "run", *arguments, "--json")
    assert ended.code == code, ended.err
    return json.loads(ended.out)


# ---------------------------------------------------------------- steps by name


def test_steps_run_one_after_the_other_on_the_lake_of_the_run(agent: Agent, history: None) -> None:
    found = document(agent, "--steps", "archive,status,audit,report,conversations,compact")
    assert (found["exit_code"], found["resume"]) == (0, None)
    assert [(step["number"], step["step"], step["exit_code"]) for step in found["steps"]] == [
        (1, "archive", 0),
        (2, "status", 0),
        (3, "audit", 0),
        (4, "report", 0),
        (5, "conversations", 0),
        (6, "compact", 0),
    ]
    archived, status, audited, reported, conversations, _ = (step["document"] for step in found["steps"])
    assert [each["rows"] for each in archived["tables"]] == [20, 0]
    assert [each["lag_rows"] for each in status["tables"]] == [0, 0]
    assert audited["failed"] is False
    assert reported["totals"]["total"] == 20
    assert conversations["conversations"] > 0
    assert (agent.folder / "report.html").exists()


def test_lake_of_a_run_is_passed_to_every_step(
    agent: Agent, history: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DURABLE_LAKE")
    other = str(tmp_path / "other")
    found = document(agent, "--steps", "archive,audit,conversations", "--lake", other, "--service", "shop")
    assert found["steps"][0]["document"]["lake"] == other
    assert {row["lake"] for row in found["steps"][1]["document"]["totals"]} == {other}


def test_summary_and_each_step_are_printed(agent: Agent, history: None) -> None:
    ended = agent("pipeline", "run", "--steps", "archive,status")
    assert (ended.code, ended.err) == (0, "")
    for shown in ("1/2 archive", "archived into", "2/2 status", "rows behind", "the run", "1. archive"):
        assert shown in ended.out


def test_run_ends_at_the_first_failed_step_with_its_exit_code(agent: Agent) -> None:
    lake_with_a_loss(agent)
    file = steps_file(
        agent, f'[[step]]\nrun = "compact"\n[[step]]\nrun = "audit"\nsince = {SINCE}\n[[step]]\nrun = "report"'
    )
    found = document(agent, "--file", file, code=1)
    assert [(step["step"], step["exit_code"]) for step in found["steps"]] == [("compact", 0), ("audit", 1)]
    assert (found["resume"], found["steps"][1]["document"]["counts"]["lost"]) == (2, 1)
    assert not (agent.folder / "report.html").exists()

    ended = agent("pipeline", "run", "--file", file)
    assert ended.code == 1
    assert ended.err == (
        "error: step 2 of 3, audit, ended with 1; to go on there, run the same command with --from 2\n"
    )
    assert "failed, with 1" in ended.out


@pytest.mark.parametrize(
    ("steps", "database", "code", "said"),
    [
        ("compact,status,report", "postgresql://nobody@127.0.0.1:1/none", 1, "the database cannot be used"),
        ("compact,report,status", None, 2, "no history; fill it"),
    ],
)
def test_run_ends_with_the_exit_code_of_the_error_of_a_step(
    agent: Agent, tmp_path: Path, steps: str, database: str | None, code: int, said: str
) -> None:
    Lake(str(tmp_path / "lake")).create("dead_letters")
    arguments = ["--steps", steps, *(["--database", database] if database else [])]
    found = document(agent, *arguments, code=code)
    assert [step["exit_code"] for step in found["steps"]] == [0, code]
    assert said in found["steps"][1]["error"]
    ended = agent("pipeline", "run", *arguments)
    assert (ended.code, ended.err.count("\n")) == (code, 1)
    assert f"step 2 of 3, {steps.split(',')[1]}, ended with {code}: " in ended.err
    assert ended.err.endswith("run the same command with --from 2\n")


def test_run_continues_from_the_given_step(agent: Agent, history: None) -> None:
    done = document(agent, "--steps", "archive,status,verify", "--from", "2", code=2)
    assert [(step["number"], step["step"]) for step in done["steps"]] == [(2, "status")]  # there is no lake
    document(agent, "--steps", "archive")
    done = document(agent, "--steps", "archive,status,verify", "--from", "3")
    assert [(step["number"], step["step"]) for step in done["steps"]] == [(3, "verify")]


# ---------------------------------------------------------------- steps of a file


def test_each_step_of_a_file_has_its_own_options(agent: Agent, history: None, conn: psycopg.Connection[Any]) -> None:
    add_letters(conn, 2)
    found = document(
        agent,
        "--file",
        steps_file(
            agent,
            f"""
            lake = "{agent.folder}/shared"
            [[step]]
            run = "archive"
            service = "shop"
            [[step]]
            run = "archive"
            service = "shop"
            [[step]]
            run = "audit"
            since = 2020-01-01T00:00:00Z
            settle = "0s"
            examples = 3
            [[step]]
            run = "report"
            out = "page.html"
            by = ["message_type", "address"]
            [[step]]
            run = "replay"
            name = "again"
            from = "dead-letters"
            all = true
            dry-run = true
            same-ids = false
            """,
        ),
    )
    first, second, audited, reported, replayed = (step["document"] for step in found["steps"])
    assert [each["rows"] for each in first["tables"]] == [20, 2]
    assert [each["rows"] for each in second["tables"]] == [0, 0]
    assert audited["since"].startswith("2020-01-01T00:00:00")
    assert set(reported["volumes"]) == {"message_type", "address"}
    assert (agent.folder / "page.html").exists()
    assert (replayed["messages"], replayed["added"], replayed["dry_run"]) == (2, 0, True)


REFUSED = {
    '[[step]]\nrun = "archve"': "step 2: 'archve' is no step; did you mean 'archive'?",
    "[[step]]\nsince = '7d'": 'step 2 has no name; write such as run = "archive"',
    '[[step]]\nrun = "audit"\nsinse = "7d"': "step 2, audit: sinse: no such option; did you mean 'since'?",
    '[[step]]\nrun = "audit"\nsince = "soon"': "step 2, audit: --since: 'soon' is not a time",
    '[[step]]\nrun = "audit"\nsince = true': "step 2, audit: since: True is no value of this option",
    '[[step]]\nrun = "audit"\nsince = ["7d"]': "step 2, audit: since: takes one value, not a list",
    '[[step]]\nrun = "audit"\nexamples = -1': "step 2, audit: invalid value for '--examples'",
    '[[step]]\nrun = "audit"\nmaster = "local"': "step 2, audit: master: belongs to the whole run",
    '[[step]]\nrun = "audit"\njson = true': "step 2, audit: json: no such option",
    '[[step]]\nrun = "audit"\nsettle = {m = 1}': "step 2, audit: settle: {'m': 1} is no value of this option",
    '[[step]]\nrun = "report"\nout = "nowhere/r.html"': "step 2, report: --out: there is no folder nowhere",
    '[[step]]\nrun = "report"\nby = "colour"': "step 2, report: --by: 'colour' is no dimension",
    '[[step]]\nrun = "replay"\nname = "again"': "step 2, replay: replay: filter the messages",
    '[[step]]\nrun = "replay"\nall = true': "step 2, replay: missing option '--name'",
    '[[step]]\nrun = "replay"\nname = "again"\nall = "yes"': "step 2, replay: all: 'yes' is neither true nor false",
    '[[step]]\nrun = "conversations"\nid = "7"': "step 2, conversations: --id: '7' is no UUID",
    '[[step]]\nrun = "conversations"\nsort = "oldest"': "step 2, conversations: invalid value for '--sort'",
    '[[step]]\nrun = "purge"\nkeep = 0': "step 2, purge: --keep: 0 is no number of days",
    '[[step]]\nrun = "report"\nlake = "a[b]"': "reports cannot be kept under a path with brackets",
    '[[step]]\nrun = "vacuum"\nkeep = 0.01': "step 2, vacuum: keep: 0:14:24 is below an hour",
    '[[step]]\nrun = "archive"\ndatabase = 7\nschema = ""': "step 2, archive: ",
    '[[step]]\nrun = "audit"\nexamples = "many"': "see durable-agent pipeline audit --help",
    "[[step]\n": "--file steps.toml: is no TOML: ",
    "[audit]\nsince = '7d'": "a run has no option 'audit'",
}


@pytest.mark.parametrize("text", REFUSED)
def test_fault_of_any_step_is_told_before_the_first_step_begins(agent: Agent, text: str) -> None:
    file = steps_file(agent, f'[[step]]\nrun = "archive"\nservice = "shop"\n{text}\n')
    ended = agent("pipeline", "run", "--file", file)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert REFUSED[text] in ended.err
    assert not (agent.folder / "lake").exists()


def test_file_in_another_encoding_is_refused(agent: Agent) -> None:
    (agent.folder / "steps.toml").write_bytes('[[step]]\nrun = "caf\u00e9"\n'.encode("latin-1"))
    ended = agent("pipeline", "run", "--file", "steps.toml")
    assert (ended.code, "--file steps.toml: is no text in UTF-8; write it in UTF-8" in ended.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name the steps, by --steps archive,audit,report or by --file FILE; not both"),
        (["--steps", "archive", "--file", "f"], "not both"),
        (["--steps", "archive,adit"], "--steps: 'adit' is no step; did you mean 'audit'?"),
        (["--steps", " , "], "--steps: ' , ' lacks the name of a step"),
        (["--steps", "archive,,verify"], "lacks the name of a step"),
        (["--steps", "archive,audit", "--from", "3"], "--from: 3 is the number of no step; there are 2"),
        (["--steps", "archive,audit", "--from", "0"], "--from: 0 is the number of no step; there are 2"),
        (["--file", "nowhere.toml"], "--file nowhere.toml: No such file or directory; name a TOML file of steps"),
        (["--file", "."], "--file .: Is a directory; name a TOML file of steps"),
        (["--steps", "archive", "--service", ""], "--service: the text is empty"),
        (["--steps", "archive,audit", "--master", "local", "--remote", "sc://x"], "give one of them"),
    ],
)
def test_run_with_wrong_arguments_is_refused(agent: Agent, arguments: list[str], said: str) -> None:
    ended = agent("pipeline", "run", *arguments)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert said in ended.err


def test_run_begins_no_step_without_a_required_option(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DURABLE_LAKE")
    ended = agent("pipeline", "run", "--steps", "archive,report")
    assert (ended.code, "step 1, archive: lake: not set" in ended.err) == (2, True)
    ended = agent("pipeline", "run", "--steps", "audit")
    assert (ended.code, "step 1, audit: missing option '--sender'" in ended.err) == (2, True)


# ---------------------------------------------------------------- one session


def test_all_steps_of_a_run_share_one_jvm(agent: Agent, history: None, monkeypatch: pytest.MonkeyPatch) -> None:
    home, counted = agent.folder / "java", agent.folder / "starts"
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    real = find_java()
    program.write_text(f'#!/bin/sh\n[ "$1" = -version ] || echo start >> {counted}\nexec {real}/bin/java "$@"\n')
    program.chmod(0o755)
    monkeypatch.setitem(os.environ, "JAVA_HOME", str(home))
    with agent.process("pipeline", "run", "--steps", "archive,audit,report,audit", "--json") as process:
        printed, err = process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert [step["exit_code"] for step in json.loads(printed)["steps"]] == [0, 0, 0, 0]
    assert counted.read_text().count("start") <= 2  # the launcher asks one JVM how to start the other


def test_steps_are_named_by_the_docs_and_are_all_commands_but_two() -> None:
    (named,) = re.findall(r"^\*\*Steps\*\* are the commands (.+?) of `durable-agent", PIPELINE.read_text(), re.M | re.S)
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert re.findall(r"`(\w+)`", named) == [*STEPS]
    assert commands - STEPS.keys() == {"erase", "run"}


def test_export_is_a_step(agent: Agent, history: None) -> None:
    taken = document(agent, "--steps", "archive,export")["steps"]
    assert [table["table"] for table in taken[1]["document"]["tables"]] == ["history", "dead_letters"]
    assert (agent.folder / "lake" / "iceberg" / "history" / "metadata" / "version-hint.text").exists()


@pytest.mark.parametrize("option", ["--master", "--remote"])
@pytest.mark.parametrize("step", ["archive", "verify", "purge", "report", "audit", "conversations", "replay", "run"])
def test_empty_place_of_spark_is_refused(agent: Agent, step: str, option: str) -> None:
    needed = {
        "audit": ["--sender", "lake", "--receiver", "lake"],
        "replay": ["--name", "x", "--all"],
        "report": ["--out", "page.html"],
        "run": ["--steps", "archive"],
    }
    for empty in ("", " "):
        ended = agent("pipeline", step, *needed.get(step, []), option, empty)
        assert (ended.code, f"{option}: the text is empty; give one, or leave it out" in ended.err) == (2, True), ended
