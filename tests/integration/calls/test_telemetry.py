"""Calls are counted by their outcome at both ends, and one trace covers both, over sockets and without them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from durable import Bus
from durable.application.call_tracing import CallTracing
from durable.calls import service
from durable.calls.caller import RemoteService
from durable.calls.contract import contract_of
from durable.calls.links import Links
from durable.calls.places import Elsewhere
from durable.calls.telemetry import TRAFFIC, CallTelemetry, Traffic
from durable.errors import CallTimeout, NoProvider, RemoteError
from durable.settings import load_settings
from durable.statistics import CallSide
from durable.transports.frames import Call, Result
from durable.transports.tcp.transport import TcpTransport
from tests.failure.waiting import eventually
from tests.support.calling import Inventory, Offering, offering


@pytest.fixture(params=["tcp", "unix", "http", "here"])
async def offered(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Offering]:
    async with offering(request.param, tmp_path) as each:
        yield each


def outcomes(telemetry: CallTelemetry, side: CallSide, method: str) -> dict[str, int]:
    (found,) = [each for each in telemetry.statistics() if (each.side, each.method) == (side, method)]
    assert sum(found.durations.counts) == sum(found.outcomes.values())
    return dict(found.outcomes)


async def test_calls_are_counted_by_outcome_at_both_ends(offered: Offering) -> None:
    inventory = offered.caller(slow={"timeout": 0.05})
    for _ in range(3):
        await inventory.reserve("A-1")
    with pytest.raises(RemoteError):
        await inventory.fail("no")
    with pytest.raises(CallTimeout):
        await inventory.slow("x")
    both = offered.telemetry, offered.provider.telemetry
    assert [outcomes(each, side, "reserve") for each, side in zip(both, SIDES, strict=True)] == [{"ok": 3}] * 2
    assert [outcomes(each, side, "fail") for each, side in zip(both, SIDES, strict=True)] == [{"raised": 1}] * 2
    assert outcomes(offered.telemetry, CallSide.CLIENT, "slow") == {"timeout": 1}
    await eventually(lambda: outcomes(offered.provider.telemetry, CallSide.SERVER, "slow") == {"cancelled": 1})


SIDES = CallSide.CLIENT, CallSide.SERVER


async def test_refused_calls_are_counted(tmp_path: Path) -> None:
    async with offering("unix", tmp_path, call_concurrency=1, call_backlog=1) as offered:
        inventory = offered.caller()
        calls = [asyncio.create_task(inventory.slow(str(number))) for number in range(3)]
        await eventually(lambda: outcomes(offered.provider.telemetry, CallSide.SERVER, "slow") == {"overloaded": 1})
        offered.stock.go.set()
        await asyncio.gather(*calls, return_exceptions=True)
        assert outcomes(offered.provider.telemetry, CallSide.SERVER, "slow") == {"overloaded": 1, "ok": 2}


async def test_unknown_names_are_not_counted_by_name(offered: Offering) -> None:
    """A stranger could ask for any number of them."""
    target = offered.place.choose(())
    assert target is not None
    caller = await target.caller()
    await caller.call(Call("inventory", "stranger", b""), lambda: None)
    assert "stranger" not in {each.method for each in offered.provider.telemetry.statistics()}


async def test_provider_tells_its_recent_traffic(offered: Offering) -> None:
    inventory = offered.caller()
    await asyncio.gather(*(inventory.reserve("A-1") for _ in range(20)))
    with pytest.raises(RemoteError):
        await inventory.fail("no")
    target = offered.place.choose(())
    assert target is not None
    answer = await (await target.caller()).call(Call(TRAFFIC, "recent", b""), lambda: None)
    assert isinstance(answer, Result)
    (told,) = msgspec.msgpack.decode(answer.body, type=list[Traffic])
    assert (told.service, told.calls, told.failed) == ("inventory", 21, 1)
    assert told.p99 is not None
    assert told.p99 <= 1


async def test_call_without_a_provider_is_a_problem_until_there_is_one(tmp_path: Path) -> None:
    telemetry = CallTelemetry()
    links = Links(lambda _: TcpTransport(load_settings(), "orders", 2))
    place = Elsewhere(f"unix://{tmp_path}/s", lambda: links)
    remote = RemoteService(
        contract_of(Inventory), place, timeout=5, options={}, on_error=None, telemetry=telemetry
    ).stub()
    assert telemetry.unprovided() == []
    with pytest.raises(NoProvider):
        await remote.reserve("A-1")
    assert telemetry.unprovided() == ["inventory"]
    async with offering("unix", tmp_path):
        await remote.reserve("A-1")
        assert telemetry.unprovided() == []
        await links.close()


# Traces ----------------------------------------------------------------------------------------------------------


class Traced:
    def __init__(self, offered: Offering) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        offered.telemetry.spans = offered.provider.telemetry.spans = CallTracing(self.provider)

    def spans(self, kind: SpanKind) -> list[Any]:
        return [each for each in self.exporter.get_finished_spans() if each.kind is kind]


async def test_one_trace_covers_caller_and_provider(offered: Offering) -> None:
    traced = Traced(offered)
    with traced.provider.get_tracer("test").start_as_current_span("application") as application:
        await offered.caller().reserve("A-1")
    (client,), (server,) = traced.spans(SpanKind.CLIENT), traced.spans(SpanKind.SERVER)
    assert client.name == server.name == "inventory/reserve"
    assert client.parent.span_id == application.get_span_context().span_id
    assert server.parent.span_id == client.context.span_id
    assert server.context.trace_id == application.get_span_context().trace_id
    assert dict(server.attributes) == {
        "rpc.system": "durable",
        "rpc.service": "inventory",
        "rpc.method": "reserve",
    }
    assert client.attributes["rpc.service"] == "inventory"
    assert server.status.status_code is StatusCode.UNSET


async def test_error_of_a_method_is_an_error_of_both_spans(offered: Offering) -> None:
    traced = Traced(offered)
    with pytest.raises(RemoteError):
        await offered.caller().fail("no such thing")
    for span in (*traced.spans(SpanKind.CLIENT), *traced.spans(SpanKind.SERVER)):
        assert span.attributes["error.type"] == "LookupError"
        assert span.status.status_code is StatusCode.ERROR


async def test_calls_of_untraced_callers_begin_traces(offered: Offering) -> None:
    traced = Traced(offered)
    offered.telemetry.spans = None
    await offered.caller().reserve("A-1")
    (server,) = traced.spans(SpanKind.SERVER)
    assert server.parent is None


async def test_long_tracestate_is_left_out(offered: Offering) -> None:
    traced = Traced(offered)
    state = ",".join(f"v{number}={'x' * 200}" for number in range(5))
    carrier = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": state}
    from opentelemetry.context import attach, detach
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    token = attach(TraceContextTextMapPropagator().extract(carrier))
    try:
        await offered.caller().reserve("A-1")
    finally:
        detach(token)
    (server,) = traced.spans(SpanKind.SERVER)
    assert f"{server.context.trace_id:032x}" == "a" * 32


# Metrics ---------------------------------------------------------------------------------------------------------


@service("clock", version="1.0")
class Clock:
    async def ask(self) -> int:
        return 12


async def test_durations_are_histograms_of_opentelemetry(make_database: Any) -> None:
    reader = InMemoryMetricReader()
    bus = Bus("clocks", database=make_database("clocks"))
    bus.meter(MeterProvider([reader]))
    bus.offer(Clock, Clock())
    clock = bus.caller(Clock)
    async with bus:
        assert await clock.ask() == 12
    data = reader.get_metrics_data()
    assert data is not None
    found = {
        each.name: each for part in data.resource_metrics for scope in part.scope_metrics for each in scope.metrics
    }
    for side in CallSide:
        (point,) = found[f"rpc.{side}.duration"].data.data_points
        attributes = {"rpc.system": "durable", "rpc.service": "clock", "rpc.method": "ask"}
        assert (dict(point.attributes or {}), getattr(point, "count", 0)) == (attributes, 1)
        assert found[f"rpc.{side}.duration"].unit == "ms"
