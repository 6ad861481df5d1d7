"""Handlers that fail: attempts, delays, dead letters, on Postgres and in memory alike."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable import (
    Context,
    InvalidSetting,
    NoUnitOfWork,
    PutBack,
    Reject,
    Release,
    Retry,
    RetryAfter,
    RetryLater,
    WiringError,
    message,
)
from durable.testing import eventually
from tests.contract.bus.orders import BILLING, NEVER, SECOND, OrderBilled, OrderPlaced, OrderShipped, collect
from tests.contract.bus.worlds import World
from tests.support.subclasses import Text


class Panic(BaseException):
    """What an extension raises that is no Exception."""


class Busy(Exception):
    retry_after = 0


@message("contract.basket")
class Basket(msgspec.Struct):
    articles: list[int]


@message("contract.unrouted")
class Unrouted(msgspec.Struct):
    """Has neither a route nor a handler."""


class TestFailing:
    async def test_the_sends_and_effects_of_a_failed_attempt_are_forgotten(self, world_with_tables: World) -> None:
        world = world_with_tables
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[]))
        async def handle(order: OrderPlaced, session: AsyncSession, ctx: Context) -> None:
            await session.execute(text("INSERT INTO effects VALUES (:number)"), {"number": ctx.attempt})
            ctx.send(OrderShipped(ctx.attempt))
            if ctx.attempt == 1:
                raise ZeroDivisionError

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert shipped == [OrderShipped(2)]
            async with world.bus.unit_of_work() as uow:
                assert list(await uow.session.scalars(text("SELECT number FROM effects"))) == [2]

    async def test_each_attempt_decodes_its_message_anew(self, world: World) -> None:
        seen: list[int] = []

        @world.bus.handles(Basket, retry=Retry(immediate=1, delays=[SECOND]))
        async def handle(basket: Basket) -> None:
            basket.articles.append(len(seen))
            seen.append(len(basket.articles))
            if len(seen) < 3:
                raise ZeroDivisionError

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(Basket([]))
            await world.settle()
            await world.advance(2 * SECOND)
        assert seen == [1, 1, 1]

    async def test_failing_message_is_retried_at_once_then_after_each_delay_then_dead_lettered(
        self, world: World
    ) -> None:
        attempts: list[int] = []

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[10, 60], jitter=0))
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            raise ZeroDivisionError("no orders today")

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert (attempts, world.scheduled()) == ([1, 2], 1)
            await world.advance(timedelta(seconds=11))
            assert attempts == [1, 2, 3]
            await world.advance(timedelta(seconds=11))
            assert (attempts, world.scheduled()) == ([1, 2, 3], 1)
            await world.advance(timedelta(seconds=50))
            assert attempts == [1, 2, 3, 4]
            (letter,) = world.dead_letters()
            assert letter[:3] == ("contract.order-placed", "ZeroDivisionError", "no orders today")
            assert letter.attempts == 4
            assert 'raise ZeroDivisionError("no orders today")' in letter.traceback

    @pytest.mark.parametrize(
        ("by_setting", "by_handler", "buried"),
        [
            ("forget", None, False),
            ("forget", "dead-letter", True),
            ("dead-letter", None, True),
            ("dead-letter", "forget", False),
        ],
    )
    @pytest.mark.parametrize("comes", ["while it waits", "before its retry", "before it is sent"])
    async def test_expired_message_is_a_dead_letter_when_on_expiry_asks_for_one(
        self, world: World, by_setting: Any, by_handler: Any, buried: bool, comes: str
    ) -> None:
        world.bus.configure(on_expiry=by_setting)
        world.bus.route(OrderBilled, to=BILLING)

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=0, delays=[60], jitter=0), on_expiry=by_handler)
        async def handle(order: OrderPlaced) -> None:
            raise ZeroDivisionError

        async with world:
            if comes == "while it waits":
                await world.pause(OrderPlaced)
            async with world.bus.unit_of_work():
                if comes == "before it is sent":
                    world.bus.send(OrderBilled(1), deliver_by=timedelta(seconds=-1))
                else:
                    world.bus.send(OrderPlaced(1), deliver_by=timedelta(seconds=30))
            await world.settle()
            await world.advance(timedelta(seconds=31))
            if comes == "before it is sent":
                buried = by_setting == "dead-letter"
            assert [letter.exception_type for letter in world.dead_letters()] == ["expired"] * buried
            assert len(world.expired()) == (not buried)
            reasons = {
                "while it waits": "expired before it was handled",
                "before its retry": "the next attempt",
                "before it is sent": "expired before it was sent",
            }
            assert all(letter.reason.startswith(reasons[comes]) for letter in world.dead_letters())

    async def test_message_expired_on_its_way_out_is_sent_when_its_letter_is_replayed(self, world: World) -> None:
        world.bus.configure(on_expiry="dead-letter")
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderBilled(1), to=BILLING, deliver_by=timedelta(seconds=-1))
            await world.settle()
            assert [letter.reason for letter in world.dead_letters()] == ["expired before it was sent"]
            assert world.sent_to(BILLING) == []
            await world.replay()
            assert (world.dead_letters(), len(world.sent_to(BILLING))) == ([], 1)

    @pytest.mark.parametrize("is_moved", [False, True])
    async def test_delay_of_a_message_is_no_part_of_its_age(self, world: World, is_moved: bool) -> None:
        attempts: list[int] = []

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[30], jitter=0, max_age=60))
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            raise ZeroDivisionError

        async with world:
            async with world.bus.unit_of_work():
                message_id = world.bus.send(OrderPlaced(1), delay=60 if is_moved else 3_600)
            if is_moved:
                assert await world.bus.reschedule(message_id, delay=3_600)
            await world.advance(timedelta(seconds=3_601))
            assert (attempts, world.scheduled()) == ([1, 2], 1)
            await world.advance(timedelta(seconds=32))
            assert (attempts, len(world.dead_letters())) == ([1, 2, 3], 1)

    async def test_policy_of_a_class_of_errors_is_used_and_the_handler_precedes_the_service(self, world: World) -> None:
        attempts: dict[str, int] = {}
        errors = {"os": FileNotFoundError("os"), "key": KeyError("key"), "value": ValueError("value")}
        world.bus.on_error(OSError, KeyError, retry=Retry(immediate=1, delays=[]))

        @world.bus.handles(OrderPlaced, retry=Retry.never(), on_error={KeyError: Retry(immediate=3, delays=[])})
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            attempts[ctx.headers["fails"]] = ctx.attempt
            raise errors[ctx.headers["fails"]]

        async with world:
            async with world.bus.unit_of_work():
                for name in errors:
                    world.bus.send(OrderPlaced(1), headers={"fails": name})
            await world.settle()
            assert attempts == {"os": 2, "key": 4, "value": 1}
            assert len(world.dead_letters()) == 3

    @pytest.mark.parametrize("error", [int, Reject, "TimeoutError"])
    def test_policy_for_a_class_other_than_an_error_is_refused(self, world: World, error: Any) -> None:
        with pytest.raises(InvalidSetting, match="on_error"):
            world.bus.on_error(error, retry=Retry())

    async def test_message_succeeding_at_last_is_no_dead_letter(self, world: World) -> None:
        @world.bus.handles(OrderPlaced, retry=Retry(immediate=0, delays=[10]))
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            if ctx.attempt == 1:
                raise ZeroDivisionError

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            await world.advance(timedelta(seconds=12))
            assert (world.scheduled(), world.dead_letters()) == (0, [])

    async def test_a_rejected_message_is_a_dead_letter_at_once(self, world: World) -> None:
        attempts: list[int] = []

        @world.bus.handles(OrderPlaced)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            raise Reject("we do not ship there")

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert attempts == [1]
            (letter,) = world.dead_letters()
            assert (letter.exception_type, letter.reason) == ("durable.errors.Reject", "we do not ship there")

    async def test_retry_later_sets_the_time_of_the_next_attempt(self, world: World) -> None:
        attempts: list[int] = []

        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            if ctx.attempt < 3:
                raise RetryLater(timedelta(hours=1))

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            await world.advance(timedelta(minutes=50))
            assert attempts == [1]
            await world.advance(timedelta(minutes=11))
            await world.advance(timedelta(minutes=61))
            assert (attempts, world.dead_letters()) == ([1, 2, 3], [])

    async def test_message_put_back_comes_last_with_its_new_headers(self, world: World) -> None:
        seen: list[tuple[int, int, dict[str, str]]] = []

        @world.bus.handles(OrderPlaced, retry=NEVER, concurrency=1)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            seen.append((order.number, ctx.attempt, dict(ctx.headers)))
            if order.number == 1 and ctx.attempt < 3:
                raise PutBack("not now", headers={"lane": f"slow {ctx.attempt}", "hop": None})

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1), headers={"hop": "a", "by": "me"})
                world.bus.send(OrderPlaced(2))
            await world.settle()
        assert seen == [
            (1, 1, {"hop": "a", "by": "me"}),
            (2, 1, {}),
            (1, 2, {"by": "me", "lane": "slow 1"}),
            (1, 3, {"by": "me", "lane": "slow 2"}),
        ]

    async def test_headers_of_subclasses_of_text_are_put_back_as_plain_ones(self, world: World) -> None:
        seen: list[dict[str, str]] = []

        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            seen.append(dict(ctx.headers))
            if len(seen) < 2:
                raise PutBack(headers={Text("lane"): Text("slow")})

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
        assert seen == [{}, {"lane": "slow"}]

    @pytest.mark.parametrize("headers", [{"a": "x" * 10_000}, {"a": "line\nbreak"}], ids=["long", "control character"])
    async def test_message_put_back_with_unstorable_headers_is_a_dead_letter(
        self, world: World, headers: dict[str, str]
    ) -> None:
        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced) -> None:
            raise PutBack(headers=headers)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            assert letter.reason.startswith("it cannot be put back with other headers: ")

    @pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
    @pytest.mark.parametrize("error", [Panic("unwrap() on None"), SystemExit(3), KeyboardInterrupt()], ids=repr)
    async def test_base_exception_is_a_failed_attempt_and_the_next_message_is_handled(
        self, world: World, error: BaseException, is_async: bool
    ) -> None:
        attempts: list[tuple[int, int]] = []

        async def handle(order: OrderPlaced, ctx: Context) -> None:
            handle_sync(order, ctx)

        def handle_sync(order: OrderPlaced, ctx: Context) -> None:
            attempts.append((order.number, ctx.attempt))
            if order.number == 1:
                raise error

        declare = world.bus.handles(OrderPlaced, retry=Retry(immediate=1, delays=[]), concurrency=1)
        declare(handle) if is_async else declare(handle_sync)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
                world.bus.send(OrderPlaced(2))
            await world.settle()
            (letter,) = world.dead_letters()
            assert letter.exception_type.rpartition(".")[2] == type(error).__name__
        assert attempts == [(1, 1), (1, 2), (2, 1)]

    @pytest.mark.parametrize("mistake", ["route", "return", "reply"])
    async def test_a_mistake_of_the_wiring_is_a_dead_letter_at_once(self, world: World, mistake: str) -> None:
        attempts: list[int] = []

        @world.bus.handles(OrderPlaced)
        async def handle(order: OrderPlaced, ctx: Context) -> object:
            attempts.append(ctx.attempt)
            if mistake == "route":
                ctx.send(Unrouted())
            elif mistake == "reply":
                ctx.reply(OrderShipped(1))
            return object()

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            kinds = {"return": "UnknownMessageType"}
            assert letter.exception_type == f"durable.errors.{kinds.get(mistake, 'RoutingError')}"
        assert attempts == [1]

    async def test_error_without_a_retry_time_uses_the_retries_of_the_handler(self, world: World) -> None:
        attempts: list[int] = []

        @world.bus.handles(OrderPlaced, retry=Retry(immediate=0, delays=[1, 1]), on_error={Busy: RetryAfter()})
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            raise Busy

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))

            async def has_ended() -> bool:
                await world.advance(2 * SECOND)
                return bool(world.dead_letters())

            await eventually(has_ended, within=30)
            assert attempts == [1, 2, 3]

    async def test_a_released_message_comes_again_and_the_attempt_is_not_counted(self, world: World) -> None:
        attempts: list[int] = []

        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            attempts.append(ctx.attempt)
            if len(attempts) < 3:
                raise Release

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert (attempts, world.dead_letters()) == ([1, 1, 1], [])

    async def test_failed_message_of_a_group_holds_the_rest_of_its_key(self, world: World) -> None:
        """Also where they were taken with it, and are run alone because of it."""
        handled: list[int] = []

        @world.bus.handles(OrderPlaced, max_batch=10, retry=Retry(immediate=0, delays=[10], jitter=0))
        async def handle(order: OrderPlaced, ctx: Context) -> None:
            if order.number == 2 and ctx.attempt == 1:
                raise ZeroDivisionError
            handled.append(order.number)

        async with world:
            async with world.bus.unit_of_work():
                for number in range(1, 5):
                    world.bus.send(OrderPlaced(number), key="k")
                world.bus.send(OrderPlaced(5), key="other")
            await world.settle()
            assert set(handled) == {1, 5}
            handled.clear()
            await world.advance(20 * SECOND)
        assert handled == [2, 3, 4]

    async def test_failing_message_of_a_group_alone_is_run_again(self, world: World) -> None:
        shipped = collect(world.bus, OrderShipped)
        attempts: dict[int, list[int]] = {}

        @world.bus.handles(OrderPlaced, max_batch=10, concurrency=1, retry=Retry(immediate=1, delays=[]))
        async def handle(order: OrderPlaced, ctx: Context) -> OrderShipped:
            attempts.setdefault(order.number, []).append(ctx.attempt)
            if order.number == 3:
                raise ZeroDivisionError
            return OrderShipped(order.number)

        async with world:
            async with world.bus.unit_of_work():
                for number in range(6):
                    world.bus.send(OrderPlaced(number))
            await world.settle()
            assert sorted(order.number for order in shipped) == [0, 1, 2, 4, 5]
            assert [letter.attempts for letter in world.dead_letters()] == [2]
            assert attempts[3] == [1, 1, 2]  # in the group, then alone
            assert attempts[5] == [1]

    @pytest.mark.parametrize("is_async", [True, False])
    async def test_handler_exceeding_its_timeout_fails(self, world: World, is_async: bool) -> None:
        shipped = collect(world.bus, OrderShipped)
        let_go = threading.Event()

        async def handle(order: OrderPlaced) -> OrderShipped:
            await asyncio.Event().wait()
            return OrderShipped(1)

        def handle_in_thread(order: OrderPlaced) -> OrderShipped:
            let_go.wait(5)
            return OrderShipped(1)

        declare = world.bus.handles(OrderPlaced, timeout=0.05, retry=NEVER)
        declare(handle) if is_async else declare(handle_in_thread)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            assert letter.exception_type == "TimeoutError"
            let_go.set()  # the thread cannot be stopped; what it does now must not be committed
        assert shipped == []

    async def test_a_handler_must_not_commit_its_session(self, world: World) -> None:
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced, session: AsyncSession) -> None:
            world.bus.send(OrderShipped(1))
            await session.commit()

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            assert letter.exception_type == f"durable.errors.{WiringError.__name__}"
            assert "durable commits it" in letter.reason
            assert shipped == []

    @pytest.mark.parametrize("is_async", [True, False])
    @pytest.mark.parametrize("shape", ["transaction", "context manager", "savepoint open", "connection"])
    async def test_a_handler_must_not_commit_its_session_in_any_other_way(
        self, world_with_tables: World, is_async: bool, shape: str
    ) -> None:
        world = world_with_tables
        shipped = collect(world.bus, OrderShipped)

        def commit(session: Session) -> None:
            world.bus.send(OrderShipped(1))
            session.execute(text("INSERT INTO effects VALUES (1)"))
            transaction = session.get_transaction()
            assert transaction is not None
            if shape == "connection":
                session.connection().commit()
            elif shape == "context manager":
                with transaction:
                    pass
            else:
                if shape == "savepoint open":
                    session.begin_nested()
                transaction.commit()

        if is_async:

            @world.bus.handles(OrderPlaced, retry=NEVER)
            async def handle(order: OrderPlaced, session: AsyncSession) -> None:
                await session.run_sync(commit)
        else:

            @world.bus.handles(OrderPlaced, retry=NEVER)
            def handle_in_thread(order: OrderPlaced, session: Session) -> None:
                commit(session)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            assert letter.exception_type == f"durable.errors.{WiringError.__name__}"
            assert shipped == []
            async with world.bus.unit_of_work() as uow:
                assert (await uow.session.execute(text("SELECT count(*) FROM effects"))).scalar_one() == 0

    async def test_message_sent_by_a_task_outliving_its_handler_is_stored_or_refused(self, world: World) -> None:
        shipped = collect(world.bus, OrderShipped)
        accepted: list[UUID] = []
        left: set[asyncio.Task[None]] = set()

        async def keep_sending(ctx: Context) -> None:
            for _ in range(200):
                with suppress(NoUnitOfWork):
                    accepted.append(ctx.send(OrderShipped(1)))
                await asyncio.sleep(0)

        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced, session: AsyncSession, ctx: Context) -> None:
            left.add(asyncio.create_task(keep_sending(ctx)))
            await asyncio.sleep(0)

        async with world:
            async with world.bus.unit_of_work():
                for number in range(5):
                    world.bus.send(OrderPlaced(number))
            await world.settle()
            await asyncio.wait(left)
            await world.settle()
            assert len(left) == 5
            assert len(shipped) == len(set(accepted)) >= 5
            assert len(accepted) < 5 * 200
            assert world.dead_letters() == []

    async def test_handler_swallowing_the_refusal_of_its_commit_commits_once(self, world: World) -> None:
        shipped = collect(world.bus, OrderShipped)

        @world.bus.handles(OrderPlaced, retry=NEVER)
        async def handle(order: OrderPlaced, session: AsyncSession) -> OrderShipped:
            with pytest.raises(WiringError):
                await session.commit()
            return OrderShipped(order.number)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            assert shipped == [OrderShipped(1)]

    @pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
    async def test_handler_rolling_back_its_session_has_failed(self, world: World, is_async: bool) -> None:
        shipped = collect(world.bus, OrderShipped)

        async def handle(order: OrderPlaced, session: AsyncSession) -> OrderShipped:
            await session.rollback()
            return OrderShipped(order.number)

        def handle_sync(order: OrderPlaced, session: Session) -> OrderShipped:
            session.rollback()
            return OrderShipped(order.number)

        declare = world.bus.handles(OrderPlaced, retry=NEVER)
        declare(handle) if is_async else declare(handle_sync)
        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            assert (letter.exception_type, shipped) == ("durable.errors.TransactionEnded", [])

    async def test_handler_raising_cancelled_error_has_failed_and_the_next_message_is_handled(
        self, world: World
    ) -> None:
        seen: list[int] = []

        @world.bus.handles(OrderPlaced, concurrency=1, retry=NEVER)
        async def handle(order: OrderPlaced) -> None:
            if order.number == 1:
                raise asyncio.CancelledError
            seen.append(order.number)

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
                world.bus.send(OrderPlaced(2))
            await world.settle()
            assert seen == [2]
            assert [letter.exception_type for letter in world.dead_letters()] == ["RuntimeError"]

    async def test_a_sync_handler_may_fail_with_any_exception(self, world: World) -> None:
        @world.bus.handles(OrderPlaced, retry=NEVER)
        def handle(order: OrderPlaced) -> None:
            next(iter([]))

        async with world:
            async with world.bus.unit_of_work():
                world.bus.send(OrderPlaced(1))
            await world.settle()
            (letter,) = world.dead_letters()
            assert "StopIteration" in letter.reason
