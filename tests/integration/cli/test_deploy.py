"""`durable-agent check-deploy`: what would break if this code were deployed to another database."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import Connection

from durable.cli.doctor import deploy as against
from durable.encryption.ring import KeyRing
from durable.settings import load_settings
from durable.storage import in_flight, inbox
from durable.storage.in_flight import Page
from durable.storage.inbox import Arrival
from durable.storage.locks import nodes_class
from durable.storage.rows import Letter
from tests.failure import leftovers
from tests.support import letters
from tests.support.command import Agent
from tests.support.letters import envelope
from tests.support.tables import Tables
from tests.support.waiting_messages import put

LATER = datetime(2999, 1, 1, tzinfo=UTC)
GOOD, BAD = b'{"order_id":1}', b'{"number":1}'

DEPLOYED = """
from durable import upcaster

@message("NAME.order-placed", version=2)
class OrderPlacedV2(msgspec.Struct):
    order_id: int
    total: str

@upcaster(OrderPlaced, to=OrderPlacedV2)
def with_total(old: OrderPlaced) -> OrderPlacedV2:
    return OrderPlacedV2(old.order_id, "0")

@bus.handles(OrderPlacedV2)
async def place(order: OrderPlacedV2) -> None:
    raise AssertionError("nothing is handled")
