"""`durable-agent demo --pipeline`: the flights, their history in a lake, audited, reported, replayed, audited again."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession
from rich.console import Console

from durable.cli.pipeline.plan import run_step
from durable.demo import run_pipeline, steps
from durable.embedded import postgres
from durable.errors import InvalidSetting
from tests.support.command import Agent

pytestmark = pytest.mark.timeout(600)  # two services, two servers, and everything that befalls them

SEND_ONE_MORE = """
WITH one AS (SELECT * FROM durable.envelope_history WHERE side = 'outgoing' LIMIT 1)
INSERT INTO durable.envelope_history (id, side, message_type, source, address, outcome, correlation_id, sent_at,
    finished_at, attempts, interruptions, node_id)
SELECT gen_random_uuid(), side, message_type, source, address, outcome, correlation_id, sent_at,
    finished_at, attempts, interruptions, node_id FROM one
"""


def run(folder: Path, flights: int = 1_000) -> tuple[int, Any]:
    """The exit code, and the document."""
    with redirect_stdout(io.StringIO()) as printed:
        code = run_pipeline(run_step, folder=folder, flights=flights, all_flights=False, json_output=True, seed=7)
    return code, json.loads(printed.getvalue())


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """With a short name: a server has its socket in it."""
    path = Path(tempfile.mkdtemp(prefix="durable-flights-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def first(spark: SparkSession, folder: Path) -> tuple[int, Any]:
    """The first run in this folder."""
    return run(folder)


def test_every_flight_is_archived_audited_and_reported_and_a_day_is_replayed(first: tuple[int, Any]) -> None:
    code, document = first
    assert (code, document["differences"]) == (0, [])
    results = [step["result"] for step in document["steps"]]
    assert "4 nodes killed, every total right" in results[0]
    assert results[3].startswith("1,000 sent, 1,000 handled: lost 0, undone 0, twice 0, overdue 0, forgotten 0")
    assert results[5] == "842 messages replayed, 842 of them added"
    assert results[6].startswith("842 flights of 14 carriers, as in the data set")
    assert results[7] == "842 messages replayed, 0 of them added"
    assert results[9].startswith("842 sent, 842 handled: lost 0, undone 0, twice 0, overdue 0, forgotten 0")
    page = Path(document["page"]).read_text()
    assert page.count("</time> killed ") == 4
    assert "Volume by body.carrier" in page


def test_kept_demo_is_used_again_and_a_lost_message_is_found(first: tuple[int, Any], folder: Path) -> None:
    with postgres(folder / "demo") as server, psycopg.connect(server.url("airline")) as conn:
        conn.execute(SEND_ONE_MORE)

    code, document = run(folder)
    results = [step["result"] for step in document["steps"]]
    assert "from an earlier run" in results[0]
    assert results[1].startswith("1 row of history")
    assert results[3].startswith("1,001 sent, 1,000 handled: lost 1, undone 0, twice 0")
    assert (code, document["differences"][-1]) == (1, f"{folder}/lake: 1 lost")
    with pytest.raises(InvalidSetting, match="holds a demo of 1,000 flights"):
        run(folder, 1_001)


def test_step_uses_its_own_settings_and_raises_its_error(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_DB_SCHEMA", "theirs")
    taken = steps.Steps(Console(), run_step, silent=True)
    document = taken.pipeline(
        "How far?",
        "status",
        environment={"DURABLE_DATABASE_URL": database_url},
        summary=lambda found: f"{len(found['tables'])} tables",
    )
    assert document["horizon"] > 0
    assert [(step.title, step.command, step.result) for step in taken.taken] == [
        ("How far?", "durable-agent pipeline status", "2 tables")
    ]
    with pytest.raises(InvalidSetting, match="database_url"):
        taken.pipeline("Nowhere", "status", environment={"DURABLE_DATABASE_URL": "no url"}, summary=str)
    assert (os.environ["DURABLE_DB_SCHEMA"], "DURABLE_DATABASE_URL" in os.environ) == ("theirs", False)


def test_demo_refuses_keep_together_with_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = Agent(tmp_path, monkeypatch, capsys)
    ended = agent("demo", "--keep", "here", "--pipeline", "there")
    assert (ended.code, "give one of them" in ended.err) == (2, True)
    assert list(tmp_path.iterdir()) == []
