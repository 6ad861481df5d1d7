"""Keys over a queue that two nodes of a service listen on."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from durable import Bus, message
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK
from tests.support.servers import AnyBroker, Names

KEYS, EACH = 5, 20


@message("rabbit.order-step")
class Step(msgspec.Struct):
    key: str
    number: int


def listener(database: str, url: str, address: str, done: dict[str, list[int]]) -> Bus:
    bus = Bus("workshop", database, amqp_url=url, **QUICK)
    bus.listen(address)

    @bus.handles(Step)
    async def handle(step: Step) -> None:
        done[step.key].append(step.number)

    return bus


def received(bus: Bus) -> int:
    return bus.runtime.counters.snapshot()["received"]


async def send(bus: Bus, address: str, numbers: range) -> None:
    for number in numbers:
        async with bus.unit_of_work():
            for key in range(KEYS):
                bus.send(Step(f"k{key}", number), key=f"k{key}", to=address)


def in_order(done: dict[str, list[int]], count: int) -> bool:
    """Have all been handled? An attempt may run twice, when a node has lost its lease: the first counts."""
    first = {key: list(dict.fromkeys(numbers)) for key, numbers in done.items()}
    assert all(numbers == sorted(numbers) for numbers in first.values()), done
    return {key: list(range(count)) for key in (f"k{number}" for number in range(KEYS))} == first


@pytest.mark.parametrize("options", ["?ordered=yes&prefetch=10", "?ordered=yes&prefetch=10&type=classic"])
async def test_keys_keep_their_order_with_two_listeners_of_a_queue_even_when_one_closes(
    database_url: str, make_database: Any, broker: AnyBroker, queue_name: Names, options: str
) -> None:
    address = f"rabbitmq://default/queue/{queue_name()}"
    done: dict[str, list[int]] = defaultdict(list)
    active, standing_by = (listener(database_url, broker.url, address + options, done) for _ in range(2))
    sender = Bus("sender", make_database("sender"), amqp_url=broker.url, **QUICK)
    async with sender, AsyncExitStack() as others:
        async with active:
            await others.enter_async_context(standing_by)
            await send(sender, address, range(EACH))
            await eventually(lambda: in_order(done, EACH), within=60)
            assert (received(active), received(standing_by)) == (KEYS * EACH, 0), "one of them has had it all"
            await send(sender, address, range(EACH, 2 * EACH))
        await eventually(lambda: in_order(done, 2 * EACH), within=60)
        await send(sender, address, range(2 * EACH, 2 * EACH + 2))
        await eventually(lambda: in_order(done, 2 * EACH + 2), within=60)
        assert received(standing_by) >= 2 * KEYS


async def test_listeners_sharing_an_unordered_queue_warn_when_keys_arrive(
    database_url: str, make_database: Any, broker: AnyBroker, queue_name: Names, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"rabbitmq://default/queue/{queue_name()}?prefetch=1"
    done: dict[str, list[int]] = defaultdict(list)
    first, second = (listener(database_url, broker.url, address, done) for _ in range(2))
    sender = Bus("sender", make_database("sender"), amqp_url=broker.url, **QUICK)
    async with first, second, sender:
        await send(sender, address, range(EACH))
        await eventually(lambda: sum(map(len, done.values())) == KEYS * EACH, within=60)
        assert received(first)
        assert received(second)
    told = [record.message for record in caplog.records if "messages with a key" in record.message]
    said = (
        f"listener {address}: messages with a key arrive over a queue that is not ordered, and two listeners may store "
        "them in another order; write ordered=yes in its address"
    )
    assert told == [said] * 2