"""


@pytest.fixture
def agent(tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    monkeypatch.delenv("DURABLE_DATABASE_URL", raising=False)
    return Agent(tmp_path, monkeypatch, capsys)


def checked(agent: Agent, tables: Tables, module: str, *, code: int) -> list[Any]:
    """verdict, type, place, count and undecodable of everything that was found."""
    ended = agent("check-deploy", f"{module}:bus", "--database", tables.url, "--json")
    assert (ended.code, ended.err) == (code, "")
    document = json.loads(ended.out)
    assert document["healthy"] == (code == 0)
    return [
        (each["verdict"], each["message_type"].removeprefix(module), each["place"], each["count"], each["undecodable"])
        for each in document["types"]
    ]


def dead(tables: Tables, message_type: str, body: bytes, kind: str = "LookupError") -> None:
    letter = Letter(kind, "why", None, "0" * 16)
    with leftovers.transaction(tables.url) as conn:
        made = msgspec.structs.replace(envelope(1, message_type=message_type), body=body)
        letters.incoming(conn, [made], letter)


def test_deploy_is_healthy_when_all_messages_decode_or_upcast(agent: Agent, tables: Tables) -> None:
    module = agent.application(DEPLOYED)
    put(tables, f"{module}.order-placed", GOOD, GOOD)
    put(tables, f"{module}.order-placed.v2", b'{"order_id":1,"total":"7"}', owner=99)
    put(tables, f"{module}.order-placed", GOOD, due=LATER)
    dead(tables, f"{module}.order-placed", GOOD)
    assert checked(agent, tables, module, code=0) == [
        ("ok", ".order-placed", "dead letters", 1, 0),
        ("ok", ".order-placed", "inbox", 2, 0),
        ("ok", ".order-placed", "scheduled", 1, 0),
        ("ok", ".order-placed.v2", "inbox", 1, 0),
    ]


def test_deploy_fails_undecodable_messages_by_type_and_place_with_advice(agent: Agent, tables: Tables) -> None:
    module = agent.application(DEPLOYED)
    ids = put(tables, f"{module}.order-placed", BAD, GOOD, BAD)
    put(tables, f"{module}.order-placed.v2", b'{"order_id":1}', due=LATER)
    assert checked(agent, tables, module, code=1) == [
        ("fail", ".order-placed", "inbox", 3, 2),
        ("fail", ".order-placed.v2", "scheduled", 1, 1),
    ]
    ended = agent("check-deploy", f"{module}:bus", "--database", tables.url)
    assert ended.code == 1
    assert ended.out.splitlines()[:2] == [
        f"fail  {module}.order-placed, inbox: 2 of 3 do not decode: the body is no OrderPlaced: Object missing "
        f"required field `order_id` ({ids[0]}, {ids[2]})",
        "      -> write an upcaster, or keep the old class until these messages are handled",
    ]


def test_deploy_fails_a_type_without_a_handler(agent: Agent, tables: Tables) -> None:
    module = agent.application(DEPLOYED)
    put(tables, f"{module}.order-shipped", GOOD)
    put(tables, "elsewhere.sold", GOOD, GOOD)
    tables.execute(
        "INSERT INTO durable.nodes (service, description, version, capabilities) VALUES"
        " ('till', '', '', '{\"message_types\": [\"elsewhere.sold\"]}'),"
        " (%s, '', '', %s)",
        module,
        json.dumps({"message_types": [f"{module}.order-shipped"]}),
    )
    assert checked(agent, tables, module, code=1) == [
        ("fail", ".order-shipped", "inbox", 1, 0),  # its node is one of this service, with the code of before
        ("ok", "elsewhere.sold", "inbox", 2, 0),  # its node is another service's
    ]


def test_deploy_warns_of_messages_without_a_living_node(agent: Agent, tables: Tables) -> None:
    module = agent.application(DEPLOYED)
    put(tables, f"{module}.order-placed", GOOD, GOOD)
    put(tables, f"{module}.order-placed.v2", b'{"order_id":1,"total":"7"}')
    tables.execute("UPDATE durable.incoming_envelopes SET sent_at = now() - interval '1 hour'")
    node = tables.one(
        "INSERT INTO durable.nodes (service, description, version, capabilities) VALUES (%s, '', '', %s)"
        " RETURNING node_id",
        module,
        json.dumps({"message_types": [f"{module}.order-placed"]}),
    )
    with psycopg.connect(tables.url) as alive:
        alive.execute("SELECT pg_advisory_lock(%s, %s)", [nodes_class("durable"), node])
        assert checked(agent, tables, module, code=0) == [
            ("ok", ".order-placed", "inbox", 2, 0),
            ("ok", ".order-placed.v2", "inbox", 1, 0),
            ("warn", ".order-placed.v2", "inbox", 1, 0),
        ]


def test_deploy_fails_a_replayable_letter_when_this_code_cannot_decode_the_message(
    agent: Agent, tables: Tables
) -> None:
    module = agent.application(DEPLOYED)
    dead(tables, f"{module}.order-placed", BAD, kind="durable.errors.InvalidMessage")
    assert checked(agent, tables, module, code=0) == []
    dead(tables, f"{module}.order-shipped", GOOD)
    assert checked(agent, tables, module, code=0) == [("warn", ".order-shipped", "dead letters", 1, 0)]
    dead(tables, f"{module}.order-placed", BAD)
    assert checked(agent, tables, module, code=1)[0] == ("fail", ".order-placed", "dead letters", 1, 1)


KEYS = {name: base64.b64encode(bytes([number]) * 32).decode() for number, name in enumerate("ab")}


@pytest.mark.parametrize(
    "given", [{}, {"b": KEYS["b"]}, {"a": KEYS["b"]}, {"a": KEYS["a"]}], ids=lambda keys: f"{keys}"
)
@pytest.mark.parametrize("place", ["inbox", "scheduled", "dead letters"])
@pytest.mark.parametrize("readable", [(), (GOOD,), (GOOD, BAD)], ids=len)
def test_deploy_warns_of_messages_without_a_key(
    agent: Agent,
    tables: Tables,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    place: str,
    readable: tuple[bytes, ...],
) -> None:
    module = agent.application(DEPLOYED)
    name = f"{module}.order-placed"
    if given:
        monkeypatch.setenv("DURABLE_ENCRYPTION_KEYS", json.dumps(given))
    ring = KeyRing.of(load_settings(encryption_keys={"a": KEYS["a"]}))
    sealed = msgspec.structs.replace(envelope(1, message_type=name), body=GOOD)
    sealed = msgspec.structs.replace(sealed, body=ring.seal(sealed, GOOD, "shop"))
    made = [sealed, *(msgspec.structs.replace(envelope(1, message_type=name), body=body) for body in readable)]
    with leftovers.transaction(tables.url) as conn:
        if place == "dead letters":
            letters.incoming(conn, made, Letter("LookupError", "why", None, "0" * 16))
        else:
            inbox.store(conn, letters.SCHEMA, [Arrival(letters.ENDPOINT, each, letters.NODE) for each in made])
    if place == "scheduled":
        tables.execute("UPDATE durable.incoming_envelopes SET execution_time = %s", LATER)
    failed = readable.count(BAD)
    is_open = given.get("a") == KEYS["a"]
    verdict = "fail" if failed else "ok" if is_open else "warn"
    found = checked(agent, tables, module, code=int(bool(failed)))
    assert found == [(verdict, ".order-placed", place, len(made), failed)]
    told = agent("check-deploy", f"{module}:bus", "--database", tables.url).out
    opened = len(readable) + is_open
    assert (f" of {opened} " in told) if failed else (f"{opened} decode" in told)
    assert ("1 not looked at: they are encrypted" in told) is not is_open
    assert ("give the keys of that database" in told) is (verdict == "warn")


def test_deploy_warns_of_an_undeclared_schedule(agent: Agent, tables: Tables) -> None:
    module = agent.application(DEPLOYED + 'bus.every("0 3 * * *", OrderPlaced(1), name="kept")')
    for service in (module, "till"):
        node = tables.one(
            "INSERT INTO durable.nodes (service, description, version) VALUES (%s, '', '') RETURNING node_id", service
        )
        for name in ("kept", "dropped"):
            tables.execute(
                "INSERT INTO durable.schedules (name, cron, tz, misfire, message_type, declaration, declared_by,"
                " due_at) VALUES (%s, '0 3 * * *', 'UTC', 'once', %s, '', %s, now())",
                name if service == module else f"till-{name}",
                f"{module}.order-placed",
                node,
            )
    assert checked(agent, tables, module, code=0) == [("warn", ".order-placed", "recurring", 1, 0)]
    told = agent("check-deploy", f"{module}:bus", "--database", tables.url).out
    assert "schedule dropped (0 3 * * *) is not declared by this code and would stop" in told


def test_deploy_reads_all_pages(agent: Agent, tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "_PAGE", Page(3, 30))
    module = agent.application(DEPLOYED)
    put(tables, f"{module}.order-placed", *[GOOD] * 10, BAD)
    assert checked(agent, tables, module, code=1) == [("fail", ".order-placed", "inbox", 11, 1)]


def test_deploy_changes_no_row(agent: Agent, tables: Tables) -> None:
    module = agent.application(DEPLOYED)
    assert agent("check-deploy", f"{module}:bus", "--database", tables.url).out == "ok    no waiting messages\n"
    put(tables, f"{module}.order-placed", BAD)
    before = tables.rows("SELECT xmin::text, ctid::text FROM durable.incoming_envelopes")
    checked(agent, tables, module, code=1)
    assert tables.rows("SELECT xmin::text, ctid::text FROM durable.incoming_envelopes") == before


def test_deploy_runs_in_a_read_only_transaction(agent: Agent, tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(conn: Connection, schema: str) -> int:
        return conn.exec_driver_sql(f"DELETE FROM {schema}.incoming_envelopes").rowcount

    monkeypatch.setattr(in_flight, "count", empty)
    ended = agent("check-deploy", f"{agent.application(DEPLOYED)}:bus", "--database", tables.url)
    assert (ended.code, "cannot execute DELETE in a read-only transaction" in ended.err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--database", "postgresql://127.0.0.1:1/app"], 2, "missing argument 'APP:BUS'"),
        (["APP", "--database", "mysql://127.0.0.1:1/app"], 2, "not a Postgres URL"),
        (["APP", "--database", "postgresql://127.0.0.1:1/app"], 1, "check that Postgres runs"),
        (["APP", "--database", "TABLES", "--schema", "other"], 2, "no durable tables; name another with --schema"),
        (["APP", "--database", "TABLES", "--schema", 'a";drop'], 2, "--schema: give"),
    ],
)
def test_deploy_reports_a_bad_target_in_one_line(
    agent: Agent, tables: Tables, arguments: list[str], code: int, reason: str
) -> None:
    given = {"APP": f"{agent.application(DEPLOYED)}:bus", "TABLES": tables.url}
    ended = agent("check-deploy", *[given.get(each, each) for each in arguments])
    assert (ended.code, ended.out, ended.err.count("\n")) == (code, "", 1)
    assert reason in ended.err


def test_deploy_needs_only_a_role_with_select(agent: Agent, tables: Tables) -> None:
    module = agent.application(DEPLOYED)
    put(tables, f"{module}.order-placed", GOOD)
    role = f"reader_{module[-12:]}"
    tables.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'f9-Kestrel-40'")
    try:
        tables.execute(f"GRANT USAGE ON SCHEMA durable TO {role}")
        tables.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA durable TO {role}")
        parts = conninfo_to_dict(tables.url)
        parts |= {"user": role, "password": "f9-Kestrel-40"}
        url = f"postgresql:///{parts['dbname']}?" + "&".join(
            f"{name}={value}" for name, value in parts.items() if name != "dbname"
        )
        ended = agent("check-deploy", f"{module}:bus", "--database", url)
        assert (ended.code, ended.err) == (0, "")
        assert "order-placed, inbox: 1 decode" in ended.out
    finally:
        tables.execute(f"DROP OWNED BY {role}")
        tables.execute(f"DROP ROLE {role}")
