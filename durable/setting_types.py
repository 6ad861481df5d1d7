"""Types of settings: each with how it is read from text, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic_settings import NoDecode

from durable import strict_json
from durable.duration import duration

_LONGEST: Final = timedelta(days=36_500)
_SHORTEST_SECRET: Final = 16  # characters


def _span(value: Any) -> Any:
    """Read a length of time as durable.duration does, or as ISO 8601, by pydantic."""
    try:
        return duration(value)
    except ValueError:
        return value


def _bounded(span: timedelta) -> timedelta:
    if not timedelta(0) <= span <= _LONGEST:
        raise ValueError(f"give a time from 0 to {_LONGEST.days} days")
    return span


def _above_zero(span: timedelta) -> timedelta:
    if span <= timedelta(0):
        raise ValueError("give a time above 0")
    return span


def _read(text: str) -> Any:
    """Read JSON in which no key stands twice: the last one would count, and nobody would see the first."""
    return strict_json.read(msgspec.json.decode, text.encode())


def _by_name(value: Any) -> Any:
    """A mapping is a JSON object where it is text."""
    try:
        return _read(value) if isinstance(value, str) else value
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise ValueError('must be a JSON object, such as {"name": "value"}') from None


def _written(pattern: str, words: str) -> AfterValidator:
    """Refuse text that does not match the whole pattern, with these words."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"give {words}")
        return text

    return AfterValidator(check)


def _long_enough(secret: SecretStr) -> SecretStr:
    """A short one can be guessed, and would be found in words that are no secrets."""
    if len(secret) < _SHORTEST_SECRET:
        raise ValueError(
            f"a secret must have at least {_SHORTEST_SECRET} characters (has {len(secret)}); "
            "make one with: openssl rand -base64 24"
        )
    return secret


def _one(value: Any) -> Any:
    """The environment has text; True is no number."""
    return str(value) if isinstance(value, bool) else 1 if value == "1" else value


Count = Annotated[int, Field(ge=1, le=1 << 40)]
Secret = Annotated[SecretStr, AfterValidator(_long_enough)]
Address = Annotated[  # a secret may be in the place of a user
    str,
    _written(
        r"(?i:https?|tcp|rabbitmq)://[^@\s?#]+",
        "addresses of http://, https://, tcp:// or rabbitmq://, without a user, such as tcp://orders:2302",
    ),
]
Name = Annotated[str, _written(r"[A-Za-z0-9._-]{1,100}", "names of letters, digits, '.', '_' and '-', 100 at most")]
SchemaName = Annotated[
    str,
    _written(
        r"(?!pg_)[a-z_][a-z0-9_]{0,62}",
        "lower-case letters, digits and '_', 63 characters at most, and neither a digit nor pg_ at the start",
    ),
]
Secrets = Annotated[dict[str, SecretStr], NoDecode, BeforeValidator(_by_name)]
Names = Annotated[dict[str, str], NoDecode, BeforeValidator(_by_name)]
Duration = Annotated[timedelta, BeforeValidator(_span), AfterValidator(_above_zero), AfterValidator(_bounded)]


def _whole_peer(value: Any) -> Any:
    """A text is the only secret of a peer."""
    if isinstance(value, str | SecretStr):
        return {"secrets": {"1": value}}
    if not isinstance(value, Mapping | Peer):
        raise ValueError(f"give each peer its secret as text, or an object of {', '.join(Peer.model_fields)}")
    return value


class Peer(BaseModel):
    """A service, or another client, that proves its name by secrets or certificates of its own.

    `secrets` are by ids of your choice: all are accepted, the first signs. `certificates` are names, one of which is in
    the certificate of each of its nodes. `at` are the addresses below which it receives. `types` are the message types
    that it may send (`billing.*` those that begin so; default: any), and `endpoints` the listeners that it may send to
    (default: any). `offers` are the services that it may announce (default: any, or none where it has `types`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    secrets: dict[Name, Secret] = {}
    certificates: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    at: tuple[Address, ...] = ()
    types: tuple[str, ...] | None = None
    endpoints: tuple[str, ...] | None = None
    offers: tuple[str, ...] | None = None


Peers = Annotated[dict[Name, Annotated[Peer, BeforeValidator(_whole_peer)]], NoDecode, BeforeValidator(_by_name)]


def _listed(value: Any) -> Any:
    """A list is text with commas, or JSON."""
    if not isinstance(value, str):
        return value
    try:
        listed = _read(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        listed = None
    if listed is None and value.strip().startswith("["):
        raise ValueError('must be a JSON array, such as ["a", "b"], or a list with commas')
    return listed if isinstance(listed, list) else [part.strip() for part in value.split(",") if part.strip()]


DurationOrZero = Annotated[timedelta, BeforeValidator(_span), AfterValidator(_bounded)]
OneOrAuto = Annotated[Literal[1, "auto"], BeforeValidator(_one)]
Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)]
Pauses = Annotated[tuple[DurationOrZero, ...], NoDecode, BeforeValidator(_listed)]
