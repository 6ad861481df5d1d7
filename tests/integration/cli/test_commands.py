"""`durable-agent` on a real database: what each command does, prints and ends with."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from sqlalchemy import make_url

from durable import Bus, message
from durable.cli.run import PANELS
from durable.errors import StorageUnavailable
from durable.settings import Settings
from durable.storage import migrator
from durable.storage.database import Database
from tests.support.command import Agent
from tests.support.partitions import drop_partitions, make_partitions, purge_undated

HANDLER = """
@bus.handles(OrderPlaced)
async def place(order: OrderPlaced) -> OrderShipped:
    return OrderShipped(order.order_id)

bus.route(OrderShipped, to="tcp://127.0.0.1:1")
"""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.fixture
def database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh database, named by the environment. A node that is absent is dormant almost at once."""
    monkeypatch.setenv("DURABLE_DATABASE_URL", database_url)
    monkeypatch.setenv("DURABLE_DORMANT_GRACE", "0.05")
    return database_url


@pytest.fixture
def conn(database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection


def document(agent: Agent, *arguments: str, code: int = 0) -> Any:
    """What the command prints with --json."""
    ended = agent(*arguments, "--json")
    assert (ended.code, ended.err) == (code, "")
    return json.loads(ended.out)


# ---------------------------------------------------------------- migrate


def test_migrate_upgrades_an_empty_database_once(agent: Agent, database: str, conn: psycopg.Connection[Any]) -> None:
    conn.execute("DROP SCHEMA durable CASCADE")

    assert document(agent, "migrate", "--status", code=1) == {
        "schema": "durable", "database": None, "code": migrator.SCHEMA_VERSION, "match": False
    }  # fmt: skip
    assert f"from nothing to version {migrator.SCHEMA_VERSION}" in agent("migrate").out
    assert "up to date" in agent("migrate").out
    assert "they match" in agent("migrate", "--status").out
    assert document(agent, "migrate", "--schema", "second")["from"] is None
    assert document(agent, "status", "--schema", "second")["healthy"]


def test_sql_printed_by_migrate_creates_the_same_schema(
    agent: Agent, database: str, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DURABLE_DATABASE_URL")
    printed = agent("migrate", "--sql", "--grant-to", "postgres").out
    assert '"durable"' not in document(agent, "migrate", "--sql", "--schema", "other")["sql"]

    conn.execute("DROP SCHEMA durable CASCADE")
    conn.execute(printed.encode())

    assert agent("migrate", "--status", "--database", database).code == 0
    assert agent("status", "--database", database).code == 0
    assert agent("status", "--database-url", database, "--db-schema", "durable").code == 0
    assert "did you mean '--schema'" in agent("status", "--schemma", "durable").err
    assert "no such option: --yes; see durable-agent pipeline replay --help" in agent("pipeline", "replay", "--yes").err


@pytest.mark.parametrize("options", [("--database", "--schema"), ("--database-url", "--db-schema")])
def test_run_takes_both_spellings_of_the_database(agent: Agent, options: tuple[str, str]) -> None:
    ended = agent("run", "nowhere:bus", options[0], "postgresql://127.0.0.1:1/x", options[1], "other")
    assert "no module 'nowhere'" in ended.err


@message("cli.granted")
class Granted(msgspec.Struct):
    number: int


def test_role_with_granted_rights_runs_a_bus_without_creating_tables(
    agent: Agent, database: str, conn: psycopg.Connection[Any]
) -> None:
    conn.execute('DROP ROLE IF EXISTS "run""ner%"')
    conn.execute("""CREATE ROLE "run""ner%" LOGIN PASSWORD 'f9-Kestrel-40'""")
    url = make_url(database).set(username='run"ner%', password="f9-Kestrel-40").render_as_string(hide_password=False)
    assert "fail  rights" in agent("doctor", "--database", url).out

    assert 'granted to run"ner%' in agent("migrate", "--grant-to", 'run"ner%').out

    assert "ok    rights" in agent("doctor", "--database", url).out
    assert agent("status", "--database", url).code == 0
    asyncio.run(_run_a_node_and_its_maintenance(url))
    refused = agent("migrate", "--database", url, "--schema", "mine")
    assert (refused.code, "permission denied" in refused.err) == (1, True)
    conn.execute('DROP OWNED BY "run""ner%"')
    conn.execute('DROP ROLE "run""ner%"')


async def _run_a_node_and_its_maintenance(url: str) -> None:
    handled = asyncio.Event()
    bus = Bus("runner", database=url)

    @bus.handles(Granted)
    async def handle(granted: Granted) -> None:
        handled.set()

    async with bus, asyncio.timeout(30):
        async with bus.unit_of_work():
            bus.send(Granted(1))
        await handled.wait()
    age = timedelta(hours=1)
    async with closing(Database(bus.settings)) as database:
        assert await database.transaction(make_partitions, 9)
        await database.transaction(drop_partitions, keep_ids=age, keep_history=age)
        await database.transaction(purge_undated, keep_ids=age, keep_history=age)
        with pytest.raises(StorageUnavailable, match="permission denied"):
            await database.transaction(lambda conn, _: conn.exec_driver_sql("CREATE TABLE durable.mine (x integer)"))


@asynccontextmanager
async def closing(database: Database) -> AsyncIterator[Database]:
    try:
        yield database
    finally:
        await database.close()


# ---------------------------------------------------------------- send


def test_send_stores_the_message_as_the_application_would(
    agent: Agent, database: str, conn: psycopg.Connection[Any]
) -> None:
    module = agent.application(HANDLER)
    arguments = (f"{module}:bus", f"{module}.order-shipped", "-", "--key", "order-7", "--header", "a=b=c")

    sent = agent("send", *arguments, "--header", "d=", stdin=b'{"order_id": 7}')

    assert (sent.code, sent.err) == (0, "")
    row = conn.execute(
        "SELECT id::text, destination, body, partition_key, headers, source, owner_id, execution_time"
        " FROM durable.outgoing_envelopes"
    ).fetchall()
    headers = {"a": "b=c", "d": ""}
    assert row == [
        (sent.out.strip(), "tcp://127.0.0.1:1", b'{"order_id":7}', "order-7", headers, module, 0, None)
    ]  # fmt: skip


def test_send_accepts_a_destination_and_a_delay(agent: Agent, database: str, conn: psycopg.Connection[Any]) -> None:
    module = agent.application(HANDLER)
    arguments = (f"{module}:bus", f"{module}.order-placed", '{"order_id": 7}')

    elsewhere = document(agent, "send", *arguments, "--to", "tcp://127.0.0.1:2", "--delay", "3600")
    here = document(agent, "send", *arguments)

    rows = conn.execute(
        "SELECT id::text, destination, execution_time - now() > '59 min' FROM durable.outgoing_envelopes"
        " UNION ALL SELECT id::text, endpoint, execution_time IS NOT NULL FROM durable.incoming_envelopes"
    ).fetchall()
    assert rows == [(elsewhere["id"], "tcp://127.0.0.1:2", True), (here["id"], "local", False)]
    assert here["message_type"] == f"{module}.order-placed"


def test_send_accepts_times_a_tenant_and_a_business_key(
    agent: Agent, database: str, conn: psycopg.Connection[Any]
) -> None:
    module = agent.application(HANDLER)
    options = ("--at", "2h", "--deliver-by", "2999-12-31T23:59Z", "--tenant", "blue", "--id-from", "invoice-17")
    arguments = (f"{module}:bus", f"{module}.order-placed", '{"order_id": 7}', *options)
    assert document(agent, "send", *arguments)["id"] == document(agent, "send", *arguments)["id"]

    rows = conn.execute(
        "SELECT execution_time - now() > '119 min', deliver_by, headers ->> 'tenant' FROM durable.incoming_envelopes"
    ).fetchall()
    assert rows == [(True, datetime(2999, 12, 31, 23, 59, tzinfo=UTC), "blue")]


@pytest.mark.parametrize("route", [(), ("--to", "tcp://127.0.0.1:2")], ids=["here", "elsewhere"])
def test_send_says_when_a_message_was_sent_before(agent: Agent, database: str, route: tuple[str, ...]) -> None:
    module = agent.application(HANDLER)
    arguments = (f"{module}:bus", f"{module}.order-placed", '{"order_id": 7}', *route, "--id-from")
    first = agent("send", *arguments, "invoice-17")
    again = agent("send", *arguments, "invoice-17")

    told = "not sent again: a message under invoice-17 was sent before\n"
    assert (first.code, first.err, again.code, again.err) == (0, "", 0, told)
    assert first.out == again.out
    assert document(agent, "send", *arguments, "invoice-17")["sent"] is False
    assert document(agent, "send", *arguments, "invoice-18")["sent"] is True


def test_event_counts_as_sent_when_one_of_its_subscribers_is_new(agent: Agent, database: str) -> None:
    module = agent.application("""
bus.subscribe(OrderPlaced, to="tcp://127.0.0.1:1")
bus.subscribe(OrderPlaced, to="tcp://127.0.0.1:2")
""")
    arguments = (f"{module}:bus", f"{module}.order-placed", '{"order_id": 7}', "--id-from", "invoice-17")

    assert document(agent, "send", *arguments, "--to", "tcp://127.0.0.1:1")["sent"]
    assert document(agent, "send", *arguments)["sent"]
    assert not document(agent, "send", *arguments)["sent"]


def test_send_publishes_an_event_to_every_subscriber(
    agent: Agent, database: str, conn: psycopg.Connection[Any]
) -> None:
    module = agent.application("""
bus.subscribe(OrderPlaced, to="tcp://127.0.0.1:1")
bus.subscribe(OrderPlaced, to="tcp://127.0.0.1:2")
""")

    agent("send", f"{module}:bus", f"{module}.order-placed", '{"order_id": 7}')

    rows = conn.execute("SELECT destination FROM durable.outgoing_envelopes ORDER BY 1").fetchall()
    assert rows == [("tcp://127.0.0.1:1",), ("tcp://127.0.0.1:2",)]


# ---------------------------------------------------------------- status, nodes, circuits


def store_owned_by(conn: psycopg.Connection[Any], owner: int) -> None:
    conn.execute(
        "INSERT INTO durable.outgoing_envelopes (destination, id, message_type, source, correlation_id, content_type,"
        " body, sent_at, owner_id) VALUES ('tcp://127.0.0.1:1', gen_random_uuid(), 'a.b', 'orders',"
        " gen_random_uuid(), 'application/json', '{}', now() - interval '1 hour', %s)",
        [owner],
    )


def test_status_counts_waiting_messages_and_dead_letters(
    agent: Agent, database: str, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DURABLE_HEALTH_UNATTENDED", "P1D")
    store_owned_by(conn, 0)
    store_owned_by(conn, 0)
    conn.execute(
        "INSERT INTO durable.dead_letters (side, address, body, exception_type, reason, fingerprint, node_id)"
        " VALUES ('incoming', 'orders', '', 'ValueError', 'no', 'f', 1)"
    )

    report = document(agent, "status")

    assert report["healthy"]
    assert report["versions"]["schema_version"] == report["versions"]["needed_schema_version"]
    (group,) = report["outgoing"]
    assert 3_599 < group.pop("oldest_age_seconds") < 3_700
    assert 3_599 < group.pop("oldest_unowned_age_seconds") < 3_700
    assert group == {"destination": "tcp://127.0.0.1:1", "waiting": 2, "unowned": 2, "scheduled": 0}
    assert [(row["exception_type"], row["count"]) for row in report["dead_letters"]] == [("ValueError", 1)]
    assert report["partitions_ahead"] == 7
    text = agent("status").out.splitlines()
    assert "  destination        waiting  unowned  scheduled  oldest  oldest unowned" in text
    assert "  tcp://127.0.0.1:1        2        2          0  60 min  60 min" in text
    assert text[-1] == "healthy by its limits; 2 things need you: no node runs, 1 dead letter"
    assert [need.partition(":")[0] for need in report["needs"]] == [
        "no node is alive, and 2 messages wait",
        "1 dead letter waits to be replayed or discarded",
    ]


def latch(conn: psycopg.Connection[Any], key: str) -> None:
    conn.execute(
        "INSERT INTO durable.circuits (kind, key, reason, since, actor, probing)"
        " VALUES ('destination', %s, 'refused', now() - interval '10 min', 'node 1', true)",
        [key],
    )


def pause_handler(conn: psycopg.Connection[Any], message_type: str) -> None:
    conn.execute(
        "INSERT INTO durable.circuits (kind, key, reason, actor) VALUES ('handler', %s, 'stocktaking', 'olga')",
        [message_type],
    )
    conn.execute(
        "INSERT INTO durable.incoming_envelopes (endpoint, id, message_type, source, correlation_id, content_type,"
        " body, sent_at, owner_id) VALUES ('orders', gen_random_uuid(), %s, 'tcp://127.0.0.1:9',"
        " gen_random_uuid(), 'application/json', '{}', now(), 0)",
        [message_type],
    )


def test_status_tells_a_latched_destination_and_its_messages_within_the_limits(
    agent: Agent, database: str, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DURABLE_HEALTH_UNATTENDED", "P1D")
    latch(conn, "tcp://127.0.0.1:1")
    latch(conn, "tcp://127.0.0.1:2")
    store_owned_by(conn, 0)

    report = document(agent, "status")

    assert (report["healthy"], report["problems"]) == (True, [])
    assert len(report["needs"]) == 3
    assert "destination tcp://127.0.0.1:1 has been stopped by failures for 10 min: refused" in report["needs"]
    told = agent("status").out.splitlines()[-1]
    assert told == "healthy by its limits; 3 things need you: no node runs, 2 destinations latched"


def test_status_tells_dead_letters_beside_its_problems(
    agent: Agent, database: str, conn: psycopg.Connection[Any]
) -> None:
    for _ in range(10):
        conn.execute(
            "INSERT INTO durable.dead_letters (side, address, body, exception_type, reason, fingerprint, node_id)"
            " VALUES ('incoming', 'orders', '', 'ValueError', 'no', 'f', 1)"
        )
    told = agent("status").out.splitlines()[-1]
    assert told == "healthy by its limits; 1 thing needs you: 10 dead letters"
    store_owned_by(conn, 0)

    assert len(document(agent, "status", code=1)["needs"]) == 2

    unhealthy, more = agent("status").out.splitlines()[-2:]
    assert unhealthy.startswith("unhealthy: work has waited for ")
    assert more == "1 more thing needs you: 10 dead letters"


def test_status_tells_of_nothing_when_no_operator_is_needed(agent: Agent, database: str) -> None:
    assert document(agent, "status")["needs"] == []
    assert agent("status").out.splitlines()[-1] == "healthy"


def test_circuits_counts_the_messages_of_destinations_and_handlers(
    agent: Agent, database: str, conn: psycopg.Connection[Any]
) -> None:
    latch(conn, "tcp://127.0.0.1:1")
    latch(conn, "tcp://127.0.0.1:2")
    store_owned_by(conn, 0)
    store_owned_by(conn, 0)
    conn.execute(
        "UPDATE durable.outgoing_envelopes SET execution_time = now() + interval '1 day'"
        " WHERE id = (SELECT max(id::text)::uuid FROM durable.outgoing_envelopes)"
    )
    pause_handler(conn, "orders.order-placed")

    rows = document(agent, "circuits")

    assert {row["key"]: row["waiting"] for row in rows} == {
        "tcp://127.0.0.1:1": 1, "tcp://127.0.0.1:2": 0, "orders.order-placed": 1
    }  # fmt: skip


def test_status_is_unhealthy_when_messages_wait_longer_than_health_unattended_without_nodes(
    agent: Agent, database: str, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store_owned_by(conn, 0)

    [problem] = document(agent, "status", code=1)["problems"]

    assert "no node is alive: start one with durable-agent run APP:BUS" in problem
    assert "unhealthy: work has waited for 36" in agent("status").out
    monkeypatch.setenv("DURABLE_HEALTH_UNATTENDED", "PT2H")
    assert document(agent, "status")["problems"] == []


def test_status_reports_overdue_messages(agent: Agent, database: str, conn: psycopg.Connection[Any]) -> None:
    assert document(agent, "status")["overdue_seconds"] is None
    store_owned_by(conn, 0)
    conn.execute("UPDATE durable.outgoing_envelopes SET execution_time = now() - interval '5 min'")

    report = document(agent, "status", code=1)

    assert 299 < report["overdue_seconds"] < 400
    assert report["outgoing"][0]["oldest_age_seconds"] is None
    text = agent("status").out
    assert "scheduled work is overdue by 5 min" in text
    assert "unhealthy: scheduled work is overdue by 30" in text


def test_status_judges_each_threshold_by_name(
    agent: Agent, database: str, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DURABLE_HEALTH_UNATTENDED", "P1D")
    store_owned_by(conn, 0)
    conn.execute(
        "INSERT INTO durable.circuits (kind, key, reason, since, actor, probing)"
        " VALUES ('destination', 'tcp://127.0.0.1:2', 'refused', now() - interval '10 min', 'node 1', true)"
    )
    conn.execute(
        "INSERT INTO durable.dead_letters (side, address, body, exception_type, reason, fingerprint, node_id)"
        " VALUES ('incoming', 'orders', '', 'ValueError', 'no', 'f', 1)"
    )
    assert document(agent, "status")["healthy"]
    monkeypatch.setenv("DURABLE_HEALTH_LAG", "PT30M")
    monkeypatch.setenv("DURABLE_HEALTH_LATCHED", "PT5M")
    monkeypatch.setenv("DURABLE_HEALTH_DEAD_LETTERS", "1")

    problems = document(agent, "status", code=1)["problems"]

    assert [problem.partition(":")[0] for problem in problems] == [
        "outgoing tcp",
        "tcp",
        "1 dead letter is unresolved",
    ]


def test_status_is_unhealthy_when_a_dormant_node_owns_messages(
    agent: Agent, database: str, conn: psycopg.Connection[Any]
) -> None:
    conn.execute("INSERT INTO durable.nodes (service, description, version) VALUES ('orders', 'gone', '0')")
    assert document(agent, "status")["nodes"] == {"alive": 0, "stale": 0, "dead": 1}
    store_owned_by(conn, 1)
    store_owned_by(conn, 99)

    report = document(agent, "status", code=1)

    assert [problem.split(" owns ")[0] for problem in report["problems"]] == [
        "node 1 is dormant,", "node 99 is dormant,"
    ]  # fmt: skip
    assert "unhealthy: node 99 is dormant, owns 1 envelope" in agent("status").out
    rows = document(agent, "nodes")
    assert [(row["node_id"], row["service"], row["owned_outgoing"], row["state"]) for row in rows] == [
        (1, "orders", 1, "dead"), (99, None, 1, "dead")
    ]  # fmt: skip


def test_status_is_unhealthy_when_partitions_are_missing(
    agent: Agent, database: str, conn: psycopg.Connection[Any]
) -> None:
    (table,) = conn.execute(
        "SELECT 'durable.envelope_history_' || to_char(now() AT TIME ZONE 'UTC' + interval '1 day', 'YYYYMMDD')"
    ).fetchone() or ("",)
    conn.execute(f"DROP TABLE {table}".encode())

    assert document(agent, "status", code=1)["partitions_ahead"] == 0
    assert "fail  partitions: 0 days ahead" in agent("doctor").out


def test_circuits_shows_open_circuits_without_escape_sequences_of_peers(
    agent: Agent, database: str, conn: psycopg.Connection[Any]
) -> None:
    assert agent("circuits").out == "no open circuit\n"
    conn.execute(
        "INSERT INTO durable.circuits (kind, key, reason, since, actor)"
        " VALUES ('destination', 'tcp://127.0.0.1:1', E'refused\\n\\x1b[31m', now() - interval '5 min', 'node 1')"
    )

    (row,) = document(agent, "circuits")
    text = agent("circuits").out

    assert (row["kind"], row["key"], row["actor"], row["until"]) == ("destination", "tcp://127.0.0.1:1", "node 1", None)
    assert 299 < row["open_seconds"] < 400
    assert "refused \N{REPLACEMENT CHARACTER}[31m" in text
    assert "5 min" in text


# ---------------------------------------------------------------- doctor


def test_doctor_passes_with_a_warning_when_a_peer_is_silent(agent: Agent, database: str) -> None:
    module = agent.application(HANDLER)

    report = document(agent, "doctor", f"{module}:bus")

    assert report["healthy"]
    assert {check["name"]: check["verdict"] for check in report["checks"]} == {
        "settings": "ok", "database": "ok", "clock": "ok", "pooler": "ok", "transaction limit": "ok",
        "lock connection": "ok", "schema": "ok", "row security": "ok",
        "encryption": "ok", "rights": "warn", "partitions": "ok", "connections": "ok", "services": "ok",
        "retention": "ok", "handlers": "ok", "destination": "warn",
    }  # fmt: skip
    assert "-> start the peer" in agent("doctor", f"{module}:bus").out


PLAINTEXT = """
bus.route(OrderShipped, to="http://billing.example/in")
bus.route(OrderPlaced, to="http://127.0.0.1:1")
bus.listen("http://0.0.0.0:1")
"""


def test_doctor_lists_unencrypted_addresses(agent: Agent, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_ALLOW_PLAINTEXT", "yes")
    monkeypatch.setenv("DURABLE_SHARED_SECRET", "correct horse battery")
    monkeypatch.setenv("DURABLE_AMQP_BROKERS", '{"second": "amqp://u:tops3cret@mq.example", "third": "amqps://b"}')
    module = agent.application(PLAINTEXT)

    report = document(agent, "doctor", f"{module}:bus")

    [found] = [check for check in report["checks"] if check["name"] == "plaintext"]
    assert found["verdict"] == "warn"
    assert found["detail"].endswith("can read: http://0.0.0.0:1, http://billing.example/in, rabbitmq://second")
    assert found["advice"] == "use https:// and amqps://, and remove allow_plaintext"


def test_doctor_fails_settings_causing_lost_or_repeated_messages(
    agent: Agent, database: str, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = agent.application("""
@bus.handles(OrderPlaced, retry=Retry(delays=[7200]))
async def place(order: OrderPlaced) -> None: ...
""")
    monkeypatch.setenv("DURABLE_DEDUPE_WINDOW", "3600")
    monkeypatch.setenv("DURABLE_LOCK_DATABASE_URL", "postgresql://postgres@127.0.0.1:1/app")
    monkeypatch.setenv("DURABLE_POOL_SIZE", "1000")
    conn.execute("UPDATE durable.alembic_version SET version_num = '0000'")

    report = document(agent, "doctor", f"{module}:bus", code=1)

    failed = {check["name"]: check["advice"] for check in report["checks"] if check["verdict"] == "fail"}
    assert failed.keys() == {"retention", "lock connection", "schema"}
    assert f"{module}.order-placed" in failed["retention"]
    assert all(failed.values())
    conn.execute("UPDATE durable.alembic_version SET version_num = %s", [migrator.SCHEMA_VERSION])
    assert "warn  connections" in agent("doctor", f"{module}:bus").out


# ---------------------------------------------------------------- run


def test_help_lists_every_setting_with_its_default(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    printed = agent("run", "--help").out

    assert [name for name in Settings.model_fields if f"--{name.replace('_', '-')} " not in printed] == []
    assert "for which a duplicate is recognised; default P7D" in printed


def test_help_has_a_panel_for_each_group_of_settings(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    printed = agent("run", "--help").out

    parts = ["─ Database ─", "--database-url", "─ Delivery ─", "--send-timeout", "─ Recovery ─", "--metrics-port"]
    places = [printed.index(part) for part in parts]
    assert places == sorted(places)
    first = [name for name in Settings.model_fields if name in PANELS]
    assert first == list(PANELS), "a panel begins with no setting, or they are in another order"
    assert first[0] == next(iter(Settings.model_fields))


def test_node_runs_with_its_flags_until_sigterm(agent: Agent, database: str, conn: psycopg.Connection[Any]) -> None:
    module = agent.application(HANDLER)
    run = ("run", f"{module}:bus", "--json", "--failures-to-latch", "1", "--poll-interval", "0.1")
    with agent.process(*run) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, b"")
        joined = next(record for record in map(json.loads, lines) if record["event"] == "node %d of %s joined")
        assert (joined["level"], joined["logger"]) == ("info", "durable")
        (node,) = document(agent, "nodes")
        assert (node["service"], node["state"], node["holds_lock"]) == (module, "alive", True)

        agent("send", f"{module}:bus", f"{module}.order-placed", '{"order_id": 7}')

        latched = next(record for record in map(json.loads, lines) if "latched" in record["event"])
        assert "tcp://127.0.0.1:1" in latched["message"]
        assert document(agent, "circuits")[0]["key"] == "tcp://127.0.0.1:1"
        process.send_signal(signal.SIGTERM)
        rest, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")
    assert json.loads(rest.splitlines()[-1])["event"] == "node %d of %s left"
    assert document(agent, "nodes") == []


# ---------------------------------------------------------------- a terminal


@contextmanager
def terminal() -> Iterator[tuple[int, Callable[[], str]]]:
    """Its other end, and what was written to it so far, each time a little more."""
    ours, theirs = pty.openpty()
    try:
        yield theirs, lambda: os.read(ours, 1 << 16).decode(errors="replace")
    finally:
        os.close(ours)


def test_watch_draws_tables_on_a_terminal_until_interrupted(
    agent: Agent, database: str, conn: psycopg.Connection[Any]
) -> None:
    store_owned_by(conn, 0)
    with terminal() as (theirs, read), agent.process("status", "--watch", stdout=theirs) as process:
        os.close(theirs)
        seen = ""
        while "healthy" not in seen:
            seen += read()
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) == 130
    assert "┏" in seen


# ---------------------------------------------------------------- demo


def test_demo_passes_its_options_and_returns_the_exit_code(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def run_demo(**options: Any) -> int:
        given.update(options)
        return 1

    monkeypatch.setattr("durable.demo.run_demo", run_demo)

    ended = agent("demo", "--transport", "http", "--flights", "20", "--seed", "3", "--keep", "kept", "--json")

    assert (ended.code, ended.err) == (1, "")
    assert given == {
        "transport": "http",
        "flights": 20,
        "all_flights": False,
        "json_output": True,
        "seed": 3,
        "keep": Path("kept"),
        "shows_console": False,
    }


def test_doctor_fails_a_handler_when_its_return_type_has_no_destination(agent: Agent, database: str) -> None:
    name = agent.application(
        "@bus.handles(OrderPlaced)\nasync def ship(order: OrderPlaced) -> OrderShipped:\n    return OrderShipped(1)\n"
    )

    ended = agent("doctor", f"{name}:bus", "--database", database)

    assert ended.code == 1
    assert "the returned message cannot be sent" in ended.out
