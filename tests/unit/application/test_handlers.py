"""Handlers: what each parameter is given, decided when the handler is declared."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from uuid import NAMESPACE_URL, UUID, uuid5

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable.application.handlers import Handler
from durable.application.incoming import Context, Incoming
from durable.application.injection import Depends
from durable.application.retry import Retry
from durable.envelope import IN_REPLY_TO, REPLY_TO, Envelope, LeasedEnvelope, derived_id, new_id
from durable.errors import InvalidSetting, RoutingError
from durable.messages.registry import message


class Placed(msgspec.Struct):
    number: int


class Shipped(msgspec.Struct):
    number: int


class Posting:
    """An outbox that only writes down."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, object, dict[str, Any]]] = []

    def send(self, message: object, **options: Any) -> UUID:
        self.posted.append(("send", message, options))
        return new_id()

    def answer(self, message: object, **options: Any) -> UUID:
        self.posted.append(("answer", message, options))
        return new_id()

    def publish(self, message: object, **options: Any) -> UUID:
        self.posted.append(("publish", message, options))
        return new_id()

    def caused_by(self, cause: object) -> AbstractContextManager[None]:
        return nullcontext()

    def cascade(self, result: object) -> None:
        self.posted.append(("cascade", result, {}))


def declared(function: Callable[..., Any], **changes: Any) -> Handler:
    options: dict[str, Any] = {"concurrency": 1, "max_batch": 1} | changes
    return Handler(
        message_type="handlers.placed",
        cls=Placed,
        function=function,
        retry=Retry(),
        timeout=timedelta(seconds=1),
        **options,
    )


def context(posting: Posting | None = None, **headers: str) -> Context:
    envelope = Envelope(
        id=new_id(),
        message_type="handlers.placed",
        destination="local",
        source="shop",
        correlation_id=new_id(),
        body=b"{}",
        sent_at=datetime(2024, 2, 29, tzinfo=UTC),
        causation_id=new_id(),
        headers=headers,
    )
    return Context(LeasedEnvelope(envelope), 3, posting or Posting())  # type: ignore[arg-type]


def call(session: Any = None) -> Incoming:
    return Incoming(Placed(17), session, [context()])


def lease(envelope_id: UUID, endpoint: str, seconds: int) -> LeasedEnvelope:
    sent_at = datetime(2024, 2, 29, tzinfo=UTC) + timedelta(seconds=seconds)
    return LeasedEnvelope(
        msgspec.structs.replace(context()._envelope, id=envelope_id, sent_at=sent_at), endpoint=endpoint
    )


def uses(lease: LeasedEnvelope) -> tuple[object, ...]:
    """What makes a handled message another one than those that came before it under its id."""
    envelope, peer = lease.envelope, lease.endpoint.partition("<-")[2]
    return envelope.id, peer, envelope.sent_at if envelope.id.version == 5 else None


IDS = [UUID("019c0000-0000-7000-8000-000000000001"), derived_id(new_id(), "a"), uuid5(NAMESPACE_URL, "order-17")]
PARENTS = st.builds(
    lease, st.sampled_from(IDS), st.sampled_from(["shop", "other", "shop<-a", "shop<-b"]), st.integers(0, 1)
)


# Annotations are resolved among a module's names, so what handlers depend on is here.

steps: list[str] = []


def number(order: Placed) -> int:
    return order.number


async def doubled(number: Annotated[int, Depends(number)]) -> int:
    return number * 2


async def connection(ctx: Context) -> AsyncIterator[str]:
    steps.append(f"opened in attempt {ctx.attempt}")
    try:
        yield "connection"
    finally:
        steps.append("closed")


def resource() -> Iterator[str]:
    steps.append("taken")
    yield "resource"
    steps.append("given back")


def with_mystery(mystery) -> str:  # type: ignore[no-untyped-def]
    return str(mystery)


def of_context(ctx: Context) -> str:
    return str(ctx.id)


async def through(number: Annotated[str, Depends(of_context)]) -> str:
    return number


