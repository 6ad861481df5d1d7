"""`durable-agent dead-letters` on a real database; ten thousand letters while nodes are at work."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pty
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from durable.embedded import Embedded
from durable.envelope import Envelope
from durable.storage import circuits
from durable.storage.circuits import CircuitKind
from durable.storage.rows import Letter
from durable.testing import eventually
from tests.failure import leftovers
from tests.support import letters
from tests.support.command import Agent, Ended
from tests.support.letters import PEER, envelope
from tests.support.tables import Tables, shared_tables

APPLICATION = """
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

bus.route(OrderShipped, to="tcp://127.0.0.1:1")

@bus.handles(OrderPlaced)
async def place(order: OrderPlaced, session: AsyncSession) -> OrderShipped:
    await session.execute(text("INSERT INTO effects VALUES ('placed', :number)"), {"number": order.order_id})
    if order.order_id < 0:
        raise LookupError(f"no order {order.order_id}")
    return OrderShipped(order.order_id)
"""

NODES = """
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

def effect(kind: str):
    return text(f"INSERT INTO effects VALUES ('{kind}', :number)")

@bus.handles(OrderPlaced, max_batch=50, concurrency=2)
async def place(order: OrderPlaced, session: AsyncSession) -> None:
    await session.execute(effect("placed"), {"number": order.order_id})

@bus.handles(OrderShipped, max_batch=50, concurrency=2)
async def ship(order: OrderShipped, session: AsyncSession) -> None:
    await session.execute(effect("shipped"), {"number": order.order_id})
"""


@pytest.fixture(scope="module")
def shared(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        tables.execute("CREATE TABLE effects (kind text, number integer)")
        yield tables


@pytest.fixture
def tables(shared: Tables, monkeypatch: pytest.MonkeyPatch) -> Tables:
    """Of a database that the environment names."""
    shared.clear()
    shared.execute("TRUNCATE effects")
    monkeypatch.setenv("DURABLE_DATABASE_URL", shared.url)
    return shared


@pytest.fixture
def agent(tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


def dead(tables: Tables, *envelopes: Envelope, letter: Letter = letters.LETTER) -> list[int]:
    """Make incoming letters of these; returns their numbers."""
    with leftovers.transaction(tables.url) as conn:
        letters.incoming(conn, envelopes, letter)
    return tables.rows("SELECT letter_id FROM durable.dead_letters ORDER BY letter_id")[-len(envelopes) :]


def order(module: str, number: int) -> Envelope:
    return envelope(number, message_type=f"{module}.order-placed", field="order_id")


def document(agent: Agent, *arguments: object, code: int = 0, **options: Any) -> Any:
    """What the command prints with --json."""
    ended = agent(*map(str, arguments), "--json", **options)
    assert (ended.code, ended.err) == (code, "")
    return json.loads(ended.out)


def dead_letters(agent: Agent, *arguments: object, **options: Any) -> Ended:
    return agent("dead-letters", *map(str, arguments), **options)


def unresolved(tables: Tables) -> list[int]:
    return tables.rows("SELECT letter_id FROM durable.dead_letters WHERE resolved_at IS NULL ORDER BY 1")


def everything(tables: Tables) -> list[Any]:
    """Every row of every table, with the transaction that wrote it and where it lies."""
    names = tables.rows(
        "SELECT format('%%I.%%I', schemaname, tablename) FROM pg_tables "
        "WHERE schemaname NOT IN ('pg_catalog', 'information_schema') ORDER BY 1"
    )
    return [
        (name, tables.rows(f"SELECT xmin::text, ctid::text, t::text FROM {name} t ORDER BY ctid")) for name in names
    ]


# ---------------------------------------------------------------- parked


def of_key(key: str, number: int) -> Envelope:
    return msgspec.structs.replace(envelope(number, field="order_id"), partition_key=key)


def test_replay_of_a_parked_key_advises_to_resume_the_key(agent: Agent, tables: Tables) -> None:
    first, second = of_key("order 7", 1), of_key("order 7", 2)
    ordered = "UPDATE durable.dead_letters SET ordering_key = 'order 7'"
    dead(tables, first)
    tables.execute(ordered)
    with leftovers.transaction(tables.url) as conn:
        circuits.park(
            conn, "durable", CircuitKind.KEY, "order 7", reason="broken", actor="node 1", ordering_key="order 7"
        )
    ended = dead_letters(agent, "replay", "--all")

    assert ended.out.splitlines() == [
        "replayed 1 of 1 letter",
        "key order 7 is parked, and 1 message waits behind it; run: durable-agent resume APP:BUS --key 'order 7'",
    ]
    dead(tables, second)
    tables.execute(ordered)
    told = document(agent, "dead-letters", "replay", "--all")["parked"]
    assert told == [{"kind": "key", "key": "order 7", "waiting": 2}]


def test_replay_into_a_key_paused_by_an_operator_gives_no_advice(agent: Agent, tables: Tables) -> None:
    dead(tables, of_key("order 7", 1))
    agent("pause", "--key", "order 7", "--anyway")

    assert dead_letters(agent, "replay", "--all").out == "replayed 1 of 1 letter\n"


# ---------------------------------------------------------------- looking


def test_groups_list_and_show_need_no_application(agent: Agent, tables: Tables) -> None:
    cause = Letter.because("no such customer", "LookupError")
    one, two = dead(tables, envelope(1), envelope(2), letter=cause)
    (three,) = dead(tables, envelope(3), letter=Letter.because("late", "OutOfStock"))

    groups = document(agent, "dead-letters", "groups", "--database", tables.url)["groups"]
    assert [(group["exception_type"], group["count"], group["example"]) for group in groups] == [
        ("LookupError", 2, "no such customer"), ("OutOfStock", 1, "late")
    ]  # fmt: skip
    assert groups[0]["fingerprint"] == cause.fingerprint
    assert "no such customer" in dead_letters(agent, "groups").out

    page = document(agent, "dead-letters", "list", "--limit", 2)
    assert ([letter["letter_id"] for letter in page["letters"]], page["before"]) == ([three, two], two)
    page = document(agent, "dead-letters", "list", "--limit", 2, "--before", page["before"])
    assert ([letter["letter_id"] for letter in page["letters"]], page["before"]) == ([one], None)
    assert f"--before {two}" in dead_letters(agent, "list", "--limit", 2).out

    letter = document(agent, "dead-letters", "show", one)["letter"]
    assert (letter["body"], letter["exception_type"], letter["replayable"]) == ('{"number":1}', "LookupError", True)
    assert '{"number":1}' in dead_letters(agent, "show", letter["id"]).out


def test_show_prints_every_attempt_and_the_conversation(agent: Agent, tables: Tables) -> None:
    module = agent.application("""
