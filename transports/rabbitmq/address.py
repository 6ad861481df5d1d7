"""RabbitMQ addresses: `rabbitmq://BROKER/...`, with names percent-encoded.

    rabbitmq://default/queue/mail             send to this queue, or listen on it
    rabbitmq://default/topic                  send each type to the topic exchange under its own routing key
    rabbitmq://default/exchange/NAME/KEY      send to any exchange with this routing key
    rabbitmq://default/topic/orders           listen to what the service `orders` sends to the topic exchange

    ?type=quorum|classic  ?max_length=N       how a listener declares its queues; a full queue refuses, it never drops
    ?ordered=yes|no                           does one listener at a time have all of a queue, so that keys keep order?
    ?prefetch=N                               unacknowledged deliveries of each queue
    ?unsigned=yes                             take messages without a signature, too, where secrets are set
    ?declare=no                               the queue is somebody else's: take it as it is (queue/NAME)
    ?message_type=T                           what JSON without a type is (queue/NAME)
    ?types=a,b                                only these, of the types that are handled (topic/PUBLISHER)

BROKER stands for a URL that is in the settings, and so are user and password: `default` for amqp_url, any other name
for an entry of amqp_brokers. The options say how to listen; to a sender they mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import SplitResult, quote, unquote, urlsplit

from durable.errors import InvalidSetting
from durable.grammar import suggestion
from durable.settings import Settings
from durable.transports.hosts import normal_host
from durable.transports.plaintext import is_loopback, require_plaintext_allowed
from durable.transports.rabbitmq.options import AS_SET, Query, QueueOptions, decoded, exchange_name, queue_name, short
from durable.transports.uris import split

SCHEME: Final = "rabbitmq"
DEFAULT_BROKER: Final = "default"

_FORMS: Final = (
    "rabbitmq://default/queue/NAME, rabbitmq://default/topic, rabbitmq://default/topic/PUBLISHER"
    " or rabbitmq://default/exchange/NAME/KEY"
)
_RESERVED: Final = "amq."
_PORTS: Final = (None, 5671, 5672)


class BrokerPlace(NamedTuple):
    """Virtual host of a broker. `port` is None for its own ones, with and without TLS."""

    host: str
    port: int | None
    virtual_host: str


class Way(NamedTuple):
    """Exchange and routing key of a publish; the exchange of queues has no name."""

    exchange: str
    routing_key: str


@dataclass(frozen=True, slots=True)
class QueueAddress:
    """Queue to send to over the default exchange, or to listen on."""

    broker: str
    queue: str
    options: QueueOptions = AS_SET
    declared: bool = True
    message_type: str | None = None

    def __str__(self) -> str:
        declare = "" if self.declared else "no"
        message_type = quote(self.message_type or "", safe="")
        return _uri(self.broker, ["queue", self.queue], self.options, declare=declare, message_type=message_type)

    @property
    def way(self) -> Way:
        return Way("", self.queue)


@dataclass(frozen=True, slots=True)
class TopicAddress:
    """The topic exchange, with a routing key for each type that is sent."""

    broker: str

    def __str__(self) -> str:
        return _uri(self.broker, ["topic"])


@dataclass(frozen=True, slots=True)
class ExchangeAddress:
    """Any exchange, with one routing key; it may be empty, as fanout exchanges ignore it."""

    broker: str
    exchange: str
    routing_key: str

    def __str__(self) -> str:
        return _uri(self.broker, ["exchange", self.exchange, self.routing_key])

    @property
    def way(self) -> Way:
        return Way(self.exchange, self.routing_key)


@dataclass(frozen=True, slots=True)
class SubscriptionAddress:
    """Messages of one service on the topic exchange: a queue for each type that is handled, or of `types`."""

    broker: str
    publisher: str
    options: QueueOptions = AS_SET
    types: tuple[str, ...] = ()

    def __str__(self) -> str:
        types = ",".join(quote(name, safe="") for name in self.types)
        return _uri(self.broker, ["topic", self.publisher], self.options, types=types)


Address = QueueAddress | TopicAddress | ExchangeAddress | SubscriptionAddress
Destination = QueueAddress | ExchangeAddress
"""The addresses that a sender is made for."""
Source = QueueAddress | SubscriptionAddress
"""The addresses that a listener is made for."""


def parse(uri: str) -> Address:
    """Parse the address. Raises InvalidSetting with one sentence: the fault, and the text to write instead."""
    parts = split(uri, f"write {_FORMS}")
    if parts.scheme != SCHEME:
        raise InvalidSetting(f"{uri}: unknown scheme; write {_FORMS}")
    broker = _broker(parts)
    if parts.fragment:
        raise InvalidSetting(f"{uri}: an address has no fragment; write # in a name as %23")
    query = Query(uri, parts.query)
    match parts.path.split("/")[1:]:
        case ["queue", name]:
            return _queue(broker, decoded(name, uri, "the queue"), query)
        case ["topic"]:
            query.allow()
            return TopicAddress(broker)
        case ["topic", publisher]:
            query.allow("type", "max_length", "prefetch", "ordered", "unsigned", "types")
            name = short(decoded(publisher, uri, "the publisher"), f"{uri}: the publisher")
            return SubscriptionAddress(broker, name, query.queue_options(), query.names("types"))
        case ["exchange", name, key]:
            query.allow()
            exchange = exchange_name(decoded(name, uri, "the exchange"), f"{uri}: the exchange")
            routing_key = short(decoded(key, uri, "the routing key"), f"{uri}: the routing key") if key else ""
            return ExchangeAddress(broker, exchange, routing_key)
        case _:
            raise InvalidSetting(f"{uri}: write {_FORMS}; a slash in a name is written %2F")


def name_on_topic(service: str, message_type: str) -> str:
    """Name a routing key by who sends, or a queue by who receives. No service has a colon in its name: so no two
    services share a name, whatever their types are called.
    """
    return f"{service}:{message_type}"


def destination(uri: str, *, service: str, message_type: str, exchange: str) -> Destination:
    """Return the destination of this type that `service` sends to `uri`; raises InvalidSetting for a source."""
    match parse(uri):
        case QueueAddress() | ExchangeAddress() as address:
            return _sent_to(address)
        case TopicAddress(broker):
            key = short(name_on_topic(service, message_type), f"{uri}: the routing key of {message_type}")
            return ExchangeAddress(broker, exchange_name(exchange, "amqp_exchange"), key)
        case SubscriptionAddress(broker):
            raise InvalidSetting(
                f"{uri}: an address to listen at, not to send to; write "
                f"{TopicAddress(broker)}, and the exchange routes the message"
            )


def parse_destination(uri: str) -> Destination:
    """Parse a destination as destination() returns it. Raises InvalidSetting for a topic and a source."""
    address = parse(uri)
    if isinstance(address, Destination):
        return _sent_to(address)
    broker = quote(address.broker, safe="")
    raise InvalidSetting(
        f"{uri}: a sender needs a queue, or an exchange and a routing key; write rabbitmq://{broker}/queue/NAME or "
        f"rabbitmq://{broker}/exchange/NAME/KEY, as a route is resolved"
    )


def _sent_to(address: Destination) -> Destination:
    """Leave out the options of listeners."""
    return QueueAddress(address.broker, address.queue) if isinstance(address, QueueAddress) else address


def source(uri: str) -> Source:
    """Return the queues to listen on; raises InvalidSetting for an address that is only sent to."""
    address = parse(uri)
    match address:
        case QueueAddress() | SubscriptionAddress():
            return address
        case TopicAddress(broker):
            raise InvalidSetting(f"{uri}: say whose messages to listen to, as in {TopicAddress(broker)}/orders")
        case ExchangeAddress(broker):
            raise InvalidSetting(
                f"{uri}: an exchange has no listeners; bind a queue to it, and listen on that, as in"
                f" rabbitmq://{quote(broker, safe='')}/queue/mail"
            )


def broker_url(settings: Settings, broker: str) -> str:
    """The AMQP URL of a broker, with its password: not for showing. Raises InvalidSetting."""
    if broker == DEFAULT_BROKER:
        if settings.amqp_url is None:
            raise InvalidSetting(
                "amqp_url: not set, and rabbitmq:// addresses need it;"
                " set DURABLE_AMQP_URL, as in amqps://user:***@host:5671/vhost"
            )
        return _checked(settings, "amqp_url", settings.amqp_url.get_secret_value())
    known = [DEFAULT_BROKER, *settings.amqp_brokers]
    if broker not in settings.amqp_brokers:
        raise InvalidSetting(
            f"rabbitmq://{broker}: no broker has this name{suggestion(broker, known)}; write"
            f" rabbitmq://{DEFAULT_BROKER}/..., or add its URL to amqp_brokers"
        )
    return _checked(settings, f"amqp_brokers: {broker}", settings.amqp_brokers[broker].get_secret_value())


def broker_place(settings: Settings, broker: str) -> BrokerPlace:
    """Return the place of a broker, which many URLs lead to. Raises InvalidSetting."""
    parts = urlsplit(broker_url(settings, broker))
    host = parts.hostname or ""
    port = None if parts.port in _PORTS else parts.port
    return BrokerPlace(normal_host(host) or host, port, unquote(parts.path[1:]) or "/")


def _checked(settings: Settings, setting: str, url: str) -> str:
    """The URL may hold a password: no part of it is shown."""
    wrong = InvalidSetting(f"{setting}: not an AMQP URL; it should look like amqps://user:***@host:5671/vhost")
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  it is parsed, and may fail, only when read
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("amqp", "amqps") or not parts.hostname:
        raise wrong
    if parts.scheme == "amqp" and not is_loopback(parts.hostname):
        require_plaintext_allowed(settings, f"{setting} (amqp://{parts.hostname})", "amqps://")
    return url


def _broker(parts: SplitResult) -> str:
    """Return the name of the broker. A part that may be a user and a password is not shown."""
    if not parts.netloc or "@" in parts.netloc or ":" in parts.netloc:
        raise InvalidSetting(
            f"{SCHEME}://...{parts.path}: write the name of a broker, as in {SCHEME}://{DEFAULT_BROKER}{parts.path};"
            " its host, user and password belong in the setting amqp_url, or by its name in amqp_brokers"
        )
    return decoded(parts.netloc, f"{SCHEME}://{parts.netloc}", "the broker")


def _queue(broker: str, name: str, query: Query) -> QueueAddress:
    query.allow("type", "max_length", "prefetch", "ordered", "unsigned", "declare", "message_type")
    if name.startswith(_RESERVED):
        raise query.wrong(f"names that begin with {_RESERVED} are the broker's own; write another")
    options = query.queue_options()
    declared = query.choice("declare", "no") is None
    if not declared and (options.type or options.max_length or options.ordered):
        raise query.wrong("type, max_length and ordered say how to declare the queue; leave them out, or declare=no")
    checked = queue_name(name, f"{query.uri}: the queue")
    return QueueAddress(broker, checked, options, declared, query.name("message_type"))


def _uri(broker: str, path: list[str], options: QueueOptions = AS_SET, **more: str) -> str:
    """Write an address. Options without a value are left out; those in `more` are percent-encoded already."""
    said = {"type": options.type, "max_length": options.max_length, "prefetch": options.prefetch}
    given = {**said, "ordered": options.ordered, "unsigned": options.unsigned, **more}
    query = "&".join(f"{name}={value}" for name, value in given.items() if value)
    names = "/".join(quote(part, safe=":") for part in path)
    return f"{SCHEME}://{quote(broker, safe='')}/{names}" + (f"?{query}" if query else "")