class TestReadOnly:
    @pytest.mark.parametrize("name", ["attempt", "circuit", "headers", "id", "message_type", "anything"])
    def test_a_context_is_read_only(self, name: str) -> None:
        with pytest.raises(AttributeError):
            setattr(context(), name, 99)

    def test_the_headers_of_a_context_are_read_only(self) -> None:
        headers = context(tenant="one").headers
        with pytest.raises(TypeError):
            headers["tenant"] = "other"  # type: ignore[index]
        assert dict(headers) == {"tenant": "one"}

    @pytest.mark.parametrize("provider", [of_context, through])
    def test_a_provider_of_a_list_handler_cannot_take_a_context(self, provider: Any) -> None:
        async def handle(orders: list[Placed], number: Annotated[str, Depends(provider)]) -> None: ...

        handle.__annotations__["number"] = Annotated[str, Depends(provider)]
        handle.__annotations__["orders"] = list[Placed]
        with pytest.raises(InvalidSetting, match="a provider takes a Context"):
            declared(handle, max_batch=10)


class TestCauses:
    def test_ids_depend_on_the_message_the_handler_and_the_position(self) -> None:
        async def reserve(order: Placed) -> None: ...
        async def bill(order: Placed) -> None: ...

        def ids(handler: Handler, envelope: Envelope) -> list[UUID]:
            cause = handler.cause(LeasedEnvelope(envelope))
            return [cause.next_id("shop", "handlers.sent") for _ in range(2)]

        one, two = declared(reserve), declared(bill)
        first, second = context()._envelope, context()._envelope
        assert ids(one, first) == ids(one, first)
        assert len({*ids(one, first), *ids(two, first), *ids(one, second)}) == 6

    def test_ids_of_a_list_name_all_its_messages(self) -> None:
        async def handle(order: Placed) -> None: ...

        def ids(*envelopes: Envelope) -> UUID:
            leases = [LeasedEnvelope(each) for each in envelopes]
            return declared(handle).cause_of_list(leases).next_id("shop", "handlers.sent")

        first, second = context()._envelope, context()._envelope
        assert ids(first, second) == ids(first, second)
        assert len({ids(first), ids(first, second), ids(second, first), ids(second)}) == 4

    @given(first=PARENTS, second=PARENTS, others=st.lists(PARENTS, max_size=2), is_list=st.booleans())
    def test_ids_tell_apart_the_uses_of_an_id(
        self, first: LeasedEnvelope, second: LeasedEnvelope, others: list[LeasedEnvelope], is_list: bool
    ) -> None:
        """Those of two peers, and those that were sent under a business key at two times; not two attempts."""

        async def handle(order: Placed) -> None: ...

        handler = declared(handle)

        def sent(lease: LeasedEnvelope) -> UUID:
            cause = handler.cause_of_list([*others, lease]) if is_list else handler.cause(lease)
            return cause.next_id("shop", "handlers.sent")

        again = msgspec.structs.replace(first, attempts=first.attempts + 1, epoch=first.epoch + 1)
        assert sent(first) == sent(again)
        assert (sent(first) == sent(second)) == (uses(first) == uses(second))


