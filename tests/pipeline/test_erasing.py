"""Erasure: content is gone from the database and the lake, its record stays, and nothing looks like loss."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.types.json import Jsonb
from pyspark.sql import SparkSession

from durable.errors import ArchiveConflict, InvalidSetting
from durable.failpoints import EXIT_STATUS
from durable.pipeline import erasing
from durable.pipeline.audit import Question, audit
from durable.pipeline.beginning import Wish
from durable.pipeline.blanking import Wanted
from durable.pipeline.compaction import compact, vacuum
from durable.pipeline.copying import opened
from durable.pipeline.erasures import State
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES, Whose
from durable.pipeline.leftovers import Scrubbed
from durable.pipeline.purge import Retention, purge
from durable.storage import archives
from durable.storage.erasures import ERASED_PART, Chosen, Erasure, holds
from tests.support.archiving import Archiver
from tests.support.command import Agent
from tests.support.history import add_history, add_letters, add_old_day
from tests.support.lakes import fill, handled, sent, table
from tests.support.root import ROOT

MIDNIGHT = datetime(2026, 11, 20, tzinfo=UTC)
ANNA, BERT = "customer anna", "customer bert"
BY_KEY = Chosen(keys=[ANNA])
_FILL = """
UPDATE durable.envelope_history SET headers = jsonb_build_object('who', x.key), body = CAST(x.key AS bytea),
    error = 'no room for ' || x.key, partition_key = x.key, content_type = 'text/plain'
FROM (SELECT CASE WHEN id = ANY (%s) THEN %s ELSE %s END AS key, id AS of FROM durable.envelope_history) AS x
WHERE x.of = id AND body IS NULL AND erasure_id IS NULL
"""
_FILL_LETTERS = """
UPDATE durable.dead_letters SET headers = jsonb_build_object('who', x.key), body = CAST(x.key AS bytea),
    reason = 'no room for ' || x.key, traceback = x.key, partition_key = x.key, edited_body = CAST(x.key AS bytea),
    ordering_key = x.key, fair_key = x.key, message_digest = 17
FROM (SELECT CASE WHEN id = ANY (%s) THEN %s ELSE %s END AS key, id AS of FROM durable.dead_letters) AS x
WHERE x.of = id
"""
_ATTEMPT = """
INSERT INTO durable.failed_attempts (id, endpoint, number, failed_at, node_id, exception_type, reason, traceback)
VALUES (%s, 'shop', 1, now(), 7, 'ValueError', %s, %s)
"""


def of_anna(*numbers: int) -> list[UUID]:
    return [UUID(int=number) for number in numbers]


def add(conn: psycopg.Connection[Any], count: int, first: int = 1, **options: Any) -> None:
    """Every fifth row is Anna's, the others are Bert's."""
    add_history(conn, count, first=first, finished_at=MIDNIGHT, **options)
    anna = of_anna(*(number for number in range(first, first + count) if number % 5 == 0))
    conn.execute(_FILL, (anna, ANNA, BERT))


@pytest.fixture
def filled(archiver: Archiver, conn: psycopg.Connection[Any]) -> Archiver:
    """Twenty rows of two files, four of them Anna's, and five letters, of which number 5 is hers; all archived."""
    add(conn, 10)
    archiver.run(local_rows=1_000)
    add(conn, 10, first=11)
    archiver.run(local_rows=1_000)
    add_letters(conn, 5)
    conn.execute(_FILL_LETTERS, (of_anna(5), ANNA, BERT))
    conn.execute(_ATTEMPT, (UUID(int=5), f"no room for {ANNA}", ANNA))
    archiver.run("dead_letters", local_rows=1_000)
    return archiver


def erase(archiver: Archiver, chosen: Chosen = BY_KEY) -> Erasure:
    return erasing.erase(archiver.origin, archiver.lake, chosen, actor="a test", reason="request 4711")


def states(archiver: Archiver) -> list[State]:
    with opened(archiver.origin.url) as engine, engine.connect() as conn:
        return [each.state for each in erasing.listed(erasing.noted(conn, "durable"), archiver.lake)]


def mentions(archiver: Archiver, conn: psycopg.Connection[Any], text: str = ANNA) -> list[str]:
    """The tables, and the files of the lake as it is now, that hold this text."""
    found = []
    rows = conn.execute(
        "SELECT tablename FROM pg_tables WHERE schemaname = 'durable' AND tablename !~ '_(default|[0-9]{8})$'"
    )
    for (name,) in rows.fetchall():
        # bytea shows as hex
        query = f'SELECT count(*) FROM durable."{name}" AS t WHERE t::text LIKE %s OR t::text LIKE %s'
        row = conn.execute(query.encode(), (f"%{text}%", f"%{text.encode().hex()}%")).fetchone()
        found += [name] if row and row[0] else []
    for of in SOURCES:
        found += [of for row in archiver.lake.opened(of).to_pyarrow_table().to_pylist() if text in str(row)]
    return found


