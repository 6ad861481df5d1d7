"""Listeners that share a queue are alike, or refused when the second one is declared."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from durable.bus import Bus
from durable.errors import InvalidSetting
from durable.settings import load_settings
from durable.transports.rabbitmq.address import SubscriptionAddress, source
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