class TestArguments:
    async def test_message_session_and_context_are_known_by_their_annotations(self) -> None:
        given: list[object] = []

        async def handle(ctx: Context, session: AsyncSession, order: Placed) -> str:
            given.extend((ctx, session, order))
            return "result"

        session, made = AsyncSession(), context()
        assert await declared(handle).run(Incoming(Placed(17), session, [made])) == "result"
        assert given == [made, session, Placed(17)]

    async def test_dependencies_may_depend_on_each_other_and_be_async_or_not(self) -> None:
        async def handle(order: Placed, number: Annotated[int, Depends(number)], two: Annotated[int, Depends(doubled)]):  # type: ignore[no-untyped-def]
            return number, two

        assert await declared(handle).run(call()) == (17, 34)

    async def test_generators_are_closed_after_the_handler_in_reverse(self) -> None:
        steps.clear()

        async def handle(
            a: Annotated[str, Depends(connection)], b: Annotated[str, Depends(resource)], order: Placed
        ) -> None:
            steps.append(f"handled with {a} and {b}")

        await declared(handle).run(call())
        assert steps == [
            "opened in attempt 3",
            "taken",
            "handled with connection and resource",
            "given back",
            "closed",
        ]

    async def test_generator_is_closed_when_the_handler_fails(self) -> None:
        steps.clear()

        async def handle(order: Placed, a: Annotated[str, Depends(connection)]) -> None:
            raise LookupError

        with pytest.raises(LookupError):
            await declared(handle).run(call())
        assert steps == ["opened in attempt 3", "closed"]

    def test_a_sync_handler_has_sync_dependencies(self) -> None:
        steps.clear()

        def handle(
            order: Placed,
            session: Session,
            number: Annotated[int, Depends(number)],
            resource: Annotated[str, Depends(resource)],
        ) -> tuple[int, bool]:
            steps.append("handled")
            return number, isinstance(session, Session)

        assert declared(handle).run_sync(call(Session())) == (17, True)
        assert steps == ["taken", "handled", "given back"]

    async def test_returned_message_is_sent_after_the_dependencies_are_closed(self) -> None:
        async def handle(order: Placed, a: Annotated[str, Depends(resource)]) -> str:
            assert not posting.posted
            return a

        def handle_sync(order: Placed, a: Annotated[str, Depends(resource)]) -> str:
            return a

        posting = Posting()
        incoming = Incoming(Placed(17), AsyncSession(), [context(posting)])
        assert await declared(handle).run(incoming) == "resource"
        assert declared(handle_sync).run_sync(incoming) == "resource"
        assert posting.posted == [("cascade", "resource", {})] * 2

    def test_sync_handler_raising_stop_iteration_fails_with_runtime_error(self) -> None:
        def handle(order: Placed) -> None:
            raise StopIteration("end")

        with pytest.raises(RuntimeError, match="StopIteration") as failed:
            declared(handle).run_sync(call())
        assert isinstance(failed.value.__cause__, StopIteration)

    async def test_parameter_with_a_default_is_left_unset(self) -> None:
        async def handle(order: Placed, times: int = 3) -> int:
            return times

        assert await declared(handle).run(call()) == 3

    async def test_a_method_is_a_handler_too(self) -> None:
        class Shop:
            async def handle(self, order: Placed) -> int:
                return order.number

        assert await declared(Shop().handle).run(call()) == 17

    def test_a_handler_of_groups_takes_a_list(self) -> None:
        async def handle(orders: list[Placed]) -> None: ...

        async def handle_one(order: Placed) -> list[Placed]: ...  # type: ignore[empty-body]

        assert declared(handle, max_batch=10).takes_list
        assert not declared(handle_one).takes_list


