"""Listeners that share a queue are alike, or refused when the second one is declared."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from durable.bus import Bus
from durable.errors import InvalidSetting
from durable.settings import load_settings
from durable.transports.rabbitmq.address import SubscriptionAddress, broker_place, source
from durable.transports.rabbitmq.sharing import Named, check
from durable.transports.rabbitmq.topology import listening

BROKERS = {"us": "amqps://us/", "again": "amqps://one/"}
SETTINGS = load_settings(amqp_url="amqps://one/", amqp_brokers=BROKERS)
SAME_BROKER = {"default", "again"}
HANDLED = ("a", "b", "c")
PLACES = [
    "default/topic/orders", "default/topic/shop", "again/topic/pos", "us/topic/orders", "default/queue/mail",
    "us/queue/mail", "default/queue/other", "default/queue/billing:a", "default/queue/billing:b", "again/queue/mail",
]  # fmt: skip
TOPIC_OPTIONS = ["", "types=a", "types=b,c", "types=a,c&unsigned=yes"]
OPTIONS = [
    "", "unsigned=yes", "prefetch=5", "max_length=9", "ordered=yes", "ordered=no", "type=classic", "type=quorum",
]  # fmt: skip
QUEUE_OPTIONS = ["declare=no", "message_type=a"]
DECIDING = {"", "ordered=no", "type=quorum"}
"""Options as the settings have them."""


def addresses() -> list[str]:
    options = {place: [*OPTIONS, *(TOPIC_OPTIONS if "/topic/" in place else QUEUE_OPTIONS)] for place in PLACES}
    return [f"rabbitmq://{place}?{option}".rstrip("?") for place in PLACES for option in dict.fromkeys(options[place])]


@cache
def consumed(uri: str) -> set[tuple[bool, str]]:
    """The queues of an address, each with its broker."""
    address = source(uri)
    topology = listening(address, SETTINGS, service="billing", handled=HANDLED)
    return {(address.broker in SAME_BROKER, queue.name) for queue in topology.queues}


@cache
def kind(uri: str) -> tuple[str, bool]:
    address = source(uri)
    return address.broker, isinstance(address, SubscriptionAddress)


@cache
def deciding(uri: str) -> set[str]:
    given = uri.partition("?")[2].split("&")
    return {option for option in given if not option.startswith("types=")} - DECIDING


def refusal(one: str, other: str, names: tuple[str, str] = ("billing", "billing")) -> str:
    try:
        check(Named(other, names[1]), [Named(one, names[0])], SETTINGS, "billing")
    except InvalidSetting as error:
        return str(error)
    return ""


def test_two_addresses_are_refused_when_they_differ_on_a_shared_queue() -> None:
    for one, other in product(addresses(), repeat=2):
        if one == other:
            continue
        are_alike = kind(one) == kind(other) and deciding(one) == deciding(other)
        is_wrong = bool(consumed(one) & consumed(other)) and not are_alike
        assert bool(refusal(one, other)) == is_wrong, (one, other)


@pytest.mark.parametrize("place", ["topic/shop", "topic/orders?type=quorum", "topic/pos?types=a"])
def test_two_names_on_one_topic_are_refused(place: str) -> None:
    topic, other = "rabbitmq://default/topic/orders", f"rabbitmq://default/{place}"

    assert "give both listeners the same name=" in refusal(topic, other, ("one", "two"))
    assert "give both listeners the same name=" in refusal(topic, other, ("billing", "two"))
    assert refusal(topic, other, ("one", "one")) == ""


ONE_BROKER = [
    "amqps://mq.example", "amqps://mq.example/", "amqps://mq.example:5671", "amqps://mq.example/%2F", "amqps://MQ.Example./%2f",
    "amqps://mail:y@mq.example/", "amqps://mq.example:05671/?heartbeat=30", "amqp://shop:x@mq.example:5672//",
    "amqps://mq.example/?heartbeat=30",
]  # fmt: skip
OTHER_BROKERS = [
    "amqps://mq2.example/", "amqps://mq.example:5673/", "amqps://mq.example/mail", "amqps://mq.example/%2Fmail",
    "amqps://mq.example/MAIL", "amqps://mq.example/%252F",
]  # fmt: skip


@pytest.mark.parametrize("one", [*ONE_BROKER, *OTHER_BROKERS])
@pytest.mark.parametrize("other", [*ONE_BROKER, *OTHER_BROKERS])
def test_listeners_of_a_queue_are_alike_however_the_url_of_its_broker_is_written(one: str, other: str) -> None:
    settings = load_settings(amqp_url=one, amqp_brokers={"events": other}, allow_plaintext=True)
    mail = [Named(f"rabbitmq://{each}/queue/mail", "billing") for each in ("default", "events")]
    if one == other or {one, other} <= set(ONE_BROKER):
        with pytest.raises(InvalidSetting, match="write the same broker in both"):
            check(mail[1], mail[:1], settings, "billing")
    else:
        check(mail[1], mail[:1], settings, "billing")


@pytest.mark.parametrize("url", ["amqps://[::1]/mail", "amqps://[0:0::1]:5671/%6dail"])
def test_spellings_of_an_ipv6_broker_are_one(url: str) -> None:
    assert broker_place(load_settings(amqp_url=url), "default") == ("::1", None, "mail")


def test_refusal_names_the_queue_both_addresses_and_the_options() -> None:
    pos = "rabbitmq://default/topic/pos?types=a&unsigned=yes&prefetch=5"

    assert refusal("rabbitmq://default/topic/orders", pos) == (
        f"{pos}: it shares the queue billing:a with rabbitmq://default/topic/orders, and a delivery may come to either;"
        " write the same prefetch and unsigned in both"
    )


@pytest.mark.parametrize(("uri", "name"), [("topic/pos?unsigned=yes", None), ("topic/pos", "from-pos")])
def test_bus_refuses_a_differing_listener_on_a_shared_queue(uri: str, name: str | None) -> None:
    bus = Bus("billing", "postgresql://nowhere/none", amqp_url="amqps://one/")
    bus.listen("rabbitmq://default/topic/orders")
    bus.listen("rabbitmq://default/topic/shop")

    with pytest.raises(InvalidSetting, match="it shares the queues billing:TYPE with rabbitmq://default/topic/orders"):
        bus.listen(f"rabbitmq://default/{uri}", name=name)
    bus.listen("rabbitmq://default/topic/pos")
