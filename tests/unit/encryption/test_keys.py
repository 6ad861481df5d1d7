"""Where keys come from, and what is said of those that are none."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from durable import InvalidSetting, Keys
from durable.encryption import keys as sources
from durable.encryption.ring import KeyRing
from durable.settings import load_settings

A, B = bytes(range(32)), bytes(range(32, 64))


def text_of(key: bytes) -> str:
    return base64.b64encode(key).decode()


def test_first_key_encrypts_unless_another_is_named() -> None:
    assert Keys({"a": A, "b": B}).encrypting_id == "a"
    assert Keys({"a": A, "b": B}, encrypts="b").encrypting_id == "b"
    assert Keys().encrypting_id is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"keys": {"a": b"short"}}, "keys: 'a' must be 32 bytes"),
        ({"keys": {"a": "x" * 32}}, "keys: 'a' must be 32 bytes"),
        ({"keys": {"a b": A}}, "'a b' is no key id"),
        ({"keys": {"": A}}, "'' is no key id"),
        ({"keys": {"x" * 101: A}}, "is no key id"),
        ({"keys": {"a": A}, "encrypts": "b"}, "encrypts='b' is the id of none of these keys: 'a'"),
        ({"keys": {"a": A}, "tenants": {"acme": "b"}}, "tenants: 'acme' has key 'b', which is none of these: 'a'"),
        ({"keys": {"a": A}, "tenants": {"": "a"}}, "tenants: ''"),
    ],
)
def test_invalid_keys_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        Keys(**given)


def test_keys_are_not_shown() -> None:
    shown = repr(Keys({"a": A, "b": B}, tenants={"acme": "b"}))
    assert shown == "Keys('a', 'b', encrypts='a')"


# ---------------------------------------------------------------- settings


def test_settings_hold_keys_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_ENCRYPTION_KEYS", json.dumps({"b": text_of(B), "a": text_of(A)}))
    monkeypatch.setenv("DURABLE_ENCRYPTION_TENANTS", '{"acme": "a"}')
    settings = load_settings()
    found = sources.of_settings(settings)
    assert found == Keys({"b": B, "a": A}, tenants={"acme": "a"})
    assert found.encrypting_id == "b"
    assert text_of(A) not in repr(settings)


@pytest.mark.parametrize("key", ["", "no base64 %%", text_of(b"short"), text_of(A) + "AAAA"])
def test_setting_with_no_key_is_refused_and_not_shown(key: str) -> None:
    settings = load_settings(encryption_keys={"a": key})
    with pytest.raises(InvalidSetting, match="encryption_keys: key 'a' must be 32 bytes in base64") as raised:
        KeyRing.of(settings).load()
    assert not key or key not in str(raised.value)


def test_settings_of_two_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="encryption_keys and encryption_key_file: give one of them"):
        load_settings(encryption_keys={"a": text_of(A)}, encryption_key_file=tmp_path / "keys.json")
    with pytest.raises(InvalidSetting, match="encryption_tenants: name keys of encryption_keys"):
        load_settings(encryption_tenants={"acme": "a"})


# ---------------------------------------------------------------- files


def test_file_holds_keys_and_tenants() -> None:
    document = {"keys": {"a": text_of(A), "b": text_of(B)}, "encrypts": "b", "tenants": {"acme": "a"}}
    assert sources.of_text(json.dumps(document), "keys.json") == Keys({"a": A, "b": B}, "b", {"acme": "a"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "keys.json: is no JSON"),
        ("[]", "keys.json: must be a JSON object"),
        ('{"keys": []}', "keys.json: must be a JSON object"),
        ('{"keys": {}, "encrypt": "a"}', "keys.json: 'encrypt' is unknown; the members are keys, encrypts, tenants"),
        ('{"keys": {"a": 17}}', "keys.json: key 'a' must be 32 bytes in base64"),
        (json.dumps({"keys": {"a": text_of(A)}, "encrypts": "b"}), "keys.json: Keys: encrypts='b'"),
    ],
)
def test_file_without_keys_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        sources.of_text(text, "keys.json")
