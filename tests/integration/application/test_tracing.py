"""Traces over two services on real Postgres: the spans that OpenTelemetry's SDK is given, on every transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import httpx
import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.semconv._incubating.attributes import messaging_attributes as semconv
from opentelemetry.semconv.attributes import code_attributes, error_attributes
from opentelemetry.trace import INVALID_SPAN, SpanKind, StatusCode, use_span

from durable import Bus, Context, Middleware, Reject, Release, Retry, message
from durable.application import tracing
from durable.application.middleware import SendNext
from durable.errors import RoutingError
from durable.outbox.envelope_factory import Outgoing
from durable.testing import eventually
from tests.support.servers import AnyBroker, Names

SOON = timedelta(milliseconds=30)
REMOTE_TRACE, REMOTE_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{REMOTE_TRACE}-{REMOTE_SPAN}-01"


@message("tracing.placed")
class Placed(msgspec.Struct):
    number: int


@message("tracing.billed")
class Billed(msgspec.Struct):
    number: int


class Spans:
    """What one service has exported."""

    def __init__(self, sampled: bool = True) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider() if sampled else TracerProvider(sampler=ALWAYS_OFF)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    async def one(self, name: str) -> ReadableSpan:
        await eventually(lambda: len(self.named(name)) == 1, what=f"one span {name!r}")
        return self.named(name)[0]

    def names(self) -> set[str]:
        return {span.name for span in self._exporter.get_finished_spans()}


@pytest.fixture
def spans() -> Iterator[Spans]:
    spans = Spans()
    yield spans
    spans.provider.shutdown()


def make_bus(service: str, url: str, spans: Spans, **settings: Any) -> Bus:
    bus = Bus(service, url, poll_interval=SOON, **settings)
    bus.trace(spans.provider)
    return bus


def trace_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.trace_id)


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    assert parent.context is not None
    return (
        span.parent is not None
        and (span.parent.trace_id, span.parent.span_id) == (parent.context.trace_id, parent.context.span_id)
    )  # fmt: skip


def linked(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


def span_ids(*spans: ReadableSpan) -> set[int]:
    return {span.context.span_id for span in spans if span.context is not None}


# ---------------------------------------------------------------- one trace, over every transport


@pytest.fixture(params=["tcp", "http", "rabbitmq"])
def addresses(request: pytest.FixtureRequest) -> tuple[str, str, dict[str, Any]]:
    """Where to listen, where to send to ("" when it is the bound address), and settings."""
    if request.param != "rabbitmq":
        return f"{request.param}://127.0.0.1:0", "", {}
    broker: AnyBroker = request.getfixturevalue("broker")
    names: Names = request.getfixturevalue("queue_name")
    queue = f"rabbitmq://default/queue/{names('tracing')}"
    return queue, queue, {"amqp_url": broker.url}


async def test_trace_runs_through_both_services_and_batches_are_linked(
    make_database: Callable[[str], str], addresses: tuple[str, str, dict[str, Any]]
) -> None:
    listen, to, settings = addresses
    here, there = Spans(), Spans()
    shop = make_bus("shop", make_database("shop"), here, **settings)
    billing = make_bus("billing", make_database("billing"), there, **settings)
    billing.listen(listen)

    @billing.handles(Placed)
    async def bill(placed: Placed) -> Billed:
        return Billed(placed.number)

    @billing.handles(Billed)
    def print_bill(billed: Billed) -> None: ...

    async with billing:
        assert billing.runtime.node is not None
        peer = to or billing.runtime.node.listeners[0].address
        shop.route(Placed, to=peer)
        async with shop:
            with here.provider.get_tracer("shop").start_as_current_span("checkout") as checkout:
                async with shop.unit_of_work():
                    message_id = shop.send(Placed(1))
            last = await there.one("process tracing.billed")
            sent = await here.one(f"send {peer}")
            received = await there.one("receive billing")

    created, processed = await here.one("create tracing.placed"), await there.one("process tracing.placed")
    cascaded = await there.one("create tracing.billed")
    assert created.parent is not None
    assert created.parent.span_id == checkout.get_span_context().span_id
    assert [is_child(processed, created), is_child(cascaded, processed), is_child(last, cascaded)] == [True] * 3
    assert len({trace_of(span) for span in (created, processed, cascaded, last)}) == 1
    assert [span.kind for span in (created, processed, sent, received)] == [
        SpanKind.PRODUCER, SpanKind.CONSUMER, SpanKind.CLIENT, SpanKind.CLIENT
    ]  # fmt: skip
    assert (sent.parent, received.parent) == (None, None)
    assert linked(sent) == linked(received) == span_ids(created)
    attributes = {
        semconv.MESSAGING_SYSTEM: "durable",
        semconv.MESSAGING_OPERATION_NAME: "process",
        semconv.MESSAGING_OPERATION_TYPE: semconv.MessagingOperationTypeValues.PROCESS.value,
        semconv.MESSAGING_DESTINATION_NAME: "tracing.placed",
        semconv.MESSAGING_MESSAGE_ID: str(message_id),
        semconv.MESSAGING_MESSAGE_CONVERSATION_ID: str(message_id),
        "durable.attempt": 1,
    }
    assert dict(processed.attributes or {}).items() >= attributes.items()
    assert dict(last.attributes or {})[semconv.MESSAGING_MESSAGE_CONVERSATION_ID] == str(message_id)
    assert (sent.attributes or {})[semconv.MESSAGING_DESTINATION_NAME] == peer


async def test_a_batch_is_linked_to_each_of_its_messages(make_database: Callable[[str], str], spans: Spans) -> None:
    here = Spans()
    shop, billing = make_bus("shop", make_database("shop"), here), make_bus("billing", make_database("billing"), spans)
    billing.listen("tcp://127.0.0.1:0")

    @billing.handles(Placed, max_batch=10, concurrency=1)
    async def bill(placed: list[Placed]) -> None: ...

    async with billing:
        assert billing.runtime.node is not None
        peer = billing.runtime.node.listeners[0].address
        shop.route(Placed, to=peer)
        async with shop, shop.unit_of_work():
            for number in range(5):
                shop.send(Placed(number))
        await eventually(lambda: bool(spans.named("process tracing.placed")))

    created = here.named("create tracing.placed")
    [sent], [received], processed = (
        here.named(f"send {peer}"),
        spans.named("receive billing"),
        spans.named("process tracing.placed"),
    )
    assert len({trace_of(span) for span in created}) == 5
    assert linked(sent) == linked(received) == span_ids(*created)
    assert (sent.attributes or {})[semconv.MESSAGING_BATCH_MESSAGE_COUNT] == 5
    assert set.union(*map(linked, processed)) == span_ids(*created)
    assert all(span.parent is None for span in processed)


# ---------------------------------------------------------------- callers that know nothing of durable


async def test_the_trace_of_a_foreign_caller_over_http_goes_on_in_the_handler(database_url: str, spans: Spans) -> None:
    shop = make_bus("shop", database_url, spans)
    shop.listen("http://127.0.0.1:0")

    @shop.handles(Placed)
    async def place(placed: Placed) -> None: ...

    async with shop, httpx.AsyncClient() as client:
        assert shop.runtime.node is not None
        url = f"{shop.runtime.node.listeners[0].address}/messages/tracing.placed"
        headers = {"content-type": "application/json", "traceparent": TRACEPARENT, "tracestate": "vendor=1"}
        assert (await client.post(url, content=b'{"number": 1}', headers=headers)).status_code == 202
        processed = await spans.one("process tracing.placed")

    assert processed.parent is not None
    assert f"{processed.parent.trace_id:032x}" == REMOTE_TRACE
    assert f"{processed.parent.span_id:016x}" == REMOTE_SPAN
    assert processed.parent.trace_state["vendor"] == "1"
    assert {f"{link.context.span_id:016x}" for link in (await spans.one("receive shop")).links} == {REMOTE_SPAN}


# ---------------------------------------------------------------- what goes wrong


async def test_each_attempt_is_a_span_of_the_same_trace_and_tells_its_error(database_url: str, spans: Spans) -> None:
    shop = make_bus("shop", database_url, spans)

    @shop.handles(Placed, retry=Retry(immediate=1, delays=[]))
    async def place(placed: Placed, context: Context) -> None:
        raise ValueError("not in stock") if context.attempt == 1 else Reject("never")

    async with shop:
        async with shop.unit_of_work():
            shop.send(Placed(1))
        await eventually(lambda: len(spans.named("process tracing.placed")) == 2)

    created = await spans.one("create tracing.placed")
    first, second = spans.named("process tracing.placed")
    assert is_child(first, created)
    assert is_child(second, created)
    told = [dict(span.attributes or {}) for span in (first, second)]
    assert [attributes["durable.attempt"] for attributes in told] == [1, 2]
    assert [attributes[error_attributes.ERROR_TYPE] for attributes in told] == ["ValueError", "Reject"]
    assert told[0][code_attributes.CODE_FUNCTION_NAME].endswith("place")  # type: ignore[union-attr]
    assert (first.status.status_code, first.status.description) == (StatusCode.ERROR, "not in stock")
    assert [event.name for event in first.events] == ["exception"]


async def test_release_verdict_is_recorded_without_an_error_status(database_url: str, spans: Spans) -> None:
    shop = make_bus("shop", database_url, spans)
    released = False

    @shop.handles(Placed)
    async def place(placed: Placed) -> None:
        nonlocal released
        if not released:
            released = True
            raise Release("somebody else")

    async with shop:
        async with shop.unit_of_work():
            shop.send(Placed(1))
        await eventually(lambda: len(spans.named("process tracing.placed")) == 2)
    first = spans.named("process tracing.placed")[0]
    assert (first.status.status_code, (first.attributes or {})["durable.verdict"]) == (StatusCode.UNSET, "Release")


async def test_failed_batch_is_an_error(database_url: str, spans: Spans) -> None:
    shop = make_bus("shop", database_url, spans, failures_to_latch=1, ping_interval=timedelta(minutes=1))
    shop.route(Placed, to="tcp://127.0.0.1:1")
    async with shop:
        async with shop.unit_of_work():
            shop.send(Placed(1))
        sent = await spans.one("send tcp://127.0.0.1:1")
    assert sent.status.status_code is StatusCode.ERROR
    assert (sent.attributes or {})[error_attributes.ERROR_TYPE] == "ConnectionFailed"


async def test_refused_send_is_an_error_of_its_span(database_url: str, spans: Spans) -> None:
    shop = make_bus("shop", database_url, spans)
    async with shop:
        with pytest.raises(RoutingError):
            async with shop.unit_of_work():
                shop.send(Billed(1))
    assert (await spans.one("create tracing.billed")).status.status_code is StatusCode.ERROR


# ---------------------------------------------------------------- what tracing must not do


async def test_spans_of_agents_are_no_children_of_the_starting_span(
    make_database: Callable[[str], str], spans: Spans
) -> None:
    shop, billing = make_bus("shop", make_database("shop"), spans), make_bus("billing", make_database("billing"), spans)
    billing.listen("tcp://127.0.0.1:0")

    @billing.handles(Placed)
    async def place(placed: Placed) -> None: ...

    with spans.provider.get_tracer("shop").start_as_current_span("start-up") as startup:
        async with billing:
            assert billing.runtime.node is not None
            peer = billing.runtime.node.listeners[0].address
            shop.route(Placed, to=peer)
            async with shop:
                with use_span(INVALID_SPAN):
                    async with shop.unit_of_work():
                        shop.send(Placed(1))
                agents = [
                    await spans.one(name) for name in (f"send {peer}", "receive billing", "process tracing.placed")
                ]
    assert startup.get_span_context().trace_id not in map(trace_of, agents)


async def test_traceparent_of_the_caller_is_replaced_by_the_one_of_the_span(database_url: str, spans: Spans) -> None:
    shop = make_bus("shop", database_url, spans)

    @shop.handles(Placed)
    async def place(placed: Placed) -> None: ...

    async with shop:
        async with shop.unit_of_work():
            shop.send(Placed(1), headers={"traceparent": TRACEPARENT})
        processed = await spans.one("process tracing.placed")
    assert is_child(processed, await spans.one("create tracing.placed"))


async def test_full_headers_are_left_unchanged(database_url: str, spans: Spans) -> None:
    seen: list[int] = []
    shop = make_bus("shop", database_url, spans)

    @shop.handles(Placed)
    async def place(placed: Placed, context: Context) -> None:
        seen.append(len(context.headers))

    async with shop:
        async with shop.unit_of_work():
            shop.send(Placed(1), headers={str(number): "" for number in range(100)})
            shop.send(Placed(2), headers={"long": "x" * 8_100})
            shop.send(Placed(3), headers={"short": "x"})
        await eventually(lambda: len(seen) == 3)
    assert sorted(seen) == [1, 2, 100]


async def test_unsampled_trace_stays_unsampled_at_the_receiver(
    make_database: Callable[[str], str], spans: Spans
) -> None:
    unsampled = Spans(sampled=False)
    shop, billing = (
        make_bus("shop", make_database("shop"), unsampled),
        make_bus("billing", make_database("billing"), spans),
    )
    billing.listen("tcp://127.0.0.1:0")
    traceparents: list[str] = []

    @billing.handles(Placed)
    async def bill(placed: Placed, context: Context) -> None:
        traceparents.append(context.headers["traceparent"])

    async with billing:
        assert billing.runtime.node is not None
        shop.route(Placed, to=billing.runtime.node.listeners[0].address)
        async with shop:
            async with shop.unit_of_work():
                shop.send(Placed(1))
            await eventually(lambda: len(traceparents) == 1)
        await spans.one("receive billing")
    assert int(traceparents[0].split("-")[3], 16) & 1 == 0
    assert spans.names() == {"receive billing"}


async def test_middleware_added_later_runs_within_the_spans(database_url: str, spans: Spans) -> None:
    headers: list[str] = []

    class Looking(Middleware):
        def send(self, outgoing: Outgoing, call_next: SendNext) -> Any:
            headers.append(outgoing.headers["traceparent"])
            return call_next(outgoing)

    shop = make_bus("shop", database_url, spans)
    shop.use(Looking(), stage="before")
    shop.route(Placed, to="tcp://127.0.0.1:1")
    async with shop, shop.unit_of_work():
        shop.send(Placed(1))
    created = await spans.one("create tracing.placed")
    assert created.context is not None
    assert headers[0].split("-")[2] == f"{created.context.span_id:016x}"


def test_attributes_have_the_names_of_the_conventions() -> None:
    ours = (
        (tracing.SYSTEM, semconv.MESSAGING_SYSTEM),
        (tracing.OPERATION_NAME, semconv.MESSAGING_OPERATION_NAME),
        (tracing.OPERATION_TYPE, semconv.MESSAGING_OPERATION_TYPE),
        (tracing.DESTINATION, semconv.MESSAGING_DESTINATION_NAME),
        (tracing.MESSAGE_ID, semconv.MESSAGING_MESSAGE_ID),
        (tracing.CONVERSATION_ID, semconv.MESSAGING_MESSAGE_CONVERSATION_ID),
        (tracing.BATCH_COUNT, semconv.MESSAGING_BATCH_MESSAGE_COUNT),
        (tracing.ERROR_TYPE, error_attributes.ERROR_TYPE),
        (tracing.FUNCTION, code_attributes.CODE_FUNCTION_NAME),
    )
    assert [name for name, _ in ours] == [name for _, name in ours]