def in_files(archiver: Archiver, text: str = ANNA) -> list[Path]:
    """The files below the lake that hold this text: Parquet is read, because it is compressed."""
    import pyarrow.parquet as pq

    found = []
    for file in Path(archiver.lake.url).rglob("*.*"):
        if file.suffix == ".parquet":
            metadata = pq.read_metadata(file)
            statistics = [
                str(metadata.row_group(group).column(column).statistics)
                for group in range(metadata.num_row_groups)
                for column in range(metadata.num_columns)
            ]
            content = str(pq.ParquetFile(file).read().to_pylist()) + str(statistics)
        elif file.is_file():
            content = file.read_bytes().decode(errors="replace")
        else:
            continue
        found += [file] if text in content else []
    return found


def is_whole(archiver: Archiver) -> bool:
    return archiver.verify("history").is_whole and archiver.verify("dead_letters").is_whole


# ---------------------------------------------------------------- what goes, and what stays


@pytest.mark.parametrize("chosen", [BY_KEY, Chosen(ids=of_anna(5, 10, 15, 20))], ids=["by key", "by id"])
def test_erasure_leaves_no_content_and_every_row(
    filled: Archiver, conn: psycopg.Connection[Any], chosen: Chosen
) -> None:
    assert len(mentions(filled, conn)) > 3
    of_bert = f"partition_key = '{BERT}'"
    before = filled.lake.read(filled.spark, "history").where(of_bert).orderBy("id").collect()

    done = erase(filled, chosen)

    assert (done.history_rows, done.letter_rows, done.lake_history_rows, done.lake_letter_rows) == (4, 1, 4, 1)
    assert mentions(filled, conn) == []
    assert filled.ids() == [*range(1, 21)]
    assert (
        filled.lake.read(filled.spark, "history").where(f"partition_key = '{BERT}'").orderBy("id").collect() == before
    )
    erased = filled.lake.read(filled.spark, "history").where("erasure_id IS NOT NULL").orderBy("id").collect()
    assert [int.from_bytes(row.id) for row in erased] == [5, 10, 15, 20]
    assert {(bytes(row.erasure_id), row.outcome, row.address) for row in erased} == {
        (done.erasure_id.bytes, "handled", "shop")
    }
    assert is_whole(filled)
    assert states(filled) == [State.DONE]


def note(conn: psycopg.Connection[Any], **columns: Any) -> None:
    """An action of an operator."""
    action = {"id": uuid4(), "actor": "olga", "verb": "discard", "target": "dead letters: all", "changed": 1} | columns
    names, places = ", ".join(action), ", ".join(f"%({name})s" for name in action)
    conn.execute(f"INSERT INTO durable.actions ({names}) VALUES ({places})".encode(), action)


def begin_replay(conn: psycopg.Connection[Any], name: str = "a replay", **plan: Any) -> None:
    whole = {"lake": "/lakes/shop", "where": None, "address": [], **plan}
    conn.execute("INSERT INTO durable.replays (name, plan) VALUES (%s, %s)", [name, Jsonb(whole)])


def pause_key(conn: psycopg.Connection[Any], reason: str) -> None:
    conn.execute(
        "INSERT INTO durable.circuits (kind, key, reason, actor) VALUES ('key', %s, %s, 'node 7')", [ANNA, reason]
    )


