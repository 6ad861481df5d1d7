"""What an address needs on its broker, who declares it, and what a refusal means."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from durable.errors import InvalidSetting
from durable.settings import Settings, load_settings
from durable.transports.rabbitmq.address import Destination, destination, source
from durable.transports.rabbitmq.refusals import explained
from durable.transports.rabbitmq.topology import (
    Binding,
    Exchange,
    Queue,
    Topology,
    listening,
    sending,
    targeted,
    union,
)

SETTINGS = load_settings()
NEVER = 2_147_483_647
TOPIC = "rabbitmq://default/topic/orders"
MAIL = "rabbitmq://default/queue/mail"


def listened(
    uri: str, handled: Collection[str] = ("orders.placed", "orders.paid"), settings: Settings = SETTINGS
) -> Topology:
    return listening(source(uri), settings, service="billing", handled=handled)


def target(uri: str, settings: Settings = SETTINGS) -> Destination:
    return destination(uri, service="orders", message_type="orders.paid", exchange=settings.amqp_exchange)


def sent(uri: str, settings: Settings = SETTINGS) -> Topology:
    return sending(target(uri, settings), settings)


# ---------------------------------------------------------------- who declares what


def test_a_listener_on_a_queue_declares_the_queue_alone() -> None:
    assert listened(MAIL) == Topology(queues=(Queue("mail", "quorum"),))


def test_listener_on_the_topic_declares_exchange_queues_and_bindings_for_handled_types() -> None:
    assert listened(TOPIC) == Topology(
        (Exchange("durable"),),
        (Queue("billing:orders.paid", "quorum"), Queue("billing:orders.placed", "quorum")),
        (
            Binding("durable", "orders:orders.paid", "billing:orders.paid"),
            Binding("durable", "orders:orders.placed", "billing:orders.placed"),
        ),
    )


def test_a_listener_can_ask_for_some_of_the_types() -> None:
    assert [queue.name for queue in listened(f"{TOPIC}?types=orders.paid").queues] == ["billing:orders.paid"]


def test_a_sender_declares_the_topic_exchange_and_never_a_queue() -> None:
    other = load_settings(amqp_exchange="events")

    assert sent("rabbitmq://default/topic") == Topology((Exchange("durable"),))
    assert sent("rabbitmq://default/topic", other) == Topology((Exchange("events"),))
    assert sent("rabbitmq://default/exchange/events/a") == Topology()
    assert sent(MAIL) == Topology()


# ---------------------------------------------------------------- how queues are declared


def test_queues_are_quorum_queues_without_a_delivery_limit() -> None:
    assert listened(MAIL).queues[0].arguments == {"x-queue-type": "quorum", "x-delivery-limit": NEVER}


def test_a_queue_is_ordered_where_the_address_or_else_the_setting_says_so() -> None:
    def is_ordered(uri: str, settings: Settings) -> bool:
        queue = listened(uri, settings=settings).queues[0]
        assert queue.ordered == queue.arguments.get("x-single-active-consumer", False)
        return queue.ordered

    ordered = load_settings(amqp_ordered=True)
    assert is_ordered(MAIL, ordered)
    assert is_ordered(TOPIC, ordered)
    assert not is_ordered(f"{MAIL}?ordered=no", ordered)
    assert not is_ordered(MAIL, SETTINGS)
    assert is_ordered(f"{TOPIC}?ordered=yes", SETTINGS)


def test_option_of_the_address_precedes_the_setting_of_the_queue_type() -> None:
    settings = load_settings(amqp_queue_type="classic")

    assert listened(MAIL, settings=settings).queues[0].arguments == {"x-queue-type": "classic"}
    assert listened(f"{MAIL}?type=quorum", settings=settings).queues[0].type == "quorum"


@pytest.mark.parametrize("uri", [f"{MAIL}?max_length=10", f"{TOPIC}?max_length=10&types=orders.paid"])
def test_a_full_queue_refuses_and_drops_nothing(uri: str) -> None:
    arguments = listened(uri).queues[0].arguments

    assert (arguments["x-max-length"], arguments["x-overflow"]) == (10, "reject-publish")


def test_foreign_queue_is_not_declared() -> None:
    assert [queue.declared for queue in listened(f"{MAIL}?declare=no").queues] == [False]


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("uri", "handled", "reason"),
    [
        (TOPIC, (), "no message type is handled here.*declare handlers"),
        (f"{TOPIC}?types=orders.pad", ("orders.paid",), "orders.pad is not handled here; did you mean 'orders.paid'"),
        (f"{MAIL}?message_type=orders.pad", ("orders.paid",), "orders.pad is not handled here; did you mean"),
        (TOPIC, ("a" * 248,), "the name of a queue has 256 bytes, more than the 255 of AMQP"),
        ("rabbitmq://default/topic/orders-and-more", ("a" * 240,), "the routing key has 256 bytes"),
        ("rabbitmq://default/topic/%23.a", ("b",), r"\* and # match any name"),
        ("rabbitmq://default/topic/a.*.b", ("b",), r"\* and # match any name"),
    ],
)
def test_address_unfit_for_listening_is_refused(uri: str, handled: Collection[str], reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        listened(uri, handled)


@pytest.mark.parametrize(
    ("service", "exchange", "reason"),
    [("größe", "durable", "the name of a queue is 'größe:a'; AMQP allows ASCII"), ("shop", "a*", "amqp_exchange is")],
)
def test_names_unfit_for_amqp_are_refused(service: str, exchange: str, reason: str) -> None:
    settings = load_settings(amqp_exchange=exchange)

    with pytest.raises(InvalidSetting, match=reason):
        listening(source(TOPIC), settings, service=service, handled=["a"])


def test_the_longest_names_are_allowed() -> None:
    assert len(listened(TOPIC, ("a" * 247,)).queues[0].name) == 255


def test_star_inside_a_word_is_literal() -> None:
    assert listened("rabbitmq://default/topic/a*", ("b",)).bindings[0].routing_key == "a*:b"


# ---------------------------------------------------------------- all of an application


def test_union_of_topologies_holds_each_thing_once() -> None:
    other = listened("rabbitmq://default/topic/shop?types=orders.paid")
    both = union([listened(TOPIC), other, listened(MAIL), sent("rabbitmq://default/topic")])

    assert both.exchanges == (Exchange("durable"),)
    assert [queue.name for queue in both.queues] == ["billing:orders.paid", "billing:orders.placed", "mail"]
    assert [binding.routing_key for binding in both.bindings] == [
        "orders:orders.paid", "orders:orders.placed", "shop:orders.paid"
    ]  # fmt: skip


def test_destination_is_foreign_unless_declared_by_its_own_listener() -> None:
    mail, events = (target(uri) for uri in (MAIL, "rabbitmq://default/exchange/events/a"))
    expected = union([targeted(mail), targeted(events), sent("rabbitmq://default/topic")])

    assert expected.exchanges == (Exchange("durable"), Exchange("events", declared=False))
    assert [(queue.name, queue.declared) for queue in expected.queues] == [("mail", False)]
    assert expected.declared == Topology((Exchange("durable"),))
    for both in ([listened(MAIL), targeted(mail)], [targeted(mail), listened(MAIL)]):
        assert union(both) == listened(MAIL)


def test_one_queue_with_two_sets_of_arguments_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="queue mail: two addresses declare it with different arguments"):
        union([listened(MAIL), listened(f"{MAIL}?max_length=1")])


# ---------------------------------------------------------------- what a refusal means

QUEUE = Queue("mail", "quorum")
INEQUIVALENT = (
    "PRECONDITION_FAILED - inequivalent arg '{}' for queue 'mail' in vhost '/': received {} but current is {}"
)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (INEQUIVALENT.format("x-queue-type", "'quorum'", "'classic'"),
         "queue mail: its x-queue-type is classic, and quorum was asked for; write type=classic in its address, or"
         " delete it when it is empty: it is declared again"),
        (INEQUIVALENT.format("x-queue-type", "the value 'quorum' of type 'longstr'", "none"),
         "queue mail: its x-queue-type is not set, and quorum was asked for; write type=classic in its address, or"),
        (INEQUIVALENT.format("x-queue-type", "'classic'", "'quorum'"), "write type=quorum in its address, or delete"),
        (INEQUIVALENT.format("x-queue-type", "'classic'", "'stream'"), "could drop confirmed messages"),
        (INEQUIVALENT.format("x-max-priority", "none", "the value '9' of type 'byte'"),
         "queue mail: its x-max-priority is 9, and none was asked for; listen on .../queue/mail?declare=no to take it"),
        (INEQUIVALENT.format("x-max-length", "'6'", "'5'"),
         "queue mail: its x-max-length is 5, and 6 was asked for; write max_length=5 in its address"),
        (INEQUIVALENT.format("x-max-length", "the value '5' of type 'byte'", "none"),
         "queue mail: its x-max-length is not set, and 5 was asked for; leave max_length out of its address"),
        (INEQUIVALENT.format("durable", "'true'", "'false'"),
         "queue mail: its durable is false, and true was asked for; delete it when it is empty: it is declared again"),
        (INEQUIVALENT.format("x-message-ttl", "none", "the value '1000' of type 'short'"),
         "queue mail: its x-message-ttl is 1000, and none was asked for; delete it when it is empty: it is declared"
         " again; with declare=no the broker could drop confirmed messages"),
        ("RESOURCE_LOCKED - cannot obtain exclusive access", "queue mail: it is exclusive to another connection"),
        ("ACCESS_REFUSED - access to queue 'mail' refused", "queue mail: this user may not declare it; let "),
        ("PRECONDITION_FAILED - something new", "queue mail: the broker refuses it: PRECONDITION_FAILED - something"),
    ],
)  # fmt: skip
def test_refused_queue_is_explained_with_advice(said: str, sentence: str) -> None:
    assert sentence in explained(QUEUE, said)


def test_missing_foreign_queue_is_explained_with_advice() -> None:
    said = explained(Queue("mail", "quorum", declared=False), "NOT_FOUND - no queue 'mail' in vhost '/'")

    assert said == "queue mail: there is none, and its address says declare=no; create it, or leave declare=no out"


def test_refused_exchange_is_explained_with_advice() -> None:
    said = INEQUIVALENT.replace("queue", "exchange").format("type", "'topic'", "'direct'")

    assert explained(Exchange("durable"), said) == (
        "exchange durable: its type is direct, and topic was asked for; give every service another name for it"
        " (amqp_exchange), or delete it"
    )
