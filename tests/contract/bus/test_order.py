"""The order of messages with a key, on Postgres and in memory alike."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from durable import Context, Retry, message, upcaster
from durable.errors import InvalidSetting
from tests.contract.bus.orders import MINUTE, NEVER, OrderPlaced, OrderShipped, collect
from tests.contract.bus.worlds import World
from tests.support.subclasses import TEXTS


@message("contract.booking")
class Booking(msgspec.Struct):
    number: int


@message("contract.ordering")
class Ordering(msgspec.Struct):
    number: int


@upcaster(Booking, to=Ordering)
def to_ordering(old: Booking) -> Ordering:
    return Ordering(old.number)


class TestOrder:
    async def send(self, world: World, *messages: Any, key: str = "a", **options: Any) -> None:
        async with world.bus.unit_of_work() as uow:
            for each in messages:
                uow.send(each, key=key, **options)

    async def test_message_waiting_for_its_retry_holds_only_its_own_key(self, world: World) -> None:
        seen: list[int] = []

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=0, delays=[60, 60], jitter=0))
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            if order.number == 1 and ctx.attempt < 3:
                raise RuntimeError("not yet")
            seen.append(order.number)

        async with world:
            await self.send(world, *map(OrderPlaced, (1, 2, 3)))
            await self.send(world, OrderPlaced(10), key="b")
            await world.settle()
            assert seen == [10]
            await world.advance(MINUTE)
            assert seen == [10]
            await world.advance(MINUTE)
            assert seen == [10, 1, 2, 3]

    async def test_group_keeps_a_key_in_order_and_releases_messages_behind_a_failure(self, world: World) -> None:
        seen: list[int] = []

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=0, delays=[60], jitter=0), max_batch=10)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            if order.number == 2 and ctx.attempt < 2:
                raise RuntimeError("not yet")
            if order.number not in seen:
                seen.append(order.number)

        async with world:
            await self.send(world, *map(OrderPlaced, (1, 2, 3, 4)))
            await world.settle()
            assert seen == [1]
            await world.advance(MINUTE)
            assert seen == [1, 2, 3, 4]

    async def test_a_key_orders_messages_of_different_types(self, world: World) -> None:
        seen: list[str] = []

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=0, delays=[60], jitter=0))
        async def place(order: OrderPlaced, ctx: Context) -> None:
            if ctx.attempt == 1:
                raise RuntimeError("not yet")
            seen.append(f"placed {order.number}")

        @world.bus.handles(OrderShipped)
        async def ship(order: OrderShipped) -> None:
            seen.append(f"shipped {order.number}")

        async with world:
            await self.send(world, OrderPlaced(1), OrderShipped(1))
            await self.send(world, OrderShipped(2), key="b")
            await world.settle()
            assert seen == ["shipped 2"]
            await world.advance(MINUTE)
            assert seen == ["shipped 2", "placed 1", "shipped 1"]

    async def test_delayed_message_holds_no_other_of_its_key(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            await self.send(world, OrderPlaced(1), delay=60)
            await self.send(world, OrderPlaced(2))
            await world.settle()
            assert seen == [OrderPlaced(2)]
            await world.advance(MINUTE)
            assert seen == [OrderPlaced(2), OrderPlaced(1)]

    @pytest.mark.parametrize("option", ["continue", "park"])
    async def test_dead_letter_parks_its_key_only_when_asked(self, world: World, option: Any) -> None:
        seen: list[int] = []

        @world.bus.handles(OrderPlaced, retry=NEVER, on_dead_letter=option)
        async def handle(order: OrderPlaced) -> None:
            if order.number == 2:
                raise RuntimeError("broken")
            seen.append(order.number)

        async with world:
            await self.send(world, *map(OrderPlaced, (1, 2, 3)))
            await self.send(world, OrderPlaced(10), key="b")
            await world.settle()
            assert sorted(seen) == ([1, 3, 10] if option == "continue" else [1, 10])
            assert await world.bus.resume(key="a") == (option == "park")
            await world.settle()
            assert sorted(seen) == [1, 3, 10]
            assert len(world.dead_letters()) == 1

    @pytest.mark.parametrize("time", [None, 1])
    @pytest.mark.parametrize("when", ["before the dead letter", "after the dead letter"])
    @pytest.mark.parametrize("is_ordered", [False, True])
    async def test_parked_messages_wait_for_a_resume_of_their_own_beside_a_pause(
        self, world: World, is_ordered: bool, when: str, time: int | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        seen: list[int] = []
        parked: dict[str, Any] = {"cls": OrderPlaced} if is_ordered else {"key": "a"}

        @world.bus.handles(OrderPlaced, retry=NEVER, on_dead_letter="park", ordered=is_ordered)
        async def handle(order: OrderPlaced) -> None:
            if order.number == 1:
                if when == "before the dead letter":
                    await world.bus.pause(**parked, for_=time)
                raise RuntimeError("broken")
            seen.append(order.number)

        async with world:
            await self.send(world, *map(OrderPlaced, (1, 2)))
            await world.settle()
            if when == "after the dead letter":
                await world.bus.pause(**parked, for_=time)
            await world.advance(MINUTE)
            if time is None:
                assert await world.bus.resume(**parked)
                assert "dead letter still parks" in caplog.text
                await world.settle()
            assert seen == []
            assert await world.bus.resume(**parked)
            assert not await world.bus.resume(**parked)
            await world.settle()
            assert seen == [2]

    @pytest.mark.parametrize("key", [" ", "\xa0", " a "])
    async def test_key_of_white_space_is_parked_and_resumed(self, world: World, key: str) -> None:
        seen: list[int] = []

        @world.bus.handles(OrderPlaced, retry=NEVER, on_dead_letter="park")
        async def handle(order: OrderPlaced) -> None:
            if order.number == 1:
                raise RuntimeError("broken")
            seen.append(order.number)

        async with world:
            await self.send(world, *map(OrderPlaced, (1, 2)), key=key)
            await world.settle()
            assert seen == []
            assert await world.bus.resume(key=key)
            await world.settle()
            assert seen == [2]
            with pytest.raises(InvalidSetting, match="is no name"):
                await world.bus.resume(key="")

    async def test_paused_key_waits_and_others_proceed(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            await world.bus.pause(key="a")
            await self.send(world, OrderPlaced(1))
            await self.send(world, OrderPlaced(10), key="b")
            await world.settle()
            assert seen == [OrderPlaced(10)]
            assert await world.bus.resume(key="a")
            assert not await world.bus.resume(key="a")
            await world.settle()
            assert seen == [OrderPlaced(10), OrderPlaced(1)]

    @pytest.mark.parametrize("key", TEXTS.values(), ids=list(TEXTS))
    async def test_key_of_a_subclass_of_text_is_paused_and_resumed(self, world: World, key: str) -> None:
        seen = collect(world.bus)
        async with world:
            await world.bus.pause(key=key)
            await self.send(world, OrderPlaced(1), key=key)
            await world.settle()
            assert seen == []
            assert await world.bus.resume(key="acme")
            await world.bus.pause(key="acme")
            assert await world.bus.resume(key=key)
            await world.settle()
            assert seen == [OrderPlaced(1)]

    @pytest.mark.parametrize("how", ["paused", "parked"])
    async def test_ordered_handler_ignores_stops_of_keys(self, world: World, how: str) -> None:
        shipped: list[int] = []

        @world.bus.handles(OrderPlaced, retry=NEVER, on_dead_letter="park")
        async def place(order: OrderPlaced) -> None:
            raise RuntimeError("broken")

        @world.bus.handles(OrderShipped, ordered=True)
        async def ship(order: OrderShipped) -> None:
            shipped.append(order.number)

        async with world:
            if how == "paused":
                await world.bus.pause(key="a")
            else:
                await self.send(world, OrderPlaced(1))
                await world.settle()
            await self.send(world, OrderShipped(1))
            await self.send(world, OrderShipped(2), key="b")
            await self.send(world, OrderPlaced(2))
            await world.settle()
            assert shipped == [1, 2]
            assert len(world.dead_letters()) == (how == "parked")
            assert await world.bus.resume(key="a")

    @pytest.mark.parametrize("resumed", [Booking, Ordering])
    @pytest.mark.parametrize("cls", [Booking, Ordering])
    async def test_park_of_a_renamed_handler_is_ended_under_both_names(
        self, world: World, cls: type[Any], resumed: type[Any]
    ) -> None:
        seen: list[int] = []

        @world.bus.handles(Ordering, retry=NEVER, on_dead_letter="park", ordered=True)
        async def handle(order: Ordering) -> None:
            if order.number == 1:
                raise RuntimeError("broken")
            seen.append(order.number)

        async with world:
            await self.send(world, cls(1))
            await self.send(world, cls(2))
            await world.settle()
            assert seen == []
            assert await world.bus.resume(resumed)
            assert not await world.bus.resume(resumed)
            await world.settle()
            assert seen == [2]

    async def test_an_ordered_handler_has_one_message_at_a_time_in_their_order(self, world: World) -> None:
        seen: list[int] = []

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=0, delays=[60], jitter=0), ordered=True)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            if order.number == 2 and ctx.attempt == 1:
                raise RuntimeError("not yet")
            seen.append(order.number)

        async with world:
            for number in range(5):
                await self.send(world, OrderPlaced(number), key=str(number % 2))
            await world.settle()
            assert seen == [0, 1]
            await world.advance(MINUTE)
            assert seen == [0, 1, 2, 3, 4]