RECORDS: dict[str, Callable[[psycopg.Connection[Any]], None]] = {
    "target": lambda conn: note(conn, target=f"dead letters: key={ANNA}"),
    "target in another case": lambda conn: note(conn, target=f"key {ANNA.upper()}"),
    "reason": lambda conn: note(conn, reason=f"{ANNA} asked for it"),
    "before": lambda conn: note(conn, before=Jsonb({f"key {ANNA}": {"actor": "olga"}})),
    "after": lambda conn: note(conn, after=Jsonb({f"key {ANNA}": {"actor": "olga"}})),
    "where of a replay": lambda conn: begin_replay(conn, where=f"partition_key = '{ANNA}'"),
    "address of a replay": lambda conn: begin_replay(conn, address=["shop", f"shop/{ANNA}"]),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_erasure_by_key_empties_a_record_of_operators(
    filled: Archiver, conn: psycopg.Connection[Any], kind: str
) -> None:
    RECORDS[kind](conn)
    note(conn, target=f"dead letters: key={BERT}", reason="old")
    survey = erasing.survey(filled.origin, filled.lake, BY_KEY)
    assert survey.here.records == 1
    erase(filled)
    assert (mentions(filled, conn), mentions(filled, conn, ANNA.upper())) == ([], [])
    assert "actions" in mentions(filled, conn, BERT)
    assert erasing.survey(filled.origin, filled.lake, BY_KEY).is_empty


TIMED: Final[dict[str, Any]] = {
    "since": {"at": "2030-05-01T12:00:00.471200+00:00", "given": "2030-05-01T12:00:00.4712Z"},
    "end": "2030-05-01T12:00:00.471201+00:00",
    "only": {"service": "shop", "side": "outgoing"},
    "side": "outgoing",
    "id": ["00000000-0000-0000-0000-000000004712"],
    "destination": "tcp://4712:1",
}
"""Parts of a plan that no key is looked for in."""


@pytest.mark.parametrize("key", ["4712", "outgoing"])
def test_erasure_leaves_times_ids_and_destination_of_a_plan(
    filled: Archiver, conn: psycopg.Connection[Any], key: str
) -> None:
    begin_replay(conn, **TIMED)
    assert erasing.survey(filled.origin, filled.lake, Chosen(keys=[key])).here.records == 0
    begin_replay(conn, name="another", where=f"partition_key = '{key}'", **TIMED)
    assert erasing.survey(filled.origin, filled.lake, Chosen(keys=[key])).here.records == 1
    erase(filled, Chosen(keys=[key]))
    (one,), (other,) = conn.execute("SELECT plan FROM durable.replays ORDER BY name").fetchall()
    assert one == {"lake": "/lakes/shop", "where": None, "address": [], **TIMED}
    assert other == one | {"where": ERASED_PART}


@pytest.mark.parametrize("chosen", [BY_KEY, Chosen(ids=of_anna(5, 10, 15, 20))], ids=["by key", "by id"])
def test_erasure_empties_the_reason_of_an_action_beside_its_letter(
    filled: Archiver, conn: psycopg.Connection[Any], chosen: Chosen
) -> None:
    conn.execute(
        "UPDATE durable.dead_letters SET resolution = 'discarded', resolved_at = now(), resolved_by = 'olga', "
        "resolution_reason = 'she moved to ' || CASE WHEN id = %s THEN 'Ulm' ELSE 'Bonn' END",
        of_anna(5),
    )
    note(conn, reason="she moved to Ulm")
    note(conn, reason="she moved to Bonn")
    filled.run("dead_letters", local_rows=1_000)
    assert erasing.survey(filled.origin, filled.lake, chosen).here.records == 1
    erase(filled, chosen)
    reasons = conn.execute("SELECT reason FROM durable.actions ORDER BY number").fetchall()
    assert reasons == [(None,), ("she moved to Bonn",)]


def test_erasure_empties_the_reason_of_a_paused_key(filled: Archiver, conn: psycopg.Connection[Any]) -> None:
    pause_key(conn, f"no room for {ANNA}")
    erase(filled)
    assert conn.execute("SELECT key, reason FROM durable.circuits").fetchall() == [(ANNA, "erased")]
    assert erasing.survey(filled.origin, filled.lake, BY_KEY).is_empty


@given(
    key=st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=12), after=st.sampled_from(["", " ", ","])
)
def test_key_in_a_text_is_found_in_every_spelling(key: str, after: str) -> None:
    for written in (key, key.replace("'", "''"), json.dumps(key, ensure_ascii=False)):
        assert holds(f"key={written}{after}", key) or not key.strip()


@pytest.mark.parametrize("chosen", [BY_KEY, Chosen(ids=of_anna(5, 10, 15, 20))], ids=["by key", "by id"])
def test_erasure_empties_answers_to_the_messages_and_answers_among_them(
    filled: Archiver, conn: psycopg.Connection[Any], chosen: Chosen
) -> None:
    for request, answer in ((5, 901), (902, 10), (903, 904)):
        conn.execute(
            "INSERT INTO durable.answers (request_id, endpoint, id, message_type, headers, body)"
            " VALUES (%s, 'local', %s, 'told', '{}', 'told')",
            [UUID(int=request), UUID(int=answer)],
        )
    erase(filled, chosen)
    left = conn.execute("SELECT request_id FROM durable.answers WHERE body IS NOT NULL OR headers IS NOT NULL")
    assert left.fetchall() == [(UUID(int=903),)]


def test_erased_letter_is_discarded_and_archived_so(filled: Archiver, conn: psycopg.Connection[Any]) -> None:
    erase(filled)
    rows = conn.execute("SELECT letter_id, resolution, resolved_by, replayable FROM durable.dead_letters ORDER BY 1")
    assert [row for row in rows.fetchall() if row[1]] == [(5, "discarded", "a test", False)]
    assert filled.run("dead_letters", local_rows=1_000).rows == 1
    assert mentions(filled, conn) == []
    assert is_whole(filled)


def test_row_not_archived_yet_is_archived_without_its_erased_content(
    filled: Archiver, conn: psycopg.Connection[Any]
) -> None:
    add(conn, 5, first=21)
    done = erase(filled)
    assert (done.history_rows, done.lake_history_rows) == (5, 4)
    assert filled.run(local_rows=1_000).rows == 5
    assert mentions(filled, conn) == []
    assert is_whole(filled)


def test_rows_of_another_service_in_the_same_lake_are_left(
    filled: Archiver, conn: psycopg.Connection[Any], spark: SparkSession
) -> None:
    fill(filled.lake, table([sent(1, service="billing", database="other", partition_key=ANNA)]))
    there = erasing.survey(filled.origin, filled.lake, BY_KEY)
    assert [(whose.service, rows) for whose, rows in there.others.items()] == [("billing", 1)]
    assert (there.here.history, there.lake) == (4, {"history": 4, "dead_letters": 1})
    erase(filled)
    assert filled.lake.read(spark, "history").where("service = 'billing'").first().partition_key == ANNA  # type: ignore[union-attr]


_FAILED = """
INSERT INTO durable.failed_attempts (id, endpoint, number, failed_at, node_id, exception_type, reason, traceback)
VALUES (%s, 'shop', 1, %s, 7, 'ValueError', %s, %s)
"""


