"""How handlers are called, and with what, on Postgres and in memory alike."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated
from uuid import UUID, uuid5

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from durable import (
    Context,
    Depends,
    InvalidMessage,
    Retry,
)
from tests.contract.bus.orders import (
    BILLING,
    MAIL,
    NEVER,
    ORDERS,
    SECOND,
    OrderBilled,
    OrderPlaced,
    OrderShipped,
    arriving,
    collect,
)
from tests.contract.bus.worlds import World


class Deadly(Exception):
    """Cannot be shown: whoever tries ends."""

    def __str__(self) -> str:
        raise SystemExit

    __repr__ = __str__


class Base(DeclarativeBase):
    pass


class Kept(Base):
    __tablename__ = "effects"
    number: Mapped[int] = mapped_column(primary_key=True)


# What handlers depend on; here, because annotations are resolved among a module's names.

steps: list[str] = []


def name_order(order: OrderPlaced) -> str:
    return f"order {order.number}"


async def make_greeting(name: Annotated[str, Depends(name_order)]) -> str:
    return f"hello, {name}"


async def open_connection() -> AsyncIterator[str]:
    steps.append("opened")
    yield "connection"
    steps.append("closed")


async def swallow() -> AsyncIterator[str]:
    with suppress(ValueError):
        yield "resource"


def swallow_sync() -> Iterator[str]:
    with suppress(ValueError):
        yield "resource"


def take_resource() -> Iterator[str]:
    steps.append("taken")
    yield "resource"
    steps.append("given back")


def double(order: OrderPlaced) -> int:
    return order.number * 2


class TestHandling:
    async def test_context_describes_the_message(self, world: World) -> None:
        contexts: list[Context] = []

        @world.bus.handles(OrderPlaced)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            contexts.append(ctx)

        async with world:
            async with world.bus.unit_of_work():
                sent = world.bus.send(OrderPlaced(1), headers={"tenant": "blue"}, key="order-1")
            await world.settle()
            (ctx,) = contexts
            assert (ctx.id, ctx.correlation_id, ctx.causation_id) == (sent, sent, None)
            assert (ctx.source, ctx.message_type, ctx.attempt) == ("orders", "contract.order-placed", 1)
            assert ctx.headers == {"tenant": "blue"}

    @pytest.mark.parametrize(
        ("returned", "expected"),
        [
            (OrderShipped(1), [1]),
            ([OrderShipped(1), OrderShipped(2)], [1, 2]),
            ((OrderShipped(1), None), [1]),
            (None, []),
        ],
    )
    async def test_messages_returned_by_a_handler_are_sent(
        self, world: World, returned: object, expected: list[int]
    ) -> None:
        shipped = collect(world.bus, OrderShipped, concurrency=1)

        @world.bus.handles(OrderPlaced)
        async def handle(order: OrderPlaced) -> object:
            return returned

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert [order.number for order in shipped] == expected

    async def test_event_returned_by_a_handler_goes_to_every_subscriber(self, world: World) -> None:
        world.bus.subscribe(OrderShipped, to=BILLING)
        world.bus.subscribe(OrderShipped, to=MAIL)

        @world.bus.handles(OrderPlaced)
        async def handle(order: OrderPlaced) -> OrderShipped:
            return OrderShipped(order.number)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert world.sent_to(BILLING) == world.sent_to(MAIL) == [("contract.order-shipped", b'{"number":1}')]

    async def test_a_conversation_keeps_its_correlation_id_and_each_message_its_cause(self, world: World) -> None:
        contexts: dict[str, Context] = {}

        @world.bus.handles(OrderPlaced)
        async def place(order: OrderPlaced, ctx: Context) -> OrderShipped:
            contexts["placed"] = ctx
            return OrderShipped(order.number)

        @world.bus.handles(OrderShipped)
        async def ship(order: OrderShipped, ctx: Context) -> None:
            contexts["shipped"] = ctx
            world.bus.send(OrderBilled(order.number))

        @world.bus.handles(OrderBilled)
        async def bill(order: OrderBilled, ctx: Context) -> None:
            contexts["billed"] = ctx

        async with world:
            async with world.bus.unit_of_work():
                sent = world.bus.send(OrderPlaced(1))
            await world.settle()
        assert {ctx.correlation_id for ctx in contexts.values()} == {sent}
        assert contexts["shipped"].causation_id == contexts["placed"].id == sent
        assert contexts["billed"].causation_id == contexts["shipped"].id

    async def test_repeated_attempt_sends_the_same_ids(self, world: World) -> None:
        attempts: list[list[UUID]] = []

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=2, delays=[]))
        async def place(order: OrderPlaced, ctx: Context) -> None:
            attempts.append([ctx.send(OrderShipped(1)), ctx.send(OrderShipped(2)), ctx.send(OrderBilled(1))])
            if ctx.attempt < 3:
                raise RuntimeError("not yet")

        shipped = collect(world.bus, OrderShipped)
        collect(world.bus, OrderBilled)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
        assert len(attempts) == 3
        assert attempts[0] == attempts[1] == attempts[2]
        assert len(set(attempts[0])) == 3
        assert sorted(order.number for order in shipped) == [1, 2]

    async def test_messages_under_one_business_key_are_one_message(self, world: World) -> None:
        billed = collect(world.bus, OrderBilled)
        async with world:
            for _ in range(2):
                async with world.bus.unit_of_work():
                    world.bus.send(OrderBilled(1), id_from="invoice-1")
            async with world.bus.unit_of_work():
                for _ in range(2):
                    world.bus.send(OrderBilled(2), id_from="invoice-2")
            await world.settle()
        assert sorted(bill.number for bill in billed) == [1, 2]

    @pytest.mark.parametrize(
        "letter", ["x", "\N{CYRILLIC SMALL LETTER ZHE}", "\N{CJK UNIFIED IDEOGRAPH-4E2D}"], ids=ascii
    )
    async def test_key_is_bounded_in_bytes_of_any_alphabet(self, world: World, letter: str) -> None:
        shipped = collect(world.bus, OrderShipped)
        longest = letter * (1_000 // len(letter.encode()))
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderShipped(1), key=longest, delay=60)
                with pytest.raises(InvalidMessage, match="partition_key is longer than 1000 bytes"):
                    world.bus.send(OrderShipped(2), key=longest + letter, delay=60)
            await world.advance(timedelta(seconds=61))
        assert shipped == [OrderShipped(1)]

    @pytest.mark.parametrize("to", [None, MAIL], ids=["local", "remote"])
    async def test_cancelled_message_frees_its_business_key(self, world: World, to: str | None) -> None:
        billed = collect(world.bus, OrderBilled)
        async with world:
            async with world.bus.unit_of_work():
                first = world.bus.send(OrderBilled(1), to=to, id_from="invoice-1", delay=3_600)
            assert await world.bus.cancel(first)
            async with world.bus.unit_of_work():
                assert world.bus.send(OrderBilled(2), to=to, id_from="invoice-1") == first
            await world.settle()
            assert (billed if to is None else world.sent_to(MAIL)) == (
                [OrderBilled(2)] if to is None else [("contract.order-billed", b'{"number":2}')]
            )

    @pytest.mark.parametrize("came_in", [False, True], ids=["local", "from a peer"])
    async def test_discarded_dead_letter_frees_its_business_key(self, world: World, came_in: bool) -> None:
        seen: list[int] = []

        @world.bus.handles(OrderBilled, retry=NEVER)
        async def handle(billed: OrderBilled) -> None:
            seen.append(billed.number)
            if billed.number == 1:
                raise RuntimeError("the first is wrong")

        async def send(number: int) -> None:
            async with world.bus.unit_of_work():
                world.bus.send(OrderBilled(number), to=ORDERS if came_in else None, id_from="invoice-1")
            await world.settle()

        async with world:
            await send(1)
            assert len(world.dead_letters()) == 1
            await world.discard()
            await send(2)
            await send(3)
        assert seen == [1, 2]

    async def test_discarded_letter_of_another_message_frees_no_business_key(self, world: World) -> None:
        billed = collect(world.bus, OrderBilled)
        first = msgspec.structs.replace(
            arriving("contract.order-billed"), id=uuid5(UUID(int=0), "invoice-1"), sent_at=datetime.now(UTC)
        )
        async with world:
            for number in (1, 2):
                body = b'{"number":%d}' % number
                await world.arrive(msgspec.structs.replace(first, body=body))
            assert [letter.exception_type for letter in world.dead_letters()] == ["quarantined on arrival"]
            await world.discard()
            await world.arrive(msgspec.structs.replace(first, sent_at=first.sent_at + SECOND))
        assert billed == [OrderBilled(1)]

    async def test_reply_goes_to_the_address_of_reply_to(self, world: World) -> None:
        billed = collect(world.bus, OrderBilled)

        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            ctx.reply(OrderBilled(order.number))

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1), reply_to=ORDERS)
                world.bus.send(OrderPlaced(2))
            await world.settle()
            assert billed == [OrderBilled(1)]
            (letter,) = world.dead_letters()
            assert letter.exception_type == "durable.errors.RoutingError"
            assert "asks for no reply" in letter.reason

    async def test_error_with_a_text_ending_the_process_is_a_failed_attempt(self, world: World) -> None:
        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced) -> None:
            raise Deadly

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            assert "cannot be made" in letter.reason

    @pytest.mark.parametrize("ends", ["close", "invalidate"])
    async def test_handler_ending_its_session_and_returning_a_message_is_retried(self, world: World, ends: str) -> None:
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[]))
        async def handle(order: OrderPlaced, session: AsyncSession, ctx: Context) -> OrderShipped:
            if ctx.attempt == 1:
                await getattr(session, ends)()
            return OrderShipped(ctx.attempt)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
        assert (shipped, world.dead_letters()) == ([OrderShipped(2)], [])

    async def test_handler_swallowing_a_failed_flush_and_returning_a_message_is_retried(
        self, world_with_tables: World
    ) -> None:
        world = world_with_tables
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[]))
        async def handle(order: OrderPlaced, session: AsyncSession, ctx: Context) -> OrderShipped:
            if ctx.attempt == 1:
                session.add(Kept(number=2**40))  # out of range
                with suppress(DBAPIError):
                    await session.flush()
            return OrderShipped(ctx.attempt)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
        assert (shipped, world.dead_letters()) == ([OrderShipped(2)], [])

    async def test_a_provider_cannot_make_a_success_of_a_failure(self, world: World) -> None:
        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced, resource: Annotated[str, Depends(swallow)]) -> None:
            raise ValueError("the handler's own")

        @world.bus.handles(OrderShipped, retry=NEVER)
        def handle_sync(order: OrderShipped, resource: Annotated[str, Depends(swallow_sync)]) -> None:
            raise ValueError("the handler's own")

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
                world.bus.send(OrderShipped(1))
            await world.settle()
            assert [letter.reason for letter in world.dead_letters()] == ["the handler's own"] * 2

    async def test_a_handler_sends_publishes_and_schedules_by_its_context(self, world: World) -> None:
        shipped = collect(world.bus, OrderShipped)
        world.bus.subscribe(OrderBilled, to=MAIL)

        @world.bus.handles(OrderPlaced)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            ctx.send(OrderShipped(1))
            ctx.publish(OrderBilled(2))
            ctx.send(OrderShipped(3), delay=60)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert shipped == [OrderShipped(1)]
            assert world.sent_to(MAIL) == [("contract.order-billed", b'{"number":2}')]
            await world.advance(timedelta(seconds=61))
            assert shipped == [OrderShipped(1), OrderShipped(3)]

    async def test_dependencies_are_made_for_each_attempt_and_cleaned_up_afterwards(self, world: World) -> None:
        steps.clear()

        @world.bus.handles(OrderPlaced)
        async def handle(
            order: OrderPlaced,
            greeting: Annotated[str, Depends(make_greeting)],
            connection: Annotated[str, Depends(open_connection)],
            resource: Annotated[str, Depends(take_resource)],
        ) -> None:
            steps.append(f"{greeting} by {connection} with {resource}")

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
        assert steps == ["opened", "taken", "hello, order 1 by connection with resource", "given back", "closed"]

    async def test_a_sync_handler_runs_in_a_thread_with_a_sync_session(self, world_with_tables: World) -> None:
        world = world_with_tables
        shipped = collect(world.bus, OrderShipped)
        threads: list[str] = []

        @world.bus.handles(OrderPlaced)
        def handle(
            order: OrderPlaced, session: Session, ctx: Context, doubled: Annotated[int, Depends(double)]
        ) -> OrderShipped:
            threads.append(threading.current_thread().name)
            session.execute(text("INSERT INTO effects VALUES (:number)"), {"number": doubled})
            world.bus.send(OrderShipped(doubled))
            return OrderShipped(ctx.attempt)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(4))
            await world.settle()
            assert {order.number for order in shipped} == {8, 1}
            assert threads[0].startswith("durable contract.order-placed")
            async with world.bus.unit_of_work() as uow:
                assert list(await uow.session.scalars(text("SELECT number FROM effects"))) == [8]

    async def test_handler_of_a_list_is_given_the_whole_group(self, world: World) -> None:
        groups: list[list[int]] = []

        @world.bus.handles(OrderPlaced, max_batch=100, concurrency=1)
        async def handle(orders: list[OrderPlaced]) -> None:
            groups.append([order.number for order in orders])

        async with world:
            async with world.bus.unit_of_work():
                for number in range(20):
                    world.bus.send(OrderPlaced(number))
            await world.settle()
            assert groups == [list(range(20))]
