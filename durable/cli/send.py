"""send: stores one message, given as JSON, as the application would store it."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from typing import Annotated
from uuid import UUID

import typer

from durable.bus import Bus
from durable.cli.arguments import parse_due_time, parse_duration, parse_pairs
from durable.cli.output import emit, is_json
from durable.cli.target import on_bus
from durable.errors import InvalidMessage, InvalidSetting, text_of
from durable.messages import codec
from durable.messages.registry import class_of
from durable.outbox.envelope_factory import SendOptions
from durable.storage.outages import translated

MessageType = Annotated[str, typer.Argument(metavar="TYPE", help="registered name, such as orders.order-placed")]
Body = Annotated[str, typer.Argument(metavar="JSON", help="message body; - reads standard input")]
To = Annotated[str | None, typer.Option("--to", metavar="URI", help="destination to use instead of its route")]
Key = Annotated[str | None, typer.Option("--key", help="partition key, such as order-17")]
Delay = Annotated[str | None, typer.Option("--delay", metavar="TIME", help="delay before sending: 60, 10m, 1h30m")]
At = Annotated[str | None, typer.Option("--at", metavar="TIME", help="time to send it at: 2h, 2030-12-31T23:59Z")]
DeliverBy = Annotated[
    str | None,
    typer.Option("--deliver-by", metavar="TIME", help="time when it expires unless handled: 2h, 2030-12-31T23:59Z"),
]
Tenant = Annotated[str | None, typer.Option("--tenant", help="tenant of the message, for fair handlers and its key")]
IdFrom = Annotated[
    str | None,
    typer.Option(
        "--id-from",
        metavar="KEY",
        help="business key, such as invoice-17, which gives the id: only the first message under it is handled",
    ),
]
Header = Annotated[
    list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="header of the message; can be repeated")
]


def message_options(
    key: Key = None,
    delay: Delay = None,
    at: At = None,
    deliver_by: DeliverBy = None,
    tenant: Tenant = None,
    id_from: IdFrom = None,
    header: Header = None,
) -> SendOptions:
    """Read the options of one message. Raises InvalidSetting."""
    now = datetime.now(UTC)
    headers = parse_pairs(header or (), option="--header", such_as="NAME=VALUE, such as priority=high")
    options = SendOptions(key=key, tenant=tenant, id_from=id_from, headers=headers)
    if delay is not None and at is not None:
        raise InvalidSetting("--delay, --at: both name a time; leave one of them out")
    if delay is not None:
        options["delay"] = parse_duration(delay, option="--delay")
    if at is not None:
        options["at"] = parse_due_time(at, now, option="--at")
    if deliver_by is not None:
        options["deliver_by"] = parse_due_time(deliver_by, now, option="--deliver-by")
    return options


@on_bus(options=message_options)
def send(bus: Bus, options: SendOptions, message_type: MessageType, body: Body, to: To = None) -> None:
    """Send a message in a transaction of its own and print its id; a running node delivers it.

    An event with subscribers is published to each of them, unless --to names a destination. The id of a message with
    --id-from is that of its key. A message that this database knows under the key is not sent again, which the command
    says; over a transport its receiver alone may know it.
    """
    cls = class_of(message_type)
    if to is not None:
        bus.runtime.transports.of(to)
    try:
        given = read_body(body, bus.settings.max_message_bytes)
        message = codec.decode(given, cls)
        codec.refuse_unknown_fields(given, cls)
    except InvalidMessage as error:
        raise InvalidSetting(f"JSON: {error}") from error
    try:
        envelope_id, is_sent = asyncio.run(_send(bus, message_type, message, to, options))
    except InvalidMessage as error:
        raise InvalidSetting(text_of(error)) from error
    emit({"id": envelope_id, "message_type": message_type, "sent": is_sent}, str(envelope_id))
    if not is_sent and not is_json():
        typer.echo(f"not sent again: a message under {options.get('id_from')} was sent before", err=True)


async def _send(
    bus: Bus, message_type: str, message: object, to: str | None, options: SendOptions
) -> tuple[UUID, bool]:
    """Send in a unit of work, without agents; return the id, and whether it is new. Raises WiringError, InvalidMessage,
    StorageUnavailable.
    """
    is_event = to is None and bus.application.routes.is_event(message_type)
    try:
        await bus.runtime.check()
        with translated():
            async with bus.unit_of_work() as uow:
                sent = uow.publish(message, **options) if is_event else uow.send(message, to=to, **options)
                await uow.session.run_sync(lambda _: uow.outbox.store())
                return sent, uow.outbox.is_stored(sent)
    finally:
        await bus.runtime.stop()


def read_body(body: str, max_bytes: int) -> bytes:
    """Read the bytes of a JSON argument, or of standard input for `-`. Raises InvalidMessage when it is too large."""
    if body != "-":
        return body.encode(errors="surrogateescape")
    data = sys.stdin.buffer.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise InvalidMessage(f"standard input exceeds max_message_bytes ({max_bytes}); send less, or raise the setting")
    return data