def test_attempts_of_messages_without_history_are_erased_by_id(filled: Archiver, conn: psycopg.Connection[Any]) -> None:
    one, other = UUID(int=71), UUID(int=72)
    for each in (one, other):
        conn.execute(_FAILED, (each, datetime.now(UTC), f"{ANNA} is unknown", f"in line 1: {ANNA}"))
    erasing.erase(filled.origin, filled.lake, Chosen(ids=[one]), actor="a test", reason="4711")
    found = conn.execute(
        "SELECT id, reason, traceback FROM durable.failed_attempts WHERE id IN (%s, %s) ORDER BY id", (one, other)
    ).fetchall()
    assert found == [(one, "erased", ""), (other, f"{ANNA} is unknown", f"in line 1: {ANNA}")]


def test_purge_leaves_no_attempts_of_messages_without_history(filled: Archiver, conn: psycopg.Connection[Any]) -> None:
    """Nothing would tell any more whose key they are."""
    now = datetime.now(UTC)
    add_old_day(conn, 40, 1, first=71)
    filled.run()
    for number, age in ((71, 40), (72, 3)):
        conn.execute(_FAILED, (UUID(int=number), now - timedelta(days=age), ANNA, ANNA))
    month = Retention(timedelta(days=30), timedelta(days=30))
    assert purge(lambda: filled.spark, filled.lake, filled.origin, month).rows == 1
    left = {each for (each,) in conn.execute("SELECT id FROM durable.failed_attempts").fetchall()}
    assert (UUID(int=71) in left, UUID(int=72) in left) == (False, True)


def test_repeated_erasure_changes_nothing(filled: Archiver, conn: psycopg.Connection[Any]) -> None:
    first = erase(filled, Chosen(ids=of_anna(5)))
    version = filled.lake.opened("history").version()
    again = erase(filled, Chosen(ids=of_anna(5)))
    assert (again.history_rows, again.lake_history_rows) == (0, 0)
    assert again.erasure_id != first.erasure_id
    assert filled.lake.opened("history").version() == version


_SERVICES, _ERASED = st.sampled_from(["shop", "billing"]), st.sampled_from([None, 9])
_IDS, _WORDS = st.sampled_from([*range(4)]), st.sampled_from(["a", "b", "", None])


@given(
    rows=st.lists(st.tuples(_IDS, _WORDS, _SERVICES, st.sampled_from(["a", "b", None]), _ERASED), max_size=8),
    ids=st.lists(_IDS, max_size=2),
    keys=st.lists(st.sampled_from(["a", "b", ""]), max_size=2),
)
def test_mask_and_count_of_an_erasure_choose_the_same_rows(
    rows: list[tuple[int, str | None, str, str | None, int | None]], ids: list[int], keys: list[str]
) -> None:
    stored = [
        handled(number, partition_key=key, service=service, database=database, erasure_id=erased and UUID(int=erased))
        for number, key, service, database, erased in rows
    ]
    batch = table(stored).drop_columns("day").combine_chunks()
    wanted = Wanted([UUID(int=number) for number in ids], keys, [Whose("shop", "a")])
    found = [batch.slice(n, 1).filter(wanted.condition()).num_rows == 1 for n in range(len(rows))]
    assert found == [
        service == "shop" and database != "b" and erased is None and (number in ids or key in keys)
        for number, key, service, database, erased in rows
    ]
    for part in batch.to_batches():
        assert wanted.mask(part).to_pylist() == found


# ---------------------------------------------------------------- nothing looks like loss


def test_audit_reports_the_erasure_and_no_loss(
    filled: Archiver, conn: psycopg.Connection[Any], spark: SparkSession
) -> None:
    add(conn, 20, side="outgoing", outcome="sent")
    filled.run(local_rows=1_000)
    erase(filled, Chosen(ids=of_anna(5, 10)))
    verdict = audit(spark, [filled.lake], [filled.lake], Question(settle=timedelta(0)))
    assert (verdict.failed, verdict.counts["alien"]) == (False, 0)
    assert [(each["service"], each["rows"], each["reason"]) for each in verdict.erased] == [("shop", 5, "request 4711")]


def test_time_of_the_last_archive_is_unchanged_by_an_erasure(filled: Archiver) -> None:
    before = filled.lake.archived_at("history")
    erase(filled)
    assert filled.lake.archived_at("history") == before


# ---------------------------------------------------------------- files


def test_replaced_files_hold_the_content_until_they_are_scrubbed(
    filled: Archiver, conn: psycopg.Connection[Any]
) -> None:
    archived = filled.files()
    compact(filled.lake, "history", above=1)
    erase(filled)
    assert in_files(filled) != [], "readers of the version before go on"
    (app,) = {file.name.split("-")[1] for file in archived}
    left_behind = filled.files()[0].with_name(f"part-{app}-1-aaaaaaaa-1-0.parquet")
    left_behind.write_bytes(next(file for file in in_files(filled) if "history" in file.parts).read_bytes())
    stranger = filled.files()[0].with_name("part-of-something-else.parquet")
    stranger.write_bytes(b"not ours")

    assert erasing.scrub(filled.origin, filled.lake, BY_KEY).removed > 2

    stranger.unlink()
    assert in_files(filled) == []
    assert filled.ids() == [*range(1, 21)]
    assert is_whole(filled)
    add(conn, 5, first=21)
    assert filled.run(local_rows=1_000).rows == 5, "the offset has outlived the log"
    assert filled.lake.opened("history").metadata().configuration["delta.logRetentionDuration"] == "interval 30 days"


