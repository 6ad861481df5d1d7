from datetime import UTC, datetime, timedelta
from unittest.mock import AsyncMock

from shop import BILLING, CountStock, OrderPlaced, OrderShipped, bus, ship
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from durable import Bus
from durable.testing import InMemoryBus, ManualClock


def sessions() -> AsyncMock:
    return AsyncMock(spec=AsyncSession)


async def place(order_id: int) -> None:
    async with bus.unit_of_work():
        bus.send(OrderPlaced(order_id))


async def test_placed_order_is_shipped() -> None:
    async with InMemoryBus(bus, sessions) as memory:
        await place(17)
        assert memory.sent(OrderPlaced) == [OrderPlaced(17)]  # committed; not handled yet
        await memory.drain()
        assert memory.sent_to(BILLING) == [OrderShipped(17)]
        memory.assert_no_dead_letters()


async def test_carrier_that_fails_is_asked_again_after_a_minute() -> None:
    async with InMemoryBus(bus, sessions) as memory:
        memory.fail(ship, TimeoutError("no answer of the carrier"), times=2)
        await place(17)
        await memory.drain()  # the first attempt and the immediate one
        assert memory.dead_letters == memory.handled == []
        assert len(memory.scheduled) == 1
        memory.clock.advance(60)
        await memory.drain()  # the third attempt
        assert memory.sent(OrderShipped) == [OrderShipped(17)]


async def test_order_without_a_carrier_is_a_dead_letter_until_replayed() -> None:
    async with InMemoryBus(bus, sessions) as memory:
        memory.fail(OrderPlaced, TimeoutError, times=3)  # every attempt that its Retry allows
        await place(17)
        await memory.drain()
        memory.clock.advance(60)  # without this line the message still waits, and there is no letter
        await memory.drain()
        [letter] = memory.dead_letters
        assert letter.message == OrderPlaced(17)
        memory.replay(letter)
        await memory.drain()
        assert memory.sent(OrderShipped) == [OrderShipped(17)]


async def test_stock_is_counted_every_night() -> None:
    clock = ManualClock(datetime(2030, 5, 4, 12, tzinfo=UTC))
    async with InMemoryBus(bus, sessions, clock=clock) as memory:
        await memory.drain()
        assert memory.sent(CountStock) == []
        clock.advance(timedelta(days=2))
        await memory.drain()
        assert len(memory.sent(CountStock)) == 2
        await bus.run_schedule("nightly")
        await memory.drain()
        assert len(memory.handled) == 3


async def test_shipped_order_is_billed() -> None:
    billing, billed = Bus("billing"), []

    @billing.handles(OrderShipped)
    async def bill(shipped: OrderShipped) -> None:
        billed.append(shipped.order_id)

    clock = ManualClock()  # one for both: otherwise a message may arrive before it was sent
    async with (
        InMemoryBus(bus, sessions, clock=clock) as memory,
        InMemoryBus(billing, clock=clock) as there,
    ):
        await place(17)
        await memory.drain()
        assert billed == []  # the message waits for its destination
        memory.connect(BILLING, there)
        there.deliver_twice(OrderShipped)
        await memory.drain()  # of all connected buses
        assert billed == [17]
        assert there.duplicates == 1


async def test_sessions_of_a_database(database_url: str) -> None:
    engine = create_async_engine(database_url.replace("postgresql://", "postgresql+asyncpg://", 1))
    async with engine.connect() as connection:
        await connection.begin()
        factory = async_sessionmaker(connection, join_transaction_mode="create_savepoint", expire_on_commit=False)
        async with InMemoryBus(bus, factory) as memory:
            await place(17)
            await memory.drain()
            memory.assert_no_dead_letters()
        await connection.rollback()  # the rows of the test are gone
    await engine.dispose()
