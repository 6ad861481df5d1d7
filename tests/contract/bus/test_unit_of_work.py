"""Units of work, on Postgres and in memory alike."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from durable import (
    Bus,
    InvalidSetting,
    NoUnitOfWork,
)
from durable.testing import InMemoryBus
from tests.contract.bus.orders import OrderPlaced, collect
from tests.contract.bus.worlds import World


class TestUnitOfWork:
    async def test_a_message_is_handled_once_after_the_commit_and_not_before(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
                await world.settle()
                assert seen == []
            await world.settle()
            assert seen == [OrderPlaced(1)]

    async def test_a_unit_of_work_takes_a_timeout_above_0(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work(timeout=600) as uow:
                uow.send(OrderPlaced(1))
            for nothing in (0, -1, timedelta(0)):
                with pytest.raises(InvalidSetting, match="timeout must be above 0"):
                    world.bus.unit_of_work(timeout=nothing)
            await world.settle()
            assert seen == [OrderPlaced(1)]

    async def test_rollback_discards_the_messages_sent(self, world: World) -> None:
        seen = collect(world.bus)
        async with world:
            async with world.bus.unit_of_work() as uow:
                world.bus.send(OrderPlaced(1))
                await uow.session.rollback()
            await world.settle()
            assert seen == []

    async def test_exception_in_the_block_discards_the_messages_and_is_raised(self, world: World) -> None:
        seen = collect(world.bus)

        async def fail_after_sending() -> None:
            async with world.bus.unit_of_work() as uow:
                uow.send(OrderPlaced(1))
                raise ZeroDivisionError

        async with world:
            with pytest.raises(ZeroDivisionError):
                await fail_after_sending()
            await world.settle()
            assert seen == []

    async def test_each_commit_of_a_session_stores_its_messages(self, world: World) -> None:
        seen = collect(world.bus, concurrency=1)
        async with world:
            async with world.bus.unit_of_work() as uow:
                uow.send(OrderPlaced(1))
                await uow.session.commit()
                uow.send(OrderPlaced(2))
                await uow.session.rollback()
                uow.send(OrderPlaced(3))
                await uow.session.commit()
                uow.send(OrderPlaced(4))
            await world.settle()
            assert [order.number for order in seen] == [1, 3, 4]

    async def test_savepoint_rolled_back_discards_its_messages(self, world: World) -> None:
        seen = collect(world.bus, concurrency=1)
        async with world:
            async with world.bus.unit_of_work() as uow:
                uow.send(OrderPlaced(1))
                async with uow.session.begin_nested() as savepoint:
                    uow.send(OrderPlaced(2))
                    await savepoint.rollback()
                async with uow.session.begin_nested():
                    uow.send(OrderPlaced(3))
                    async with uow.session.begin_nested() as inner:
                        uow.send(OrderPlaced(4))
                        await inner.rollback()
                uow.send(OrderPlaced(5))
            await world.settle()
            assert [order.number for order in seen] == [1, 3, 5]

    async def test_send_outside_a_unit_of_work_raises_with_advice(self, world: World) -> None:
        collect(world.bus)
        async with world:
            with pytest.raises(NoUnitOfWork, match=r"bus\.unit_of_work\(\)"):
                world.bus.send(OrderPlaced(1))
            async with world.bus.unit_of_work():
                pass
            with pytest.raises(NoUnitOfWork):
                world.bus.publish(OrderPlaced(1))

    async def test_two_tasks_each_have_their_own_unit_of_work(self, world: World) -> None:
        seen = collect(world.bus)
        both_open = asyncio.Barrier(2)

        async def place(number: int, *, commits: bool) -> None:
            async with world.bus.unit_of_work() as uow:
                world.bus.send(OrderPlaced(number))
                await both_open.wait()
                if not commits:
                    await uow.session.rollback()

        async with world:
            await asyncio.gather(place(1, commits=True), place(2, commits=False))
            await world.settle()
            assert seen == [OrderPlaced(1)]

    async def test_a_session_of_the_application_is_a_unit_of_work_when_enlisted(self, world_with_tables: World) -> None:
        world = world_with_tables
        seen = collect(world.bus, concurrency=1)
        async with world, world.bus.runtime.sessions.open() as session:
            with world.bus.enlist(session) as outbox:
                await session.execute(text("INSERT INTO effects VALUES (1)"))
                outbox.send(OrderPlaced(1))
                world.bus.send(OrderPlaced(2))
                await session.commit()
            outbox.send(OrderPlaced(3))
            await session.commit()
            await world.settle()
            assert [order.number for order in seen] == [1, 2, 3]

    async def test_a_sync_session_is_a_unit_of_work_when_enlisted(self, world_with_tables: World) -> None:
        world = world_with_tables
        seen = collect(world.bus)
        async with world:
            with world.bus.runtime.sessions.open_sync() as session, world.bus.enlist(session):
                world.bus.send(OrderPlaced(1))
                session.rollback()
                session.execute(text("INSERT INTO effects VALUES (1)"))
                world.bus.send(OrderPlaced(2))
                session.commit()
            await world.settle()
            assert seen == [OrderPlaced(2)]

    @pytest.mark.parametrize("commits", [True, False])
    async def test_session_joined_to_a_transaction_is_committed_by_the_transaction(
        self, world_with_tables: World, commits: bool
    ) -> None:
        world = world_with_tables
        seen = collect(world.bus)
        async with world, world.bus.runtime.sessions.open() as opened:
            assert isinstance(opened.bind, AsyncEngine)
            async with opened.bind.connect() as connection:
                outer = await connection.begin()
                async with AsyncSession(connection) as session:
                    with world.bus.enlist(session):
                        await session.execute(text("INSERT INTO effects VALUES (1)"))
                        world.bus.send(OrderPlaced(1))
                        await session.commit()
                await world.settle()
                assert seen == []
                await (outer.commit() if commits else outer.rollback())
            await world.settle()
            assert seen == [OrderPlaced(1)] * commits

    async def test_task_outliving_a_unit_of_work_cannot_send(self, world: World) -> None:
        seen = collect(world.bus)
        over = asyncio.Event()

        async def outlive() -> None:
            await over.wait()
            with pytest.raises(NoUnitOfWork, match="this task was started is over"):
                world.bus.send(OrderPlaced(1))

        async with world:
            async with world.bus.unit_of_work() as uow:
                outliving = asyncio.create_task(outlive())
            over.set()
            await outliving
            with pytest.raises(NoUnitOfWork):
                uow.send(OrderPlaced(2))
            await world.settle()
            assert seen == []

    async def test_each_of_two_buses_has_its_own_outbox_of_a_session(self, world_with_tables: World) -> None:
        world = world_with_tables
        seen = collect(world.bus)
        other = Bus("audit")
        gathered = collect(other)
        async with world, InMemoryBus(other) as memory:
            async with world.bus.unit_of_work() as uow:
                uow.send(OrderPlaced(1))
                with other.enlist(uow.session):
                    other.send(OrderPlaced(2))
            await world.settle()
            await memory.drain()
            assert (seen, gathered) == ([OrderPlaced(1)], [OrderPlaced(2)])
