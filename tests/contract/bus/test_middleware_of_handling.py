"""Middleware around what is handled, on Postgres and in memory alike."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable import (
    Context,
    HandleNext,
    Incoming,
    Middleware,
    Reject,
    Retry,
    RetryLater,
)
from durable.testing import eventually
from tests.contract.bus.orders import (
    MINUTE,
    NEVER,
    OrderBilled,
    OrderPlaced,
    OrderShipped,
    Sending,
    Watching,
    collect,
    tenant,
)
from tests.contract.bus.worlds import World


class Handling(Middleware):
    """A component of one function, around what is handled of one class."""

    def __init__(self, function: Callable[[Incoming, HandleNext], Awaitable[object]], cls: type = OrderPlaced) -> None:
        self._function = function
        self._cls = cls

    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        if isinstance(incoming.message, self._cls):
            return await self._function(incoming, call_next)
        return await call_next(incoming)


class TestMiddlewareOfHandling:
    async def test_middleware_is_given_message_handler_and_attempt(self, world: World) -> None:
        watching = Watching()
        world.bus.use(watching)

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[]))
        async def place(order: OrderPlaced, ctx: Context) -> None:
            if ctx.attempt == 1:
                raise RuntimeError("not yet")

        async with world:
            async with world.bus.unit_of_work():
                sent = world.bus.send(OrderPlaced(1), headers={"user": "ann"})
            await world.settle()
        assert [incoming.attempt for incoming in watching.handled] == [1, 2]
        for incoming in watching.handled:
            assert (incoming.message, incoming.context.id) == (OrderPlaced(1), sent)
            assert incoming.context.headers == {"user": "ann"}
            assert incoming.handler.endswith("place")

    async def test_a_message_may_be_finished_without_its_handler(self, world: World) -> None:
        async def skip(incoming: Incoming, call_next: HandleNext) -> object:
            return None if incoming.message == OrderPlaced(1) else await call_next(incoming)

        world.bus.use(Handling(skip))
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
                world.bus.send(OrderPlaced(2))
            await world.settle()
            assert (seen, world.dead_letters(), world.waiting()) == ([OrderPlaced(2)], [], 0)

    async def test_the_handler_may_be_given_another_message(self, world: World) -> None:
        async def annotate(incoming: Incoming, call_next: HandleNext) -> object:
            assert isinstance(incoming.message, OrderPlaced)
            return await call_next(incoming.replace(message=OrderPlaced(incoming.message.number, "annotated")))

        world.bus.use(Handling(annotate))
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert seen == [OrderPlaced(1, "annotated")]

    async def test_error_of_the_middleware_counts_as_raised_by_the_handler(self, world: World) -> None:
        async def refuse(incoming: Incoming, call_next: HandleNext) -> object:
            match incoming.message, incoming.attempt:
                case OrderPlaced(1), _:
                    raise Reject("never")
                case OrderPlaced(2), 1:
                    raise RetryLater(5)
                case OrderPlaced(3), 1 | 2:
                    raise ConnectionError("try again")
                case _:
                    return await call_next(incoming)

        world.bus.use(Handling(refuse))
        seen = collect(world.bus, retry=Retry(immediate=2, delays=[60]))
        async with world:
            async with world.bus.unit_of_work():
                for number in (1, 2, 3):
                    world.bus.send(OrderPlaced(number))
            await world.settle()
            assert [(letter.reason, letter.attempts) for letter in world.dead_letters()] == [("never", 1)]
            assert (seen, world.scheduled()) == ([OrderPlaced(3)], 1)
            await world.advance(5 * MINUTE)
            assert seen == [OrderPlaced(3), OrderPlaced(2)]

    async def test_effects_of_the_handler_are_undone_when_the_middleware_fails_afterwards(
        self, world_with_tables: World
    ) -> None:
        async def fail_once(incoming: Incoming, call_next: HandleNext) -> object:
            result = await call_next(incoming)
            if incoming.attempt == 1:
                raise ConnectionError
            return result

        world = world_with_tables
        world.bus.use(Handling(fail_once))
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[]))
        async def place(order: OrderPlaced, session: AsyncSession) -> OrderShipped:
            await session.execute(text("INSERT INTO effects VALUES (:number)"), {"number": order.number})
            return OrderShipped(order.number)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(7))
            await world.settle()
            async with world.bus.unit_of_work() as uow:
                assert list(await uow.session.scalars(text("SELECT number FROM effects"))) == [7]
        assert shipped == [OrderShipped(7)]

    async def test_handler_run_twice_by_the_middleware_sends_twice_and_finishes_its_message_once(
        self, world: World
    ) -> None:
        async def twice(incoming: Incoming, call_next: HandleNext) -> object:
            await call_next(incoming)
            return await call_next(incoming)

        world.bus.use(Handling(twice))
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced)
        async def place(order: OrderPlaced, ctx: Context) -> OrderShipped:
            ctx.send(OrderShipped(1))
            return OrderShipped(2)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert sorted(order.number for order in shipped) == [1, 1, 2, 2]
            assert (world.dead_letters(), world.waiting()) == ([], 0)

    async def test_a_run_in_a_savepoint_can_be_forgotten_and_repeated(self, world_with_tables: World) -> None:
        async def repeat(incoming: Incoming, call_next: HandleNext) -> object:
            assert isinstance(incoming.session, AsyncSession)
            try:
                async with incoming.session.begin_nested():
                    return await call_next(incoming)
            except ConnectionError:
                return await call_next(incoming)

        world = world_with_tables
        world.bus.use(Handling(repeat))
        shipped, runs = collect(world.bus, OrderShipped), list[int]()

        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def place(order: OrderPlaced, session: AsyncSession, ctx: Context) -> None:
            runs.append(ctx.attempt)
            await session.execute(text("INSERT INTO effects VALUES (:number)"), {"number": len(runs)})
            ctx.send(OrderShipped(len(runs)))
            if len(runs) == 1:
                raise ConnectionError

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert (runs, shipped, world.dead_letters()) == ([1, 1], [OrderShipped(2)], [])
            async with world.bus.unit_of_work() as uow:
                assert list(await uow.session.scalars(text("SELECT number FROM effects"))) == [2]

    async def test_context_variable_set_by_the_middleware_holds_for_the_handler_and_its_messages(
        self, world: World
    ) -> None:
        async def set_up(incoming: Incoming, call_next: HandleNext) -> object:
            token = tenant.set(incoming.context.headers.get("tenant", "none"))
            try:
                return await call_next(incoming)
            finally:
                tenant.reset(token)

        contexts: dict[int, Context] = {}
        world.bus.use(Handling(set_up, object))
        world.bus.use(Sending(lambda outgoing, call_next: call_next(outgoing.with_headers({"tenant": tenant.get()}))))

        @world.bus.handles(OrderPlaced)
        async def place(order: OrderPlaced, ctx: Context) -> OrderShipped:
            ctx.send(OrderShipped(1))
            return OrderShipped(2)

        @world.bus.handles(OrderShipped)
        def ship(order: OrderShipped, ctx: Context) -> OrderBilled:
            contexts[order.number] = ctx
            return OrderBilled(order.number + 2)

        @world.bus.handles(OrderBilled)
        async def bill(order: OrderBilled, ctx: Context) -> None:
            contexts[order.number] = ctx

        async with world:
            tenant.set("blue")
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            tenant.set("none")
            await world.settle()
        assert {number: ctx.headers["tenant"] for number, ctx in contexts.items()} == dict.fromkeys(
            (1, 2, 3, 4), "blue"
        )

    async def test_middleware_sees_each_message_of_a_group_and_a_failing_one_runs_alone(self, world: World) -> None:
        async def refuse(incoming: Incoming, call_next: HandleNext) -> object:
            if incoming.message == OrderPlaced(3):
                raise ZeroDivisionError
            return await call_next(incoming)

        watching = Watching()
        world.bus.use(watching, stage="before")
        world.bus.use(Handling(refuse))

        @world.bus.handles(OrderPlaced, max_batch=10, concurrency=1, retry=NEVER)
        async def place(order: OrderPlaced) -> OrderShipped:
            return OrderShipped(order.number)

        shipped = collect(world.bus, OrderShipped)
        async with world:
            async with world.bus.unit_of_work():
                for number in range(6):
                    world.bus.send(OrderPlaced(number))
            await world.settle()
            assert sorted(order.number for order in shipped) == [0, 1, 2, 4, 5]
            assert [letter.exception_type for letter in world.dead_letters()] == ["ZeroDivisionError"]
        placed = [each.message for each in watching.handled if isinstance(each.message, OrderPlaced)]
        assert placed == [OrderPlaced(number) for number in (0, 1, 2, 3, 0, 1, 2, 3, 4, 5)]

    async def test_middleware_sees_a_list_handler_once_with_every_context(self, world: World) -> None:
        watching, seen = Watching(), list[list[OrderPlaced]]()
        world.bus.use(watching)

        @world.bus.handles(OrderPlaced, max_batch=100, concurrency=1)
        async def place(orders: list[OrderPlaced]) -> None:
            seen.append(orders)

        async with world:
            async with world.bus.unit_of_work():
                sent = [world.bus.send(OrderPlaced(number)) for number in range(5)]
            await world.settle()
        (incoming,) = watching.handled
        assert incoming.message == incoming.messages == seen[0] == [OrderPlaced(number) for number in range(5)]
        assert [ctx.id for ctx in incoming.contexts] == sent
        assert incoming.context is incoming.contexts[0]


class TestMiddlewareOfSyncHandlers:
    async def test_middleware_stays_in_the_loop_and_the_sync_handler_runs_in_its_thread_and_transaction(
        self, world_with_tables: World
    ) -> None:
        threads: dict[str, str] = {}

        async def around(incoming: Incoming, call_next: HandleNext) -> object:
            threads["middleware"] = threading.current_thread().name
            await asyncio.sleep(0)
            result = await call_next(incoming)
            session = incoming.session
            assert isinstance(session, Session)
            await asyncio.to_thread(session.execute, text("INSERT INTO effects VALUES (:n)"), {"n": 2})
            return result

        world = world_with_tables
        world.bus.use(Handling(around))
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced)
        def place(order: OrderPlaced, session: Session, ctx: Context) -> OrderShipped:
            threads.setdefault("handler", threading.current_thread().name)
            session.execute(text("INSERT INTO effects VALUES (:number)"), {"number": order.number})
            world.bus.send(OrderShipped(1))
            return OrderShipped(2)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            async with world.bus.unit_of_work() as uow:
                assert sorted(await uow.session.scalars(text("SELECT number FROM effects"))) == [1, 2]
        assert sorted(order.number for order in shipped) == [1, 2]
        assert threads["middleware"] == threading.main_thread().name
        assert threads["handler"].startswith("durable contract.order-placed")

    async def test_failed_attempt_of_a_sync_handler_is_undone_and_repeated(self, world_with_tables: World) -> None:
        async def fail_once(incoming: Incoming, call_next: HandleNext) -> object:
            result = await call_next(incoming)
            if incoming.attempt == 1:
                raise ConnectionError
            return result

        world = world_with_tables
        world.bus.use(Handling(fail_once))
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced, max_batch=10, concurrency=1, retry=Retry(immediate=2, delays=[]))
        def place(order: OrderPlaced, session: Session, ctx: Context) -> OrderShipped:
            session.execute(text("INSERT INTO effects VALUES (:number)"), {"number": order.number})
            if (order.number, ctx.attempt) == (2, 2):
                raise StopIteration
            return OrderShipped(order.number)

        async with world:
            async with world.bus.unit_of_work():
                for number in (1, 2, 3):
                    world.bus.send(OrderPlaced(number))
            await world.settle()
            async with world.bus.unit_of_work() as uow:
                assert sorted(await uow.session.scalars(text("SELECT number FROM effects"))) == [1, 2, 3]
        assert sorted(order.number for order in shipped) == [1, 2, 3]
        assert world.dead_letters() == []

    async def test_sync_handler_exceeding_its_timeout_fails_and_commits_nothing_later(self, world: World) -> None:
        let_go, went_on = threading.Event(), threading.Event()
        watching = Watching()
        world.bus.use(watching)
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced, timeout=0.05, retry=NEVER)
        def place(order: OrderPlaced) -> OrderShipped:
            let_go.wait(5)
            went_on.set()
            return OrderShipped(1)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            assert letter.exception_type == "TimeoutError"
            let_go.set()
            await eventually(went_on.is_set)
        assert len(watching.handled) == 1
        assert shipped == []