class TestDeclaring:
    @pytest.mark.parametrize(
        ("is_async", "wrong", "right"),
        [(True, Session, "AsyncSession in an async"), (False, AsyncSession, "Session in a sync")],
    )
    def test_session_annotation_must_match_the_kind_of_handler(self, is_async: bool, wrong: type, right: str) -> None:
        async def handle(session: Any) -> None: ...

        def handle_sync(session: Any) -> None: ...

        function = handle if is_async else handle_sync
        function.__annotations__["session"] = wrong
        with pytest.raises(InvalidSetting, match=f"session must be annotated {right} handler"):
            declared(function)

    @pytest.mark.parametrize("hint", [int, Shipped, list[Shipped], Annotated[str, "no dependency"], None])
    def test_parameter_of_an_unknown_type_is_refused_with_the_known_ones(self, hint: Any) -> None:
        async def handle(order: Placed, mystery: Any) -> None: ...

        if hint is None:
            del handle.__annotations__["mystery"]
        else:
            handle.__annotations__["mystery"] = hint
        with pytest.raises(
            InvalidSetting, match=r"parameter 'mystery' has no known type; annotate it with Placed, AsyncSession"
        ):
            declared(handle)

    def test_advice_for_an_unknown_parameter_names_types_of_this_kind_of_handler_alone(self) -> None:
        def single(order: Placed, mystery: int) -> None: ...

        async def single_async(order: Placed, mystery: int) -> None: ...

        def many(orders: list[Placed], mystery: int) -> None: ...

        async def many_async(orders: list[Placed], made: Annotated[str, Depends(with_mystery)]) -> None: ...

        told: dict[Callable[..., Any], str] = {
            single: "Placed, Session, Context or",
            single_async: "Placed, AsyncSession, Context or",
            many: "list[Placed], Session or",
            many_async: "list[Placed], AsyncSession or",
        }
        for function, types in told.items():
            options = {"max_batch": 10} if types.startswith("list") else {}
            with pytest.raises(InvalidSetting, match=re.escape(f"annotate it with {types} Annotated[T, Dep")):
                declared(function, **options)

    def test_parameter_of_another_message_class_is_refused_with_both_ways_out(self) -> None:
        @message("handlers.returned")
        class Returned(msgspec.Struct):
            item: str

        async def handle(order: Placed) -> None: ...

        handle.__annotations__["order"] = Returned
        with pytest.raises(
            InvalidSetting,
            match=r"parameter 'order' is a Returned, but this handler handles Placed: annotate it with Placed, "
            r"or declare @bus\.handles\(Returned\)",
        ):
            declared(handle)

    def test_a_dependency_is_looked_at_when_the_handler_is_declared(self) -> None:
        async def handle(order: Placed, made: Annotated[str, Depends(with_mystery)]) -> None: ...

        with pytest.raises(InvalidSetting, match="parameter 'mystery' has no known type"):
            declared(handle)

    @pytest.mark.parametrize("provider", [doubled, connection])
    def test_a_sync_handler_cannot_wait_for_an_async_dependency(self, provider: Any) -> None:
        def handle(order: Placed, made: Any) -> None: ...

        handle.__annotations__["made"] = Annotated[Any, Depends(provider)]
        with pytest.raises(InvalidSetting, match=f"cannot depend on the async {provider.__name__}"):
            declared(handle)

    def test_unresolvable_annotation_is_refused(self) -> None:
        async def handle(order: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

        with pytest.raises(InvalidSetting, match="annotation cannot be resolved: name 'Nowhere' is not defined"):
            declared(handle)

    def test_a_list_of_messages_has_no_context(self) -> None:
        async def handle(orders: list[Placed], ctx: Context) -> None: ...

        with pytest.raises(InvalidSetting, match="no one Context for a list"):
            declared(handle, max_batch=10)

    def test_list_of_messages_needs_a_batch_of_several(self) -> None:
        async def handle(orders: list[Placed]) -> None: ...

        with pytest.raises(InvalidSetting, match="a list has one message with max_batch=1; give max_batch=, such as"):
            declared(handle)

    @pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"max_batch": 0}])
    def test_concurrency_and_max_batch_must_be_at_least_1(self, wrong: dict[str, int]) -> None:
        async def handle(order: Placed) -> None: ...

        with pytest.raises(InvalidSetting, match="must be at least 1"):
            declared(handle, **wrong)

    def test_a_handler_is_named_after_its_function(self) -> None:
        assert declared(number).name == f"{__name__}.number"
        assert not declared(number).is_async


class TestContext:
    def test_context_describes_the_message(self) -> None:
        made = context(tenant="blue")
        assert (made.source, made.message_type, made.attempt) == ("shop", "handlers.placed", 3)
        assert made.headers == {"tenant": "blue"}
        assert made.sent_at == datetime(2024, 2, 29, tzinfo=UTC)
        assert len({made.id, made.correlation_id, made.causation_id}) == 3

    def test_context_sends_publishes_and_schedules(self) -> None:
        posting = Posting()
        made = context(posting)
        made.send(Shipped(1), key="a")
        made.publish(Shipped(2))
        made.send(Shipped(3), delay=60, key="b")
        assert posting.posted == [
            ("send", Shipped(1), {"to": None, "key": "a"}),
            ("publish", Shipped(2), {}),
            ("send", Shipped(3), {"to": None, "key": "b", "delay": 60}),
        ]

    def test_context_replies_to_the_address_of_reply_to(self) -> None:
        posting = Posting()
        context(posting, **{REPLY_TO: "tcp://shop:1"}).reply(Shipped(1))
        [(kind, answer, given)] = posting.posted
        assert (kind, answer, given["to"]) == ("answer", Shipped(1), "tcp://shop:1")
        UUID(given["headers"][IN_REPLY_TO])

    def test_context_refuses_a_reply_without_reply_to(self) -> None:
        with pytest.raises(RoutingError, match="gave no reply_to="):
            context().reply(Shipped(1))
