"""Canonical description of an application, as `durable-agent describe --json` prints it and `--check` reads it.

    received    the schema of what comes in here: a handled message, the arguments of an offered method, a result
    sent        the schema of what goes out: a sent message, the result of an offered method, arguments

Lists are in the order of their names, so that equal applications have equal descriptions.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from durable import strict_json
from durable.errors import InvalidSetting, text_of
from durable.messages.schemas import Json

FORMAT: Final = 1

Role = Literal["offers", "calls"]


class DescribedMethod(Struct, frozen=True, kw_only=True):
    """A method. `digest` is compared by callers of the same version before they call."""

    name: str
    signature: str
    digest: str
    arguments: Json
    result: Json


class DescribedService(Struct, frozen=True, kw_only=True):
    """A service that the application offers or calls."""

    name: str
    version: Annotated[str, Meta(pattern=r"^[0-9]{1,6}\.[0-9]{1,6}$")]
    role: Role
    addresses: list[str]
    methods: list[DescribedMethod]


class DescribedMessage(Struct, frozen=True, kw_only=True):
    """A message type. `received` is None for one that is not handled, `sent` for one that is not sent elsewhere."""

    type: str
    name: str
    version: int
    content_type: str
    encrypted: bool = False
    handler: str | None = None
    destinations: list[str] = []
    is_event: bool = False
    received: Json | None = None
    sent: Json | None = None


class DescribedListener(Struct, frozen=True, kw_only=True):
    """An address at which the application receives."""

    address: str
    name: str


class DescribedQueue(Struct, frozen=True, kw_only=True):
    """A queue of RabbitMQ. One that is not `declared` here is another service's."""

    broker: str
    name: str
    declared: bool
    arguments: dict[str, Any] = {}
    bindings: list[str] = []
    """Routing keys, each behind the exchange."""


class Description(Struct, frozen=True, kw_only=True):
    """An application as others see it."""

    format: Literal[1] = FORMAT
    application: str
    durable: str
    listeners: list[DescribedListener] = []
    services: list[DescribedService] = []
    messages: list[DescribedMessage] = []
    queues: list[DescribedQueue] = []


def read(content: bytes, name: str) -> Description:
    """Return the description in a file of this name. Raises InvalidSetting for bytes that are none."""
    try:
        found = strict_json.read(msgspec.json.decode, content)
        of = found.get("format") if isinstance(found, dict) else None
        if isinstance(of, int) and of > FORMAT:
            raise InvalidSetting(f"{name}: is a description of format {of}, made by a later durable; use that one")
        return msgspec.convert(found, Description)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidSetting(
            f"{name}: is no description: {text_of(error)}; make one with durable-agent describe APP:BUS --json"
        ) from error
