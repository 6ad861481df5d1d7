"""Configuration and command line: every bad input ends with its exit code and one line that names what is wrong."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from sqlalchemy import make_url

from durable.embedded import Embedded
from tests.conftest import fresh_databases
from tests.support.command import Agent, Ended
from tests.support.pooler import pooler
from tests.support.servers import EMBEDDED

HANDLER = """
@bus.handles(OrderPlaced)
async def place(order: OrderPlaced) -> None: ...
"""
SLOW_RETRIES = """
@bus.handles(OrderPlaced, retry=Retry(delays=[7200]))
async def place(order: OrderPlaced) -> None: ...
"""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.fixture(scope="module")
def shared_url(servers: Callable[[int], Embedded]) -> Iterator[str]:
    with fresh_databases(servers(EMBEDDED)) as make:
        yield make("shared")


@pytest.fixture
def database(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database that no test of this module changes, named by the environment."""
    monkeypatch.setenv("DURABLE_DATABASE_URL", shared_url)
    return shared_url


@pytest.fixture
def own_database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh database, named by the environment."""
    monkeypatch.setenv("DURABLE_DATABASE_URL", database_url)
    return database_url


def refuses(ended: Ended, *named: str, code: int = 2) -> None:
    """It ended with this code, and one line on standard error that has all of these words."""
    assert ended.code == code, ended
    assert ended.err.startswith("error: "), ended
    assert ended.err.count("\n") == 1, ended.err
    assert [word for word in named if word not in ended.err] == [], ended.err


# ---------------------------------------------------------------- settings: as flags, in the environment, in code

BAD_SETTINGS = [
    ("db_schema", 'a";drop', "db_schema"),
    ("batch_size", "0", "batch_size"),
    ("batch_size", "many", "batch_size"),
    ("ping_interval", "-1", "ping_interval"),
    ("ping_interval", "soon", "ping_interval"),
    ("heartbeat_stale", "1", "heartbeat_stale"),
    ("dedupe_window", "60", "dedupe_window"),
    ("max_message_bytes", "999999999", "max_message_bytes"),
    ("database_url", "mysql://root@localhost/x", "database_url"),
    ("database_url", "postgresql+psycopg2://localhost/x", "database_url"),
]


@pytest.mark.parametrize(("name", "value", "named"), BAD_SETTINGS)
def test_a_bad_setting_is_refused_as_a_flag(agent: Agent, name: str, value: str, named: str) -> None:
    refuses(agent("run", f"{agent.application()}:bus", f"--{name.replace('_', '-')}", value), named)


@pytest.mark.parametrize(("name", "value", "named"), BAD_SETTINGS)
def test_a_bad_setting_is_refused_in_the_environment(
    agent: Agent, name: str, value: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"DURABLE_{name.upper()}", value)

    refuses(agent("run", f"{agent.application()}:bus"), named)
    refuses(agent("status"), named)


@pytest.mark.parametrize(("name", "value", "named"), BAD_SETTINGS)
def test_a_bad_setting_is_refused_in_code(agent: Agent, name: str, value: str, named: str) -> None:
    module = agent.application(f"Bus('orders', **{ {name: value}!r})")

    refuses(agent("run", f"{module}:bus"), named)


def test_bad_schema_is_refused_by_every_command(agent: Agent, database: str) -> None:
    for command in ("migrate", "status", "nodes", "circuits", "doctor"):
        refuses(agent(command, "--schema", 'a";drop'), "--schema")


def test_an_unknown_setting_is_refused_with_a_suggestion(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(agent("run", f"{agent.application()}:bus", "--batchsize", "5"), "--batchsize", "'--batch-size'")
    module = agent.application("Bus('orders', batchsize=5)")
    refuses(agent("run", f"{module}:bus"), "batchsize", "'batch_size'")
    monkeypatch.setenv("DURABLE_BATCHSIZE", "5")
    refuses(agent("run", f"{agent.application()}:bus"), "DURABLE_BATCHSIZE", "'DURABLE_BATCH_SIZE'")
    refuses(agent("status"), "DURABLE_BATCHSIZE", "'DURABLE_BATCH_SIZE'")


def test_missing_database_url_is_refused(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DURABLE_DATABASE_URL", raising=False)

    for command in ("migrate", "status", "nodes", "circuits", "doctor"):
        refuses(agent(command), "database_url", "DURABLE_DATABASE_URL")
    refuses(agent("run", f"{agent.application()}:bus"), "database_url", "DURABLE_DATABASE_URL")


def test_a_retention_below_the_retry_horizon_is_refused(agent: Agent, database: str) -> None:
    refuses(agent("run", f"{agent.application(SLOW_RETRIES)}:bus", "--dedupe-window", "3600"), "dedupe_window")


# ---------------------------------------------------------------- the application


@pytest.mark.parametrize(
    ("name", "source", "named"),
    [
        ("nosuchmodule:bus", "", ["APP:BUS", "'nosuchmodule'"]),
        ("MODULE.inner:bus", "", ["APP:BUS", "MODULE.inner"]),
        ("MODULE", "", ["APP:BUS", "app:bus"]),
        ("MODULE:", "", ["APP:BUS", "app:bus"]),
        (":bus", "", ["APP:BUS", "app:bus"]),
        ("MODULE.py:bus()", "", ["APP:BUS", "write MODULE:bus\n"]),
        ("../MODULE:bus", "", ["APP:BUS", "app:bus"]),
        ("MODULE:buss", "", ["APP:BUS", "'buss'", "'bus'"]),
        ("MODULE:OrderPlaced", "", ["APP:BUS", "durable.Bus"]),
        ("MODULE:bus", "import nosuchdependency", ["APP:BUS", "nosuchdependency", ".py:15"]),
        ("MODULE:bus", "1 / 0", ["APP:BUS", "ZeroDivisionError", ".py:15"]),
        ("MODULE:bus", "def (", ["APP:BUS", "SyntaxError", ".py:15"]),
        ("MODULE:bus", "raise SystemExit(3)", ["APP:BUS", "SystemExit"]),
        ("MODULE:bus", "bus.listen('tpc://127.0.0.1:2301')", ["tpc://127.0.0.1:2301", "'tcp'"]),
        ("MODULE:bus", "bus.route(OrderPlaced, to='rabbit://x')", ["rabbit://x", "tcp://"]),
        ("MODULE:bus", "@bus.handles(OrderPlaced)\nasync def f(order): ...", ["'order'", "OrderPlaced"]),
        ("MODULE:bus", "bus = Bus('orders', mode='send-only')", ["send-only"]),
    ],
)  # fmt: skip
def test_application_unable_to_run_is_refused(agent: Agent, name: str, source: str, named: list[str]) -> None:
    module = agent.application(f"\n{source}")

    ended = agent("run", name.replace("MODULE", module))

    refuses(ended, *(word.replace("MODULE", module) for word in named))


def test_traceback_is_shown_only_on_demand(agent: Agent) -> None:
    module = agent.application("\n1 / 0")

    assert "Traceback" in agent("run", f"{module}:bus", "--debug").err


def test_listener_for_other_machines_without_a_certificate_is_refused(agent: Agent, database: str) -> None:
    module = agent.application("bus.listen('tcp://0.0.0.0:2301')")
    refuses(agent("run", f"{module}:bus"), "tcp://0.0.0.0:2301", "tls_certificate")


def test_occupied_port_is_refused(agent: Agent, database: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        uri = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        refuses(agent("run", f"{agent.application(f'bus.listen({uri!r})')}:bus"), uri, "in use")


def test_a_lock_connection_through_a_pooler_is_refused(agent: Agent, database: str) -> None:
    with pooler(database) as url:
        module = agent.application(HANDLER)
        refuses(agent("run", f"{module}:bus", "--lock-database-url", url), "lock_database_url", "pooler")
        os.environ["DURABLE_LOCK_DATABASE_URL"] = url
        try:
            examined = agent("doctor")
        finally:
            del os.environ["DURABLE_LOCK_DATABASE_URL"]
    assert examined.code == 1
    assert "fail  lock connection: goes through a pooler" in examined.out


# ---------------------------------------------------------------- the database


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("UPDATE durable.alembic_version SET version_num = '0000'", "durable-agent migrate"),
        ("UPDATE durable.alembic_version SET version_num = '9999'", "pip install --upgrade"),
        ("DELETE FROM durable.alembic_version", "durable-agent migrate"),
        ("DROP SCHEMA durable CASCADE", "durable-agent migrate"),
    ],
)
def test_another_schema_version_is_refused_with_the_command_to_run(
    agent: Agent, own_database: str, change: str, named: str
) -> None:
    with psycopg.connect(own_database, autocommit=True) as conn:
        conn.execute(change.encode())
    module = agent.application(HANDLER)

    refuses(agent("run", f"{module}:bus"), "'durable'", named)
    refuses(agent("send", f"{module}:bus", f"{module}.order-placed", '{"order_id": 1}'), "'durable'", named)
    refuses(agent("nodes"), "'durable'", named)
    seen = agent("status")
    assert (seen.code, seen.err) == (1, "")
    assert "unhealthy: schema 'durable'" in seen.out
    assert named in seen.out


def test_a_newer_schema_is_not_migrated(agent: Agent, own_database: str) -> None:
    with psycopg.connect(own_database, autocommit=True) as conn:
        conn.execute("UPDATE durable.alembic_version SET version_num = '9999'")

    refuses(agent("migrate"), "9999", "pip install --upgrade")
    compared = agent("migrate", "--status")
    assert compared.code == 1
    assert "database 9999" in compared.out


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("postgresql://postgres@127.0.0.1:1/app", "refused"),
        ("postgresql://postgres@/app?host=/nowhere", "/nowhere"),
        ("SERVER/nosuchdatabase", "nosuchdatabase"),
    ],
)
def test_unreachable_database_is_reported_in_one_line(
    agent: Agent, database: str, url: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = urlsplit(database)
    unreachable = url if "SERVER" not in url else parts._replace(path="/nosuchdatabase").geturl()
    monkeypatch.setenv("DURABLE_DATABASE_URL", unreachable.replace(":///", "://postgres@/"))
    module = agent.application(HANDLER)

    for command in ("migrate", "status", "nodes", "circuits"):
        refuses(agent(command), named, code=1)
    refuses(agent("run", f"{module}:bus"), code=1)
    examined = agent("doctor", f"{module}:bus")
    assert examined.code == 1
    assert "fail  database" in examined.out


# ---------------------------------------------------------------- arguments


SEND = ["send", "MODULE:bus", "MODULE.order-placed", '{"order_id": 1}']
SEND_TO = [*SEND, "--to", "tcp://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run"], ["APP:BUS"]),
        (["statsu"], ["statsu", "'status'"]),
        (["status", "--jsn"], ["--jsn", "'--json'"]),
        (["run", "MODULE:bus", "--batch-size"], ["--batch-size"]),
        (["run", "MODULE:bus", "--log-level", "loud"], ["--log-level"]),
        (["status", "--watch"], ["--watch", "terminal"]),
        (["migrate", "--status", "--sql"], ["--status"]),
        (["migrate", "--grant-to", ""], ["--grant-to"]),
        (["demo", "--flights", "0"], ["--flights"]),
        (["demo", "--flights", "5", "--all"], ["--flights", "--all"]),
        (["demo", "--seed", "x"], ["--seed"]),
        (["demo", "--transport", "htp"], ["--transport", "'http'"]),
        (["send", "MODULE:bus", "MODULE.order-place", "{}"], ["MODULE.order-place", "'MODULE.order-placed'"]),
        (["send", "MODULE:bus", "os.system", "{}"], ["os.system"]),
        (["send", "MODULE:bus", "MODULE.order-placed", "{"], ["JSON"]),
        (["send", "MODULE:bus", "MODULE.order-placed", ""], ["JSON"]),
        (["send", "MODULE:bus", "MODULE.order-placed", "[" * 100_000], ["JSON"]),
        (["send", "MODULE:bus", "MODULE.order-placed", '{"order_id": "x"}'], ["JSON", "order_id"]),
        (["send", "MODULE:bus", "MODULE.order-placed", '{"order_id": 1}'], ["no destination"]),
        ([*SEND, "--to", "tpc://x:1"], ["tpc://x:1", "'tcp'"]),
        ([*SEND, "--delay", "nan"], ["--delay"]),
        ([*SEND, "--delay", "-1"], ["--delay"]),
        ([*SEND, "--delay", "1e300"], ["--delay"]),
        ([*SEND, "--at", "noon"], ["--at", "'noon'"]),
        ([*SEND, "--at", "2h", "--delay", "2h"], ["--at", "--delay"]),
        ([*SEND, "--deliver-by", "2030-01-01"], ["--deliver-by"]),
        ([*SEND_TO, "--id-from", ""], ["id_from"]),
        ([*SEND_TO, "--tenant", "\n"], ["tenant"]),
        ([*SEND, "--header", "x"], ["--header", "'x'"]),
        ([*SEND_TO, "--header", "x=a\r\nb"], ["header", "control character"]),
        ([*SEND_TO, "--key", "x" * 2_000], ["partition_key"]),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(agent: Agent, database: str, arguments: list[str], named: list[str]) -> None:
    module = agent.application()

    ended = agent(*(argument.replace("MODULE", module) for argument in arguments))

    refuses(ended, *(word.replace("MODULE", module) for word in named))


def test_unknown_field_of_a_sent_message_is_refused(agent: Agent, database: str) -> None:
    module = agent.application()
    ended = agent("send", f"{module}:bus", f"{module}.order-placed", '{"order_id": 1, "orderid": 5}')

    refuses(ended, "JSON: OrderPlaced: unknown field 'orderid'; did you mean 'order_id'?")


def test_too_large_message_from_standard_input_is_refused(agent: Agent, database: str) -> None:
    module = agent.application()
    arguments = ("send", f"{module}:bus", f"{module}.order-placed", "-")

    refuses(agent(*arguments, stdin=b" " * (1 << 20) + b"{}"), "max_message_bytes")
    refuses(agent(*arguments, stdin=b"\xff\xfe"), "JSON")


def test_role_without_rights_is_told_the_command_to_run(
    agent: Agent, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("DROP ROLE IF EXISTS stranger")
        conn.execute("CREATE ROLE stranger LOGIN PASSWORD 'f9-Kestrel-40'")
    url = make_url(database).set(username="stranger", password="f9-Kestrel-40")
    monkeypatch.setenv("DURABLE_DATABASE_URL", url.render_as_string(hide_password=False))

    refuses(agent("nodes"), "permission denied", "--grant-to", code=1)
    refuses(agent("migrate", "--schema", "other"), "permission denied", code=1)
    examined = agent("doctor")
    assert examined.code == 1
    assert "fail  rights: this role lacks USAGE on the schema, " in examined.out


@pytest.mark.parametrize("arguments", [["status", "--json"], ["migrate", "--sql"], ["--help"]])
def test_closed_output_ends_a_command_silently(agent: Agent, database: str, arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with agent.process(*arguments, stdout=writing) as process:
        os.close(writing)
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait() == 141
