"""Dead letters with encrypted bodies: shown only where it is asked for, edited, rehearsed and replayed; and doctor."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from durable import Bus
from durable.messages.sealed import is_sealed, parted
from durable.testing import eventually
from tests.support import canary
from tests.support.canary import CANARY
from tests.support.command import Agent, Ended
from tests.support.tables import Tables

A, B = (bytes([number]) * 32 for number in (1, 2))

APPLICATION = """
from datetime import timedelta
from durable import Keys, Retry

@message("NAME.paid", encrypted=True)
class Paid(msgspec.Struct):
    number: int
    card: str

@message("NAME.shipped", encrypted=True)
class Shipped(msgspec.Struct):
    number: int
    card: str

@message("NAME.packed", encrypted=True, content_type="application/msgpack")
class Packed(msgspec.Struct):
    number: int
    card: str

bus = Bus("NAME", poll_interval=timedelta(milliseconds=50))
bus.route(Shipped, to="tcp://127.0.0.1:1")
seen = []

@bus.handles(Paid, retry=Retry(immediate=0, delays=[]))
async def pay(paid: Paid) -> Shipped:
    if paid.number < 0:
        raise LookupError(f"no payment {paid.number}")
    seen.append(paid)
    return Shipped(paid.number, paid.card)

@bus.handles(Packed, retry=Retry(immediate=0, delays=[]))
async def pack(packed: Packed) -> None:
    if packed.number < 0:
        raise LookupError(f"no pack {packed.number}")
    seen.append(packed)
