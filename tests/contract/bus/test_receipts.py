"""Receipts: the outcome of a message for a caller that has its id. On Postgres and in memory alike."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Literal
from uuid import UUID, uuid4

import pytest

from durable import InvalidSetting, PutBack, Reject, Retry, StillWaiting, UnknownMessage
from durable.envelope import new_id
from tests.contract.bus.orders import (
    BILLING,
    MAIL,
    MINUTE,
    NEVER,
    SECOND,
    OrderBilled,
    OrderPlaced,
    OrderShipped,
    arriving,
    collect,
)
from tests.contract.bus.worlds import World

SOON = 20  # seconds: a bound, no measure


async def sent(world: World, message: object, *, publish: bool = False, **options: object) -> UUID:
    async with world.bus.unit_of_work() as uow:
        send = uow.publish if publish else uow.send
        return send(message, **options)  # type: ignore[arg-type]


async def test_receipt_tells_of_a_handled_message(world: World) -> None:
    collect(world.bus, OrderPlaced)
    async with world:
        message = await sent(world, OrderPlaced(1))
        await world.settle()
        receipt = await world.bus.wait_for(message, timeout=SOON)
    assert (receipt.id, receipt.outcome, receipt.message_type) == (message, "handled", "contract.order-placed")
    [delivery] = receipt.deliveries
    assert (delivery.side, delivery.address, delivery.reason) == ("incoming", "local", None)
    assert delivery.ended_at is not None


async def test_receipt_comes_to_all_callers_when_the_message_ends_later(world: World) -> None:
    collect(world.bus, OrderPlaced)
    async with world:
        await world.pause(OrderPlaced)
        message = await sent(world, OrderPlaced(1))
        callers = [asyncio.create_task(world.bus.wait_for(message, timeout=SOON)) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert not any(caller.done() for caller in callers)
        await world.bus.resume(OrderPlaced)
        await world.settle()
        assert {receipt.outcome for receipt in await asyncio.gather(*callers)} == {"handled"}


async def test_receipt_tells_the_reason_of_a_dead_letter(world: World) -> None:
    @world.bus.handles(OrderPlaced, retry=NEVER)
    async def handle(order: OrderPlaced) -> None:
        raise Reject("no such number")

    async with world:
        message = await sent(world, OrderPlaced(1))
        await world.settle()
        receipt = await world.bus.wait_for(message, timeout=SOON)
        assert receipt.outcome == "dead-lettered"
        assert "no such number" in (receipt.reason or "")
        await world.discard()
        receipt = await world.bus.wait_for(message, timeout=SOON)
        assert (receipt.outcome, receipt.reason) == ("discarded", "a test")
        assert [each.attempts for each in receipt.deliveries] == [1]


@pytest.mark.parametrize("on_expiry", ["forget", "dead-letter"])
@pytest.mark.parametrize(
    ("retry", "errors", "life", "outcome", "attempts"),
    [
        (NEVER, [], None, "handled", 0),
        (NEVER, [KeyError()], None, "dead-lettered", 1),
        (Retry(immediate=2, delays=[]), [KeyError()], None, "handled", 1),
        (Retry(immediate=2, delays=[]), [KeyError()] * 2, None, "handled", 2),
        (Retry(immediate=2, delays=[]), [KeyError()] * 3, None, "dead-lettered", 3),
        (Retry(immediate=1, delays=[SECOND]), [KeyError()] * 2, None, "handled", 2),
        (Retry(immediate=1, delays=[SECOND] * 2), [KeyError()] * 3, None, "handled", 3),
        (Retry(immediate=1, delays=[SECOND]), [KeyError()] * 3, None, "dead-lettered", 3),
        (Retry(immediate=2, delays=[]), [KeyError(), PutBack()], None, "handled", 2),
        (Retry(immediate=2, delays=[]), [KeyError(), Reject()], None, "dead-lettered", 2),
        (Retry(immediate=1, delays=[2 * MINUTE]), [KeyError()] * 2, MINUTE, "expired", 2),
        (Retry(immediate=0, delays=[SECOND, 2 * MINUTE]), [KeyError()] * 2, MINUTE, "expired", 2),
    ],
)
async def test_end_of_a_message_tells_its_failed_attempts(
    world: World,
    on_expiry: Literal["forget", "dead-letter"],
    retry: Retry,
    errors: list[Exception],
    life: timedelta | None,
    outcome: str,
    attempts: int,
) -> None:
    left = list(errors)

    @world.bus.handles(OrderPlaced, retry=retry, on_expiry=on_expiry)
    async def handle(order: OrderPlaced) -> None:
        if left:
            raise left.pop(0)

    if (outcome, on_expiry) == ("expired", "dead-letter"):
        outcome = "dead-lettered"
    async with world:
        message = await sent(world, OrderPlaced(1), deliver_by=life)
        await world.settle()
        for _ in retry.delays:
            await world.advance(2 * SECOND)
        receipt = await world.bus.wait_for(message, timeout=SOON)
        [delivery] = receipt.deliveries
        assert (delivery.outcome, delivery.attempts) == (outcome, attempts)
        assert world.ended() == [(outcome, attempts)]
        assert [letter.attempts for letter in world.dead_letters()] == [attempts] * (outcome == "dead-lettered")


async def test_receipt_tells_of_a_cancelled_message(world: World) -> None:
    collect(world.bus, OrderPlaced)
    async with world:
        message = await sent(world, OrderPlaced(1), delay=MINUTE)
        with pytest.raises(StillWaiting, match=str(message)):
            await world.bus.wait_for(message, timeout=0.05)
        await world.bus.cancel(message, reason="sold out")
        receipt = await world.bus.wait_for(message, timeout=SOON)
    assert (receipt.outcome, receipt.reason) == ("cancelled", "cancelled by orders: sold out")


async def test_receipt_tells_of_an_expired_message(world: World) -> None:
    collect(world.bus, OrderPlaced)
    async with world:
        await world.pause(OrderPlaced)
        message = await sent(world, OrderPlaced(1), deliver_by=MINUTE)
        await world.advance(2 * MINUTE)
        assert (await world.bus.wait_for(message, timeout=SOON)).outcome == "expired"


async def test_receipt_tells_of_a_message_to_another_service(world: World) -> None:
    world.bus.route(OrderBilled, to=BILLING)
    async with world:
        message = await sent(world, OrderBilled(1))
        await world.settle()
        receipt = await world.bus.wait_for(message, timeout=SOON)
    assert receipt.outcome == "sent"
    assert [(each.side, each.address) for each in receipt.deliveries] == [("outgoing", BILLING)]


async def test_receipt_of_an_event_has_the_outcome_of_each_subscriber(world: World) -> None:
    for uri in (BILLING, MAIL):
        world.bus.subscribe(OrderShipped, to=uri)
    collect(world.bus, OrderShipped)
    async with world:
        await world.pause(destination=MAIL)
        message = await sent(world, OrderShipped(1), publish=True)
        await world.settle()
        with pytest.raises(StillWaiting):
            await world.bus.wait_for(message, timeout=0.05)
        caller = asyncio.create_task(world.bus.wait_for(message, timeout=SOON))
        await asyncio.sleep(0.1)  # its first look finds two places where the message has ended
        await world.bus.resume(destination=MAIL)
        await world.settle()
        receipt = await caller
    found = {(each.address, each.outcome) for each in receipt.deliveries}
    assert found == {("local", "handled"), (BILLING, "sent"), (MAIL, "sent")}
    assert receipt.outcome == "sent"


async def test_receipt_is_given_for_an_arrived_message(world: World) -> None:
    collect(world.bus, OrderPlaced)
    arrived = arriving()
    async with world:
        await world.arrive(arrived)
        assert (await world.bus.wait_for(arrived.id, timeout=SOON)).outcome == "handled"


@pytest.mark.parametrize("unknown", [new_id(), uuid4(), UUID(int=0), UUID(int=2**128 - 1)])
async def test_wait_for_refuses_an_unknown_id(world: World, unknown: UUID) -> None:
    async with world:
        with pytest.raises(UnknownMessage, match=str(unknown)):
            await world.bus.wait_for(unknown, timeout=SOON)


async def test_wait_for_refuses_the_id_of_a_message_when_rolled_back(world: World) -> None:
    collect(world.bus, OrderPlaced)
    async with world:
        async with world.bus.unit_of_work() as uow:
            message = uow.send(OrderPlaced(1))
            await uow.session.rollback()
        with pytest.raises(UnknownMessage):
            await world.bus.wait_for(message, timeout=SOON)


@pytest.mark.parametrize("time", [0, -1, timedelta(0)])
async def test_wait_for_refuses_a_timeout_of_zero_or_less(world: World, time: float | timedelta) -> None:
    async with world:
        with pytest.raises(InvalidSetting, match="timeout must be above 0"):
            await world.bus.wait_for(new_id(), timeout=time)


async def test_cancelled_caller_leaves_the_others_waiting(world: World) -> None:
    collect(world.bus, OrderPlaced)
    async with world:
        await world.pause(OrderPlaced)
        message = await sent(world, OrderPlaced(1))
        left, stays = (asyncio.create_task(world.bus.wait_for(message, timeout=SOON)) for _ in range(2))
        await asyncio.sleep(0.05)
        left.cancel()
        await world.bus.resume(OrderPlaced)
        await world.settle()
        assert (await stays).outcome == "handled"
        assert left.cancelled()


@pytest.mark.parametrize("comes", ["while it waits", "before its retry", "before it is sent"])
async def test_receipt_tells_the_reason_of_an_expired_message(world: World, comes: str) -> None:
    world.bus.route(OrderBilled, to=BILLING)

    @world.bus.handles(OrderPlaced, retry=Retry(immediate=0, delays=[60], jitter=0))
    async def fail(order: OrderPlaced) -> None:
        raise ZeroDivisionError("no orders")

    async with world:
        if comes == "while it waits":
            await world.pause(OrderPlaced)
        elif comes == "before it is sent":
            await world.pause(destination=BILLING)
        kind = OrderBilled if comes == "before it is sent" else OrderPlaced
        message = await sent(world, kind(1), deliver_by=timedelta(seconds=30))
        await world.settle()
        await world.advance(timedelta(seconds=31))
        receipt = await world.bus.wait_for(message, timeout=SOON)
    reasons = {
        "while it waits": "expired before it was handled",
        "before its retry": "the next attempt, 0:01:00 later, would come after its deliver_by; this one failed: "
        "ZeroDivisionError: no orders",
        "before it is sent": "expired before it was sent",
    }
    assert (receipt.outcome, receipt.reason) == ("expired", reasons[comes])
