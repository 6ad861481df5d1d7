"""What may be written as a RabbitMQ address, what it stands for, and what a mistake is answered with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from durable.errors import InvalidSetting
from durable.settings import Settings, load_settings
from durable.transports.rabbitmq.address import (
    Address,
    ExchangeAddress,
    QueueAddress,
    SubscriptionAddress,
    TopicAddress,
    broker_url,
    destination,
    name_on_topic,
    parse,
    source,
)
from durable.transports.rabbitmq.options import QueueOptions

MAIL = "rabbitmq://default/queue/mail"


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        (MAIL, QueueAddress("default", "mail")),
        ("rabbitmq://default/topic", TopicAddress("default")),
        ("rabbitmq://second/topic/orders", SubscriptionAddress("second", "orders")),
        ("rabbitmq://default/exchange/events/a.b", ExchangeAddress("default", "events", "a.b")),
        ("rabbitmq://default/exchange/fan/", ExchangeAddress("default", "fan", "")),
        ("rabbitmq://my%20broker/queue/a%2Fb%23c%20d", QueueAddress("my broker", "a/b#c d")),
        ("rabbitmq://%C3%A9%3F/exchange/a%2Cb/k%2F%C3%A9", ExchangeAddress("\u00e9?", "a,b", "k/\u00e9")),
        (f"{MAIL}?type=classic&max_length=5&prefetch=65535",
         QueueAddress("default", "mail", QueueOptions("classic", 5, 65_535))),
        (f"{MAIL}?prefetch=1&declare=no&message_type=mail.wanted",
         QueueAddress("default", "mail", QueueOptions(prefetch=1), declared=False, message_type="mail.wanted")),
        ("rabbitmq://default/topic/orders?type=quorum&types=a,b.c",
         SubscriptionAddress("default", "orders", QueueOptions("quorum"), types=("a", "b.c"))),
    ],
)  # fmt: skip
def test_address_is_parsed_and_printed_unchanged(uri: str, address: Address) -> None:
    assert parse(uri) == address
    assert str(address) == uri


names = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=60)
plain_names = st.from_regex(r"[a-zA-Z0-9\-_.:@#,/+ ]{1,127}", fullmatch=True).filter(
    lambda name: not name.startswith("amq.")
)
counts = st.none() | st.integers(1, 65_535)
options = st.builds(QueueOptions, st.sampled_from([None, "quorum", "classic"]), counts, counts)
addresses = (
    st.builds(QueueAddress, names, plain_names, options, st.just(True), st.none() | names)
    | st.builds(QueueAddress, names, plain_names, st.builds(QueueOptions, prefetch=counts), st.booleans())
    | st.builds(TopicAddress, names)
    | st.builds(ExchangeAddress, names, plain_names, names | st.just(""))
    | st.builds(SubscriptionAddress, names, names, options, st.lists(names, unique=True, max_size=5).map(tuple))
)


@given(addresses)
def test_address_with_any_names_can_be_written(address: Address) -> None:
    assert parse(str(address)) == address


@pytest.mark.parametrize(
    ("uri", "what_to_write"),
    [
        ("amqp://default/queue/mail", "unknown scheme; write rabbitmq://default/queue/NAME"),
        ("mail", "unknown scheme; write rabbitmq://default/queue/NAME"),
        ("rabbitmq://[/queue/mail", "not a valid address.*write rabbitmq://default/queue/NAME"),
        ("rabbitmq://default", "write rabbitmq://default/queue/NAME, .*/topic, .*/topic/PUBLISHER or .*/NAME/KEY"),
        ("rabbitmq://default/", "write rabbitmq://default/queue/NAME"),
        ("rabbitmq://default/queues/mail", "write rabbitmq://default/queue/NAME"),
        ("rabbitmq://default/queue/a/b", "a slash in a name is written %2F"),
        ("rabbitmq://default/exchange/events", "rabbitmq://default/exchange/NAME/KEY"),
        ("rabbitmq:///queue/mail", "write the name of a broker, as in rabbitmq://default/queue/mail"),
        ("rabbitmq://localhost:5672/queue/mail", "as in rabbitmq://default/queue/mail.*belong in the setting amqp_url"),
        (f"{MAIL}#top", "write # in a name as %23"),
        ("rabbitmq://default/queue/", "the queue has no printable name; write one, as in rabbitmq://"),
        ("rabbitmq://default/queue/a%00b", "no printable name"),
        ("rabbitmq://default/topic/", "the publisher has no printable name"),
        ("rabbitmq://default/exchange//key", "the exchange has no printable name"),
        ("rabbitmq://default/queue/%ff", "the queue is not UTF-8; percent-encode it as such"),
        ("rabbitmq://default/queue/a%3Fb", r"the queue is 'a\?b'; AMQP allows ASCII letters, digits, spaces and -_"),
        ("rabbitmq://default/queue/caf%C3%A9", "the queue is .*; AMQP allows ASCII letters"),
        ("rabbitmq://default/exchange/a*/k", "the exchange is .*; AMQP allows ASCII letters"),
        ("rabbitmq://default/queue/amq.gen-1", r"begin with amq\. are the broker's own; write another"),
        (f"{MAIL}?prefech=1", "unknown option prefech; did you mean 'prefetch'.; this address takes type, max_length"),
        (f"{MAIL}?types=a", "unknown option types; did you mean 'type'"),
        ("rabbitmq://default/topic?type=quorum", "unknown option type; this address takes none"),
        ("rabbitmq://default/exchange/a/b?prefetch=1", "unknown option prefetch; this address takes none"),
        ("rabbitmq://default/topic/orders?message_type=a", "unknown option message_type; .* takes type, "),
        (f"{MAIL}?prefetch", r"prefetch has no value; write options as in \?prefetch=100"),
        (f"{MAIL}?prefetch=", "prefetch has no value"),
        (f"{MAIL}?=1", "an option has no value"),
        (f"{MAIL}?prefetch=1&prefetch=2", "prefetch is given twice"),
        (f"{MAIL}?prefetch=0", "prefetch=0; write a whole number from 1 to 65535"),
        (f"{MAIL}?prefetch=65536", "from 1 to 65535"),
        (f"{MAIL}?prefetch=٣", "from 1 to 65535"),
        (f"{MAIL}?max_length=0", "max_length=0; write a whole number from 1 on"),
        (f"{MAIL}?max_length=-1", "from 1 on"),
        (f"{MAIL}?max_length=1e3", "from 1 on"),
        (f"{MAIL}?max_length={'9' * 5_000}", "from 1 on"),
        (f"{MAIL}?type=Quorum", "type=Quorum; write type=quorum or type=classic"),
        (f"{MAIL}?declare=yes", "declare=yes; write declare=no"),
        (f"{MAIL}?declare=no&type=quorum", "leave them out, or declare=no"),
        (f"{MAIL}?declare=no&max_length=1", "leave them out, or declare=no"),
        (f"{MAIL}?message_type=%00", "message_type has no printable name"),
        ("rabbitmq://default/topic/orders?types=a,,b", "types has no printable name"),
    ],
)  # fmt: skip
def test_mistake_is_refused_with_the_correct_form(uri: str, what_to_write: str) -> None:
    with pytest.raises(InvalidSetting, match=what_to_write):
        parse(uri)


@pytest.mark.parametrize(
    ("uri", "longest"),
    [
        ("rabbitmq://default/queue/{}", 255),
        ("rabbitmq://default/exchange/{}/k", 127),
        ("rabbitmq://default/exchange/e/{}", 255),
        ("rabbitmq://default/topic/{}", 255),
        ("rabbitmq://default/queue/q?message_type={}", 255),
        ("rabbitmq://default/topic/orders?types=a,{}", 255),
    ],
)
def test_names_are_no_longer_than_amqp_allows(uri: str, longest: int) -> None:
    parse(uri.format("x" * longest))
    with pytest.raises(InvalidSetting, match=f"has {longest + 1} bytes, more than the {longest} of AMQP"):
        parse(uri.format("x" * (longest + 1)))


def test_length_is_counted_in_bytes() -> None:
    parse(f"rabbitmq://default/exchange/e/{'%C3%A9' * 127}")
    with pytest.raises(InvalidSetting, match="has 256 bytes"):
        parse(f"rabbitmq://default/exchange/e/{'%C3%A9' * 128}")


@pytest.mark.parametrize("uri", ["rabbitmq://user:tops3cret@host/queue/mail", "rabbitmq://tops3cret@default/topic?x=1"])
def test_a_password_in_an_address_is_refused_and_not_shown(uri: str) -> None:
    with pytest.raises(InvalidSetting, match="belong in the setting amqp_url") as refused:
        parse(uri)
    assert "tops3cret" not in str(refused.value)


# ---------------------------------------------------------------- sent to, listened on


def resolved(uri: str) -> str:
    return str(destination(uri, service="orders", message_type="orders.order-placed", exchange="durable"))


def test_the_topic_is_resolved_to_a_routing_key_for_each_type() -> None:
    assert resolved("rabbitmq://second/topic") == "rabbitmq://second/exchange/durable/orders:orders.order-placed"


services = st.from_regex(r"[ab][ab._-]{0,3}", fullmatch=True)


@given(services, services, st.data())
def test_no_two_services_share_a_name_on_a_topic(one: str, other: str, data: st.DataObject) -> None:
    joined = data.draw(st.sampled_from([f"{service}{separator}x" for service in (one, other) for separator in "-.:_"]))
    cut = [(joined[:end], joined[end + 1 :]) for end in range(1, len(joined) - 1)]
    named = [(service, type_) for service, type_ in cut if ":" not in service]
    assert len({name_on_topic(*each) for each in named}) == len(named)


@pytest.mark.parametrize("uri", [MAIL, "rabbitmq://default/topic", "rabbitmq://default/exchange/events/a%2Fb"])
def test_resolving_twice_changes_nothing(uri: str) -> None:
    assert resolved(resolved(uri)) == resolved(uri)


def test_queue_is_one_destination_with_any_listener_options() -> None:
    assert resolved(f"{MAIL}?type=classic&message_type=a") == MAIL


def test_too_long_routing_key_is_refused_when_resolved() -> None:
    with pytest.raises(InvalidSetting, match=r"the routing key of a.* has 256 bytes, more than the 255"):
        destination("rabbitmq://default/topic", service="s" * 100, message_type="a" * 155, exchange="durable")


def test_invalid_exchange_is_refused_when_resolved() -> None:
    with pytest.raises(InvalidSetting, match=r"amqp_exchange is 'a\*'; AMQP allows"):
        destination("rabbitmq://default/topic", service="orders", message_type="a", exchange="a*")


def test_addresses_for_listening_and_for_sending_are_not_interchangeable() -> None:
    assert source(MAIL) == parse(MAIL)
    with pytest.raises(InvalidSetting, match="not to send to; write rabbitmq://default/topic,"):
        resolved("rabbitmq://default/topic/orders")
    with pytest.raises(InvalidSetting, match="whose messages to listen to, as in rabbitmq://default/topic/orders"):
        source("rabbitmq://default/topic")
    with pytest.raises(InvalidSetting, match=r"an exchange has no listeners; .* as in rabbitmq://default/queue/mail"):
        source("rabbitmq://default/exchange/events/a")


# ---------------------------------------------------------------- brokers


def test_a_broker_is_found_in_the_settings_by_its_name() -> None:
    settings = load_settings(amqp_url="amqp://127.0.0.1", amqp_brokers={"second": "amqps://u:p@b:5671/vhost"})

    assert broker_url(settings, "default") == "amqp://127.0.0.1"
    assert broker_url(settings, "second") == "amqps://u:p@b:5671/vhost"


def test_broker_missing_in_the_settings_is_refused() -> None:
    settings = load_settings(amqp_brokers={"second": "amqps://b"})

    with pytest.raises(
        InvalidSetting, match=r"amqp_url: not set.*set DURABLE_AMQP_URL, as in amqps://user:\*\*\*@host"
    ):
        broker_url(settings, "default")
    with pytest.raises(InvalidSetting, match=r"no broker has this name; did you mean 'second'.; write .*amqp_brokers"):
        broker_url(settings, "secnd")


@pytest.mark.parametrize(
    "url",
    ["http://u:tops3cret@h", "amqp:///tops3cret", "tops3cret", "amqp://u:tops3cret@h:70000/", "amqp://[tops3cret"],
)
def test_invalid_amqp_url_is_refused_and_not_shown(url: str) -> None:
    settings = Settings(amqp_url=SecretStr(url), amqp_brokers={"second": SecretStr(url)})

    for broker, setting in (("default", "amqp_url"), ("second", "amqp_brokers: second")):
        with pytest.raises(InvalidSetting, match=f"{setting}: not an AMQP URL; it .* amqps://") as refused:
            broker_url(settings, broker)
        assert "tops3cret" not in str(refused.value)