"""


class App:
    """An application with dead letters, and the command."""

    def __init__(self, agent: Agent, tables: Tables, source: str = APPLICATION) -> None:
        self.agent = agent
        self.tables = tables
        self.name = agent.application(source)
        self.module = importlib.import_module(self.name)
        self.bus: Bus = self.module.bus

    def fail(self, *names: str, **options: Any) -> list[int]:
        """Let messages of these classes become dead letters; returns their numbers."""

        async def run() -> None:
            before = self.tables.count("dead_letters")
            async with self.bus:
                async with self.bus.unit_of_work():
                    for name in names:
                        self.bus.send(getattr(self.module, name)(-1, CANARY), **options)
                await eventually(lambda: self.tables.count("dead_letters") == before + len(names))

        asyncio.run(run())
        return self.tables.rows("SELECT letter_id FROM durable.dead_letters ORDER BY letter_id")[-len(names) :]

    def handle(self, count: int) -> list[Any]:
        """Run the bus until so many were handled."""

        async def run() -> None:
            async with self.bus:
                await eventually(lambda: len(self.module.seen) >= count)

        asyncio.run(run())
        return list(self.module.seen)

    def __call__(self, *arguments: str) -> Ended:
        return self.agent("dead-letters", *arguments)

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json").out)


def give(monkeypatch: pytest.MonkeyPatch, **keys: bytes) -> None:
    encoded = {name: base64.b64encode(key).decode() for name, key in keys.items()}
    monkeypatch.setenv("DURABLE_ENCRYPTION_KEYS", json.dumps(encoded))


@pytest.fixture
def app(tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> App:
    monkeypatch.setenv("DURABLE_DATABASE_URL", tables.url)
    monkeypatch.syspath_prepend(tmp_path)
    give(monkeypatch, a=A)
    return App(Agent(tmp_path, monkeypatch, capsys), tables)


@pytest.mark.parametrize("name", ["Paid", "Packed"])
def test_show_prints_a_body_only_on_demand(app: App, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    [number] = app.fail(name, tenant="acme")
    for words in ([str(number)], [f"{app.name}:bus", str(number)]):
        shown = app("show", *words)
        assert shown.code == 0
        assert "(encrypted with key a; show --decrypt opens it)" in shown.out
        assert canary.in_text(shown.out) == []
        assert canary.in_text(app("show", *words, "--json").out) == []
        row = app.json("show", *words)["letter"]
        assert (row["body"], row["body_key"]) == (None, "a")
        assert CANARY in app("show", *words, "--decrypt").out or name == "Packed"
        opened = app.json("show", f"{app.name}:bus", *words[-1:], "--decrypt")["letter"]
        assert json.loads(opened["body"]) == {"number": -1, "card": CANARY}
    for listing in (["list"], ["groups"]):
        assert canary.in_text(app(*listing).out) == []
    give(monkeypatch, b=B)
    ended = app("show", str(number), "--decrypt")
    assert (ended.code, ended.err) == (
        1,
        "error: no encryption key 'a' here: give it by encryption_keys, encryption_key_file or Bus.keys_from()\n",
    )
    monkeypatch.delenv("DURABLE_ENCRYPTION_KEYS")
    assert app("show", str(number), "--decrypt").code == 2
    assert app("show", str(number)).code == 0


@pytest.mark.parametrize("name", ["Paid", "Packed"])
def test_edited_body_is_encrypted_and_handled(app: App, name: str) -> None:
    [number] = app.fail(name, tenant="acme")
    body = json.dumps({"number": 17, "card": f"{CANARY}-2"})
    ended = app("edit", f"{app.name}:bus", str(number), "--body", body)
    assert ended.code == 0, ended.err
    assert all(is_sealed(bytes(each)) for each in app.tables.rows("SELECT body FROM durable.incoming_envelopes"))
    assert all(is_sealed(bytes(each)) for each in app.tables.rows("SELECT edited_body FROM durable.dead_letters"))
    assert canary.found(app.tables) == []
    [seen] = app.handle(1)
    assert (seen.number, seen.card) == (17, f"{CANARY}-2")
    shown = app.json("show", f"{app.name}:bus", str(number), "--decrypt")["letter"]
    assert json.loads(shown["edited_body"]) == json.loads(body)
    assert json.loads(shown["body"])["number"] == -1


def test_edit_without_the_application_encrypts_with_the_keys_of_the_settings(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    [number] = app.fail("Paid")
    body = json.dumps({"number": 17, "card": CANARY})
    monkeypatch.delenv("DURABLE_ENCRYPTION_KEYS")
    refused = app("edit", str(number), "--body", body)
    assert refused.code == 2
    assert "no key, and a message is to be encrypted" in refused.err
    give(monkeypatch, b=B, a=A)
    assert app("edit", str(number), "--body", body).code == 0
    [kept] = app.tables.rows("SELECT body FROM durable.incoming_envelopes")
    parts = parted(bytes(kept))
    assert parts is not None
    assert parts.key_id == "b"
    assert canary.found(app.tables) == []


def test_edit_refuses_a_body_of_another_class(app: App) -> None:
    [number] = app.fail("Paid")
    refused = app("edit", f"{app.name}:bus", str(number), "--body", '{"number": "many"}')
    assert (refused.code, "the body is no Paid" in refused.err) == (2, True)


def test_rehearsal_opens_and_prints_no_body(app: App) -> None:
    [number] = app.fail("Paid")
    words = (f"{app.name}:bus", str(number))
    failing = app.json("replay", *words, "--rehearse")["rehearsed"]
    assert [(each["outcome"], each["error"]["message"]) for each in failing] == [("fails", "no payment -1")]
    body = json.dumps({"number": 17, "card": CANARY})
    ended = app("edit", *words, "--body", body, "--rehearse", "--json")
    [rehearsed] = json.loads(ended.out)["rehearsed"]
    assert rehearsed["outcome"] == "succeeds"
    assert [(each["message_type"], each["body"], each["body_key"]) for each in rehearsed["sends"]] == [
        (f"{app.name}.shipped", None, "a")
    ]
    assert canary.in_text(ended.out) == []
    rehearsed = app("edit", *words, "--body", body, "--rehearse").out
    assert ("(encrypted with key a)" in rehearsed, "show" in rehearsed) == (True, False), "it is stored nowhere"


def test_letter_is_handled_by_hand(app: App) -> None:
    [number] = app.fail("Paid")
    ended = app("debug", f"{app.name}:bus", str(number))
    assert (ended.code, "no payment -1" in ended.out + ended.err) == (1, True)


def test_body_of_another_letter_is_not_shown(app: App) -> None:
    [number] = app.fail("Paid")
    app.tables.execute("UPDATE durable.dead_letters SET id = gen_random_uuid()")
    ended = app("show", str(number), "--decrypt")
    assert ended.code == 1
    assert "was changed on the way, or in the table" in ended.err


# ---------------------------------------------------------------- doctor


def checks(app: App, *words: str) -> dict[str, tuple[str, str]]:
    found = json.loads(app.agent("doctor", *words, "--json").out)["checks"]
    return {each["name"]: (each["verdict"], each["detail"]) for each in found}


def test_doctor_tells_of_keys(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = f"{app.name}:bus"
    assert checks(app, bus)["encryption keys"] == ("ok", "a; a encrypts")
    assert checks(app)["encryption keys"] == ("ok", "a; a encrypts")
    assert "missing keys" not in checks(app)
    app.fail("Paid")
    give(monkeypatch, b=B)
    assert checks(app)["missing keys"] == ("fail", "1 of key a in dead letters: messages wait for them")
    app.tables.execute("UPDATE durable.dead_letters SET body = '{}'")
    assert checks(app, bus)["readable bodies"][0] == "warn"
    monkeypatch.delenv("DURABLE_ENCRYPTION_KEYS")
    assert "encryption keys" not in checks(app)


def test_doctor_tells_of_a_missing_unused_or_broken_ring(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DURABLE_ENCRYPTION_KEYS")
    encrypting = app.agent.application(APPLICATION)
    verdict, detail = checks(app, f"{encrypting}:bus")["encryption keys"]
    assert (verdict, f"none, although {encrypting}.packed, {encrypting}.paid" in detail) == ("fail", True)
    readable = app.agent.application()
    assert "encryption keys" not in checks(app, f"{readable}:bus")
    give(monkeypatch, a=A)
    unused = app.agent.application()
    assert checks(app, f"{unused}:bus")["encryption keys"] == ("warn", "a, and nothing is encrypted")
    monkeypatch.setenv("DURABLE_ENCRYPTION_KEYS", '{"a": "short"}')
    broken = app.agent.application(APPLICATION)
    verdict, detail = checks(app, f"{broken}:bus")["encryption keys"]
    assert (verdict, "key 'a' must be 32 bytes in base64" in detail) == ("fail", True)