import itertools
attempts = itertools.count(1)

@bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[0.01]))
async def place(order: OrderPlaced) -> None:
    raise ValueError(f"no {next(attempts)}\\x1b[31m")
""")
    cause = envelope(0)
    dead(tables, cause)
    caused = msgspec.structs.replace(order(module, 1), correlation_id=cause.id, causation_id=cause.id)
    with leftovers.transaction(tables.url) as conn:
        letters.waiting(conn, [caused])
    with agent.process("run", f"{module}:bus", "--poll-interval", "0.05") as process:
        asyncio.run(eventually(lambda: tables.count("dead_letters") == 2, within=60))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)

    shown = document(agent, "dead-letters", "show", caused.id)
    printed = dead_letters(agent, "show", caused.id).out

    assert [(each["number"], each["reason"]) for each in shown["attempts"]] == [
        (number, f"no {number}\x1b[31m") for number in (1, 2, 3)
    ]
    assert all("in place" in each["traceback"] for each in shown["attempts"])
    assert [each["id"] for each in shown["related"]] == [str(cause.id)]
    assert printed.count("in place") == 3
    assert "attempt 3, " in printed
    assert str(cause.id) in printed
    assert "\x1b" not in printed


def test_filters_apply_to_every_command(agent: Agent, tables: Tables) -> None:
    one, two = dead(tables, envelope(1), envelope(2, message_type="letters.other"))
    assert document(agent, "dead-letters", "list", "--type", "letters.other")["letters"][0]["letter_id"] == two
    assert document(agent, "dead-letters", "list", "--side", "outgoing")["letters"] == []
    assert document(agent, "dead-letters", "list", "--until", "1h ago")["letters"] == []
    assert len(document(agent, "dead-letters", "list", "--since", "1h ago", "--source", "elsewhere")["letters"]) == 2

    assert document(agent, "dead-letters", "replay", "--type", "letters.other")["done"] == 1
    assert document(agent, "dead-letters", "discard", "--exception", "test", "--reason", "no")["done"] == 1

    assert document(agent, "dead-letters", "groups")["groups"] == []
    states = {letter["letter_id"]: letter["resolution"] for letter in
              document(agent, "dead-letters", "list", "--state", "resolved")["letters"]}  # fmt: skip
    assert states == {one: "discarded", two: "replayed"}
    assert document(agent, "status")["dead_letters"] == []


@pytest.mark.parametrize(
    ("option", "typo", "told"),
    [
        ("--exception", "Rejct", "did you mean 'Reject'?"),
        ("--exception", "durable.errors.Rejec", "did you mean 'durable.errors.Reject'?"),
        ("--type", "letters.plced", "did you mean 'letters.placed'?"),
        ("--source", "elswhere", "did you mean 'elsewhere'?"),
        ("--address", "nowhere at all", "no letter has 'nowhere at all'"),
        ("--fingerprint", "0000", "no letter has '0000'"),
    ],
)
def test_filter_without_matches_is_reported_and_ends_with_1(
    agent: Agent, tables: Tables, option: str, typo: str, told: str
) -> None:
    dead(tables, envelope(1))
    tables.execute("UPDATE durable.dead_letters SET exception_type = 'durable.errors.Reject'")

    for command in (["list"], ["groups"], ["replay"], ["discard", "--reason", "no"]):
        ended = dead_letters(agent, *command, option, typo)
        assert (ended.code, f"{option}: no letter has {typo!r}" in ended.err, told in ended.err) == (1, True, True)
    assert len(unresolved(tables)) == 1


def test_exception_filter_accepts_the_last_part_of_a_name(agent: Agent, tables: Tables) -> None:
    dead(tables, envelope(1), envelope(2))
    tables.execute("UPDATE durable.dead_letters SET exception_type = 'durable.errors.Reject'")

    assert len(document(agent, "dead-letters", "list", "--exception", "errors.Reject")["letters"]) == 2
    assert dead_letters(agent, "list", "--exception", "ject").code == 1
    assert document(agent, "dead-letters", "discard", "--exception", "Reject", "--reason", "no")["done"] == 2


# ---------------------------------------------------------------- resolving


def test_replay_selects_letters_by_number_and_message_id(agent: Agent, tables: Tables) -> None:
    first, second = envelope(1), envelope(2)
    one, _, three = dead(tables, first, second, envelope(3))

    ended = dead_letters(agent, "replay", one, second.id, "--by", "ada", "--reason", "mended")

    assert (ended.code, ended.out, ended.err) == (0, "replayed 2 of 2 letters\n", "")
    assert unresolved(tables) == [three]
    assert tables.rows("SELECT id FROM durable.incoming_envelopes ORDER BY seq") == [first.id, second.id]
    assert "replayed" in dead_letters(agent, "show", one).out
    assert "by ada: mended" in dead_letters(agent, "show", one).out
    again = dead_letters(agent, "replay", one)
    assert (again.code, again.err) == (1, f"error: letter {one}: already replayed by ada\n")
    assert document(agent, "dead-letters", "replay", one, three)["done"] == 1, "as when a run was stopped and goes on"


def test_replay_and_discard_require_all_when_no_filter_is_given(agent: Agent, tables: Tables) -> None:
    dead(tables, envelope(1), envelope(2), envelope(3))
    for command in (["replay"], ["discard", "--reason", "no"]):
        ended = dead_letters(agent, *command)
        assert (ended.code, ended.err.count("\n"), "or give --all" in ended.err) == (2, 1, True)
    assert len(unresolved(tables)) == 3

    assert document(agent, "dead-letters", "replay", "--all", "--limit", 1)["done"] == 1
    assert document(agent, "dead-letters", "discard", "--all", "--yes", "--reason", "no")["done"] == 2


def test_replay_reports_letters_left_behind(agent: Agent, tables: Tables) -> None:
    twice = envelope(1, destination=PEER)
    with leftovers.transaction(tables.url) as conn:
        letters.outgoing(conn, [twice])
        letters.outgoing(conn, [twice])
    tables.execute(
        "INSERT INTO durable.dead_letters (side, address, body, exception_type, reason, fingerprint, node_id)"
        " VALUES ('incoming', 'shop', E'\\\\xff', 'quarantined on arrival', 'no envelope', 'f', 1)"
    )

    ended = dead_letters(agent, "replay", "--all")

    assert ended.code == 0
    assert ended.out.splitlines() == [
        "replayed 1 of 2 letters",
        "left: 1 (the message is already waiting), 1 (no whole envelope, only bytes; show it, and discard it)",
    ]
    assert "base64 /w==" in dead_letters(agent, "show", unresolved(tables)[-1]).out


@pytest.mark.parametrize(
    ("command", "done"),
    [(["replay", "--all", "--yes"], "replayed"), (["discard", "--all", "--yes", "--reason", "no"], "discarded")],
)
def test_command_counts_letters_refused_by_the_database(
    agent: Agent, tables: Tables, command: list[str], done: str
) -> None:
    dead(tables, *(envelope(number) for number in range(3)))
    tables.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'poison'; END $$"
    )
    tables.execute(
        "CREATE TRIGGER refuse BEFORE UPDATE OR DELETE ON durable.dead_letters FOR EACH ROW "
        f"WHEN (OLD.letter_id = {unresolved(tables)[1]}) EXECUTE FUNCTION refuse()"
    )

    ended = dead_letters(agent, *command)
    tables.execute("DROP FUNCTION refuse CASCADE")

    assert ended.code == 0
    assert ended.out.splitlines() == [
        f"{done} 2 of 3 letters",
        "left: 1 (the database refuses to change it, for the reason in the log)",
    ]


def test_replay_reports_a_letter_when_its_id_was_reused(agent: Agent, tables: Tables) -> None:
    dead(tables, envelope(1))
    tables.execute("UPDATE durable.received_ids SET message_digest = message_digest + 1")

    ended = dead_letters(agent, "replay", "--all")
    assert ended.out.splitlines() == [
        "replayed 0 of 1 letter",
        "left: 1 (another message, or a repetition of this one, has used its id; show it, and discard it)",
    ]
    assert ended.code == 1


def test_command_ends_with_1_when_every_selected_letter_is_left(agent: Agent, tables: Tables) -> None:
    tables.execute(
        "INSERT INTO durable.dead_letters (side, address, body, exception_type, reason, fingerprint, node_id)"
        " VALUES ('incoming', 'shop', E'\\\\xff', 'quarantined on arrival', 'no envelope', 'f', 1)"
    )
    (letter,) = unresolved(tables)
    for selected in ([letter], ["--fingerprint", "f"], ["--all", "--yes"]):
        assert dead_letters(agent, "replay", *selected).code == 1
    assert dead_letters(agent, "discard", letter, "--reason", "no").code == 0
    assert dead_letters(agent, "replay", "--all", "--yes").code == 0


def test_edit_refuses_a_body_when_its_handler_cannot_decode_the_message(agent: Agent, tables: Tables) -> None:
    module = agent.application(APPLICATION)
    (one,) = dead(tables, order(module, 1))
    edit = ("edit", f"{module}:bus", one, "--body")
    for body, reason in (('{"order_id": "many"}', "no OrderPlaced"), ("{", "no OrderPlaced")):
        ended = dead_letters(agent, *edit, body)
        assert (ended.code, ended.err.count("\n"), reason in ended.err) == (2, 1, True)
    assert dead_letters(agent, "edit", one, "--body", "{").code == 2, "without the class it must be JSON all the same"
    assert dead_letters(agent, "edit", one, "--body", '"' + "x" * (1 << 20) + '"').code == 2
    assert unresolved(tables) == [one]

    assert dead_letters(agent, *edit, "-", stdin=b'{"order_id": 2}').code == 0

    assert tables.rows("SELECT body FROM durable.incoming_envelopes") == [b'{"order_id": 2}']
    shown = document(agent, "dead-letters", "show", one)["letter"]
    assert (shown["body"], shown["edited_body"]) == ('{"order_id":1}', '{"order_id": 2}')
    assert dead_letters(agent, *edit, "{}").code == 1, "it was resolved"


def test_edit_refuses_a_field_unless_known_to_the_class_or_the_letter(agent: Agent, tables: Tables) -> None:
    module = agent.application(APPLICATION)
    newer = msgspec.structs.replace(order(module, 1), body=b'{"order_id": -1, "newer": {"a": [1]}}')
    (one,) = dead(tables, newer)
    edit = ("edit", f"{module}:bus", one)
    for body, told in (
        ('{"order_id": 1, "urgent": true}', "--body: OrderPlaced: unknown field 'urgent'; leave it out"),
        ('{"order_id": 1, "orderid": 5}', "--body: OrderPlaced: unknown field 'orderid'; did you mean 'order_id'?"),
        ('{"order_id": 1, "newer": {"a": [2]}}', "--body: OrderPlaced: unknown field 'newer'"),
    ):
        for more in ([], ["--rehearse"]):
            ended = dead_letters(agent, *edit, "--body", body, *more)
            assert (ended.code, told in ended.err, ended.err.count("\n")) == (2, True, 1), ended.err
    assert unresolved(tables) == [one]

    kept = '{"order_id": 2, "newer": {"a": [1]}}'
    assert dead_letters(agent, *edit, "--body", kept).code == 0
    assert tables.rows("SELECT body FROM durable.incoming_envelopes") == [kept.encode()]


PACKED = """
from decimal import Decimal
from uuid import UUID

