"""`durable-agent pipeline archive|verify|purge|status`: what they do, print and end with."""

from __future__ import annotations

import json
import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from sqlalchemy import make_url

from durable.pipeline import session
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import DataFile
from tests.support.command import Agent
from tests.support.history import add_history, add_letters, add_old_day
from tests.support.roles import runtime_role


def document(agent: Agent, *arguments: str, code: int = 0) -> Any:
    ended = agent("pipeline", *arguments, "--json")
    assert (ended.code, ended.err) == (code, "")
    return json.loads(ended.out)


def archive(agent: Agent) -> Any:
    return document(agent, "archive", "--service", "shop")


def partitions(conn: psycopg.Connection[Any]) -> set[str]:
    rows = conn.execute("SELECT relname FROM pg_class WHERE relname LIKE 'envelope\\_history\\_2%' AND relkind = 'r'")
    return {row[0] for row in rows}


# ---------------------------------------------------------------- archive and status


def test_archive_prints_its_rows_and_status_prints_the_rows_left(agent: Agent, conn: psycopg.Connection[Any]) -> None:
    add_history(conn, 7, age=timedelta(hours=2))
    add_letters(conn, 2)
    before = document(agent, "status")
    assert [(each["table"], each["offset"], each["lag_rows"]) for each in before["tables"]] == [
        ("history", None, 7),
        ("dead_letters", None, 2),
    ]
    assert before["tables"][0]["lag_age"] >= 7_200

    done = archive(agent)
    assert [(each["table"], each["rows"]) for each in done["tables"]] == [("history", 7), ("dead_letters", 2)]
    after = document(agent, "status")
    assert [each["lag_rows"] for each in after["tables"]] == [0, 0]
    assert all(each["offset"] == each["confirmed"] <= after["horizon"] for each in after["tables"])
    assert "rows behind" in agent("pipeline", "status").out


def test_status_refuses_an_option_without_a_lake(agent: Agent, conn: psycopg.Connection[Any], tmp_path: Path) -> None:
    before = document(agent, "status")  # the lake of the settings is yet to come
    refused = agent("pipeline", "status", "--lake", str(tmp_path / "nowhere"))
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith(f"error: --lake {tmp_path / 'nowhere'}: there is no lake; ")
    assert [each["lake"] for each in before["tables"]] == [None, None]


def test_status_names_the_transaction_holding_the_archive_back(
    agent: Agent, conn: psycopg.Connection[Any], database_url: str
) -> None:
    with psycopg.connect(database_url, application_name="the culprit") as late:
        add_history(late, 1)
        add_history(conn, 3, first=2)
        archive(agent)
        status = document(agent, "status")
        assert "the culprit" in status["held_back_by"]["who"]
        assert status["tables"][0]["lag_rows"] == 3
        assert "the culprit" in agent("pipeline", "status").out


def test_archive_takes_the_service_name_from_a_registered_node(agent: Agent, conn: psycopg.Connection[Any]) -> None:
    add_history(conn, 1)
    unknown = agent("pipeline", "archive")
    assert (unknown.code, "give APP:BUS or --service NAME" in unknown.err) == (2, True)
    conn.execute("INSERT INTO durable.nodes (service, description, version) VALUES ('billing', '', '')")
    assert document(agent, "archive")["service"] == "billing"


@pytest.mark.parametrize(
    "arguments",
    [
        ("archive",),
        ("archive", "--end"),
        ("verify",),
        ("purge", "--keep", "30"),
        ("erase", "--key", "customer 17", "--reason", "a request", "--dry-run"),
        ("erase", "--key", "customer 17", "--reason", "a request", "--yes", "--vacuum"),
    ],
    ids=" ".join,
)
def test_service_other_than_the_archived_one_is_refused(
    agent: Agent, conn: psycopg.Connection[Any], arguments: tuple[str, ...]
) -> None:
    """Nothing is changed: a row that is emptied here alone would stay in the lake."""
    add_history(conn, 3)
    conn.execute("UPDATE durable.envelope_history SET partition_key = 'customer 17', body = 'secret'")
    archive(agent)
    refused = agent("pipeline", *arguments, "--service", "shpo")
    assert (refused.code, refused.out) == (2, "")
    assert "archived as 'shop', not as 'shpo'; give --service shop, or leave it out" in refused.err
    for row in conn.execute("SELECT body FROM durable.envelope_history"):
        assert row == (b"secret",)
    assert document(agent, "verify")["tables"][0]["missing"] == 0


