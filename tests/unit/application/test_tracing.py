"""The links of batches: read as OpenTelemetry's own propagator reads a traceparent."""

from __future__ import annotations

import msgspec
import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from durable.application.tracing import Tracing
from tests.support.receivers import envelope

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    "traceparent",
    [
        f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00", f"00-{TRACE}-{SPAN}-03", f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01", f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01-more", "00-1-2-01", "nonsense", "",
    ],
    ids=[
        "sampled", "not sampled", "random", "no trace", "no span", "forbidden version", "too long", "too short",
        "nonsense", "empty",
    ],
)  # fmt: skip
def test_link_equals_the_context_read_by_the_propagator(traceparent: str) -> None:
    headers = {"traceparent": traceparent}
    known = get_current_span(TraceContextTextMapPropagator().extract(headers, Context())).get_span_context()

    sent = msgspec.structs.replace(envelope("a.b"), headers=headers)
    with Tracing(TracerProvider()).sending("tcp://a:1", [sent]) as span:
        assert isinstance(span, ReadableSpan)
        linked = [(link.context.trace_id, link.context.span_id, link.context.trace_flags) for link in span.links]

    assert linked == ([(known.trace_id, known.span_id, known.trace_flags)] if known.is_valid else [])
