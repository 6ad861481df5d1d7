"""Deliveries that a listener holds, through every succession of arrivals, takes, failures and lost consumers."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from pamqp.commands import Basic

from durable.transports.rabbitmq.arrivals import Origin, Unmappable
from durable.transports.rabbitmq.consumers import Consumer, Delivery
from durable.transports.rabbitmq.held import Held


class Lost:
    """Stands for the future of the consumers of one connection."""

    def __init__(self) -> None:
        self.is_done = False

    def done(self) -> bool:
        return self.is_done


def connected() -> list[Consumer]:
    """Consumers of two queues at one connection."""
    lost = Lost()
    return [Consumer(Origin(queue, queue), cast(Any, None), cast(Any, lost)) for queue in ("a", "b")]


class HeldDeliveries(RuleBasedStateMachine):
    """Two queues at one connection after another; the model is a list."""

    consumers = Bundle("consumers")

    @initialize(is_ordered=st.booleans())
    def begin(self, is_ordered: bool) -> None:
        self.held = Held()
        self.held.is_ordered = is_ordered
        self.model: list[Delivery] = []
        self.under_way: list[Delivery] = []

    @initialize(target=consumers)
    def connect_first(self) -> list[Consumer]:
        return connected()

    @rule(target=consumers)
    def connect_again(self) -> list[Consumer]:
        return connected()

    @rule(of=consumers, queue=st.integers(0, 1), size=st.integers(0, 9))
    def arrive(self, of: list[Consumer], queue: int, size: int) -> None:
        content = Unmappable(bytes(size), "", {})
        delivery = Delivery(content, Basic.Properties(), Basic.Deliver(), of[queue])
        self.held.add(delivery)
        self.model.append(delivery)

    @rule(of=consumers, cancelled=st.sets(st.integers(0, 1)))
    def lose(self, of: list[Consumer], cancelled: set[int]) -> None:
        for number in cancelled:
            of[number].is_cancelled = True
        cast(Lost, of[0].lost).is_done = True

    @rule()
    def drop(self) -> None:
        told = self.held.drop_lost()
        lost = [each for each in self.model if each.consumer.is_lost]
        nobody_delivers_again = [each for each in lost if each.consumer.is_cancelled]
        dropped = lost if self.held.is_ordered else [each for each in lost if not each.consumer.is_cancelled]
        assert told == (nobody_delivers_again if self.held.is_ordered else [])
        self.model = [each for each in self.model if each not in dropped]

    @rule(most=st.integers(0, 5), most_bytes=st.integers(0, 20))
    def take(self, most: int, most_bytes: int) -> None:
        if self.under_way:
            return
        taken = self.held.take(most, most_bytes)
        assert taken == self.model[: len(taken)]
        assert len(taken) <= most
        assert len(taken) <= 1 or sum(each.weight_bytes for each in taken) <= most_bytes
        assert taken or not most or not self.model
        self.under_way, self.model = taken, self.model[len(taken) :]

    @rule(stored=st.sets(st.integers(0, 4)))
    def settle(self, stored: set[int]) -> None:
        kept = [each for place, each in enumerate(self.under_way) if place not in stored]
        self.held.put_back(kept)
        self.under_way, self.model = [], [*kept, *self.model]

    @invariant()
    def counts_what_it_holds(self) -> None:
        assert len(self.held) == len(self.model)
        assert self.held.bytes == sum(each.weight_bytes for each in self.model)


TestHeldDeliveries = HeldDeliveries.TestCase