@message("NAME.packed", content_type="application/msgpack")
class Packed(msgspec.Struct):
    order_id: UUID
    total: Decimal
    picture: bytes = b"\\xff\\x00"

@bus.handles(Packed)
async def unpack(packed: Packed) -> None: ...
"""
ID = "019b76da-a800-7cc1-8a2f-2b1c0d9a3e41"


def packed(tables: Tables, module: str, body: object, content_type: str = "application/msgpack") -> int:
    made = msgspec.structs.replace(
        envelope(1, message_type=f"{module}.packed"),
        body=body if isinstance(body, bytes) else msgspec.msgpack.encode(body),
        content_type=content_type,
    )
    return dead(tables, made)[0]


def test_msgpack_body_is_shown_and_edited_as_json(agent: Agent, tables: Tables) -> None:
    module = agent.application(PACKED)
    before = {"order_id": ID, "total": "4.20", "picture": b"\xff\x00"}
    letter = packed(tables, module, before)
    for words in ([letter], [f"{module}:bus", letter]):
        shown = document(agent, "dead-letters", "show", *words)["letter"]
        assert json.loads(shown["body"]) == {"order_id": ID, "total": "4.20", "picture": "/wA="}
        assert base64.b64decode(shown["body_base64"]) == msgspec.msgpack.encode(before)
    assert '"total":"4.20"' in dead_letters(agent, "show", letter).out

    changed = json.dumps({"order_id": ID, "total": "4.30", "picture": "/wE="})
    refused = dead_letters(agent, "edit", letter, "--body", changed)
    assert (refused.code, "name the bus" in refused.err) == (2, True)
    refused = dead_letters(agent, "edit", f"{module}:bus", letter, "--body", '{"order_id": 7}')
    assert (refused.code, "the body is no Packed" in refused.err) == (2, True)
    misspelt = json.dumps({**json.loads(changed), "pictur": "/wE="})
    refused = dead_letters(agent, "edit", f"{module}:bus", letter, "--body", misspelt)
    assert (refused.code, "unknown field 'pictur'; did you mean 'picture'?" in refused.err) == (2, True)
    assert dead_letters(agent, "edit", f"{module}:bus", letter, "--body", changed).code == 0

    [(kind, body)] = tables.rows("SELECT content_type, body FROM durable.incoming_envelopes")
    assert kind == "application/msgpack"
    assert msgspec.msgpack.decode(body) == {"order_id": ID, "total": "4.30", "picture": b"\xff\x01"}


@pytest.mark.parametrize(
    ("body", "content_type", "text"),
    [
        (b"\xc1", "application/msgpack", None),
        (b"\x81\xa1a\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", "application/msgpack", '{"a":null}'),
        (b"\xff", "application/x-unknown", None),
        (b"readable", "application/x-unknown", "readable"),
        (b"\xff", "application/json", None),
        (b"{", "application/json", "{"),
    ],
)
def test_undecodable_body_is_shown_as_text_or_base64(
    agent: Agent, tables: Tables, body: bytes, content_type: str, text: str | None
) -> None:
    letter = packed(tables, "nobody", body, content_type)
    shown = document(agent, "dead-letters", "show", letter)["letter"]
    assert shown["body"] == text
    if text is None or text.encode() != body:
        assert base64.b64decode(shown["body_base64"]) == body


def test_edit_refuses_a_body_of_an_old_version_when_its_upcaster_fails(agent: Agent, tables: Tables) -> None:
    module = agent.application("""
