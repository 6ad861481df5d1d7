"""send: one message, from JSON, stored as the application would store it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated
from uuid import UUID

import typer

from durable.bus import Bus
from durable.cli.arguments import parse_duration
from durable.cli.output import print_json
from durable.cli.target import BusName, Debug, Json, load_bus
from durable.errors import InvalidMessage, InvalidSetting
from durable.messages import codec
from durable.messages.registry import class_of
from durable.outbox.envelope_factory import SendOptions
from durable.storage.outages import translated

MessageType = Annotated[str, typer.Argument(metavar="TYPE", help="the registered name, such as orders.order-placed")]
Body = Annotated[str, typer.Argument(metavar="JSON", help="the message; - reads it from standard input")]
To = Annotated[str | None, typer.Option("--to", metavar="URI", help="send it there, whatever its route")]
Key = Annotated[str | None, typer.Option("--key", help="the partition key, such as order-17")]
Delay = Annotated[
    str | None, typer.Option("--delay", metavar="TIME", help="send it only after this time: 60, 10m, 1h30m")
]
Header = Annotated[list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="may be given several times")]


def send(
    app: BusName,
    message_type: MessageType,
    body: Body,
    to: To = None,
    key: Key = None,
    delay: Delay = None,
    header: Header = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Send a message in a transaction of its own and print its id; a running node delivers it.

    An event that has subscribers goes to each of them, unless --to names another place.
    """
    bus = load_bus(app)
    cls = class_of(message_type)
    if to is not None:
        bus.runtime.transports().of(to)
    options = _options(key, delay, header or [])
    try:
        message = codec.decode(read_body(body, bus.settings.max_message_bytes), cls)
        envelope_id = asyncio.run(_send(bus, message_type, message, to, options))
    except InvalidMessage as error:
        raise InvalidSetting(f"JSON: {error}") from error
    if json:
        print_json({"id": envelope_id, "message_type": message_type})
    else:
        print(envelope_id)


async def _send(bus: Bus, message_type: str, message: object, to: str | None, options: SendOptions) -> UUID:
    """In a unit of work, with no agent running. Raises WiringError, InvalidMessage, StorageUnavailable."""
    is_event = to is None and bus.application.routes.is_event(message_type)
    try:
        await bus.runtime.check()
        with translated():
            async with bus.unit_of_work() as uow:
                return uow.publish(message, **options) if is_event else uow.send(message, to=to, **options)
    finally:
        await bus.runtime.stop()


def read_body(body: str, max_bytes: int) -> bytes:
    """The bytes of a JSON argument, or of standard input for `-`. Raises InvalidMessage when there are too many."""
    if body != "-":
        return body.encode(errors="surrogateescape")
    data = sys.stdin.buffer.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise InvalidMessage(f"standard input has more than max_message_bytes ({max_bytes})")
    return data


def _options(key: str | None, delay: str | None, headers: Sequence[str]) -> SendOptions:
    options = SendOptions()
    if key is not None:
        options["key"] = key
    if delay is not None:
        options["delay"] = parse_duration(delay, option="--delay")
    if headers:
        options["headers"] = dict(_header(text) for text in headers)
    return options


def _header(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise InvalidSetting(f"--header: {text!r} is not of the form NAME=VALUE")
    return name, value
