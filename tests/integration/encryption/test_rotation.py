"""`durable-agent keys`: bodies are encrypted anew while nodes are at work, and a key is counted until it can go."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pytest

from durable import Bus, Keys, Retry, Settings, message
from durable.cli.keys.rotation import Rotated, rotate_all
from durable.cli.target import schema_connection
from durable.embedded.ports import free_port
from durable.encryption.ring import KeyRing
from durable.messages.digest import message_digest
from durable.messages.registry import encrypted_types
from durable.messages.sealed import KEY_ID_AT, MAGIC, parted
from durable.settings import load_settings
from durable.storage import encrypted
from durable.storage.encrypted import Wanted
from durable.storage.sql.parked import PARKED_OWNER
from durable.storage.sql.recovery import REFUSED_OWNER
from durable.testing import eventually
from tests.failure.workbench import QUICK
from tests.support import canary
from tests.support.command import Agent
from tests.support.tables import Tables

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))
NOWHERE = "tcp://127.0.0.1:1"
NEVER = Retry(immediate=0, delays=[])


@message("rotation.paid", encrypted=True)
class Paid(msgspec.Struct):
    number: int
    card: str = canary.CANARY


@message("rotation.noted")
class Noted(msgspec.Struct):
    number: int


class Shop:
    def __init__(self, url: str, keys: Keys, **settings: Any) -> None:
        self.keys = keys
        self.seen: list[int] = []
        self.bus = Bus("shop", url, **{**QUICK, **settings})
        self.bus.keys_from(lambda: self.keys)
        self.is_failing = False

        @self.bus.handles(Paid, retry=NEVER)
        async def pay(paid: Paid) -> None:
            if self.is_failing:
                raise LookupError("no such payment")
            self.seen.append(paid.number)

    async def send(self, *messages: Any, **options: Any) -> None:
        async with self.bus.unit_of_work():
            for each in messages:
                self.bus.send(each, **options)

    async def store(self, *messages: Any, **options: Any) -> None:
        """The same on a bus that does not run."""
        await self.send(*messages, **options)
        await self.bus.runtime.sessions.close()


async def run(tables: Tables, keys: Keys, **wanted: Any) -> dict[str, Rotated]:
    settings = Settings(database_url=tables.url)  # type: ignore[arg-type]
    ring = KeyRing(lambda: keys)
    encrypts = keys.encrypting_id
    assert encrypts is not None
    types = encrypted_types()
    chosen = Wanted(encrypts, keys.tenants, types, **wanted)
    rotated = await rotate_all(settings, ring, chosen, actor="ada", dry_run=False)
    return {each.place: each for each in rotated}


def keys_in(tables: Tables, table: str, column: str = "body") -> set[str | None]:
    bodies = tables.rows(f"SELECT {column} FROM durable.{table} WHERE {column} IS NOT NULL")
    return {parts.key_id if (parts := parted(bytes(body))) is not None else None for body in bodies}


async def fill(tables: Tables, keys: Keys) -> None:
    """Messages under `keys` in every place."""
    shop = Shop(tables.url, keys, history_bodies=True)
    shop.is_failing = True
    async with shop.bus:
        await shop.send(Paid(1), tenant="acme")
        await shop.send(Paid(2))
        await eventually(lambda: tables.count("dead_letters") == 2)
        await shop.send(Paid(3), delay=3_600, tenant="acme")
        await shop.send(Paid(4), delay=3_600, key="order-1")
        await shop.send(Paid(5), to=NOWHERE, delay=3_600, tenant="globex")
        await shop.send(Paid(6), to=NOWHERE)


async def test_every_place_is_encrypted_anew(tables: Tables) -> None:
    await fill(tables, Keys({"a": A}))
    digests = tables.rows("SELECT id, message_type, body FROM durable.incoming_envelopes ORDER BY id")
    before = [message_digest(kind, bytes(body)) for _, kind, body in digests]
    newer = Keys({"b": B, "a": A, "acme-1": C}, tenants={"acme": "acme-1"})
    found = await run(tables, newer)
    assert {place: (each.total, each.done, each.left) for place, each in found.items()} == {
        "outbox": (2, 2, 0),
        "inbox": (2, 2, 0),
        "dead letters": (2, 2, 0),
    }
    for table in ("incoming_envelopes", "dead_letters"):
        assert keys_in(tables, table) == {"b", "acme-1"}
    assert keys_in(tables, "outgoing_envelopes") == {"b"}
    assert keys_in(tables, "envelope_history") == {"a"}
    after = tables.rows("SELECT id, message_type, body FROM durable.incoming_envelopes ORDER BY id")
    assert [message_digest(kind, bytes(body)) for _, kind, body in after] == before
    again = await run(tables, newer)
    assert all((each.total, each.done) == (0, 0) for each in again.values())

    shop = Shop(tables.url, Keys({"b": B, "acme-1": C}, tenants={"acme": "acme-1"}))  # without the old key
    async with shop.bus:
        await tables.pass_time(timedelta(hours=2))
        await eventually(lambda: sorted(shop.seen) == [3, 4])
    assert canary.found(tables) == []


def test_replayed_letter_is_handled_after_a_rotation(
    tables: Tables, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prepare() -> None:
        await fill(tables, Keys({"a": A}))
        await run(tables, Keys({"b": B, "a": A}))

    async def handle() -> None:
        shop = Shop(tables.url, Keys({"b": B}))
        async with shop.bus:
            await eventually(lambda: sorted(shop.seen) == [1, 2])

    asyncio.run(prepare())
    monkeypatch.setenv("DURABLE_DATABASE_URL", tables.url)
    assert agent("dead-letters", "replay", "--all") == (0, "replayed 2 of 2 letters\n", "")
    asyncio.run(handle())
    assert tables.one("SELECT count(*) FROM durable.dead_letters WHERE resolution = 'replayed'") == 2


async def test_readable_bodies_of_encrypted_classes_are_encrypted(tables: Tables) -> None:
    await fill(tables, Keys({"a": A}))
    for table, address in (("incoming_envelopes", "endpoint"), ("outgoing_envelopes", "destination")):
        await tables.change(
            f"""INSERT INTO durable.{table} ({address}, id, message_type, source, correlation_id, content_type, body,
                sent_at, execution_time, owner_id)
            SELECT 'local', gen_random_uuid(), kind, 'elsewhere', gen_random_uuid(), 'application/json',
                '{{"number":17,"card":"canary-kx7q-0815"}}', now(), now() + interval '1 hour', 0
            FROM unnest(ARRAY['rotation.paid', 'rotation.noted']) AS kind"""
        )
    assert canary.found(tables) == ["incoming_envelopes", "outgoing_envelopes"]
    found = await run(tables, Keys({"a": A}))
    assert [each.done for each in found.values()] == [1, 1, 0]
    assert keys_in(tables, "incoming_envelopes") == {"a", None}
    found = await run(tables, Keys({"a": A}), everything=True)
    assert [each.done for each in found.values()] == [1, 1, 0]
    assert keys_in(tables, "incoming_envelopes") == {"a"}
    assert canary.found(tables) == []
    shop = Shop(tables.url, Keys({"a": A}))
    async with shop.bus:
        await tables.pass_time(timedelta(hours=2))
        await eventually(lambda: sorted(shop.seen) == [3, 4, 17])


async def test_unopened_body_is_left(tables: Tables) -> None:
    shop = Shop(tables.url, Keys({"a": A, "lost": C}, tenants={"acme": "lost"}))
    await shop.store(Paid(1), delay=3_600, tenant="acme")
    await shop.store(Paid(2), Paid(3), delay=3_600)
    await tables.change(
        "UPDATE durable.incoming_envelopes SET body = body || '\\x00' WHERE seq = (SELECT max(seq) FROM "
        "durable.incoming_envelopes)"
    )
    inbox = (await run(tables, Keys({"b": B, "a": A})))["inbox"]
    assert (inbox.total, inbox.done, inbox.left, inbox.unopened_count) == (3, 1, 0, 2)
    assert any("no encryption key 'lost' here" in reason for reason in inbox.unopened)
    assert any("was changed on the way, or in the table" in reason for reason in inbox.unopened)
    assert keys_in(tables, "incoming_envelopes") == {"a", "b", "lost"}


BROKEN_OFF = [MAGIC, MAGIC + b"\xff" * 60, MAGIC.ljust(KEY_ID_AT, b"\0") + b"\x03\xff\xfe\xfd" + b"rest" * 10]


async def test_broken_off_body_needs_no_key_and_is_left(tables: Tables) -> None:
    shop = Shop(tables.url, Keys({"a": A}))
    await shop.store(*map(Paid, range(4)), delay=3_600)
    for number, body in enumerate(BROKEN_OFF):
        await tables.change(
            f"UPDATE durable.incoming_envelopes SET body = '\\x{body.hex()}' WHERE seq = "
            f"(SELECT seq FROM durable.incoming_envelopes ORDER BY seq OFFSET {number} LIMIT 1)"
        )
    keys = Keys({"b": B, "a": A})
    with schema_connection(load_settings(database_url=tables.url)) as conn:
        found = encrypted.count_keys(conn, "durable", encrypted_types(), everything=False)
        locked, locked_without_any = (encrypted.count_locked(conn, "durable", known) for known in (["b"], []))
    inbox = {each.key_id: (each.rows, each.readable) for each in found if each.place == "inbox"}
    assert inbox == {"a": (1, 0), None: (3, 0)}
    assert [(each.key_id, each.rows) for each in locked] == [("a", 1)]
    assert locked_without_any == locked
    rotated = (await run(tables, keys))["inbox"]
    assert (rotated.total, rotated.done, rotated.left, rotated.unopened_count) == (1, 1, 0, 0)


@contextmanager
def refused(tables: Tables, table: str, *ids: UUID) -> Iterator[None]:
    """Let the database refuse changes of these rows."""
    tables.execute(
        f"""CREATE FUNCTION refuse_in_{table}() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF OLD.id = ANY (TG_ARGV::uuid[]) THEN
                RAISE EXCEPTION 'the application says no' USING DETAIL = 'business data';
            END IF;
            RETURN NEW;
        END $$"""
    )
    arguments = ", ".join(f"'{each}'" for each in ids)
    tables.execute(
        f"CREATE TRIGGER refuse BEFORE UPDATE ON durable.{table} FOR EACH ROW "
        f"EXECUTE FUNCTION refuse_in_{table}({arguments})"
    )
    yield
    tables.execute(f"DROP FUNCTION refuse_in_{table} CASCADE")


async def test_rows_refused_by_the_database_are_named_and_the_others_are_encrypted(tables: Tables) -> None:
    await fill(tables, Keys({"a": A}))
    shop = Shop(tables.url, Keys({"a": A}))
    await shop.store(*map(Paid, range(10, 19)), delay=3_600)
    waiting = tables.rows("SELECT id FROM durable.incoming_envelopes ORDER BY seq")[1::6]
    letter_id, letter = tables.rows("SELECT letter_id, id FROM durable.dead_letters ORDER BY letter_id")[0]
    newer = Keys({"b": B, "a": A})

    with refused(tables, "incoming_envelopes", *waiting), refused(tables, "dead_letters", letter):
        found, again = await run(tables, newer), await run(tables, newer)

    assert {place: (each.total, each.done, each.left) for place, each in found.items()} == {
        "outbox": (2, 2, 0),
        "inbox": (11, 9, 0),
        "dead letters": (2, 1, 0),
    }
    why = "the application says no"
    assert found["outbox"].refused == []
    assert found["inbox"].refused == [f"incoming_envelopes {each}, endpoint 'local': {why}" for each in sorted(waiting)]
    assert found["dead letters"].refused == [f"dead_letters {letter}, letter_id '{letter_id}': {why}"]
    assert keys_in(tables, "incoming_envelopes") == keys_in(tables, "dead_letters") == {"a", "b"}
    assert [(each.total, each.done, each.refused_count) for each in again.values()] == [(0, 0, 0), (2, 0, 2), (1, 0, 1)]


@pytest.mark.parametrize(
    ("owner", "done", "left"), [(0, 2, 0), (99, 0, 2), (PARKED_OWNER, 2, 0), (REFUSED_OWNER, 2, 0)]
)
async def test_rows_of_nodes_are_left_and_counted(tables: Tables, owner: int, done: int, left: int) -> None:
    shop = Shop(tables.url, Keys({"a": A}))
    await shop.store(Paid(1), Paid(2), delay=3_600)
    await tables.change(f"UPDATE durable.incoming_envelopes SET owner_id = {owner}, execution_time = NULL")
    inbox = (await run(tables, Keys({"b": B, "a": A})))["inbox"]
    assert (inbox.total, inbox.done, inbox.left) == (2, done, left)


async def letter(tables: Tables, **columns: str) -> None:
    """A dead letter that came in readable, with these columns by SQL."""
    values = {
        "side": "'incoming'", "address": "'shop'", "id": "gen_random_uuid()", "message_type": "'rotation.paid'",
        "source": "'elsewhere'", "correlation_id": "gen_random_uuid()", "content_type": "'application/json'",
        "body": """'{"number":17,"card":"x"}'""", "sent_at": "now()", "exception_type": "'Odd'", "reason": "'odd'",
        "fingerprint": "'f'", "node_id": "1", "replayable": "true",
    } | columns  # fmt: skip
    await tables.change(f"INSERT INTO durable.dead_letters ({', '.join(values)}) SELECT {', '.join(values.values())}")


RESOLVED = {"resolution": "'discarded'", "resolved_at": "now()", "resolved_by": "'ada'"}
READABLE = """'{"number":18,"card":"x"}'"""
LETTERS = {
    "a letter": ({}, 1),
    "an edited letter": ({"edited_body": READABLE}, 1),
    "a resolved letter": (RESOLVED, 1),
    "bytes that arrived": ({"replayable": "false"}, 0),
    "edited bytes that arrived": ({"replayable": "false", "edited_body": READABLE}, 0),
    "bytes without an id": ({"replayable": "false", "id": "NULL"}, 0),
    "a letter of another type": ({"message_type": "'rotation.noted'"}, 0),
}


@pytest.mark.parametrize("name", LETTERS)
async def test_readable_letters_are_those_of_a_rotation(tables: Tables, name: str) -> None:
    columns, count = LETTERS[name]
    await letter(tables, **columns)

    def readable() -> tuple[int, int]:
        with schema_connection(load_settings(database_url=tables.url)) as conn:
            uses = encrypted.count_keys(conn, "durable", encrypted_types(), everything=False)
            doctor = encrypted.count_readable(conn, "durable", encrypted_types(), everything=False)
        return doctor, sum(each.readable for each in uses)

    assert readable() == (count, count)
    assert (await run(tables, Keys({"a": A})))["dead letters"].done == count
    assert readable() == (0, 0)


@pytest.mark.parametrize(("columns", "waiting"), [({}, 1), (RESOLVED, 0)])
async def test_missing_key_of_a_letter_is_told_while_the_letter_waits(
    tables: Tables, columns: dict[str, str], waiting: int
) -> None:
    await fill(tables, Keys({"lost": A}))
    body = "(SELECT body FROM durable.dead_letters ORDER BY letter_id LIMIT 1)"
    await letter(tables, **columns, body=body, edited_body=body)
    await tables.change("DELETE FROM durable.dead_letters WHERE source = 'shop'")
    with schema_connection(load_settings(database_url=tables.url)) as conn:
        locked = {each.place: each.rows for each in encrypted.count_locked(conn, "durable", ["b"])}
        uses = encrypted.count_keys(conn, "durable", encrypted_types(), everything=False)
    assert locked.get("dead letters", 0) == waiting
    assert [each.rows for each in uses if each.place == "dead letters" and each.key_id == "lost"] == [1]


async def test_locked_rows_are_passed_over_and_found_by_the_next_run(tables: Tables) -> None:
    shop = Shop(tables.url, Keys({"a": A}))
    await shop.store(*map(Paid, range(5)), delay=3_600)
    newer = Keys({"b": B, "a": A})
    plain = tables.url.replace("postgresql+asyncpg", "postgresql").replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(plain) as conn:
        conn.execute("SELECT FROM durable.incoming_envelopes ORDER BY seq LIMIT 2 FOR UPDATE")
        inbox = (await run(tables, newer))["inbox"]
        assert (inbox.total, inbox.done, inbox.left) == (5, 3, 2)
    inbox = (await run(tables, newer))["inbox"]
    assert (inbox.total, inbox.done, inbox.left) == (2, 2, 0)


async def test_rotation_beside_running_nodes_loses_and_doubles_nothing(
    tables: Tables, make_database: Callable[[str], str]
) -> None:
    """Two services, a stream of messages, and key after key: each is handled once."""
    at = f"tcp://127.0.0.1:{free_port()}"
    billing = Shop(tables.url, Keys({"k0": A}))
    billing.bus.listen(at)
    other = Tables(make_database("orders"), None)  # type: ignore[arg-type]
    orders = Shop(other.url, Keys({"k0": A}))
    orders.bus.route(Noted, to=NOWHERE)
    rounds, each_round = 6, 40
    rotated = 0
    async with billing.bus, orders.bus:
        for number in range(rounds):
            first = number * each_round
            for place in range(first, first + each_round, 4):
                await orders.send(*map(Paid, range(place, place + 2)), to=at)
                await orders.send(Paid(place + 2), to=at, key=f"order-{place % 3}")
                await billing.send(Paid(place + 3), delay=5 if place % 8 else None)
            newer = {f"k{each}": bytes([each + 1]) * 32 for each in range(number + 1, -1, -1)}
            billing.keys = Keys(newer, encrypts=f"k{number}")
            billing.bus.application.ring.refresh()  # the receiver has the new key before anybody encrypts with it
            billing.keys = orders.keys = Keys(newer)
            billing.bus.application.ring.refresh()
            orders.bus.application.ring.refresh()
            for each in (tables, other):
                found = await run(each, Keys(newer))
                rotated += sum(done.done for done in found.values())
                assert not any(done.unopened_count for done in found.values())
        await eventually(lambda: len(billing.seen) >= rounds * each_round, within=60, what="handling")
        await eventually(lambda: tables.count("incoming_envelopes") == 0)
    assert sorted(billing.seen) == list(range(rounds * each_round))
    assert tables.count("dead_letters") == 0
    assert rotated > 0


# ---------------------------------------------------------------- the commands


def environment(monkeypatch: pytest.MonkeyPatch, tables: Tables, **keys: bytes) -> None:
    monkeypatch.setenv("DURABLE_DATABASE_URL", tables.url)
    encoded = {name: base64.b64encode(key).decode() for name, key in keys.items()}
    monkeypatch.setenv("DURABLE_ENCRYPTION_KEYS", json.dumps(encoded))


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


def call(agent: Agent, *arguments: str) -> Any:
    ended = agent(*arguments, "--json")
    return ended.code, json.loads(ended.out)


def test_commands_count_and_rotate(tables: Tables, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(fill(tables, Keys({"a": A})))
    environment(monkeypatch, tables, b=B, a=A)
    code, listed = call(agent, "keys", "list")
    assert code == 0
    rows = {row["key"]: row for row in listed["keys"]}
    assert list(rows["a"]) == ["key", "state", "outbox", "inbox", "dead_letters", "history", "answers"]
    assert list(rows["a"].values()) == ["a", "decrypts", 2, 2, 2, 2, 0]
    assert list(rows["b"].values()) == ["b", "encrypts", 0, 0, 0, 0, 0]

    code, told = call(agent, "keys", "rotate", "--dry-run")
    assert (code, told["dry_run"], [place["total"] for place in told["places"]]) == (0, True, [2, 2, 2])
    assert keys_in(tables, "incoming_envelopes") == {"a"}

    code, told = call(agent, "keys", "rotate")
    assert (code, told["key"], [place["done"] for place in told["places"]]) == (0, "b", [2, 2, 2])
    rows = {row["key"]: row for row in call(agent, "keys", "list")[1]["keys"]}
    assert [rows["a"][place] for place in ("outbox", "inbox", "dead_letters", "history")] == [0, 0, 0, 2]

    environment(monkeypatch, tables, c=C)
    rows = {row["key"]: row for row in call(agent, "keys", "list")[1]["keys"]}
    assert (rows["b"]["state"], rows["a"]["state"], rows["c"]["state"]) == ("missing", "missing", "encrypts")
    code, told = call(agent, "keys", "rotate")
    assert code == 1
    assert [place["unopened_count"] for place in told["places"]] == [2, 2, 2]
    ended = agent("keys", "list")
    assert "missing" in ended.out


def test_command_names_refused_rows_and_ends_with_1(
    tables: Tables, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(fill(tables, Keys({"a": A})))
    environment(monkeypatch, tables, b=B, a=A)
    waiting = tables.one("SELECT id FROM durable.incoming_envelopes ORDER BY seq LIMIT 1")
    named = f"incoming_envelopes {waiting}, endpoint 'local': the application says no"
    with refused(tables, "incoming_envelopes", waiting):
        ended = agent("keys", "rotate")
        code, told = call(agent, "keys", "rotate")
    assert (ended.code, ended.out) == (
        1,
        "outbox: 2 of 2 encrypted anew with key b\n"
        "inbox: 1 of 2 encrypted anew with key b\n"
        "  left: 1 (the database refuses to change them)\n"
        f"  refused: {named}\n"
        "dead letters: 2 of 2 encrypted anew with key b\n",
    )
    assert code == 1
    assert [(place["refused_count"], place["refused"]) for place in told["places"]] == [(0, []), (1, [named]), (0, [])]


def test_commands_without_keys(tables: Tables, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_DATABASE_URL", tables.url)
    assert agent("keys", "list").out == "no encrypted body, and no key\n"
    ended = agent("keys", "rotate")
    assert (ended.code, ended.err) == (
        2,
        "error: encryption_keys: no key to encrypt with; give encryption_keys or encryption_key_file, or APP:BUS with "
        "Bus.keys_from()\n",
    )
    asyncio.run(fill(tables, Keys({"a": A})))
    [row] = call(agent, "keys", "list")[1]["keys"]
    assert (row["key"], row["state"], row["inbox"]) == ("a", "unknown", 2)
