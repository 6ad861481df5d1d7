"""Encryption keys by their ids: which one encrypts, and which ones decrypt.

    Keys({"2026-11": b"...", "2026-05": b"..."})                        the first encrypts, all decrypt
    Keys({...}, encrypts="2026-05")                                     another one encrypts
    Keys({...}, tenants={"acme": "acme-1", "globex": "globex-3"})       tenants with keys of their own

A key is 32 random bytes. Its id is no secret: it travels with each body, and stands in the output of commands.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from durable import strict_json
from durable.arguments import checked_names
from durable.errors import InvalidSetting
from durable.messages.sealed import KEY_ID
from durable.settings import Settings

KEY_BYTES: Final = 32

_MEMBERS: Final = ("keys", "encrypts", "tenants")


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """Encryption keys by their ids.

    `encrypts`: id of the key that encrypts (default: the first). `tenants`: id of the key that encrypts for a tenant,
    which is the header `tenant`, as of `send(tenant=...)`; other messages get the key of `encrypts`. Every key
    decrypts. Raises InvalidSetting for a key that has not 32 bytes, or an id without a key.
    """

    keys: Mapping[str, bytes] = field(default_factory=dict)
    encrypts: str | None = None
    tenants: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("keys", self.keys), ("tenants", self.tenants)):
            if not isinstance(value, Mapping):  # and nothing of it is shown
                raise InvalidSetting(f"Keys: {name}: give a mapping, not {type(value).__name__}")
        for key_id, key in self.keys.items():
            if not isinstance(key_id, str) or not KEY_ID.fullmatch(key_id):
                raise InvalidSetting(f"Keys: keys: {key_id!r} is no key id; give letters, digits, '.', '-' and '_'")
            if not isinstance(key, bytes) or len(key) != KEY_BYTES:
                raise InvalidSetting(f"Keys: keys: {key_id!r} must be {KEY_BYTES} bytes; make one by os.urandom(32)")
        if self.encrypts is not None and not self._has(self.encrypts):
            raise InvalidSetting(f"Keys: encrypts={self.encrypts!r} is the id of none of these keys: {self._ids}")
        for tenant, key_id in self.tenants.items():
            if not tenant or not isinstance(tenant, str) or not self._has(key_id):
                raise InvalidSetting(
                    f"Keys: tenants: {tenant!r} has key {key_id!r}, which is none of these: {self._ids}"
                )

    def __repr__(self) -> str:
        return f"Keys({self._ids}, encrypts={self.encrypting_id!r})"

    def _has(self, key_id: object) -> bool:
        return isinstance(key_id, str) and key_id in self.keys

    @property
    def _ids(self) -> str:
        return ", ".join(map(repr, self.keys)) or "none"

    @property
    def encrypting_id(self) -> str | None:
        """Id of the key that encrypts for tenants without a key of their own; None without any key."""
        return self.encrypts or next(iter(self.keys), None)


Keys.__init__ = checked_names(Keys.__init__)  # type: ignore[method-assign]
NO_KEYS: Final = Keys()


def of_settings(settings: Settings) -> Keys:
    """Read the keys of the settings encryption_keys and encryption_tenants. Raises InvalidSetting."""
    encoded = {key_id: key.get_secret_value() for key_id, key in settings.encryption_keys.items()}
    return _keys({"keys": encoded, "tenants": settings.encryption_tenants}, "encryption_keys")


def of_text(text: str | bytes, place: str) -> Keys:
    """Read a document such as {"keys": {"2026-11": "base64"}, "encrypts": "2026-11", "tenants": {"acme": "2026-11"}}.

    Raises InvalidSetting, which names the place and shows no key.
    """
    try:
        document = json.loads(text)
        strict_json.read(msgspec.json.decode, text if isinstance(text, bytes) else text.encode())
    except json.JSONDecodeError as error:
        raise InvalidSetting(f"{place}: is no JSON (line {error.lineno})") from None
    except (ValueError, RecursionError) as error:
        raise InvalidSetting(f"{place}: is no JSON of keys: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("keys"), dict):
        raise InvalidSetting(f'{place}: must be a JSON object such as {{"keys": {{"2026-11": "..."}}}}')
    for name in document:
        if name not in _MEMBERS:
            raise InvalidSetting(f"{place}: {name!r} is unknown; the members are {', '.join(_MEMBERS)}")
    return _keys(document, place)


def _keys(document: Mapping[str, Any], place: str) -> Keys:
    keys = {key_id: _decoded(key_id, encoded, place) for key_id, encoded in document["keys"].items()}
    try:
        return Keys(keys, document.get("encrypts"), document.get("tenants") or {})
    except InvalidSetting as error:
        raise InvalidSetting(f"{place}: {error}") from None


def _decoded(key_id: str, encoded: Any, place: str) -> bytes:
    try:
        key = base64.b64decode(encoded, validate=True)
    except (TypeError, ValueError, binascii.Error):
        key = b""
    if len(key) != KEY_BYTES:
        raise InvalidSetting(
            f"{place}: key {key_id!r} must be {KEY_BYTES} bytes in base64; make one by: openssl rand -base64 32"
        )
    return key
