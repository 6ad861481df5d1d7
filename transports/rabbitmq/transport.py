"""RabbitMQ: makes senders and listeners for `rabbitmq://` URIs, over the brokers that the settings name.

    rabbitmq_address, rabbitmq_options        URIs
    rabbitmq_topology                         exchanges, queues and bindings that an address needs
    rabbitmq_sharing                          queues that two listeners share
    rabbitmq_message, rabbitmq_arrivals       an envelope as an AMQP message; what arrives as an envelope
    rabbitmq_signatures                       who has sent a message
    rabbitmq_broker, rabbitmq_socket          connections, shared and named
    rabbitmq_channel                          frames on their channels; errors translated
    rabbitmq_declaring, rabbitmq_refusals     declares a topology, or says what differs
    rabbitmq_sender, rabbitmq_publisher       the sending end
    rabbitmq_listener, rabbitmq_consumers     the receiving end

The first five decide and do no I/O; the others wait and act.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from durable.settings import Settings
from durable.transports import peers
from durable.transports.rabbitmq.address import SCHEME, broker_url, destination, parse, parse_destination, source
from durable.transports.rabbitmq.broker import Brokers
from durable.transports.rabbitmq.listener import RabbitListener
from durable.transports.rabbitmq.sender import RabbitSender

__all__ = ["RabbitListener", "RabbitSender", "RabbitTransport"]

SCHEMES: Final = (SCHEME,)


class RabbitTransport:
    """A `durable.transports.base.Transport`.

    `service` is part of the names of queues and routing keys, and how brokers show our connections. `messages` are the
    classes that this service handles by message type, when it is called: a listener to a topic has a queue for each.
    """

    schemes: tuple[str, ...] = SCHEMES

    def __init__(self, settings: Settings, *, service: str, messages: Callable[[], Mapping[str, type]]) -> None:
        self._settings = settings
        self._service = service
        self._messages = messages
        self._brokers = Brokers(settings, service)
        peers.check(settings)

    def check(self, uri: str) -> None:
        """Raise InvalidSetting unless this is an address on a broker whose URL is in the settings."""
        broker_url(self._settings, parse(uri).broker)

    def resolve(self, uri: str, message_type: str) -> str:
        """The queue, or the exchange and routing key, for messages of this type: `rabbitmq://BROKER/topic` has one for
        each type."""
        exchange = self._settings.amqp_exchange
        return str(destination(uri, service=self._service, message_type=message_type, exchange=exchange))

    def sender(self, destination: str) -> RabbitSender:
        """Make a sender to one queue, or to one exchange and routing key; raises InvalidSetting for another address."""
        address = parse_destination(destination)
        return RabbitSender(address, self._brokers[address.broker], self._settings, self._service)

    def listener(self, uri: str, endpoint: str) -> RabbitListener:
        address = source(uri)
        broker = self._brokers[address.broker]
        return RabbitListener(address, endpoint, broker, self._settings, self._service, self._messages)
