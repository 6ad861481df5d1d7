"""topology: the queues and exchanges that the application needs, compared with its RabbitMQ brokers.

    declared    by this application: its listeners' queues and bindings, and the topic exchange
    expected    of others: the queues and exchanges that it sends to

Exchanges and queues are looked up; bindings cannot be, because AMQP 0.9.1 has no request for them. Declaring an
existing binding changes nothing, so --apply declares them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from durable.bus import Bus
from durable.cli.output import Block, Table, emit
from durable.cli.target import on_bus
from durable.errors import TransportError
from durable.transports.rabbitmq import address as addresses
from durable.transports.rabbitmq.topology import Exchange, Queue, Topology, listening, sending, targeted, union

if TYPE_CHECKING:
    from durable.transports.rabbitmq.declaring import Found

Apply = Annotated[bool, typer.Option("--apply", help="declare missing queues, exchanges and bindings")]

_SCHEME = f"{addresses.SCHEME}://"
_ON_APPLY = "declared on apply"
_UNSEEN = "(AMQP cannot list bindings: --apply declares them, and so does the listener when it starts)"


@dataclass(frozen=True, slots=True)
class Survey:
    """The exchanges and queues that the application needs on one broker, and the state of each."""

    broker: str
    topology: Topology
    found: dict[Exchange | Queue, Found]

    @property
    def problems(self) -> list[str]:
        """Missing and refused exchanges and queues, each with advice."""
        return [explained(thing, found) for thing, found in self.found.items() if found.state != "present"]


@on_bus()
def topology(bus: Bus, apply: Apply = False) -> None:
    """Compare the application's queues and exchanges with its RabbitMQ brokers; ends with 1 when one is missing."""
    surveys = asyncio.run(_surveys(bus, apply))
    problems = [problem for seen in surveys for problem in seen.problems]
    blocks = [block for seen in surveys for block in _blocks(seen)]
    document = {"healthy": not problems, "problems": problems, "brokers": [_document(seen) for seen in surveys]}
    emit(document, *([*blocks, *problems] or ["no rabbitmq:// address is declared"]))
    if problems:
        raise typer.Exit(1)


def needed(bus: Bus) -> dict[str, Topology]:
    """List the needs of the application by broker. Raises InvalidSetting for an invalid address."""
    settings, service, handled = bus.settings, bus.service, bus.application.by_type()
    parts: dict[str, list[Topology]] = {}
    for uri in _checked(bus, (listener.uri for listener in bus.application.listeners)):
        source = addresses.source(uri)
        parts.setdefault(source.broker, []).append(listening(source, settings, service=service, handled=handled))
    for uri in _checked(bus, bus.application.destinations()):
        # Addresses were resolved by message type when they were declared: the type no longer matters.
        destination = addresses.destination(uri, service=service, message_type="", exchange=settings.amqp_exchange)
        parts.setdefault(destination.broker, []).extend([sending(destination, settings), targeted(destination)])
    return {broker: union(parts[broker]) for broker in sorted(parts)}


async def survey(bus: Bus, name: str, topology: Topology, *, apply: bool = False) -> Survey:
    """Inspect one broker; with `apply` declare missing queues, exchanges and bindings first.

    Raises InvalidSetting when one cannot be declared, TransportError when the broker cannot be reached.
    """
    # Imported here, once a rabbitmq:// address is known: aio-pika is optional.
    from durable.transports.rabbitmq.broker import Brokers
    from durable.transports.rabbitmq.declaring import declare, inspect

    seconds = bus.settings.connect_timeout.total_seconds()
    broker = Brokers(bus.settings, bus.service)[name]
    try:
        async with broker.connection("topology") as connection:
            if apply:
                await declare(await connection.get(), topology.declared, seconds=seconds)
            things: list[Exchange | Queue] = [*topology.exchanges, *topology.queues]
            found = {thing: await inspect(await connection.get(), thing, seconds=seconds) for thing in things}
    except TransportError as error:
        raise TransportError(f"{error}; check that the broker {name} runs, and its URL in the settings") from error
    return Survey(name, topology, found)


def _checked(bus: Bus, uris: Iterable[str]) -> list[str]:
    """Select RabbitMQ addresses. Raises InvalidSetting for a wrong one, and when aio-pika is not installed."""
    chosen = [uri for uri in uris if uri.startswith(_SCHEME)]
    for uri in chosen:
        bus.runtime.transports.of(uri)
    return chosen


async def _surveys(bus: Bus, apply: bool) -> list[Survey]:
    return [await survey(bus, broker, topology, apply=apply) for broker, topology in needed(bus).items()]


def explained(thing: Exchange | Queue, found: Found) -> str:
    """Say why a queue or exchange cannot be used; after a semicolon the advice."""
    if found.reason:
        return found.reason
    ours = "durable-agent topology --apply declares it, and so does this service when it starts"
    advice = ours if thing.declared else "until another service declares it, messages for it wait"
    return f"{thing}: missing; {advice}"


def _document(seen: Survey) -> dict[str, Any]:
    return {
        "broker": seen.broker,
        "exchanges": [asdict(exchange) | asdict(seen.found[exchange]) for exchange in seen.topology.exchanges],
        "queues": [
            {"name": queue.name, "declared": queue.declared, "arguments": queue.arguments} | asdict(seen.found[queue])
            for queue in seen.topology.queues
        ],
        "bindings": [asdict(binding) | {"state": _ON_APPLY} for binding in seen.topology.bindings],
    }


def _blocks(seen: Survey) -> list[Block]:
    exchanges = [
        (exchange.name, _declarer(exchange), seen.found[exchange].state) for exchange in seen.topology.exchanges
    ]
    queues = [
        (queue.name, _declarer(queue), found.state, found.message_count, found.consumer_count, _arguments(queue))
        for queue in seen.topology.queues
        for found in [seen.found[queue]]
    ]
    bindings = [(binding.exchange, binding.routing_key, binding.queue) for binding in seen.topology.bindings]
    blocks: list[Block] = [f"broker {seen.broker}"]
    if exchanges:
        blocks.append(Table("exchanges", ["name", "declared by", "state"], exchanges))
    if queues:
        columns = ["name", "declared by", "state", "messages", "consumers", "arguments"]
        blocks.append(Table("queues", columns, queues))
    if bindings:
        blocks.append(Table("bindings", ["exchange", "routing key", "queue"], bindings))
        blocks.append(_UNSEEN)
    return blocks


def _declarer(thing: Exchange | Queue) -> str:
    return "this service" if thing.declared else "others"


def _arguments(queue: Queue) -> str:
    return ", ".join(f"{name}={value}" for name, value in queue.arguments.items())
