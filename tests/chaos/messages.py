"""The messages of the two services, and what each stands for.

Order     orders -> billing    of a key: handled in the order of its numbers; some are answered by a Receipt
Charge    orders -> billing    in batches, behind a circuit breaker that a storm opens
Reminder  orders -> billing    with a delay
Offer     orders -> billing    with a deadline; by a sync handler
Note      orders -> orders     the service's own queue
Receipt   billing -> orders    sent by the handler of an Order, under its key and number
Tick      orders -> billing    a recurring schedule
"""

from __future__ import annotations

import msgspec

from durable import message

FAILS = "fails"
"""Behaviour of messages that fail in every attempt, and become dead letters."""
FAILS_AT_FIRST = "fails at first"
ANSWERS = "answers"
SLOW = "slow"


class Kind(msgspec.Struct):
    """Fields that every message has; `number` counts within the key, or is that of the sender."""

    number: int
    key: str = ""
    behaviour: str = ""


@message("chaos.order")
class Order(Kind):
    pass


@message("chaos.charge")
class Charge(Kind):
    pass


@message("chaos.reminder")
class Reminder(Kind):
    pass


@message("chaos.offer")
class Offer(Kind):
    pass


@message("chaos.note")
class Note(Kind):
    pass


@message("chaos.receipt")
class Receipt(Kind):
    pass


@message("chaos.tick")
class Tick(msgspec.Struct):
    pass


TICK_SECONDS = 2
"""Time between two occurrences of the schedule."""


def kind_of(sent: object) -> str:
    return type(sent).__name__.lower()