from durable import upcaster

@message("NAME.order-placed", version=2)
class OrderPlacedV2(msgspec.Struct):
    order_id: int

@upcaster(OrderPlaced, to=OrderPlacedV2)
def newer(old: OrderPlaced) -> OrderPlacedV2:
    if old.order_id < 0:
        raise ValueError("no such order")
    return OrderPlacedV2(old.order_id)

@bus.handles(OrderPlacedV2)
async def place(order: OrderPlacedV2) -> None: ...
""")
    (letter,) = dead(tables, order(module, -1))
    [rehearsed] = document(agent, "dead-letters", "replay", f"{module}:bus", letter, "--rehearse", code=1)["rehearsed"]
    assert "no such order" in rehearsed["error"]["message"]
    refused = dead_letters(agent, "edit", f"{module}:bus", letter, "--body", '{"order_id": -2}')
    assert (refused.code, "no such order" in refused.err) == (2, True)
    assert agent("dead-letters", "debug", f"{module}:bus", str(letter)).code == 1
    assert dead_letters(agent, "edit", f"{module}:bus", letter, "--body", '{"order_id": 2}').code == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["show", "seven"], "neither the number of a dead letter nor the UUID"),
        (["show", "0190-7"], "neither the number of a dead letter nor the UUID"),
        (["show", "4711"], "no dead letter 4711"),
        (["show", "0190c0de-0000-7000-8000-000000000000"], "no dead letter"),
        (["show"], "name a letter, such as 1"),
        (["show", "1", "2"], "name one"),
        (["replay", "4711"], "no dead letter 4711"),
        (["replay", "99999999999999999999"], "neither"),
        (["replay", "1", "--rehearse"], "name its bus"),
        (["replay", "--all", "--rate", "0"], "--rate"),
        (["replay", "--all", "--limit", "0"], "--limit"),
        (["list", "--since", "yesterday"], "--since: 'yesterday' is not a time"),
        (["list", "--side", "left"], "left"),
        (["list", "--before", "0"], "--before"),
        (["discard", "1"], "--reason"),
        (["discard", "1", "--reason", ""], "--reason: the text is empty"),
        (["discard", "1", "--reason", " "], "--reason: the text is empty"),
        (["edit", "1"], "--body"),
        (["groups", "nothing:bus"], "no module 'nothing'"),
        (["lost"], "lost"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_usage_prints_one_line_and_ends_with_2(
    agent: Agent, tables: Tables, arguments: list[str], reason: str
) -> None:
    if arguments[-1] == "--rehearse":
        tables.execute("ALTER TABLE durable.dead_letters ALTER letter_id RESTART WITH 1")
        dead(tables, envelope(1))
    ended = dead_letters(agent, *arguments)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert reason in ended.err


@contextmanager
def ending_connections(tables: Tables) -> Iterator[None]:
    """End those of others, and let nobody connect again meanwhile."""
    database = tables.one("SELECT current_database()")
    with psycopg.connect(make_conninfo(tables.url, dbname="postgres"), autocommit=True) as conn:
        conn.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false".encode())
        tables.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        yield
        conn.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true".encode())


def test_replay_reports_its_progress_when_the_database_goes_away(agent: Agent, tables: Tables) -> None:
    with leftovers.transaction(tables.url) as conn:
        letters.many(conn, range(3_000), message_type="letters.placed", kind="ValueError", reason="no")
    with agent.process("dead-letters", "replay", "--all", "--rate", "200") as process:
        asyncio.run(eventually(lambda: tables.count("incoming_envelopes") >= 50, within=60))
        with ending_connections(tables):
            out, err = process.communicate(timeout=30)
    done = tables.count("incoming_envelopes")

    assert (process.returncode, out, err.count(b"\n")) == (1, b"", 1)
    assert f"{done} letters were replayed: run the command again for the rest" in err.decode()
    assert document(agent, "dead-letters", "replay", "--all")["done"] == 3_000 - done


def test_commands_refuse_an_older_schema(agent: Agent, tables: Tables) -> None:
    version = tables.one("SELECT version_num FROM durable.alembic_version")
    tables.execute("UPDATE durable.alembic_version SET version_num = '0000'")
    try:
        for command in (["groups"], ["list"], ["show", "1"], ["replay", "--all"]):
            ended = dead_letters(agent, *command)
            assert (ended.code, "run: durable-agent migrate" in ended.err) == (2, True)
    finally:
        tables.execute("UPDATE durable.alembic_version SET version_num = %s", version)


# ---------------------------------------------------------------- rehearsing, and running here


def test_rehearsal_reports_each_outcome_without_changing_a_row(agent: Agent, tables: Tables) -> None:
    module = agent.application(APPLICATION)
    one, two, three = dead(tables, order(module, 1), order(module, -2), envelope(3, message_type=f"{module}.unknown"))
    with leftovers.transaction(tables.url) as conn:
        letters.outgoing(conn, [envelope(4, destination=PEER)])
    before = everything(tables)

    rehearsed = document(agent, "dead-letters", "replay", f"{module}:bus", "--all", "--rehearse", code=1)["rehearsed"]
    printed = dead_letters(agent, "replay", f"{module}:bus", "--all", "--rehearse")

    assert everything(tables) == before
    assert [(each["letter_id"], each["outcome"]) for each in rehearsed] == [
        (one, "succeeds"), (two, "fails"), (three, "fails"), (three + 1, "is sent")
    ]  # fmt: skip
    (sent,) = rehearsed[0]["sends"]
    assert (sent["message_type"], sent["destination"], sent["body"]) == (
        f"{module}.order-shipped", PEER, '{"order_id":1}'
    )  # fmt: skip
    assert (rehearsed[1]["error"]["type"], rehearsed[1]["error"]["message"]) == ("LookupError", "no order -2")
    assert "in place" in rehearsed[1]["error"]["traceback"]
    assert "no handler" in rehearsed[2]["error"]["message"]
    assert (printed.code, printed.err) == (1, "")
    assert printed.out.startswith(
        "rehearsed 4 letters and rolled back: 1 would succeed, 2 would fail, 1 would be sent\n"
    )
    assert document(agent, "dead-letters", "replay", f"{module}:bus", one, "--rehearse")["rehearsed"]


def test_edit_rehearses_the_new_body(agent: Agent, tables: Tables) -> None:
    module = agent.application(APPLICATION)
    (one,) = dead(tables, order(module, -1))
    before = everything(tables)

    edit = ("dead-letters", "edit", f"{module}:bus", one, "--rehearse", "--body")
    assert document(agent, *edit, '{"order_id": -2}', code=1)["rehearsed"][0]["error"]["message"] == "no order -2"
    assert document(agent, *edit, '{"order_id": 2}')["rehearsed"][0]["outcome"] == "succeeds"
    assert everything(tables) == before


def test_debug_runs_the_handler_and_rolls_back_unless_commit_is_given(agent: Agent, tables: Tables) -> None:
    module = agent.application(APPLICATION)
    one, two = dead(tables, order(module, 1), order(module, -2))
    before = everything(tables)

    rehearsed = agent("dead-letters", "debug", f"{module}:bus", str(one))
    failed = agent("dead-letters", "debug", f"{module}:bus", str(two), "--commit")

    assert everything(tables) == before
    assert (rehearsed.code, rehearsed.err) == (0, "")
    assert rehearsed.out.startswith(f"letter {one}: succeeds, rolled back\n")
    assert f"{module}.order-shipped" in rehearsed.out
    assert (failed.code, failed.out) == (1, "")
    assert failed.err.startswith("Traceback")
    assert failed.err.endswith("LookupError: no order -2\n")

    kept = document(agent, "dead-letters", "debug", f"{module}:bus", one, "--commit", "--by", "ada")
    assert (kept["outcome"], kept["committed"], len(kept["sends"])) == ("succeeds", True, 1)
    assert tables.rows("SELECT * FROM effects") == [("placed", 1)]
    assert tables.count("outgoing_envelopes") == 1
    assert unresolved(tables) == [two]
    again = agent("dead-letters", "debug", f"{module}:bus", str(one), "--commit")
    assert (again.code, again.err) == (1, f"error: letter {one}: already handled by ada\n")
    assert agent("dead-letters", "debug", f"{module}:bus", str(one)).code == 0, "to look at it again does no harm"


@pytest.mark.parametrize(("letter", "code"), [("seven", 2), ("4711", 2)])
def test_debug_refuses_an_unknown_letter(agent: Agent, tables: Tables, letter: str, code: int) -> None:
    module = agent.application(APPLICATION)
    ended = agent("dead-letters", "debug", f"{module}:bus", letter)
    assert (ended.code, ended.err.count("\n")) == (code, 1)


def test_debug_refuses_a_letter_without_a_handler(agent: Agent, tables: Tables) -> None:
    module = agent.application(APPLICATION)
    (one,) = dead(tables, envelope(1))
    ended = agent("dead-letters", "debug", f"{module}:bus", str(one))
    assert (ended.code, "has no handler for letters.placed" in ended.err) == (2, True)


def test_debug_opens_the_debugger_at_the_failure(agent: Agent, tables: Tables) -> None:
    module = agent.application(APPLICATION)
    (one,) = dead(tables, order(module, -7))
    with agent.process("dead-letters", "debug", f"{module}:bus", str(one), "--pdb", stdin=-1) as process:
        out, err = process.communicate(b"p 'the order is', order.order_id\nq\n", timeout=60)
    assert process.returncode == 1
    assert b"LookupError: no order -7" in err
    assert b"('the order is', -7)" in out
    assert tables.rows("SELECT * FROM effects") == []


# ---------------------------------------------------------------- ten thousand


@contextmanager
def terminal() -> Iterator[tuple[int, Callable[[], str]]]:
    """Its other end, and everything that was written to it; read all the time, or the writer would wait."""
    ours, theirs = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        try:
            while written := os.read(ours, 1 << 16):
                seen.append(written)
        except OSError:  # the other end is closed
            pass

    reading = threading.Thread(target=read)
    reading.start()
    try:
        yield theirs, lambda: b"".join(seen).decode(errors="replace")
    finally:
        os.close(theirs)
        reading.join(10)
        os.close(ours)


CAUSES = {"LookupError": 3_400, "ValueError": 3_300, "OutOfStock": 3_300}


def test_replay_of_one_cause_under_traffic_continues_after_a_stop(agent: Agent, tables: Tables) -> None:
    module = agent.application(NODES)
    placed, shipped = f"{module}.order-placed", f"{module}.order-shipped"
    first = 0
    with leftovers.transaction(tables.url) as conn:
        for kind, count in CAUSES.items():
            numbers = range(first, first + count)
            letters.many(conn, numbers, message_type=placed, kind=kind, reason=f"no {kind}", field="order_id")
            first += count
    groups = document(agent, "dead-letters", "groups")["groups"]
    assert {group["exception_type"]: group["count"] for group in groups} == CAUSES
    chosen = ("--fingerprint", groups[0]["fingerprint"])

    def replayed() -> int:
        return int(tables.one("SELECT count(*) FROM durable.dead_letters WHERE resolution = 'replayed'"))

    def effects(kind: str) -> list[int]:
        return sorted(tables.rows("SELECT number FROM effects WHERE kind = %s", kind))

    with ExitStack() as stack:
        nodes = [
            stack.enter_context(agent.process("run", f"{module}:bus", "--poll-interval", "0.1", "--log-level", "error"))
            for _ in range(2)
        ]
        with leftovers.transaction(tables.url) as conn:
            others = [envelope(number, message_type=shipped, field="order_id") for number in range(3_000)]
            letters.waiting(conn, others[:1_000])
        asyncio.run(eventually(lambda: effects("shipped"), within=60, what="nodes at work"))

        with (
            terminal() as (theirs, seen),
            agent.process("dead-letters", "replay", *chosen, "--rate", "1500", stderr=theirs) as process,
        ):
            asyncio.run(eventually(lambda: replayed() >= 1_000, within=60, what="half of a replay"))
            with leftovers.transaction(tables.url) as conn:
                letters.waiting(conn, others[1_000:])
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=30)
            progress = seen()
        done = replayed()
        assert process.returncode == 130
        assert 1_000 <= done < CAUSES["LookupError"]
        assert out.decode() == f"stopped: replayed {done:,} of 3,400 letters; run the same command again for the rest\n"
        assert "replayed" in progress
        assert "/3400" in progress
        asyncio.run(eventually(lambda: len(effects("placed")) >= done, within=60, what="the first half handled"))
        assert effects("placed") == list(range(done)), "nothing lost, nothing doubled, the oldest first"
        assert len(unresolved(tables)) == 10_000 - done

        assert document(agent, "dead-letters", "replay", *chosen)["done"] == 3_400 - done
        asyncio.run(eventually(lambda: len(effects("placed")) >= 3_400, within=60, what="all of it handled"))
        asyncio.run(eventually(lambda: len(effects("shipped")) >= 3_000, within=60, what="the others handled"))
        for node in nodes:
            node.send_signal(signal.SIGTERM)
        for node in nodes:
            assert node.wait(timeout=60) == 0

    assert effects("placed") == list(range(3_400))
    assert effects("shipped") == list(range(3_000))
    ends = tables.rows("SELECT replay_count, resolution, count(*) FROM durable.dead_letters GROUP BY 1, 2 ORDER BY 1")
    assert ends == [(0, None, 6_600), (1, "replayed", 3_400)]
    assert tables.count("incoming_envelopes") == 0