@pytest.mark.parametrize("option", ["--new-lake", "--successor"])
def test_option_of_archiving_beside_end_is_refused(agent: Agent, conn: psycopg.Connection[Any], option: str) -> None:
    add_history(conn, 1)
    archive(agent)
    refused = agent("pipeline", "archive", "--end", option)
    assert (refused.code, f"--end: archives nothing, and {option} says how to archive" in refused.err) == (2, True)
    assert document(agent, "status")["tables"][0]["lake"] is not None


def test_archiving_can_be_interrupted_and_continued(agent: Agent, conn: psycopg.Connection[Any]) -> None:
    """In the same lake: what was written meanwhile, and is still here, is archived once."""
    add_history(conn, 5)
    archive(agent)
    assert document(agent, "archive", "--end") == {"ended": 2}
    assert document(agent, "archive", "--end") == {"ended": 0}
    assert [each["lake"] for each in document(agent, "status")["tables"]] == [None, None]
    assert "is not archived; run" in agent("pipeline", "purge", "--service", "shop").err
    old = add_old_day(conn, 40, 2, first=101)
    add_history(conn, 3, first=6)
    assert conn.execute("SELECT durable.archived_below('envelope_history')").fetchone() == (None,)
    assert conn.execute(
        "SELECT durable.drop_partition('envelope_history', current_date - 40, interval '30 days')"
    ).fetchone() == (True,)
    assert old not in partitions(conn)

    assert [each["rows"] for each in archive(agent)["tables"]] == [3, 0]
    assert [each["whole"] for each in document(agent, "verify")["tables"]] == [True, True]
    after = document(agent, "status")
    assert [(each["lag_rows"], each["problem"], each["gone"]) for each in after["tables"]] == [(0, None, {})] * 2


# ---------------------------------------------------------------- verify


def test_verify_finds_rows_missing_in_the_lake(agent: Agent, conn: psycopg.Connection[Any], tmp_path: Path) -> None:
    add_history(conn, 20)
    add_history(conn, 10, first=101, side="outgoing", outcome="sent")
    conn.execute("UPDATE durable.envelope_history SET id = gen_random_uuid() WHERE side = 'outgoing'")
    add_letters(conn, 3)
    archive(agent)
    whole = document(agent, "verify")
    assert [(each["table"], each["rows"], each["whole"]) for each in whole["tables"]] == [
        ("history", 30, True),
        ("dead_letters", 3, True),
    ]

    conn.execute("UPDATE durable.envelope_history SET xid = 1 WHERE id = '00000000-0000-0000-0000-000000000005'")
    lacking = document(agent, "verify", code=1)
    assert (lacking["tables"][0]["missing"], lacking["tables"][0]["twice"]) == (1, 0)


def test_verify_finds_rows_twice_in_the_lake(agent: Agent, conn: psycopg.Connection[Any]) -> None:
    add_history(conn, 5)
    archive(agent)
    lake = Lake(str(agent.folder / "lake"))
    (file,) = Path(lake.table_url("history")).glob("day=*/*.parquet")

    copied = file.with_name("copied.parquet")
    copied.write_bytes(file.read_bytes())
    day = date.fromisoformat(file.parent.name.removeprefix("day="))  # midnight may have passed since
    twice = DataFile(f"{file.parent.name}/{copied.name}", day, 5, file.stat().st_size, '{"numRecords": 5}')
    lake.commit("history", [twice], app_id="somebody else", low=0, high=1)
    assert document(agent, "verify", code=1)["tables"][0]["twice"] == 5


def test_verify_prints_differing_columns(agent: Agent, conn: psycopg.Connection[Any]) -> None:
    """As do the steps of a plan."""
    add_history(conn, 5)
    archive(agent)
    (file,) = Path(Lake(str(agent.folder / "lake")).table_url("history")).glob("day=*/*.parquet")
    rows = pq.ParquetFile(file).read()
    changed = pa.array([number + 1 for number in rows["attempts"].to_pylist()], rows["attempts"].type)
    index = rows.schema.get_field_index("attempts")
    pq.write_table(rows.set_column(index, rows.schema.field(index), changed), file)

    (history, _) = document(agent, "verify", code=1)["tables"]
    assert [(each["flaw"], each["columns"]) for each in history["examples"]] == [("differs", ["attempts"])] * 5
    run = agent("pipeline", "run", "--steps", "verify", "--service", "shop", "--json")
    (step,) = json.loads(run.out)["steps"]
    assert [each["columns"] for each in step["document"]["tables"][0]["examples"]] == [["attempts"]] * 5


