"""Requests and their answers, awaited by id. On Postgres and in memory alike."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import assert_type
from uuid import UUID, uuid4

import msgspec
import pytest

from durable import Context, InvalidMessage, InvalidSetting, NoAnswer, Reject, StillWaiting, UnknownMessage, message
from durable.envelope import IN_REPLY_TO, Envelope
from durable.requests.receipts import Receipt
from tests.contract.bus.orders import BILLING, NEVER, OrderBilled, arriving
from tests.contract.bus.worlds import World

SOON = 20  # seconds: a bound, no measure


@message("answers.reserve")
class Reserve(msgspec.Struct):
    count: int


@message("answers.reserved")
class Reserved(msgspec.Struct):
    count: int


@message("answers.sold-out")
class SoldOut(msgspec.Struct):
    left: int


def stock(world: World, left: int = 10) -> None:
    """Answer requests for reservations."""

    @world.bus.handles(Reserve, retry=NEVER)
    async def reserve(wanted: Reserve, ctx: Context) -> None:
        if wanted.count < 0:
            raise Reject("a count is not negative")
        ctx.reply(Reserved(wanted.count) if wanted.count <= left else SoldOut(left))


def expecting(world: World) -> None:
    world.bus.expects(Reserved)
    world.bus.expects(SoldOut)


async def requested(world: World, count: int, *answers: type, **options: object) -> UUID:
    async with world.bus.unit_of_work() as uow:
        return uow.request(Reserve(count), *(answers or (Reserved, SoldOut)), **options)  # type: ignore[arg-type]


def answering(request: UUID | str, count: int = 1) -> Envelope:
    envelope = arriving("answers.reserved", msgspec.json.encode(Reserved(count)))
    return msgspec.structs.replace(envelope, headers={IN_REPLY_TO: str(request)})


async def test_answer_is_given_to_all_callers_as_often_as_they_ask(world: World) -> None:
    stock(world)
    expecting(world)
    async with world:
        request = await requested(world, 3)
        await world.settle()
        callers = [world.bus.wait_for(request, Reserved, timeout=SOON) for _ in range(3)]
        assert await asyncio.gather(*callers) == [Reserved(3)] * 3
        assert await world.bus.wait_for(request, SoldOut, Reserved, timeout=SOON) == Reserved(3)
        assert (await world.bus.wait_for(request, timeout=SOON)).outcome == "handled"


async def test_type_of_an_answer_is_one_of_the_awaited_classes(world: World) -> None:
    stock(world)
    expecting(world)
    async with world:
        request = await requested(world, 3)
        await world.settle()
        wait_for = world.bus.wait_for
        assert_type(await wait_for(request), Receipt)
        assert_type(await wait_for(request, Reserved), Reserved)
        assert_type(await wait_for(request, SoldOut, Reserved), SoldOut | Reserved)
        assert_type(await wait_for(request, SoldOut, Reserved, Reserve), SoldOut | Reserved | Reserve)
        four = await wait_for(request, SoldOut, Reserved, Reserve, OrderBilled, timeout=SOON)
        assert_type(four, SoldOut | Reserved | Reserve | OrderBilled)


async def test_early_caller_gets_the_answer_when_the_request_is_handled(world: World) -> None:
    stock(world)
    expecting(world)
    async with world:
        await world.pause(Reserve)
        request = await requested(world, 12)
        caller = asyncio.create_task(world.bus.wait_for(request, Reserved, SoldOut, timeout=SOON))
        with pytest.raises(StillWaiting):
            await world.bus.wait_for(request, Reserved, timeout=0.05)
        await world.bus.resume(Reserve)
        await world.settle()
        assert await caller == SoldOut(10)


async def test_caller_waits_on_when_the_request_was_handled_without_an_answer(world: World) -> None:
    world.bus.handles(Reserve)(_silent)
    expecting(world)
    async with world:
        request = await requested(world, 1)
        await world.settle()
        with pytest.raises(StillWaiting):
            await world.bus.wait_for(request, Reserved, timeout=0.2)
        caller = asyncio.create_task(world.bus.wait_for(request, Reserved, timeout=SOON))
        await world.arrive(answering(request, 4))
        assert await caller == Reserved(4)


async def test_rejected_request_has_no_answer_and_the_reason_is_told(world: World) -> None:
    stock(world)
    expecting(world)
    async with world:
        request = await requested(world, -1)
        await world.settle()
        with pytest.raises(NoAnswer, match=r"dead-lettered: .*a count is not negative"):
            await world.bus.wait_for(request, Reserved, timeout=SOON)


async def test_expired_request_has_no_answer(world: World) -> None:
    stock(world)
    expecting(world)
    async with world:
        await world.pause(Reserve)
        request = await requested(world, 1, timeout=60)
        await world.advance(timedelta(minutes=2))
        await world.bus.resume(Reserve)
        await world.settle()
        with pytest.raises(NoAnswer, match="expired"):
            await world.bus.wait_for(request, Reserved, timeout=SOON)


async def test_answer_of_another_class_is_refused_with_its_own_class(world: World) -> None:
    stock(world)
    expecting(world)
    async with world:
        request = await requested(world, 100)
        await world.settle()
        with pytest.raises(InvalidMessage, match=r"of type answers\.sold-out, not answers\.reserved"):
            await world.bus.wait_for(request, Reserved, timeout=SOON)
        assert await world.bus.wait_for(request, SoldOut, timeout=SOON) == SoldOut(10)


async def test_second_answer_is_dropped_and_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.bus.handles(Reserve)(_silent)
    expecting(world)
    async with world:
        request = await requested(world, 1)
        for count in (1, 2):
            await world.arrive(answering(request, count))
        assert await world.bus.wait_for(request, Reserved, timeout=SOON) == Reserved(1)
    assert caplog.text.count("answers dropped") == 1


@pytest.mark.parametrize("named", ["", "order-17"])
async def test_answer_without_a_request_is_a_dead_letter(world: World, named: str) -> None:
    expecting(world)
    async with world:
        await world.arrive(answering(named))
        [letter] = world.dead_letters()
        assert "names no request" in letter.reason


async def test_answer_to_a_request_of_unknown_id_is_kept_for_its_caller(world: World) -> None:
    expecting(world)
    async with world:
        unknown = uuid4()
        with pytest.raises(UnknownMessage):
            await world.bus.wait_for(unknown, Reserved, timeout=SOON)
        await world.arrive(answering(unknown, 7))
        assert await world.bus.wait_for(unknown, Reserved, timeout=SOON) == Reserved(7)


async def test_requests_are_refused_when_their_answers_would_be_lost(world: World) -> None:
    stock(world)
    world.bus.expects(Reserved)
    world.bus.expects(SoldOut, at=BILLING)
    async with world.for_sending(), world.bus.unit_of_work() as uow:
        with pytest.raises(InvalidMessage, match=r"answer answers\.reserve is not expected; declare bus\.expects"):
            uow.request(Reserve(1), Reserve)
        with pytest.raises(InvalidMessage, match="name the classes of its answers"):
            uow.request(Reserve(1))
        with pytest.raises(InvalidMessage, match="expected at one address"):
            uow.request(Reserve(1), Reserved, SoldOut)
        with pytest.raises(InvalidMessage, match="reply_to='local' is this service, and the message goes to memory"):
            uow.request(Reserve(1), Reserved, to=BILLING)
        with pytest.raises(InvalidSetting, match="timeout"):
            uow.request(Reserve(1), Reserved, timeout="soon")


async def test_class_of_answers_has_one_declaration(world: World) -> None:
    world.bus.expects(Reserved)
    with pytest.raises(InvalidSetting, match="is handled by"):
        world.bus.handles(Reserved)(_silent_answer)
    with pytest.raises(InvalidSetting, match="is handled by"):
        world.bus.expects(Reserved)


async def _silent(wanted: Reserve) -> None: ...


async def _silent_answer(answer: Reserved) -> None: ...


@pytest.mark.parametrize("outcome", ["dead-lettered", "expired", "cancelled"])
async def test_request_under_a_forgotten_key_is_told_by_its_own_end(world: World, outcome: str) -> None:
    taking(world)
    expecting(world)
    options: dict[str, object] = {"delay": 3_600} if outcome == "cancelled" else {}
    options |= {"timeout": 60, "delay": 30} if outcome == "expired" else {}
    async with world:
        first = await requested(world, 1, id_from="weekly")
        await world.settle()
        assert (await world.bus.wait_for(first, timeout=SOON)).outcome == "handled"
        await world.outlive_ids()
        if outcome == "expired":
            await world.pause(Reserve)
        second = await requested(world, -1, id_from="weekly", **options)
        await world.settle()
        if outcome == "cancelled":
            await world.bus.cancel(second)
        if outcome == "expired":
            await world.advance(timedelta(minutes=2))
        assert second == first
        assert (await world.bus.wait_for(second, timeout=SOON)).outcome == outcome
        with pytest.raises(NoAnswer, match=outcome):
            await world.bus.wait_for(second, Reserved, timeout=SOON)


async def test_key_of_a_waiting_message_is_not_forgotten(world: World) -> None:
    stock(world)
    expecting(world)
    async with world:
        await world.pause(Reserve)
        request = await requested(world, 1, id_from="weekly")
        await world.outlive_ids()
        assert await requested(world, 2, id_from="weekly") == request
        assert world.waiting() == 1
        await world.bus.resume(Reserve)
        await world.settle()
        await requested(world, 3, id_from="weekly")
        await world.settle()
        assert await world.bus.wait_for(request, Reserved, timeout=SOON) == Reserved(1)
        assert [outcome for outcome, _ in world.ended() if outcome == "handled"] == ["handled"] * 2  # with the answer


def taking(world: World) -> None:
    """Handle requests for reservations without an answer, or reject them."""

    @world.bus.handles(Reserve, retry=NEVER)
    async def reserve(wanted: Reserve) -> None:
        if wanted.count < 0:
            raise Reject("a count is not negative")
