"""Messages that arrive, on Postgres and in memory alike; dates and bodies that are refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest

from durable import (
    InvalidMessage,
    InvalidSetting,
    RoutingError,
    UnknownMessageType,
    message,
)
from durable.envelope import new_id
from tests.contract.bus.orders import (
    BILLING,
    NEVER,
    ORDERS,
    SECOND,
    AsDataclass,
    NobodyWantsThis,
    OrderPlaced,
    arriving,
    collect,
)
from tests.contract.bus.worlds import World


@message("contract.unfinished")
class Unfinished(msgspec.Struct):
    part: NotYet  # type: ignore[name-defined]  # noqa: F821


Misdate = Callable[[datetime], tuple[dict[str, Any], str]]
"""Makes fields of an envelope that arrives now, and the reason why it is a dead letter."""


def dated_id(moment: datetime) -> UUID:
    return UUID(int=int(moment.timestamp() * 1000) << 80 | 7 << 76 | 2 << 62 | new_id().int & ((1 << 62) - 1))


def id_of_2100(now: datetime) -> tuple[dict[str, Any], str]:
    return {"id": dated_id(datetime(2100, 1, 1, tzinfo=UTC))}, "the time in its id is more than clock_lead"


def id_of_the_day_after_tomorrow(now: datetime) -> tuple[dict[str, Any], str]:
    return {"id": dated_id(now + timedelta(days=1, minutes=1))}, "the time in its id is more than clock_lead"


def sent_the_day_after_tomorrow(now: datetime) -> tuple[dict[str, Any], str]:
    return {"sent_at": now + timedelta(days=1, minutes=1)}, "its sent_at is more than clock_lead"


def id_older_than_the_window(now: datetime) -> tuple[dict[str, Any], str]:
    return {"id": dated_id(now - timedelta(days=7, minutes=1))}, "it is older than duplicates are remembered"


def undated_id_sent_before_the_window(now: datetime) -> tuple[dict[str, Any], str]:
    return {"id": uuid4(), "sent_at": now - timedelta(days=7, minutes=1)}, "it is older than duplicates are remembered"


def due_beyond_the_window(now: datetime) -> tuple[dict[str, Any], str]:
    return {"execution_time": now + timedelta(days=7, minutes=1)}, "it is put off for longer than duplicates"


def due_in_the_year_9998(now: datetime) -> tuple[dict[str, Any], str]:
    return {"execution_time": datetime(9998, 1, 1, tzinfo=UTC)}, "it is put off for longer than duplicates"


def nil_id(now: datetime) -> tuple[dict[str, Any], str]:
    return {"id": UUID(int=0)}, "is no id of a message"


def max_id(now: datetime) -> tuple[dict[str, Any], str]:
    return {"id": UUID(int=2**128 - 1)}, "is no id of a message"


MISDATED: list[Misdate] = [
    id_of_2100, id_of_the_day_after_tomorrow, sent_the_day_after_tomorrow, id_older_than_the_window,
    undated_id_sent_before_the_window, due_beyond_the_window, due_in_the_year_9998, nil_id, max_id,
]  # fmt: skip


def a_little_ahead(now: datetime) -> tuple[dict[str, Any], str]:
    return {"id": dated_id(now + timedelta(hours=23)), "sent_at": now + timedelta(hours=23)}, ""


def within_the_window(now: datetime) -> tuple[dict[str, Any], str]:
    moment = now - timedelta(days=6, hours=23)
    return {"id": dated_id(moment), "sent_at": moment}, ""


def due_within_the_window(now: datetime) -> tuple[dict[str, Any], str]:
    return {"execution_time": now + timedelta(days=6, hours=23)}, ""


WELL_DATED: list[Misdate] = [a_little_ahead, within_the_window, due_within_the_window]


class TestArriving:
    async def test_envelope_arriving_twice_is_handled_once(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            envelope = arriving()
            await world.arrive(envelope)
            await world.arrive(envelope)
            assert seen == [OrderPlaced(1)]
            assert world.dead_letters() == []

    async def test_another_message_under_the_same_id_is_a_dead_letter(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            envelope = arriving()
            await world.arrive(envelope)
            for _ in range(2):  # a repeat of it makes no other letter
                await world.arrive(msgspec.structs.replace(envelope, body=b'{"number":2}'))
            assert seen == [OrderPlaced(1)]
            (letter,) = world.dead_letters()
            assert "under the same id" in letter.reason

    async def test_undecodable_body_is_a_dead_letter_without_an_attempt(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            await world.arrive(arriving(body=b'{"number":"one"}'))
            assert seen == []
            (letter,) = world.dead_letters()
            assert letter.exception_type == "durable.errors.InvalidMessage"
            assert "the body is no OrderPlaced" in letter.reason

    async def test_unhandled_type_is_a_dead_letter(self, world: World) -> None:
        async with world:
            await world.arrive(arriving("os.system"))
            (letter,) = world.dead_letters()
            assert (letter.message_type, letter.attempts) == ("os.system", 0)
            assert letter.reason == "no node has a handler for os.system"

    @pytest.mark.parametrize("misdate", MISDATED, ids=lambda misdate: misdate.__name__)
    async def test_misdated_envelope_is_quarantined(self, world: World, misdate: Misdate) -> None:
        seen = collect(world.bus, OrderPlaced)
        changed, reason = misdate(datetime.now(UTC))
        async with world:
            await world.arrive(msgspec.structs.replace(arriving(), **changed))
            assert [reason in letter.reason for letter in world.dead_letters()] == [True]
            await world.arrive(arriving())
            assert len(seen) == 1

    @pytest.mark.parametrize("misdate", MISDATED[:-2], ids=lambda misdate: misdate.__name__)
    async def test_misdated_envelope_is_handled_when_its_letter_is_replayed(
        self, world: World, misdate: Misdate
    ) -> None:
        seen = collect(world.bus, OrderPlaced)
        changed, _ = misdate(datetime.now(UTC))
        envelope = msgspec.structs.replace(arriving(), **changed)
        async with world:
            await world.arrive(envelope)
            await world.replay()
            assert (seen, world.dead_letters()) == ([OrderPlaced(1)], [])
            assert (await world.bus.wait_for(envelope.id, timeout=20)).outcome == "handled"

    @pytest.mark.parametrize("misdate", MISDATED[-2:], ids=lambda misdate: misdate.__name__)
    async def test_envelope_without_an_id_of_its_own_cannot_be_replayed(self, world: World, misdate: Misdate) -> None:
        seen = collect(world.bus, OrderPlaced)
        changed, _ = misdate(datetime.now(UTC))
        async with world:
            await world.arrive(msgspec.structs.replace(arriving(), **changed))
            await world.replay()
            assert (seen, len(world.dead_letters())) == ([], 1)

    async def test_message_under_a_taken_id_leaves_the_receipt_of_the_first(self, world: World) -> None:
        collect(world.bus)
        async with world:
            envelope = arriving()
            await world.arrive(envelope)
            await world.arrive(msgspec.structs.replace(envelope, body=b'{"number":2}'))
            await world.replay()
            assert len(world.dead_letters()) == 1
            receipt = await world.bus.wait_for(envelope.id, timeout=20)
            assert [(each.address, each.outcome) for each in receipt.deliveries] == [("orders", "handled")]

    @pytest.mark.parametrize("make_id", [new_id, uuid4], ids=["dated id", "undated id"])
    async def test_repeat_of_a_discarded_message_is_a_duplicate(
        self, world: World, make_id: Callable[[], UUID]
    ) -> None:
        attempts: list[int] = []

        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced) -> None:
            attempts.append(order.number)
            raise ZeroDivisionError

        async with world:
            envelope = msgspec.structs.replace(arriving(), id=make_id(), sent_at=datetime.now(UTC) - SECOND)
            await world.arrive(envelope)
            await world.discard()
            await world.arrive(envelope)
            assert (attempts, world.dead_letters()) == ([1], [])

    @pytest.mark.parametrize("make_id", [new_id, uuid4], ids=["dated id", "undated id"])
    async def test_repeat_of_a_cancelled_message_is_a_duplicate(
        self, world: World, make_id: Callable[[], UUID]
    ) -> None:
        seen = collect(world.bus)
        now = datetime.now(UTC)
        async with world:
            due = {"sent_at": now - SECOND, "execution_time": now + timedelta(hours=1)}
            envelope = msgspec.structs.replace(arriving(), id=make_id(), **due)
            await world.arrive(envelope)
            assert await world.bus.cancel(envelope.id)
            await world.arrive(envelope)
            await world.advance(timedelta(hours=2))
            assert (seen, world.scheduled()) == ([], 0)

    @pytest.mark.parametrize("date", WELL_DATED, ids=lambda date: date.__name__)
    async def test_envelope_within_the_bounds_of_time_is_taken(self, world: World, date: Misdate) -> None:
        collect(world.bus, OrderPlaced)
        changed, _ = date(datetime.now(UTC))
        async with world:
            await world.arrive(msgspec.structs.replace(arriving(), **changed))
            assert world.dead_letters() == []

    async def test_unstorable_envelope_is_quarantined(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            await world.arrive(msgspec.structs.replace(arriving(), headers={"a": "\0"}))
            assert seen == []
            assert [letter.exception_type for letter in world.dead_letters()] == ["quarantined on arrival"]


class TestRefused:
    async def test_misspelt_option_is_refused_and_nothing_is_sent(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work() as uow:
                for send in (world.bus.send, uow.send, world.bus.publish, uow.publish):
                    with pytest.raises(InvalidSetting, match="unknown option 'dealy'; did you mean 'delay'"):
                        send(OrderPlaced(1), dealy=60)  # type: ignore[call-arg]
            await world.settle()
            assert seen == []

    async def test_value_unfit_for_its_annotation_is_refused_at_send(self, world: World) -> None:
        seen = collect(world.bus, AsDataclass)
        async with world:
            async with world.bus.unit_of_work() as uow:
                with pytest.raises(InvalidMessage, match="AsDataclass"):
                    uow.send(AsDataclass("no id", 1.0))  # type: ignore[arg-type]
                uow.send(AsDataclass(UUID(int=1), 1))
            await world.settle()
            assert seen == [AsDataclass(UUID(int=1), 1)]
            assert world.dead_letters() == []

    async def test_event_without_any_subscriber_is_told_of_once(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with world, world.bus.unit_of_work() as uow:
            uow.publish(NobodyWantsThis(1))
            uow.publish(NobodyWantsThis(2))
        told = [record for record in caplog.records if "was published without a receiver" in record.message]
        assert [record.args for record in told] == [("contract.nobody-wants-this",)]

    async def test_handler_returning_a_message_without_a_destination_is_refused_at_the_start(
        self, world: World
    ) -> None:
        @world.bus.handles(OrderPlaced)
        async def ship(order: OrderPlaced) -> list[NobodyWantsThis] | None: ...

        with pytest.raises(RoutingError, match=r"ship: the returned message .*contract\.nobody-wants-this"):
            async with world:
                pass

    async def test_handler_returning_no_message_is_refused_at_the_start(self, world: World) -> None:
        @world.bus.handles(OrderPlaced)
        async def count(order: OrderPlaced) -> int: ...  # type: ignore[empty-body]

        with pytest.raises(UnknownMessageType, match="count: return type int is no message"):
            async with world:
                pass

    async def test_undecodable_class_is_refused_at_the_start(self, world: World) -> None:
        world.bus.route(Unfinished, to=BILLING)

        with pytest.raises(InvalidSetting, match=r"Unfinished: an annotation cannot be resolved: .*NotYet"):
            async with world:
                pass

    async def test_listener_of_a_bus_without_handlers_is_told_of(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with world:
            pass
        assert [record.args for record in caplog.records if "no handler is declared" in record.message] == [(ORDERS,)]
