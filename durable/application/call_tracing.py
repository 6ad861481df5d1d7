"""Traces of calls by OpenTelemetry, after its conventions for RPC.

    service A                                      service B
    [ the application's span ]
       +- SERVICE/METHOD (client) ---------------> SERVICE/METHOD (server)
                                                      +- whatever the method does, and calls

The context of the caller travels in the CALL frame (W3C traceparent and tracestate).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from durable.calls.telemetry import TraceContext
from durable.errors import CallFailed, RemoteError, text_of
from durable.transports.base import Answer
from durable.transports.frames import LONGEST_TRACEPARENT, LONGEST_TRACESTATE, Call, Fault
from durable.version import __version__

RPC_SYSTEM: Final = "rpc.system"
RPC_SERVICE: Final = "rpc.service"
RPC_METHOD: Final = "rpc.method"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"

_NOWHERE: Final = Context()
"""The context of a connection, without a trace."""
_W3C: Final = TraceContextTextMapPropagator()


class CallTracing:
    """A `durable.calls.telemetry.CallSpans`. `bus.trace()` puts it in its place."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("durable", __version__, provider)

    @contextmanager
    def calling(self, service: str, method: str, at: str) -> Iterator[TraceContext]:
        with self._span(service, method, SpanKind.CLIENT, None) as span:
            if span.is_recording():
                span.set_attributes(_address(at))
            carrier: dict[str, str] = {}
            _W3C.inject(carrier)
            try:
                yield _bounded(carrier)
            except BaseException as error:
                kind = error.error if isinstance(error, RemoteError) else type(error).__qualname__
                _fail(span, kind, text_of(error) if isinstance(error, CallFailed) else type(error).__qualname__)
                raise

    @contextmanager
    def called(self, call: Call) -> Iterator[Callable[[Answer], None]]:
        carrier = {"traceparent": call.traceparent, "tracestate": call.tracestate}
        parent = _W3C.extract(carrier, _NOWHERE) if call.traceparent else _NOWHERE
        with self._span(call.service, call.method, SpanKind.SERVER, parent) as span:

            def tell(answer: Answer) -> None:
                if isinstance(answer, Fault):
                    _fail(span, answer.error or answer.kind.value, answer.text)

            try:
                yield tell
            except BaseException as error:  # cancelled: its caller is gone
                _fail(span, type(error).__qualname__, "the call was cancelled")
                raise

    def _span(self, service: str, method: str, kind: SpanKind, parent: Context | None) -> AbstractContextManager[Span]:
        attributes = {RPC_SYSTEM: "durable", RPC_SERVICE: service, RPC_METHOD: method}
        return self._tracer.start_as_current_span(
            f"{service}/{method}",
            parent,
            kind,
            attributes,
            record_exception=False,
            set_status_on_exception=False,
        )


def _fail(span: Span, kind: str, text: str) -> None:
    span.set_attribute(ERROR_TYPE, kind)
    span.set_status(Status(StatusCode.ERROR, text))


def _bounded(carrier: dict[str, str]) -> TraceContext:
    """Return the part of a trace context that fits into a CALL frame."""
    parent, state = carrier.get("traceparent", ""), carrier.get("tracestate", "")
    if len(parent) > LONGEST_TRACEPARENT:
        return TraceContext()
    return TraceContext(parent, state if len(state) <= LONGEST_TRACESTATE else "")


def _address(at: str) -> dict[str, str | int]:
    parts = urlsplit(at)
    if parts.scheme == "unix":
        return {SERVER_ADDRESS: parts.path}
    if not parts.hostname:
        return {}
    return {SERVER_ADDRESS: parts.hostname, **({SERVER_PORT: parts.port} if parts.port else {})}
