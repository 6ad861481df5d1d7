"""Exchanges, queues and bindings that an address needs, and the side that declares each.

    service orders                       broker                                         service billing
    sends to rabbitmq://default/topic    topic exchange `durable`                       listens on .../topic/orders
    orders.order-placed ---------------> orders:orders.order-placed -- binding -------> billing:orders.order-placed
                                         {publisher}:{type}                             {service}:{type}, the queue

    a listener declares   its queues; on topic/PUBLISHER the exchange and the bindings too
    a sender declares     the topic exchange, when it sends there; never a queue: until a first consumer has declared
                          one, what is sent is unroutable, and waits in the sender's outbox

A message is confirmed as soon as one queue has it. A queue that is missing beside others misses the message for good,
so a listener declares at once where its queue was deleted, and again and again while it is up.

Everything is durable; no queue is exclusive or deletes itself. A queue with a greatest length refuses what is beyond
it (x-overflow=reject-publish): by default a broker confirms a message, and then drops the oldest one.

An ordered queue has a single active consumer: of the listeners of all nodes one is given everything, the others stand
by, and the next one goes on with the first message that was not acknowledged. With several at once, the messages of a
key would be stored in the order of their databases' commits, which is not that of the queue.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from durable.errors import InvalidSetting
from durable.grammar import suggestion
from durable.settings import Settings
from durable.transports.rabbitmq.address import (
    Destination,
    ExchangeAddress,
    QueueAddress,
    Source,
    SubscriptionAddress,
    name_on_topic,
)
from durable.transports.rabbitmq.options import QueueOptions, QueueType, exchange_name, queue_name, short

_WILDCARDS: Final = frozenset("*#")
_NO_DELIVERY_LIMIT: Final = 2**31 - 1
# From RabbitMQ 4.0 on, a quorum queue drops what was redelivered 20 times, which a receiver that cannot store for a
# while soon reaches. Its own word for "never", -1, makes RabbitMQ 3 drop at the first redelivery.


@dataclass(frozen=True, slots=True)
class Exchange:
    """Durable topic exchange. One that is not `declared` must exist, of any type."""

    name: str
    declared: bool = True

    def __str__(self) -> str:
        return f"exchange {self.name}"


@dataclass(frozen=True, slots=True)
class Queue:
    """Durable queue. One that is not `declared` must exist, with any arguments."""

    name: str
    type: QueueType = "quorum"
    max_length: int | None = None
    ordered: bool = False
    declared: bool = True

    @property
    def arguments(self) -> dict[str, str | int]:
        """Arguments of the declaration, which must equal those on the broker."""
        if not self.declared:
            return {}
        arguments: dict[str, str | int] = {"x-queue-type": self.type}
        if self.type == "quorum":
            arguments["x-delivery-limit"] = _NO_DELIVERY_LIMIT
        if self.max_length is not None:
            arguments |= {"x-max-length": self.max_length, "x-overflow": "reject-publish"}
        if self.ordered:
            arguments["x-single-active-consumer"] = True
        return arguments

    def __str__(self) -> str:
        return f"queue {self.name}"


@dataclass(frozen=True, slots=True, order=True)
class Binding:
    """Binding: messages of the exchange with this routing key go to the queue."""

    exchange: str
    routing_key: str
    queue: str

    def __str__(self) -> str:
        return f"binding of queue {self.queue} to exchange {self.exchange}"


Thing = Exchange | Queue | Binding


@dataclass(frozen=True, slots=True)
class Topology:
    """Topology of one broker, each exchange, queue and binding once."""

    exchanges: tuple[Exchange, ...] = ()
    queues: tuple[Queue, ...] = ()
    bindings: tuple[Binding, ...] = ()

    def __iter__(self) -> Iterator[Thing]:
        """Iterate in the order in which they can be declared."""
        yield from self.exchanges
        yield from self.queues
        yield from self.bindings

    @property
    def declared(self) -> Topology:
        """Return the topology without the parts that others declare."""
        exchanges = tuple(exchange for exchange in self.exchanges if exchange.declared)
        return Topology(exchanges, tuple(queue for queue in self.queues if queue.declared), self.bindings)


def listening(address: Source, settings: Settings, *, service: str, handled: Collection[str]) -> Topology:
    """Return the topology that a listener of `service` declares; `handled` are the message types that it handles.

    Raises InvalidSetting when there is nothing to listen to, or a name is longer than AMQP allows.
    """
    match address:
        case QueueAddress():
            if address.message_type is not None:
                _refuse_unhandled(address.message_type, address, handled)
            queue = queue_at(address.queue, address.options, settings)
            return Topology(queues=(replace(queue, declared=address.declared),))
        case SubscriptionAddress():
            return _subscription(address, settings, service, handled)


def sending(address: Destination, settings: Settings) -> Topology:
    """Return the topology that a sender to this address declares."""
    match address:
        case ExchangeAddress(_, settings.amqp_exchange):
            return Topology(exchanges=(Exchange(settings.amqp_exchange),))
        case _:
            return Topology()


def targeted(address: Destination) -> Topology:
    """Return the parts that a sender to this address needs, and that others declare."""
    match address:
        case QueueAddress():
            return Topology(queues=(Queue(address.queue, declared=False),))
        case ExchangeAddress():
            return Topology(exchanges=(Exchange(address.exchange, declared=False),))


def union(topologies: Iterable[Topology]) -> Topology:
    """All of them as one. What one declares and another expects is declared.

    Raises InvalidSetting when two declare one queue with different arguments.
    """
    exchanges: dict[str, Exchange] = {}
    queues: dict[str, Queue] = {}
    bindings: set[Binding] = set()
    for topology in topologies:
        bindings.update(topology.bindings)
        for exchange in topology.exchanges:
            if exchange.declared or exchange.name not in exchanges:
                exchanges[exchange.name] = exchange
        for queue in topology.queues:
            known = queues.get(queue.name)
            if known is None or not known.declared:
                queues[queue.name] = queue
            elif queue.declared and queue != known:
                raise InvalidSetting(
                    f"{queue}: two addresses declare it with different arguments; write the same options in both"
                )
    return Topology(
        tuple(exchanges[name] for name in sorted(exchanges)),
        tuple(queues[name] for name in sorted(queues)),
        tuple(sorted(bindings)),
    )


def _subscription(address: SubscriptionAddress, settings: Settings, service: str, handled: Collection[str]) -> Topology:
    for name in address.types:
        _refuse_unhandled(name, address, handled)
    types = sorted(address.types or handled)
    if not types:
        raise InvalidSetting(
            f"{address}: no message type is handled here, so the address has no queues; declare handlers"
        )
    queues = [queue_at(name_on_topic(service, name), address.options, settings) for name in types]
    exchange = exchange_name(settings.amqp_exchange, "amqp_exchange")
    bindings = [
        Binding(exchange, _binding_key(name_on_topic(address.publisher, name), address), queue.name)
        for name, queue in zip(types, queues, strict=True)
    ]
    return Topology((Exchange(exchange),), tuple(queues), tuple(bindings))


def _refuse_unhandled(name: str, address: Source, handled: Collection[str]) -> None:
    if name not in handled:
        raise InvalidSetting(
            f"{address}: {name} is not handled here{suggestion(name, handled)};"
            " declare its handler with @bus.handles, or take it out of the address"
        )


def queue_at(name: str, options: QueueOptions, settings: Settings) -> Queue:
    """Return the queue as an address with these options declares it."""
    ordered = settings.amqp_ordered if options.ordered is None else options.ordered == "yes"
    type_ = options.type or settings.amqp_queue_type
    return Queue(queue_name(name, "the name of a queue"), type_, options.max_length, ordered)


def _binding_key(key: str, address: SubscriptionAddress) -> str:
    """A word that is * or # would stand for any other."""
    if _WILDCARDS & set(key.split(".")):
        raise InvalidSetting(f"{address}: * and # match any name; write the name of one service, one address for each")
    return short(key, f"{address}: the routing key")
