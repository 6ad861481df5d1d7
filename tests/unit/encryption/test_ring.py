"""The ring: which key encrypts, which are asked for, and how often its source is."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

import durable
from durable import InvalidSetting, Keys, message
from durable.encryption.decoding import decode
from durable.encryption.ring import KeyRing
from durable.envelope import Envelope, LeasedEnvelope
from durable.errors import Forged, InvalidMessage, MissingKey
from durable.messages.routing import LOCAL
from durable.messages.sealed import is_sealed, parted
from durable.settings import load_settings
from durable.testing import eventually

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))


@message("ring.paid", encrypted=True)
class Paid(msgspec.Struct):
    amount: int


@message("ring.shipped")
class Shipped(msgspec.Struct):
    number: int


def envelope(body: bytes = b'{"amount":17}', **changes: Any) -> Envelope:
    given: dict[str, Any] = {"id": UUID(int=17), "message_type": "ring.paid", "destination": "tcp://billing:2301"}
    sent_at = datetime(2026, 1, 1, tzinfo=UTC)
    return Envelope(
        **{**given, "source": "a", "correlation_id": UUID(int=1), "body": body, "sent_at": sent_at, **changes}
    )


def ring_of(*, everything: bool = False, **keys: Any) -> KeyRing:
    return KeyRing(lambda: Keys(**keys), everything=everything)


def key_of(body: bytes) -> str:
    parts = parted(body)
    assert parts is not None
    return parts.key_id


class Counted:
    """A source that counts its calls, and can be changed or made to fail."""

    def __init__(self, keys: Keys) -> None:
        self.keys: Any = keys
        self.calls = 0
        self.error: Exception | None = None

    def __call__(self) -> Keys:
        self.calls += 1
        if self.error is not None:
            raise self.error
        found: Keys = self.keys
        return found


def test_body_comes_back_from_its_envelope() -> None:
    ring = ring_of(keys={"a": A})
    [sealed] = ring.sealed([envelope()])
    assert is_sealed(sealed.body)
    assert b"17" not in sealed.body
    assert ring.opened(sealed) == envelope()


def test_readable_body_is_returned_unchanged() -> None:
    plain = envelope()
    assert KeyRing().opened(plain) is plain


def test_encrypted_body_is_not_encrypted_again() -> None:
    ring = ring_of(keys={"a": A})
    [sealed] = ring.sealed([envelope()])
    assert ring.sealed([sealed]) == [sealed]


def test_key_of_the_tenant_encrypts() -> None:
    ring = ring_of(keys={"a": A, "b": B, "c": C}, tenants={"acme": "b", "globex": "c"})
    tenants = {"acme": "b", "globex": "c", "other": "a", "": "a"}
    for tenant, key_id in tenants.items():
        [sealed] = ring.sealed([envelope(headers={"tenant": tenant} if tenant else {})])
        assert key_of(sealed.body) == key_id
        assert ring.opened(sealed).body == envelope().body


def test_body_of_one_tenant_does_not_open_for_another() -> None:
    ring = ring_of(keys={"a": A})
    [sealed] = ring.sealed([envelope(headers={"tenant": "acme"})])
    with pytest.raises(Forged):
        ring.opened(msgspec.structs.replace(sealed, headers={"tenant": "globex"}))


def test_former_key_decrypts() -> None:
    [sealed] = ring_of(keys={"a": A}).sealed([envelope()])
    assert ring_of(keys={"b": B, "a": A}).opened(sealed) == envelope()


def test_missing_key_is_named() -> None:
    [sealed] = ring_of(keys={"a": A}).sealed([envelope()])
    for ring in (KeyRing(), ring_of(keys={"b": B})):
        assert ring.missing(sealed.body) == "a"
        with pytest.raises(MissingKey, match="no encryption key 'a' here") as raised:
            ring.opened(sealed)
        assert raised.value.key_id == "a"
    assert ring_of(keys={"a": B}).missing(sealed.body) is None
    assert KeyRing().missing(b"{}") is None


def test_body_sealed_for_another_inbox_is_refused() -> None:
    ring = ring_of(keys={"a": A})
    [local] = ring.sealed([envelope(destination=LOCAL)])
    [remote] = ring.sealed([envelope()])
    assert ring.opened(local, LOCAL).body == ring.opened(remote, "billing<-orders").body == envelope().body
    for sealed, endpoint in ((local, "billing"), (remote, LOCAL)):
        with pytest.raises(Forged, match="was sealed for"):
            ring.opened(sealed, endpoint)


def test_encryption_without_a_key_is_refused() -> None:
    for ring in (KeyRing(), ring_of()):
        with pytest.raises(InvalidSetting, match="no key, and a message is to be encrypted"):
            ring.sealed([envelope()])


def test_classes_are_chosen_by_their_declaration_or_all() -> None:
    assert [KeyRing().must_seal(name) for name in ("ring.paid", "ring.shipped", "unknown")] == [True, False, False]
    assert all(ring_of(everything=True).must_seal(name) for name in ("ring.paid", "ring.shipped", "unknown"))


def test_reason_of_a_codec_is_not_kept_of_an_encrypted_body() -> None:
    ring = ring_of(keys={"a": A})
    [sealed] = ring.sealed([envelope(b'{"amount":"canary-4711"}', destination=LOCAL)])
    with pytest.raises(InvalidMessage) as raised:
        decode(ring, LeasedEnvelope(sealed, endpoint=LOCAL), Paid)
    assert "the encrypted body is no Paid" in str(raised.value)
    error: BaseException | None = raised.value
    while error is not None:
        assert "canary" not in str(error)
        assert "amount" not in str(error)
        error = error.__cause__ or error.__context__


# ---------------------------------------------------------------- its source


def test_source_is_asked_once_for_many_messages() -> None:
    source = Counted(Keys({"a": A}))
    ring = KeyRing(source, reload_seconds=3_600)
    for number in range(500):
        [sealed] = ring.sealed([envelope(id=UUID(int=number + 1))])
        assert ring.opened(sealed).body == envelope().body
    assert source.calls == 1


async def test_missing_key_is_asked_for_soon() -> None:
    source = Counted(Keys({"a": A}))
    ring = KeyRing(source, reload_seconds=3_600)
    [sealed] = ring_of(keys={"b": B}).sealed([envelope()])
    assert ring.missing(sealed.body) == "b"
    source.keys = Keys({"a": A, "b": B})
    for _ in range(1_000):
        ring.missing(sealed.body)
    assert await eventually(lambda: ring.missing(sealed.body) is None)
    assert ring.opened(sealed) == envelope()
    assert source.calls < 20


async def test_file_is_followed(tmp_path: Path) -> None:
    def write(**keys: bytes) -> None:
        text = json.dumps({"keys": {name: base64.b64encode(key).decode() for name, key in keys.items()}})
        (tmp_path / "new").write_text(text)
        os.replace(tmp_path / "new", tmp_path / "keys.json")

    write(a=A)
    ring = KeyRing.of(load_settings(encryption_key_file=tmp_path / "keys.json", encryption_reload=0.05))
    [first] = ring.sealed([envelope()])
    write(b=B, a=A)
    assert await eventually(lambda: key_of(ring.sealed([envelope()])[0].body) == "b")
    assert ring.opened(first) == envelope()


async def test_keys_of_before_are_used_while_the_source_fails(caplog: pytest.LogCaptureFixture) -> None:
    source = Counted(Keys({"a": A}))
    ring = KeyRing(source, reload_seconds=0.02)
    [sealed] = ring.sealed([envelope()])
    with caplog.at_level(logging.ERROR, "durable"):
        source.error = OSError("the vault is sealed")
        asked = source.calls
        assert await eventually(lambda: source.calls > asked + 3)
        assert ring.opened(sealed) == envelope()
        assert ring.trouble == "OSError: the vault is sealed"
    told = [record for record in caplog.records if "the encryption keys cannot be read" in record.getMessage()]
    assert len(told) == 1  # and not one line for each try
    source.error = None
    assert await eventually(lambda: ring.trouble == "")


@pytest.mark.parametrize("wrong", [OSError("no vault"), {"a": A}, None], ids=["error", "dict", "None"])
def test_source_without_any_keys_is_an_error(wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
    source = Counted(wrong)
    source.error = wrong if isinstance(wrong, Exception) else None
    with pytest.raises(InvalidSetting, match="the encryption keys cannot be read") as refused:
        KeyRing(source).load()
    assert "those of before" not in caplog.text
    for name in re.findall(r"return durable\.(\w+)", str(refused.value)):
        assert hasattr(durable, name), "the name in the error can be imported"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_ring_reloads_in_a_forked_process() -> None:
    source = Counted(Keys({"a": A}))
    ring = KeyRing(source, reload_seconds=0.05)
    ring.load()
    child = os.fork()
    if child == 0:
        source.keys = Keys({"b": B})
        found = threading.Event()
        for _ in range(400):
            if "b" in ring.key_ids():
                found.set()
                break
            threading.Event().wait(0.05)
        os._exit(0 if found.is_set() else 1)
    assert os.waitpid(child, 0)[1] == 0


async def test_thread_of_a_forgotten_ring_ends() -> None:
    def threads() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "durable encryption keys"]

    before = set(threads())
    ring = KeyRing(lambda: Keys({"a": A}), reload_seconds=0.02)
    ring.load()
    [thread] = [each for each in threads() if each not in before]
    del ring
    is_over: Callable[[], bool] = lambda: not thread.is_alive()  # noqa: E731
    assert await eventually(is_over)


def test_missing_keys_with_made_up_ids_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    ring = ring_of(keys={"a": A})
    for number in range(300):
        ring.tell_missing(f"made-up-{number}", 1)
        ring.tell_missing("made-up-0", 1)
    assert len(caplog.messages) == 11
    assert caplog.messages[0] == "encryption key made-up-0 is missing: 1 message waits for it, and others may follow"
    assert caplog.messages[-1] == "encryption keys are missing: more than 9; others are not named for a while"
