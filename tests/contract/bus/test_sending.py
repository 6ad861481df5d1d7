"""What may be sent, and where it goes, on Postgres and in memory alike."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import attrs
import msgspec
import pytest
from pydantic import BaseModel

from durable import (
    Context,
    InvalidMessage,
    Retry,
    RoutingError,
    UnknownMessageType,
    message,
)
from durable.envelope import new_id
from tests.contract.bus.orders import (
    BILLING,
    MAIL,
    ORDERS,
    AsDataclass,
    NobodyWantsThis,
    OrderBilled,
    OrderPlaced,
    OrderShipped,
    collect,
)
from tests.contract.bus.worlds import World


@message("contract.pydantic")
class AsModel(BaseModel):
    id: UUID
    total: float


@message("contract.attrs")
@attrs.define
class AsAttrs:
    id: UUID
    total: float


@message("contract.struct")
class AsStruct(msgspec.Struct):
    id: UUID
    total: float


class NoMessage(msgspec.Struct):
    """A class that no @message has registered."""


class TestSending:
    async def test_an_event_goes_to_every_subscriber_and_to_the_handler_here(self, world: World) -> None:
        seen = collect(world.bus)
        world.bus.subscribe(OrderPlaced, to=BILLING)
        world.bus.subscribe(OrderPlaced, to=MAIL)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.publish(OrderPlaced(1))
            await world.settle()
            assert seen == [OrderPlaced(1)]
            copy = ("contract.order-placed", b'{"number":1,"note":""}')
            assert (world.sent_to(BILLING), world.sent_to(MAIL)) == ([copy], [copy])

    async def test_event_without_subscribers_is_published_without_an_error(self, world: World) -> None:
        async with world:
            async with world.bus.unit_of_work():
                assert isinstance(world.bus.publish(NobodyWantsThis()), UUID)
            await world.settle()
            assert world.dead_letters() == []

    async def test_paused_destination_is_sent_nothing_until_resumed(self, world: World) -> None:
        world.bus.route(OrderPlaced, to=BILLING)
        async with world:
            await world.pause(destination=BILLING)
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert world.sent_to(BILLING) == []
            assert await world.bus.resume(destination=BILLING)
            await world.settle()
            assert len(world.sent_to(BILLING)) == 1

    @pytest.mark.parametrize("delay", [0, 60])
    async def test_message_of_a_business_key_is_sent_once(self, world: World, delay: int) -> None:
        seen = collect(world.bus)
        world.bus.route(OrderBilled, to=BILLING)
        async with world:
            for number in (1, 2):
                async with world.bus.unit_of_work():
                    world.bus.send(OrderPlaced(number), id_from="order-1", delay=delay)
                    world.bus.send(OrderBilled(1), id_from="order-1", delay=delay)
                await world.settle()
            assert world.scheduled() == (2 if delay else 0)
            await world.advance(timedelta(seconds=61))
            assert seen == [OrderPlaced(1)]
            assert world.sent_to(BILLING) == [("contract.order-billed", b'{"number":1}')]
            assert world.dead_letters() == []

    async def test_command_without_a_destination_raises_with_advice(self, world: World) -> None:
        async with world, world.bus.unit_of_work():
            with pytest.raises(RoutingError, match=r"bus\.route\(OrderPlaced, to=\.\.\.\)"):
                world.bus.send(OrderPlaced(1))

    async def test_a_command_goes_to_its_route(self, world: World) -> None:
        world.bus.route(OrderPlaced, to=BILLING)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
                world.bus.send(OrderPlaced(2), to=MAIL)
            await world.settle()
            assert [body for _, body in world.sent_to(BILLING)] == [b'{"number":1,"note":""}']
            assert [body for _, body in world.sent_to(MAIL)] == [b'{"number":2,"note":""}']

    async def test_object_of_an_unregistered_class_is_refused_at_send(self, world: World) -> None:
        async with world, world.bus.unit_of_work():
            with pytest.raises(UnknownMessageType, match="NoMessage is not a message"):
                world.bus.send(NoMessage())

    @pytest.mark.parametrize(
        ("given", "options"),
        [
            pytest.param(AsStruct(new_id(), math.nan), {}, id="NaN in the body"),
            pytest.param(AsModel(id=new_id(), total=math.inf), {}, id="infinity in the body"),
            pytest.param(OrderPlaced(1, "\ud800"), {}, id="a lone surrogate in the body"),
            pytest.param(OrderPlaced(1, "x" * (1 << 20)), {}, id="a body over the limit"),
            pytest.param(OrderPlaced(1), {"headers": {"a": "\0"}}, id="NUL in a header"),
            pytest.param(OrderPlaced(1), {"headers": {"a": "b\r\nc"}}, id="CRLF in a header"),
            pytest.param(OrderPlaced(1), {"headers": {"a": math.nan}}, id="a header that is no text"),
            pytest.param(OrderPlaced(1), {"deliver_by": datetime(2030, 1, 1)}, id="a naive deliver_by"),
            pytest.param(OrderPlaced(1), {"at": datetime(2030, 1, 1)}, id="a naive time"),
            pytest.param(OrderPlaced(1), {"at": datetime.now(UTC), "delay": 1}, id="at and delay"),
            pytest.param(OrderPlaced(1), {"delay": -1}, id="a negative delay"),
            pytest.param(OrderPlaced(1), {"delay": timedelta(seconds=-0.001)}, id="a negative timedelta"),
            pytest.param(OrderPlaced(1), {"delay": "-5"}, id="a negative delay as text"),
            pytest.param(OrderPlaced(1), {"key": "x" * 1001}, id="a key over the limit"),
        ],
    )
    async def test_unstorable_or_unreadable_message_is_refused_at_send(
        self, world: World, given: object, options: Any
    ) -> None:
        async with world.for_sending(), world.bus.unit_of_work() as uow:
            with pytest.raises(InvalidMessage):
                world.bus.send(given, to=ORDERS, **options)
            await uow.session.commit()
        assert world.waiting() == 0

    async def test_a_refused_message_leaves_the_others_of_its_unit_of_work(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
                with pytest.raises(InvalidMessage):
                    world.bus.send(OrderPlaced(2, "\ud800"))
            await world.settle()
            assert seen == [OrderPlaced(1)]

    async def test_a_delayed_message_waits_for_its_time(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1), delay=60)
                world.bus.send(OrderPlaced(2), at=datetime.now(UTC) + timedelta(hours=1))
                world.bus.send(OrderPlaced(3), delay=timedelta(minutes=1), to=BILLING)
            await world.settle()
            assert (seen, world.sent_to(BILLING), world.scheduled()) == ([], [], 3)
            await world.advance(timedelta(seconds=62))
            assert seen == [OrderPlaced(1)]
            assert [body for _, body in world.sent_to(BILLING)] == [b'{"number":3,"note":""}']
            await world.advance(timedelta(hours=1))
            assert seen == [OrderPlaced(1), OrderPlaced(2)]

    async def test_message_past_its_deadline_expires_unhandled(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1), deliver_by=datetime.now(UTC) - timedelta(hours=1))
                world.bus.send(OrderPlaced(2), deliver_by=timedelta(hours=2), delay=60)
            await world.settle()
            assert world.expired() == ["contract.order-placed"]
            await world.advance(timedelta(seconds=61))
            assert world.expired() == ["contract.order-placed"]
            assert seen == [OrderPlaced(2)]
            assert world.dead_letters() == []

    async def test_message_due_after_its_deliver_by_is_refused(self, world: World) -> None:
        async with world, world.bus.unit_of_work():
            given: list[dict[str, Any]] = [{"delay": 60}, {"delay": 30}, {"at": datetime.now(UTC) + timedelta(hours=1)}]
            for late in given:
                with pytest.raises(InvalidMessage, match="when its deliver_by"):
                    world.bus.send(OrderPlaced(1), to=BILLING, deliver_by=timedelta(seconds=30), **late)

    async def test_message_expires_at_once_when_its_next_attempt_is_past_the_deadline(self, world: World) -> None:
        @world.bus.handles(OrderPlaced, retry=Retry(immediate=0, delays=[60]))
        async def fail(order: OrderPlaced) -> None:
            raise LookupError("no such order")

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1), deliver_by=timedelta(seconds=30))
                world.bus.send(OrderPlaced(2), deliver_by=timedelta(seconds=90))
            await world.settle()
            assert world.expired() == ["contract.order-placed"]
            assert (world.scheduled(), world.dead_letters()) == (1, [])

    async def test_message_sent_by_a_handler_inherits_the_deadline_when_declared(self, world: World) -> None:
        @world.bus.handles(OrderPlaced, inherit_deliver_by=True)
        async def ship(order: OrderPlaced, ctx: Context) -> list[OrderShipped]:
            assert ctx.deliver_by is not None
            world.bus.send(OrderShipped(2), to=BILLING, deliver_by=timedelta(hours=9))
            ctx.send(OrderShipped(3), to=BILLING, deliver_by=None)
            return [OrderShipped(1)]

        world.bus.route(OrderShipped, to=BILLING)
        deadline = datetime.now(UTC) + timedelta(hours=1)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1), deliver_by=deadline)
            await world.settle()
        own, none, inherited = world.deadlines(BILLING)
        assert own is not None
        assert abs(own - deadline - timedelta(hours=8)) < timedelta(minutes=5)
        assert (none, inherited) == (None, deadline)

    @pytest.mark.parametrize("cls", [AsStruct, AsDataclass, AsModel, AsAttrs])
    async def test_a_message_may_be_of_any_of_the_four_kinds(self, world: World, cls: type) -> None:
        seen = collect(world.bus, cls)
        given = cls(id=new_id(), total=17.5)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(given)
            await world.settle()
            assert seen == [given]
            assert type(seen[0]) is cls