def test_compaction_writes_no_content_into_the_log(filled: Archiver) -> None:
    compact(filled.lake, "history", above=1)
    log = Path(filled.lake.table_url("history"), "_delta_log")
    assert [file.name for file in log.iterdir() if b"customer" in file.read_bytes()] == []


def test_day_compacted_during_an_erasure_is_erased(
    filled: Archiver, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Lake.replace
    met: list[Any] = []

    def late(self: Lake, table: Any, *rest: Any) -> None:
        if not met:
            met.append(compact(filled.lake, table, above=1))
        replace(self, table, *rest)

    monkeypatch.setattr(Lake, "replace", late)
    erase(filled)
    assert met[0].days == 1
    assert mentions(filled, conn) == []
    assert filled.ids() == [*range(1, 21)]


def test_erasure_does_not_wait_for_an_archiver(filled: Archiver) -> None:
    with opened(filled.origin.url) as engine, engine.connect() as other:
        assert archives.try_lock(other, "durable")
        with pytest.raises(ArchiveConflict, match="another archiver is at work"):
            erase(filled)


# ---------------------------------------------------------------- interrupted, restored


@pytest.mark.parametrize("failpoint", ["E1", "E2", "E3"])
def test_interrupted_erasure_is_named_and_finished_by_the_same_choice(
    filled: Archiver, conn: psycopg.Connection[Any], failpoint: str
) -> None:
    program = (
        "import sys; from durable.pipeline import erasing; from durable.pipeline.lake import Lake; "
        "from durable.storage.erasures import Chosen; from tests.support.archiving import origin_of; "
        f"erasing.erase(origin_of(sys.argv[1]), Lake(sys.argv[2]), Chosen(keys=[{ANNA!r}]), actor='x', reason='y')"
    )
    command = [sys.executable, "-c", program, filled.origin.url, filled.lake.url]
    died = subprocess.run(
        command, cwd=ROOT, env={"DURABLE_FAILPOINT": failpoint}, capture_output=True, text=True, check=False
    )
    assert died.returncode == EXIT_STATUS, died.stderr
    assert states(filled) == [State.INTERRUPTED]

    done = erase(filled)
    assert (done.history_rows, done.letter_rows, done.lake_history_rows, done.lake_letter_rows) == (4, 1, 4, 1)
    assert (done.actor, states(filled)) == ("x", [State.DONE])
    assert mentions(filled, conn) == []
    assert is_whole(filled)


def test_restored_lake_is_erased_by_the_same_choice(
    filled: Archiver, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(filled.lake.url, tmp_path / "backup")
    first = erase(filled)
    shutil.rmtree(filled.lake.url)
    shutil.move(tmp_path / "backup", filled.lake.url)
    assert states(filled) == [State.LAKE_RESTORED]
    again = erase(filled)
    assert (again.erasure_id, again.lake_history_rows, states(filled)) == (first.erasure_id, 4, [State.DONE])
    assert mentions(filled, conn) == []


def test_restored_database_is_erased_by_the_same_choice(filled: Archiver, conn: psycopg.Connection[Any]) -> None:
    conn.execute("CREATE TABLE kept AS SELECT * FROM durable.envelope_history")
    first = erase(filled)
    conn.execute("TRUNCATE durable.envelope_history")
    conn.execute("INSERT INTO durable.envelope_history SELECT * FROM kept")
    conn.execute("DROP TABLE kept")
    conn.execute("TRUNCATE durable.erasures")
    assert states(filled) == [State.DATABASE_RESTORED]
    again = erase(filled)
    assert (again.erasure_id, again.history_rows, states(filled)) == (first.erasure_id, 4, [State.DONE])
    assert mentions(filled, conn) == []


# ---------------------------------------------------------------- other lakes, other databases, other writers


def test_erasure_reaches_the_lake_of_the_database_and_the_named_lake(
    filled: Archiver, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    old, filled.lake = filled.lake, Lake(str(tmp_path / "new"))
    for of in ("history", "dead_letters"):
        filled.run(of, local_rows=1_000, wish=Wish(is_new_lake=True))
    own, filled.lake = filled.lake, old
    assert erasing.survey(filled.origin, old, BY_KEY).lake == {"history": 8, "dead_letters": 2}
    done = erase(filled)
    assert (done.lake, done.lake_history_rows, states(filled)) == (own.url, 4, [State.DONE])
    erasing.scrub(filled.origin, old, BY_KEY)
    assert in_files(filled) == []
    filled.lake = own
    assert (in_files(filled), states(filled), is_whole(filled)) == ([], [State.DONE], True)


def move(archiver: Archiver, lake: Lake, wish: Wish) -> None:
    archiver.lake = lake
    for of in SOURCES:
        archiver.run(of, local_rows=1_000, wish=wish)


def test_erasure_is_missing_in_an_earlier_lake_when_used_again(
    filled: Archiver, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    old = filled.lake
    move(filled, Lake(str(tmp_path / "new")), Wish(is_new_lake=True))
    erase(filled)
    assert states(filled) == [State.DONE]
    move(filled, old, Wish(is_new_lake=True))
    assert states(filled) == [State.LAKE_RESTORED]
    erase(filled)
    erasing.scrub(filled.origin, old, BY_KEY)
    assert (in_files(filled), states(filled), is_whole(filled)) == ([], [State.DONE], True)


def test_erasure_of_the_earlier_lake_alone_is_named_after_a_move(
    filled: Archiver, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    conn.execute("CREATE TABLE kept AS SELECT * FROM durable.envelope_history")
    first = erase(filled)
    conn.execute("TRUNCATE durable.envelope_history, durable.erasures")
    conn.execute("INSERT INTO durable.envelope_history SELECT * FROM kept")
    conn.execute("DROP TABLE kept")
    move(filled, Lake(str(tmp_path / "new")), Wish(is_new_lake=True, is_successor=True))
    assert states(filled) == [State.DATABASE_RESTORED]
    again = erase(filled)
    erasing.scrub(filled.origin, filled.lake, BY_KEY)
    assert (again.erasure_id, in_files(filled), states(filled)) == (first.erasure_id, [], [State.DONE])


def test_erasure_is_refused_when_the_lake_of_the_database_is_missing(
    filled: Archiver, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    fill(Lake(str(tmp_path / "other")), table([sent(1)]))
    Path(filled.lake.url).rename(tmp_path / "moved")
    with pytest.raises(InvalidSetting, match=r"the database is archived into .*, which is not there"):
        erasing.erase(filled.origin, Lake(str(tmp_path / "other")), BY_KEY, actor="a test", reason="r")
    filled.lake = Lake(str(tmp_path / "moved"))
    assert erase(filled).lake_history_rows == 4


def test_rows_of_a_lost_database_are_erased_with_its_name(filled: Archiver, conn: psycopg.Connection[Any]) -> None:
    fill(filled.lake, table([sent(1, service="shop", database="lost", partition_key=ANNA)]))
    there = erasing.survey(filled.origin, filled.lake, BY_KEY)
    assert (there.lake["history"], [(*whose, rows) for whose, rows in there.others.items()]) == (
        4,
        [("shop", "lost", 1)],
    )
    assert erase(filled).lake_history_rows == 4
    there = erasing.survey(filled.origin, filled.lake, BY_KEY, ["lost"])
    assert (there.lake["history"], there.others) == (1, {})
    done = erasing.erase(filled.origin, filled.lake, BY_KEY, actor="a test", reason="r", lost=["lost"])
    assert (done.lake_history_rows, states(filled)) == (1, [State.DONE, State.DONE])
    assert mentions(filled, conn) == []


_OF_COMPACTION = "part-00000-11111111-2222-4333-8444-555555555555-c000.zstd.parquet"
_OF_ERASURE = "part-0a0a0a0a-7-x1234567-0-0.parquet"
_OF_ARCHIVER = "part-0a0a0a0a-7-12345678-0-0.parquet"


@pytest.mark.parametrize(
    ("name", "minutes", "found"),
    [
        (_OF_COMPACTION, 1, Scrubbed(busy=1)),
        (f"{_OF_COMPACTION}#1", 1, Scrubbed(busy=1)),
        (_OF_ERASURE, 1, Scrubbed(busy=1)),
        (_OF_COMPACTION, 61, Scrubbed(removed=1)),
        (f"{_OF_COMPACTION}#1", 61, Scrubbed(removed=1)),
        (_OF_ERASURE, 61, Scrubbed(removed=1)),
        (_OF_ARCHIVER, 61, Scrubbed()),
        ("of-somebody-else.parquet", 61, Scrubbed()),
    ],
)
def test_unreadable_file_is_left_to_its_writer_for_an_hour(
    filled: Archiver, name: str, minutes: int, found: Scrubbed
) -> None:
    erase(filled)
    erasing.scrub(filled.origin, filled.lake, BY_KEY)
    unreadable = filled.files()[0].with_name(name)
    unreadable.write_bytes(b"PAR1 half of a file")
    moment = (datetime.now(UTC) - timedelta(minutes=minutes)).timestamp()
    os.utime(unreadable, (moment, moment))
    assert erasing.scrub(filled.origin, filled.lake, BY_KEY) == found
    assert unreadable.exists() == (found.removed == 0)
    assert is_whole(filled)


def test_file_of_a_writer_at_work_stays_unless_its_content_was_erased(
    filled: Archiver, conn: psycopg.Connection[Any]
) -> None:
    """A compaction of rows that no erasure concerns may still commit."""
    add(conn, 4, first=31)  # Bert's
    filled.run(local_rows=1_000)
    of_bert = max(filled.files(), key=lambda file: file.stat().st_mtime_ns)
    at_work = of_bert.with_name(_OF_COMPACTION)
    at_work.write_bytes(of_bert.read_bytes())
    with_anna = of_bert.with_name(_OF_COMPACTION.replace("0000-", "0001-"))
    with_anna.write_bytes(min(filled.files(), key=lambda file: file.stat().st_mtime_ns).read_bytes())
    erase(filled)
    erasing.scrub(filled.origin, filled.lake, BY_KEY)
    assert (at_work.exists(), with_anna.exists(), in_files(filled)) == (True, False, [])


def test_vacuum_removes_erased_content_of_a_dead_compaction(filled: Archiver) -> None:
    left = filled.files()[0].with_name(_OF_COMPACTION)
    left.write_bytes(filled.files()[0].read_bytes())
    erase(filled)
    assert vacuum(filled.lake, "history", timedelta(days=7)) == 1
    assert not left.exists()


def test_archive_of_a_successor_names_the_undone_erasures(
    agent: Agent, filled: Archiver, conn: psycopg.Connection[Any]
) -> None:
    erase(filled)
    conn.execute("TRUNCATE durable.erasures")  # as in a dump from before
    ended = agent("pipeline", "archive", "--service", "shop", "--successor")
    assert (ended.code, ended.err) == (1, "")
    assert "erasures that are not whole, here or in the lake: erase once more" in ended.out
    assert "run durable-agent pipeline erase with the same --id or --key again" in ended.out
    erase_command(agent, "--key", ANNA, "--yes")
    assert agent("pipeline", "archive", "--service", "shop", "--successor").code == 0


def test_archive_into_a_restored_lake_names_the_undone_erasures(
    agent: Agent, filled: Archiver, conn: psycopg.Connection[Any]
) -> None:
    """All rows that the lake has lost are still in the database."""
    backup = Path(filled.lake.url).with_name("backup")
    shutil.copytree(filled.lake.url, backup)
    erase(filled)
    add_history(conn, 1, first=901)
    filled.run()
    shutil.rmtree(filled.lake.url)
    shutil.copytree(backup, filled.lake.url)
    ended = agent("pipeline", "archive", "--service", "shop")
    assert (ended.code, ended.err) == (1, "")
    assert "erasures that are not whole, here or in the lake: erase once more" in ended.out
    erase_command(agent, "--key", ANNA, "--yes")
    assert agent("pipeline", "archive", "--service", "shop").code == 0


def test_verify_gives_advice_about_a_row_erased_in_one_place(
    agent: Agent, filled: Archiver, conn: psycopg.Connection[Any]
) -> None:
    erase(filled)
    conn.execute("UPDATE durable.envelope_history SET erasure_id = gen_random_uuid() WHERE erasure_id IS NOT NULL")
    assert agent("pipeline", "verify", "--service", "shop").code == 0
    conn.execute("UPDATE durable.envelope_history SET erasure_id = NULL WHERE id = %s", (UUID(int=5),))
    ended = agent("pipeline", "verify", "--service", "shop")
    assert (ended.code, "erased in one of the places only: run durable-agent pipeline erase" in ended.out) == (1, True)


# ---------------------------------------------------------------- the command


@pytest.fixture
def agent(
    filled: Archiver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Agent:
    monkeypatch.setenv("DURABLE_DATABASE_URL", filled.origin.url)
    monkeypatch.setenv("DURABLE_LAKE", filled.lake.url)
    return Agent(tmp_path, monkeypatch, capsys)


def erase_command(agent: Agent, *arguments: str, code: int = 0) -> Any:
    ended = agent("pipeline", "erase", "--service", "shop", "--reason", "request 4711", *arguments, "--json")
    assert (ended.code, ended.err) == (code, "")
    return json.loads(ended.out)


def test_rehearsal_counts_and_changes_nothing(agent: Agent, filled: Archiver, conn: psycopg.Connection[Any]) -> None:
    before = mentions(filled, conn)
    told = erase_command(agent, "--key", ANNA, "--dry-run")
    assert (told["dry_run"], told["erasure"]) == (True, None)
    assert told["found"] == {
        "history": 4,
        "dead_letters": 1,
        "open_letters": 1,
        "waiting": 0,
        "records": 0,
        "lake_history": 4,
        "lake_dead_letters": 1,
    }
    assert mentions(filled, conn) == before
    assert conn.execute("SELECT count(*) FROM durable.erasures").fetchone() == (0,)


def test_status_verify_and_the_record_report_an_erasure_by_command(
    agent: Agent, filled: Archiver, conn: psycopg.Connection[Any]
) -> None:
    told = erase_command(agent, "--key", ANNA, "--yes", "--vacuum", "--by", "anna's lawyer")
    assert told["erasure"]["history_rows"] == 4
    assert told["files_removed"] >= 3
    assert in_files(filled) == []
    for command in ("status", "verify"):
        ended = agent("pipeline", command, *(["--service", "shop"] if command == "verify" else []), "--json")
        assert ended.code == 0, ended
        (record,) = json.loads(ended.out)["erasures"]
        assert (record["actor"], record["reason"], record["state"]) == ("anna's lawyer", "request 4711", "done")
        assert (record["history_rows"], record["lake_history_rows"], record["chosen_count"]) == (4, 4, 1)
        assert ANNA not in ended.out
    shown = agent("pipeline", "status")
    assert "content that is gone on purpose" in shown.out
    assert erase_command(agent, "--key", ANNA, "--yes")["erasure"]["erasure_id"] == told["erasure"]["erasure_id"]


@pytest.mark.parametrize(("answer", "code", "erased"), [(b"n\n", 1, 0), (b"y\n", 0, 4)])
def test_command_asks_for_confirmation_on_a_terminal(
    agent: Agent, conn: psycopg.Connection[Any], answer: bytes, code: int, erased: int
) -> None:
    ours, theirs = os.openpty()
    arguments = ("--service", "shop", "--reason", "request 4711", "--key", ANNA)
    with agent.process("pipeline", "erase", *arguments, stdin=theirs) as process:
        os.write(ours, answer)
        out, err = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert (process.returncode, b"would be erased" in out, b"erase them for good?" in err) == (code, True, True), err
    row = conn.execute("SELECT count(*) FROM durable.envelope_history WHERE erasure_id IS NOT NULL").fetchone()
    assert row == (erased,)


def test_empty_key_is_erased_and_every_text_may_stand_in_its_record(
    agent: Agent, conn: psycopg.Connection[Any]
) -> None:
    conn.execute("UPDATE durable.envelope_history SET partition_key = '' WHERE id = %s", (UUID(int=3),))
    told = erase_command(agent, "--key", "", "--yes")
    assert (told["erasure"]["history_rows"], told["found"]["history"]) == (1, 1)
    row = conn.execute("SELECT body FROM durable.envelope_history WHERE id = %s", (UUID(int=3),)).fetchone()
    assert row == (None,)


def test_command_ends_with_1_while_messages_wait(agent: Agent, conn: psycopg.Connection[Any]) -> None:
    conn.execute(
        "INSERT INTO durable.incoming_envelopes (endpoint, id, message_type, source, correlation_id, content_type, "
        "body, sent_at, owner_id, partition_key) VALUES ('shop', %s, 't', 's', %s, 'text/plain', '', now(), 0, %s)",
        (UUID(int=99), UUID(int=99), ANNA),
    )
    assert erase_command(agent, "--key", ANNA, "--yes", code=1)["found"]["waiting"] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "choose messages by --id or by --key, one of both"),
        (["--id", str(UUID(int=5)), "--key", ANNA], "choose messages by --id or by --key, one of both"),
        (["--id", "17"], "--id: '17' is no UUID of a message"),
        (["--key", "nobody", "--yes"], "no message of these ids or keys is here; nothing was erased"),
        (["--key", ANNA, "--json"], "erased messages cannot be brought back; give --yes, or --dry-run"),
        (["--key", ANNA], "erased messages cannot be brought back; give --yes, or --dry-run"),
        (["--key", ANNA, "--reason", " "], "--reason: the text is empty"),
        (["--key", ANNA, "--reason", "\x07"], "--reason: printable text"),
        (["--key", ANNA, "--reason", f"{ANNA} wants it"], "--reason: it holds the key that is to be erased"),
        (["--key", ANNA, "--reason", f"{ANNA.title()} wants it"], "--reason: it holds the key that is to be erased"),
        (["--key", ANNA, "--by", f"the clerk of {ANNA}"], "--by: it holds the key that is to be erased"),
        (["--key", "7", "--reason", "request of 7"], "--reason: it holds the key that is to be erased"),
        (["--key", ANNA, "--lake", "/nowhere/at/all", "--yes"], "there is no lake"),
    ],
)
def test_bad_input_is_told_and_nothing_is_erased(
    agent: Agent, conn: psycopg.Connection[Any], arguments: list[str], said: str
) -> None:
    ended = agent("pipeline", "erase", "--service", "shop", "--reason", "request 4711", *arguments)
    assert (ended.code, said in ended.err) == (2, True), ended
    assert conn.execute("SELECT count(*) FROM durable.erasures").fetchone() == (0,)


def test_lake_of_an_archived_database_must_be_named(
    agent: Agent, filled: Archiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DURABLE_LAKE")
    ended = agent("pipeline", "erase", "--service", "shop", "--reason", "r", "--key", ANNA, "--yes")
    assert (ended.code, "this database is archived into" in ended.err) == (2, True), ended


def test_database_without_a_lake_is_erased_alone(
    database_url: str, conn: psycopg.Connection[Any], archiver: Archiver
) -> None:
    add(conn, 10)
    done = erasing.erase(archiver.origin, None, BY_KEY, actor="a test", reason="request 4711")
    assert (done.history_rows, done.lake, done.finished_at is None) == (2, None, False)
    row = conn.execute("SELECT count(*) FROM durable.envelope_history WHERE partition_key = %s", (ANNA,)).fetchone()
    assert row == (0,)


def test_lake_in_an_object_store_is_erased_and_recorded(
    spark: SparkSession, database_url: str, conn: psycopg.Connection[Any], store_url: str, tmp_path: Path
) -> None:
    archiver = Archiver(spark, database_url, tmp_path)
    archiver.lake = Lake(store_url)
    add(conn, 10)
    archiver.run(local_rows=1_000)
    done = erase(archiver)
    assert (done.lake_history_rows, states(archiver)) == (2, [State.DONE])
    there = erasing.survey(archiver.origin, archiver.lake, BY_KEY)
    assert (there.is_empty, archiver.lake.sizes("history") != {}) == (True, True)
    assert erasing.scrub(archiver.origin, archiver.lake, BY_KEY) == Scrubbed(removed=1)