# ---------------------------------------------------------------- purge


def test_purge_drops_whole_days_archived_and_past_retention(agent: Agent, conn: psycopg.Connection[Any]) -> None:
    old, recent = add_old_day(conn, 40, 5), add_old_day(conn, 20, 5, first=6)
    archive(agent)
    due = document(agent, "status")["days_to_purge"]
    assert "1 day of history, from" in agent("pipeline", "status").out
    purged = document(agent, "purge", "--keep", "30")
    assert (purged["days"], len(due), purged["rows"]) == (due, 1, 5)
    assert document(agent, "status")["days_to_purge"] == []
    assert old not in partitions(conn)
    assert recent in partitions(conn)
    assert "no day of history is older" in agent("pipeline", "purge", "--keep", "30").out
    assert [each["whole"] for each in document(agent, "verify")["tables"]] == [True, True]


def test_purge_refuses_a_retention_reaching_rows_not_yet_archived(agent: Agent, conn: psycopg.Connection[Any]) -> None:
    old = add_old_day(conn, 40, 5)
    archive(agent)
    late = add_old_day(conn, 39, 2, first=6)
    refused = agent("pipeline", "purge", "--keep", "30")
    assert (refused.code, refused.out) == (2, "")
    assert re.search(r"--keep: not all rows are archived: the lake lacks 2 rows of ", refused.err)
    assert {old, late} <= partitions(conn)


def test_purge_drops_nothing_when_the_lake_lacks_rows(agent: Agent, conn: psycopg.Connection[Any]) -> None:
    old = add_old_day(conn, 40, 5)
    archive(agent)
    conn.execute("UPDATE durable.envelope_history SET id = gen_random_uuid()")
    refused = agent("pipeline", "purge", "--keep", "30")
    assert (refused.code, "the lake lacks 5 rows" in refused.err) == (1, True)
    assert old in partitions(conn)


def test_database_refuses_to_drop_a_day_not_fully_archived(conn: psycopg.Connection[Any]) -> None:
    add_old_day(conn, 40, 5)
    day = (datetime.now(UTC) - timedelta(days=40)).date()
    with pytest.raises(psycopg.errors.RaiseException, match="not archived whole"):
        conn.execute("SELECT durable.drop_archived_history(%s)", (day,))
    conn.execute("INSERT INTO durable.archives VALUES ('envelope_history', 's', 'a', 'b', 'c', 3, 3, NULL)")
    with pytest.raises(psycopg.errors.RaiseException, match="not archived whole"):
        conn.execute("SELECT durable.drop_archived_history(%s)", (day,))


