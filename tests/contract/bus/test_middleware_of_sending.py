"""Middleware around what is sent, on Postgres and in memory alike."""

from __future__ import annotations

from uuid import UUID

import pytest

from durable import (
    Context,
    Outgoing,
    Retry,
    SendNext,
    WiringError,
)
from tests.contract.bus.orders import (
    BILLING,
    MAIL,
    NobodyWantsThis,
    OrderBilled,
    OrderPlaced,
    OrderShipped,
    Sending,
    Watching,
    collect,
)
from tests.contract.bus.worlds import World


class TestMiddlewareOfSending:
    async def test_middleware_sees_each_message_sent_once_and_its_headers_arrive(self, world: World) -> None:
        watching, contexts = Watching(), list[Context]()
        world.bus.use(Sending(lambda outgoing, call_next: call_next(outgoing.with_headers({"tenant": "blue"}))))
        world.bus.use(watching, stage="after")
        world.bus.subscribe(OrderBilled, to=BILLING)
        world.bus.subscribe(OrderBilled, to=MAIL)

        @world.bus.handles(OrderPlaced)
        async def place(order: OrderPlaced, ctx: Context) -> OrderShipped:
            contexts.append(ctx)
            ctx.publish(OrderBilled(order.number))
            return OrderShipped(order.number)

        @world.bus.handles(OrderShipped)
        async def ship(order: OrderShipped, ctx: Context) -> None:
            contexts.append(ctx)

        async with world:
            async with world.bus.unit_of_work():
                sent = world.bus.send(OrderPlaced(1), headers={"user": "ann"})
                world.bus.publish(NobodyWantsThis())
            await world.settle()
            assert world.sent_to(BILLING) == world.sent_to(MAIL) == [("contract.order-billed", b'{"number":1}')]
        kinds = [(outgoing.kind, type(outgoing.message)) for outgoing in watching.sent]
        assert kinds == [
            ("command", OrderPlaced),
            ("event", NobodyWantsThis),
            ("event", OrderBilled),
            ("cascade", OrderShipped),
        ]
        causes = [outgoing.caused_by and outgoing.caused_by.id for outgoing in watching.sent]
        assert causes == [None, None, sent, sent]
        assert [ctx.id for ctx in contexts] == [watching.ids[0], watching.ids[3]]
        assert [ctx.headers for ctx in contexts] == [{"user": "ann", "tenant": "blue"}, {"tenant": "blue"}]

    async def test_message_dropped_by_the_middleware_is_not_sent_and_the_sender_proceeds(self, world: World) -> None:
        dropping = Sending(lambda outgoing, call_next: None if outgoing.options.get("key") else call_next(outgoing))
        world.bus.use(dropping)
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                dropped = world.bus.send(OrderPlaced(1), key="dropped")
                sent = world.bus.send(OrderPlaced(2))
            await world.settle()
            assert (seen, world.waiting()) == ([OrderPlaced(2)], 0)
        assert isinstance(dropped, UUID)
        assert dropped != sent

    async def test_replacement_message_goes_to_its_own_destination(self, world: World) -> None:
        def replace(outgoing: Outgoing, call_next: SendNext) -> UUID | None:
            assert isinstance(outgoing.message, OrderPlaced)
            return call_next(outgoing.replace(message=OrderBilled(outgoing.message.number)))

        world.bus.use(Sending(replace))
        world.bus.route(OrderBilled, to=BILLING)
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(7))
            await world.settle()
            assert world.sent_to(BILLING) == [("contract.order-billed", b'{"number":7}')]
        assert seen == []

    async def test_message_sent_twice_by_the_middleware_has_the_same_ids_in_a_repeated_attempt(
        self, world: World
    ) -> None:
        attempts: list[list[UUID | None]] = []

        def twice(outgoing: Outgoing, call_next: SendNext) -> UUID | None:
            if not isinstance(outgoing.message, OrderShipped):
                return call_next(outgoing)
            attempts[-1] += [call_next(outgoing), call_next(outgoing)]
            return attempts[-1][0]

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[]))
        async def place(order: OrderPlaced, ctx: Context) -> OrderShipped:
            attempts.append([])
            assert ctx.send(OrderShipped(1)) == attempts[-1][0]
            if ctx.attempt == 1:
                raise RuntimeError("not yet")
            return OrderShipped(2)

        world.bus.use(Sending(twice))
        shipped = collect(world.bus, OrderShipped)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
        assert sorted(order.number for order in shipped) == [1, 1, 2, 2]
        assert attempts[0] == attempts[1][:2]
        assert len(set(attempts[1])) == 4

    async def test_error_of_the_middleware_reaches_the_sender_and_other_messages_are_sent(self, world: World) -> None:
        def refuse(outgoing: Outgoing, call_next: SendNext) -> UUID | None:
            if outgoing.message == OrderPlaced(2):
                raise PermissionError("not today")
            return call_next(outgoing)

        world.bus.use(Sending(refuse))
        seen = collect(world.bus, concurrency=1)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
                with pytest.raises(PermissionError, match="not today"):
                    world.bus.send(OrderPlaced(2))
                world.bus.send(OrderPlaced(3))
            await world.settle()
            assert seen == [OrderPlaced(1), OrderPlaced(3)]

    async def test_middleware_cannot_be_added_to_a_working_bus(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            with pytest.raises(WiringError, match="before it starts or sends"):
                world.bus.use(Watching())
            await world.settle()
            assert seen == [OrderPlaced(1)]
