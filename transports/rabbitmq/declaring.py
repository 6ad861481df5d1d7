"""Declares a topology on a broker, or looks at what is there.

    declare    makes what is missing; raises InvalidSetting for what is there with other arguments
    inspect    looks, and changes nothing

The broker answers a refused declaration by closing its channel, so both functions use channels of their own.
Declarations before a refusal stay, and do no harm: exchanges come first, then queues, and bindings last.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum

from aio_pika import ExchangeType
from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import ChannelClosed, ChannelNotFoundEntity

from durable.errors import ConnectionFailed, InvalidSetting
from durable.transports.rabbitmq.channel import translated
from durable.transports.rabbitmq.refusals import explained
from durable.transports.rabbitmq.topology import Binding, Exchange, Queue, Thing, Topology


class State(StrEnum):
    """State of an exchange or a queue on the broker."""

    PRESENT = "present"
    MISSING = "missing"
    REFUSED = "refused"  # it is there and cannot be used: it has other arguments, or is not for this user


@dataclass(frozen=True, slots=True)
class Found:
    """State of a queue or exchange. `reason` says why it is refused and how to repair it; only existing queues have
    counts.
    """

    state: State
    reason: str = ""
    message_count: int | None = None
    consumer_count: int | None = None


async def declare(connection: AbstractConnection, topology: Topology, *, seconds: float) -> None:
    """Declare everything; what is there already stays as it is. Each step may take this many seconds.

    Raises InvalidSetting when something is there and differs, or when the user may not declare it; the message says
    what to do then. Raises TransportError when the broker does not answer, or goes away.
    """
    clock = asyncio.get_running_loop().time
    with translated("declaring"):
        async with asyncio.timeout(seconds) as deadline, _channel(connection) as channel:
            for thing in topology:
                deadline.reschedule(clock() + seconds)
                await _declare(channel, thing)


async def inspect(connection: AbstractConnection, thing: Exchange | Queue, *, seconds: float) -> Found:
    """Inspect the broker. Raises TransportError when it does not answer, or goes away."""
    found = Found(State.MISSING)
    with translated("looking"):
        async with asyncio.timeout(seconds), _channel(connection) as channel:
            try:
                found = await _inspect(channel, thing)
                await _declare(channel, thing)  # only this compares; it changes nothing that is there
            except ChannelNotFoundEntity:
                pass
            except InvalidSetting as error:
                found = replace(found, state=State.REFUSED, reason=str(error))
    return found


@asynccontextmanager
async def _channel(connection: AbstractConnection) -> AsyncIterator[AbstractChannel]:
    try:
        channel = connection.channel(publisher_confirms=False)
        await channel.initialize()
    except RuntimeError as error:  # so says aio-pika, without a class of its own, of a connection that has gone
        raise ConnectionFailed("broker lost: the connection was closed") from error
    try:
        yield channel
    finally:
        await channel.close()


async def _declare(channel: AbstractChannel, thing: Thing) -> None:
    try:
        match thing:
            case Exchange(name, declared=True):
                await channel.declare_exchange(name, ExchangeType.TOPIC, durable=True)
            case Exchange(name):
                await channel.get_exchange(name)
            case Queue(name, declared=True):
                await channel.declare_queue(name, durable=True, arguments=dict(thing.arguments))
            case Queue(name):
                await channel.declare_queue(name, passive=True)
            case Binding(exchange, routing_key, queue):
                bound = await channel.get_queue(queue, ensure=False)
                await bound.bind(exchange, routing_key)
    except ChannelClosed as error:
        raise InvalidSetting(explained(thing, str(error))) from error


async def _inspect(channel: AbstractChannel, thing: Exchange | Queue) -> Found:
    if isinstance(thing, Exchange):
        await channel.get_exchange(thing.name)
        return Found(State.PRESENT)
    counted = (await channel.declare_queue(thing.name, passive=True)).declaration_result
    return Found(State.PRESENT, "", counted.message_count, counted.consumer_count)
