"""Queues that two listeners of a service share.

    topic/orders and topic/shop           the queue {service}:{type} of each type in common
    queue/mail and queue/mail?prefetch=5  the queue mail
    topic/orders and queue/{service}:...  the queue of a topic

The broker gives each delivery to any consumer of its queue, and again to any other. So the listeners of a queue must be
alike: in its arguments, in what they accept, and in the name under which duplicates are recognised. A broker with
two names in the settings is one broker, and the names must be the same, too: ids of numbered messages are made of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from durable.errors import InvalidSetting
from durable.settings import Settings
from durable.transports.rabbitmq.address import (
    QueueAddress,
    Source,
    broker_place,
    name_on_topic,
    source,
)
from durable.transports.rabbitmq.topology import queue_at


class Named(NamedTuple):
    """Address to listen at, and the name of its listener."""

    uri: str
    name: str


def check(added: Named, others: Iterable[Named], settings: Settings, service: str) -> None:
    """Raise InvalidSetting when a listener would share a queue with another one that differs."""
    address = source(added.uri)
    for other in others:
        before = source(other.uri)
        if broker_place(settings, before.broker) != broker_place(settings, address.broker):
            continue
        queue = shared_queue(before, address, service)
        if queue is None:
            continue
        wrong = f"{added.uri}: it shares {queue} with {other.uri}, and a delivery may come to either"
        if type(before) is not type(address):
            raise InvalidSetting(f"{wrong}; leave out one of the two addresses")
        ours, theirs = _traits(address, settings), _traits(before, settings)
        if differing := [trait for trait in ours if ours[trait] != theirs[trait]]:
            raise InvalidSetting(f"{wrong}; write the same {' and '.join(differing)} in both")
        if added.name != other.name:
            raise InvalidSetting(f"{wrong}; give both listeners the same name=")


def shared_queue(one: Source, other: Source, service: str) -> str | None:
    """Describe a queue that two addresses of one broker have in common. An address without types may have any."""
    if isinstance(one, QueueAddress):
        return f"the queue {one.queue}" if _consumes(other, one.queue, service) else None
    if isinstance(other, QueueAddress):
        return shared_queue(other, one, service)
    if not one.types and not other.types:
        return f"the queues {name_on_topic(service, 'TYPE')}"
    common = set(one.types or other.types) & set(other.types or one.types)
    return f"the queue {name_on_topic(service, min(common))}" if common else None


def _consumes(address: Source, queue: str, service: str) -> bool:
    if isinstance(address, QueueAddress):
        return address.queue == queue
    if address.types:
        return any(queue == name_on_topic(service, name) for name in address.types)
    return queue.startswith(name_on_topic(service, ""))


def _traits(address: Source, settings: Settings) -> dict[str, object]:
    """Return all that a listener at this address does with a queue, by the names of the options.

    The name of its broker is a part of ids.
    """
    queue, options = queue_at("shared", address.options, settings), address.options
    traits: dict[str, object] = {
        "broker": address.broker,
        "type": queue.type,
        "max_length": queue.max_length,
        "ordered": queue.ordered,
        "prefetch": options.prefetch,
        "unsigned": options.unsigned,
    }
    if isinstance(address, QueueAddress):
        traits |= {"declare": address.declared, "message_type": address.message_type}
    return traits