def test_purge_requires_an_archive_and_the_right_lake(
    agent: Agent, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    assert "is not archived; run" in agent("pipeline", "purge", "--service", "shop").err
    archive(agent)
    elsewhere = agent("pipeline", "purge", "--service", "shop", "--lake", str(tmp_path / "elsewhere"))
    assert (elsewhere.code, "is archived into" in elsewhere.err) == (2, True)
    for days in ("0", "-1", "1e9", "0.01"):
        assert agent("pipeline", "purge", "--service", "shop", "--keep", days).code == 2


# ---------------------------------------------------------------- rights


def test_runtime_role_archives_verifies_and_purges(
    agent: Agent, conn: psycopg.Connection[Any], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = add_old_day(conn, 40, 5)
    add_letters(conn, 2)
    with runtime_role(database_url) as url:
        monkeypatch.setenv("DURABLE_DATABASE_URL", url)
        assert [each["rows"] for each in archive(agent)["tables"]] == [5, 2]
        assert [(each["rows"], each["whole"]) for each in document(agent, "verify")["tables"]] == [(5, True), (2, True)]
        assert document(agent, "purge", "--keep", "30")["rows"] == 5
    assert old not in partitions(conn)


def test_runtime_role_archives_partitions_made_after_its_grants(
    agent: Agent, conn: psycopg.Connection[Any], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runtime_role(database_url) as url:
        monkeypatch.setenv("DURABLE_DATABASE_URL", url)
        with psycopg.connect(url, autocommit=True) as node:
            node.execute("SELECT durable.make_partition('envelope_history', current_date + 9)")
        add_history(conn, 5, finished_at=datetime.now(UTC) + timedelta(days=9))
        assert archive(agent)["tables"][0]["rows"] == 5


def test_archive_tells_how_to_grant_a_missing_right(
    agent: Agent, conn: psycopg.Connection[Any], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_history(conn, 5)
    with runtime_role(database_url) as url:
        monkeypatch.setenv("DURABLE_DATABASE_URL", url)
        role = make_url(url).username
        for leaf in partitions(conn):
            conn.execute(f'REVOKE ALL ON durable.{leaf} FROM "{role}"'.encode())
        ended = agent("pipeline", "archive", "--service", "shop")
    assert ended.code == 2
    assert "permission denied" in ended.err
    assert "as owner of the schema, run: durable-agent migrate APP:BUS --grant-to ROLE" in ended.err


# ---------------------------------------------------------------- bad input


BAD_INPUT = {
    "--lake: the text is empty": ("archive", "--lake", ""),
    "has no durable tables": ("archive", "--schema", "elsewhere"),
    "the database cannot be used": ("status", "--database", "postgresql://nobody@127.0.0.1:1/none"),
    "lake gopher://x": ("archive", "--lake", "gopher://x", "--service", "shop"),
    "give one of them": ("archive", "--service", "shop", "--master", "local", "--remote", "sc://localhost"),
    "plain: is a file; name a folder": ("status", "--lake", "plain"),
    "plain/within: is a file; name a folder": ("archive", "--service", "shop", "--lake", "plain/within"),
    "is not archived; run: durable-agent pipeline archive": ("verify", "--service", "shop"),
}


@pytest.mark.parametrize("said", BAD_INPUT)
def test_bad_input_is_refused_in_one_line(agent: Agent, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    if said == "lake: not set":
        monkeypatch.delenv("DURABLE_LAKE")
    Path("plain").write_text("no lake")
    ended = agent("pipeline", *BAD_INPUT[said])
    assert (ended.out, ended.err.count("\n")) == ("", 1)
    assert said in ended.err
    assert ended.code == (1 if "cannot be used" in said else 2)


def test_a_schema_of_another_version_is_refused(agent: Agent, conn: psycopg.Connection[Any]) -> None:
    conn.execute("UPDATE durable.alembic_version SET version_num = '9999'")
    ended = agent("pipeline", "archive", "--service", "shop")
    assert (ended.code, "newer than this code" in ended.err) == (2, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("report",),
        ("conversations",),
        ("replay", "--name", "x", "--all"),
        ("audit", "--sender", "nowhere", "--receiver", "nowhere"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_missing_lake_is_told_before_spark_starts(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr("durable.cli.pipeline.options.spark_session", start)
    ended = agent("pipeline", *arguments)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "no history; fill it with durable-agent pipeline archive" in ended.err


def test_archive_tells_how_to_install_java_when_none_is_found(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(session, "_JVMS", tmp_path)
    monkeypatch.setattr(SparkSession, "getActiveSession", classmethod(lambda cls: None))
    ended = agent("pipeline", "archive", "--service", "shop", "--master", "local[1]")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "Spark needs Java 17 or newer, and there is none; run: apt-get install openjdk-17" in ended.err


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (("--master", "nonsense"), "error: Spark did not start: Master must either be yarn or start with spark"),
        (("--remote", "sc://127.0.0.1:1"), "error: --remote sc://127.0.0.1:1: no Spark Connect server answers there"),
        (("--remote", "http://127.0.0.1"), "The URL must start with 'sc://'"),
    ],
)
def test_unusable_spark_master_is_refused_in_one_line(agent: Agent, where: tuple[str, str], said: str) -> None:
    with agent.process("pipeline", "archive", "--service", "shop", *where) as process:
        _, err = process.communicate()
    assert (process.returncode, err.count(b"\n")) == (2, 1)
    assert said in err.decode()
