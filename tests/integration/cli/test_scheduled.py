"""`durable-agent scheduled` on a real database."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from durable.envelope import ANY_NODE, new_id
from durable.messages.routing import LOCAL
from durable.storage import outbox, schedules
from durable.storage.outbox import Sent
from durable.storage.schedules import Declaration
from tests.failure import leftovers
from tests.support.command import Agent, Ended
from tests.support.tables import Tables

PEER = "tcp://127.0.0.1:1"


@pytest.fixture
def tables(shared: Tables, monkeypatch: pytest.MonkeyPatch) -> Tables:
    """Of a database that the environment names."""
    shared.clear()
    monkeypatch.setenv("DURABLE_DATABASE_URL", shared.url)
    return shared


@pytest.fixture
def agent(tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


def wait(tables: Tables, minutes: float, *, to: str = LOCAL, attempts: int = 0, **fields: Any) -> UUID:
    """A message that waits for so many minutes more."""
    now = datetime.now(UTC)
    envelope = msgspec.structs.replace(
        leftovers.envelope(1, destination=to, envelope_id=new_id()),
        execution_time=now + timedelta(minutes=minutes),
        **fields,
    )
    with leftovers.transaction(tables.url) as conn:
        outbox.store(conn, "durable", [Sent(envelope, LOCAL if to == LOCAL else None, ANY_NODE)])
    tables.execute("UPDATE durable.incoming_envelopes SET attempts = %s WHERE id = %s", attempts, envelope.id)
    return envelope.id


def declare(tables: Tables, name: str = "nightly", *, alive: bool = True) -> None:
    node = leftovers.dead_node(tables.url)
    with leftovers.transaction(tables.url) as conn:
        given = Declaration(name, "0 3 * * *", "Europe/Vienna", "once", "reports.nightly", None, "abc")
        schedules.declare(conn, "durable", node, [given])
    tables.execute(
        "UPDATE durable.schedules SET occurrence_at = now() + interval '1 h', due_at = now() + interval '1 h'"
    )
    if not alive:
        tables.execute("DELETE FROM durable.nodes WHERE node_id = %s", node)


def scheduled(agent: Agent, *arguments: object) -> Ended:
    return agent("scheduled", *map(str, arguments))


def document(agent: Agent, *arguments: object, code: int = 0) -> Any:
    ended = scheduled(agent, *arguments, "--json")
    assert (ended.code, ended.err) == (code, "")
    return json.loads(ended.out)


def ids(tables: Tables) -> set[UUID]:
    rows = "SELECT id FROM durable.incoming_envelopes UNION ALL SELECT id FROM durable.outgoing_envelopes"
    return set(tables.rows(rows))


class TestList:
    def test_times_in_json_are_in_utc_when_the_database_has_another_zone(self, agent: Agent, tables: Tables) -> None:
        declare(tables)
        wait(tables, 60)
        wait(tables, 60, to=PEER)
        tables.execute("ALTER ROLE CURRENT_USER SET TimeZone = 'Asia/Kolkata'")
        try:
            listed = document(agent, "list")
        finally:
            tables.execute("ALTER ROLE CURRENT_USER RESET TimeZone")

        rows = [*listed["schedules"], *listed["messages"]]
        times = [value for row in rows for name, value in row.items() if name.endswith("_at") and value is not None]
        assert len(times) > 6
        assert all(time.endswith("Z") for time in times)

    def test_schedules_and_messages_are_listed_by_due_time(self, agent: Agent, tables: Tables) -> None:
        declare(tables)
        later, sooner = wait(tables, 60, to=PEER), wait(tables, 5, attempts=2)
        found = document(agent, "list")
        assert [(row["name"], row["state"]) for row in found["schedules"]] == [("nightly", "runs")]
        assert [(row["id"], row["side"], row["kind"]) for row in found["messages"]] == [
            (str(sooner), "incoming", "retry 2"),
            (str(later), "outgoing", "delayed"),
        ]
        shown = scheduled(agent, "list").out
        assert "Europe/Vienna" in shown
        assert "retry 2" in shown
        assert "more messages" in scheduled(agent, "list", "--limit", 1).out

    def test_message_due_at_the_end_of_the_calendar_is_listed(self, agent: Agent, tables: Tables) -> None:
        distant = wait(tables, 60)
        tables.execute("UPDATE durable.incoming_envelopes SET execution_time = '9999-12-31Z'")
        (row,) = document(agent, "list")["messages"]
        assert row["id"] == str(distant)
        assert "9999-12-30" in scheduled(agent, "list").out

    def test_empty_list_is_reported(self, agent: Agent) -> None:
        assert scheduled(agent, "list").out == "no schedule and no delayed message\n"

    @pytest.mark.parametrize(
        ("option", "typo", "told"),
        [
            ("--type", "failure.order-plcaed", "did you mean 'failure.order-placed'?"),
            ("--type", "x", "no delayed message has 'x'"),
            ("--address", f"{PEER}x", f"did you mean '{PEER}'?"),
        ],
    )
    def test_filter_without_matches_is_reported_and_ends_with_1(
        self, agent: Agent, tables: Tables, option: str, typo: str, told: str
    ) -> None:
        wait(tables, 60, to=PEER)
        for command in ("list", "cancel", "run-now"):
            ended = scheduled(agent, command, option, typo)
            assert (ended.code, f"{option}: " in ended.err, told in ended.err) == (1, True, True)

    @pytest.mark.parametrize(
        ("filters", "count"),
        [
            (["--address", PEER], 1),
            (["--address", "local"], 1),
            (["--type", "failure.order-placed"], 2),
            (["--due-before", "30m"], 1),
            (["--due-before", "in 2h", "--address", PEER], 1),
        ],
    )
    def test_filters_select_messages(self, agent: Agent, tables: Tables, filters: list[str], count: int) -> None:
        wait(tables, 60, to=PEER)
        wait(tables, 5)
        assert len(document(agent, "list", *filters)["messages"]) == count

    def test_orphaned_and_paused_schedules_are_listed_by_state(self, agent: Agent, tables: Tables) -> None:
        declare(tables, "gone", alive=False)
        declare(tables, "halted")
        assert scheduled(agent, "pause", "halted", "--reason", "month end", "--by", "ada").out == "paused 1 schedule\n"
        states = {row["name"]: row["state"] for row in document(agent, "list")["schedules"]}
        assert states == {"gone": "orphaned", "halted": "paused"}
        (_, halted) = document(agent, "list")["schedules"]
        assert (halted["pause"]["reason"], halted["pause"]["until"]) == ("month end", None)
        assert "resumed: month end (ada)" in scheduled(agent, "list").out
        assert scheduled(agent, "pause", "halted", "--for", "1h", "--by", "ada").code == 0
        assert "Z: paused by an operator (ada)" in scheduled(agent, "list").out
        assert scheduled(agent, "pause", "halted", "--reason", "month end", "--by", "ada").code == 0
        assert tables.rows("SELECT kind, key, reason, actor FROM durable.circuits") == [
            ("schedule", "halted", "month end", "ada")
        ]
        assert scheduled(agent, "resume", "halted").code == 0
        assert scheduled(agent, "resume", "halted").code == 1

    def test_pause_of_no_schedule_is_resumed_by_its_name(self, agent: Agent, tables: Tables) -> None:
        tables.execute(
            "INSERT INTO durable.circuits (kind, key, reason, actor) VALUES ('schedule', 'gone', 'r', 'ada')"
        )
        assert scheduled(agent, "resume", "gnoe").err == "error: NAME: no schedule 'gnoe'; did you mean 'gone'?\n"
        assert scheduled(agent, "resume", "gone").out == "resumed 1 schedule\n"


class TestChanges:
    def test_cancel_by_id_records_each_message(self, agent: Agent, tables: Tables) -> None:
        first, second, kept = wait(tables, 5), wait(tables, 5, to=PEER), wait(tables, 5)
        ended = scheduled(agent, "cancel", first, second, "--reason", "sold out", "--by", "ada")
        assert (ended.code, ended.out) == (0, "cancelled 2 of 2 messages\n")
        assert ids(tables) == {kept}
        assert tables.rows("SELECT side, outcome, error FROM durable.envelope_history ORDER BY side") == [
            ("incoming", "cancelled", "cancelled by ada: sold out"),
            ("outgoing", "cancelled", "cancelled by ada: sold out"),
        ]

    def test_all_is_required_when_no_filter_is_given(self, agent: Agent, tables: Tables) -> None:
        for _ in range(3):
            wait(tables, 5)
        refused = scheduled(agent, "cancel")
        assert (refused.code, len(refused.err.splitlines())) == (2, 1)
        assert "or give --all" in refused.err
        assert document(agent, "cancel", "--all", "--yes", "--limit", 2)["messages"]["done"] == 2
        assert len(ids(tables)) == 1

    def test_cancel_changes_no_message_when_one_is_being_handled(self, agent: Agent, tables: Tables) -> None:
        waits, runs = wait(tables, 5), wait(tables, 5)
        tables.execute("UPDATE durable.incoming_envelopes SET execution_time = NULL, owner_id = 9 WHERE id = %s", runs)
        ended = scheduled(agent, "cancel", waits, runs)
        assert ended.code == 1
        assert f"message {runs} is being handled by node 9; nothing was changed" in ended.err
        assert ids(tables) == {waits, runs}
        unknown = scheduled(agent, "run-now", new_id())
        assert "is not delayed here" in unknown.err

    def test_run_now_makes_messages_due(self, agent: Agent, tables: Tables) -> None:
        wait(tables, 5, attempts=1)
        wait(tables, 5, to=PEER)
        assert scheduled(agent, "run-now", "--type", "failure.order-placed").out == "made due 2 of 2 messages\n"
        for table in ("incoming_envelopes", "outgoing_envelopes"):
            assert tables.rows(f"SELECT execution_time FROM durable.{table}") == [None]

    def test_reschedule_leaves_messages_expiring_before_the_new_time(self, agent: Agent, tables: Tables) -> None:
        wait(tables, 5)
        wait(tables, 5, deliver_by=datetime.now(UTC) + timedelta(hours=1))
        wait(tables, 5, to=PEER)
        ended = scheduled(agent, "reschedule", "--all", "--yes", "--at", "in 2h")
        assert ended.code == 1
        assert ended.out.splitlines() == [
            "rescheduled 2 of 3 messages",
            "left: 1 (would expire before, or be too old for their receiver)",
        ]
        assert scheduled(agent, "reschedule", "--address", PEER, "--at", "8d").code == 1

    def test_schedule_runs_once_more_or_at_another_time(self, agent: Agent, tables: Tables) -> None:
        declare(tables)
        assert scheduled(agent, "run-now", "nightly", "--by", "ada").out == "made due 1 schedule\n"
        assert tables.one("SELECT asked_at IS NOT NULL AND changed_by = 'ada' FROM durable.schedules")
        assert scheduled(agent, "reschedule", "nightly", "--at", "2099-01-01T00:00Z").code == 0
        assert tables.one("SELECT due_at = '2099-01-01T00:00Z' FROM durable.schedules")

    def test_cancel_removes_an_orphaned_schedule(self, agent: Agent, tables: Tables) -> None:
        declare(tables)
        declare(tables, "gone", alive=False)
        refused = scheduled(agent, "cancel", "gone", "nightly")
        assert refused.code == 1
        assert "schedule 'nightly' was not changed: a running node declares it" in refused.err
        assert tables.count("schedules") == 2
        assert scheduled(agent, "cancel", "gone").out == "cancelled 1 schedule\n"
        assert tables.rows("SELECT name FROM durable.schedules") == ["nightly"]
        orphan = scheduled(agent, "run-now", "nightly", "gone")
        assert (orphan.code, "no schedule 'gone'" in orphan.err) == (2, True)


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["cancel", "nigthly"], "no schedule 'nigthly'; did you mean 'nightly'?"),
            (["list", "--due-before", "soon"], "--due-before: 'soon' is not a time; write 90s"),
            (["reschedule", "nightly", "--at", "2h ago"], "--at: '2h ago' is not a time"),
            (["pause", "--type", "x"], "pause: schedules are selected by name only"),
            (["pause", "nightly", "--for", "-1"], "--for: -1 is not a duration"),
            (["run-now"], "run-now: no message or schedule is selected"),
        ],
    )
    def test_bad_input_is_reported_in_one_line(
        self, agent: Agent, tables: Tables, arguments: list[str], told: str
    ) -> None:
        declare(tables)
        ended = scheduled(agent, *arguments)
        assert (ended.code, len(ended.err.splitlines())) == (2, 1)
        assert told in ended.err
