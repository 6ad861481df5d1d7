from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from durable import Bus, InvalidSetting, message, upcaster
from durable.envelope import Envelope
from durable.messages.ordering import FREE, OrderingRules, QueueKeys
from durable.storage.ordering import share_out
from tests.failure.leftovers import envelope


def keyed(key: str | None, **headers: str) -> Envelope:
    return msgspec.structs.replace(envelope(1), partition_key=key, headers=headers)


def test_message_without_a_key_has_no_place() -> None:
    assert OrderingRules().incoming(keyed(None)) == OrderingRules().outgoing(keyed(None)) == FREE


def test_empty_key_is_no_key() -> None:
    assert OrderingRules().incoming(keyed("")) == OrderingRules().outgoing(keyed("")) == FREE


def test_a_key_orders_on_both_sides() -> None:
    assert OrderingRules().incoming(keyed("k")) == OrderingRules().outgoing(keyed("k")) == QueueKeys("k")


def test_ordered_destination_or_handler_orders_everything_under_an_unprintable_key() -> None:
    message_type, destination = keyed("k").message_type, keyed("k").destination
    places = OrderingRules(ordered_types={message_type}, ordered_destinations={destination})
    for place in (places.incoming, places.outgoing):
        assert place(keyed("k")) == place(keyed("other")) == place(keyed(None))
        assert not str(place(keyed("k")).ordering_key).isprintable()


def convert(old: type[Any], new: type[Any]) -> None:
    @upcaster(old, to=new)
    def converted(_: Any) -> Any:
        return new()


def test_ordered_handler_has_one_ordering_key_with_and_without_the_code_of_older_versions(no_messages: None) -> None:
    names = ["ordering.moved", "ordering.moved.v2", "ordering.moved.v3"]
    classes = [message(name)(msgspec.defstruct(f"V{number}", [])) for number, name in enumerate(names)]

    def key_of(newest: str) -> str | None:
        return OrderingRules(ordered_types={newest}).of_type(newest).ordering_key

    without = [key_of(name) for name in names]
    for old, new in pairwise(classes):
        convert(old, new)
    assert [*without, *map(key_of, names)] == [key_of(names[0])] * 6


def test_fair_handler_counts_by_header_or_key_and_messages_without_one_share_a_share() -> None:
    message_type = keyed("k").message_type
    assert OrderingRules(shared={message_type: "tenant"}).incoming(keyed("k", tenant="blue")) == QueueKeys("k", "blue")
    assert OrderingRules(shared={message_type: "tenant"}).incoming(keyed(None)) == QueueKeys(None, "")
    assert OrderingRules(shared={message_type: "key"}).incoming(keyed("k")) == QueueKeys("k", "k")


@pytest.mark.parametrize(
    ("tenants", "weights", "size", "quotas", "after"),
    [
        ([], {}, 10, {}, ""),
        (["a"], {}, 10, {"a": 10}, ""),
        (["a", "b"], {"b": 3}, 8, {"a": 2, "b": 6}, ""),
        (["a", "b", "c"], {}, 2, {"a": 1, "b": 1}, "c"),
        (["a", "b"], {"a": 50}, 10, {"a": 10}, "b"),
        (["a", "b"], {"b": 50}, 10, {"a": 1}, "b"),
    ],
)
def test_batch_is_shared_out_by_weight_and_the_next_batch_starts_with_the_first_tenant_left_out(
    tenants: list[str], weights: dict[str, int], size: int, quotas: dict[str, int], after: str
) -> None:
    assert share_out(tenants, weights, size) == (quotas, after)


@pytest.mark.parametrize(
    "wrong",
    [
        {"on_dead_letter": "stop"},
        {"fair_by": ""},
        {"fair_by": "tenant", "ordered": True},
        {"weights": {"gold": 3}},
        {"fair_by": "tenant", "weights": {"gold": 0}},
    ],
    ids=["no such end", "no header", "fair and ordered", "weights of nobody", "no weight"],
)
def test_invalid_ordering_option_is_refused(wrong: dict[str, object]) -> None:
    from tests.failure.app import OrderPlaced

    async def handle(order: OrderPlaced) -> None:
        pass

    with pytest.raises(InvalidSetting):
        Bus("shop").handles(OrderPlaced, **wrong)(handle)  # type: ignore[arg-type]
