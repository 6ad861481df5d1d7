"""Traces by OpenTelemetry (`pip install 'durable-bus[tracing]'`), after its conventions for messaging.

    service A                                      service B
    [ the application's span ]
       +- create TYPE (producer) ----------------> process TYPE (consumer)
              ^                                       +- create OTHER (producer) ---------> ...
              :                                    ^
              : links                              : links
    send DESTINATION (client), of a batch          receive ENDPOINT (client), of a batch

`create` begins when a message is sent and ends when its unit of work remembers it; its context travels in the headers
of the envelope (W3C traceparent and tracestate), over every transport, into the span of each attempt to handle it.
Batches are traces of their own: the messages in one belong to many.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final
from uuid import UUID

from opentelemetry import trace
from opentelemetry.context import Context as TraceContext
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from durable.application.incoming import Incoming
from durable.application.middleware import HandleNext, Middleware, SendNext
from durable.envelope import Envelope
from durable.errors import Reject, Verdict, text_of, told_by
from durable.messages.registry import name_of
from durable.messages.validation import utf8_bytes
from durable.outbox.envelope_factory import Outgoing
from durable.settings import Limits
from durable.version import __version__

SYSTEM: Final = "messaging.system"
OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION: Final = "messaging.destination.name"
MESSAGE_ID: Final = "messaging.message.id"
CONVERSATION_ID: Final = "messaging.message.conversation_id"
BATCH_COUNT: Final = "messaging.batch.message_count"
ERROR_TYPE: Final = "error.type"
FUNCTION: Final = "code.function.name"
ATTEMPT: Final = "durable.attempt"
VERDICT: Final = "durable.verdict"

_NOWHERE: Final = TraceContext()
"""The context of agents, without a trace: their spans are no children of the span that started the bus."""
_W3C: Final = TraceContextTextMapPropagator()
_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_LONGEST_CONTEXT: Final = 700  # characters: a traceparent of 55, a tracestate of 512, and their names


_DEFAULTS: Final = Limits(max_message_bytes=1 << 20, max_headers=100, max_header_bytes=8 << 10)


class Tracing(Middleware):
    """Makes a span of each message that is sent, of each attempt to handle one, and of each batch.

    `provider` is whose spans they are; the global one unless given. `bus.trace()` puts it in its place.
    """

    def __init__(
        self, provider: TracerProvider | None = None, limits: Callable[[], Limits] = lambda: _DEFAULTS
    ) -> None:
        """Trace sent and handled messages. `limits` are those of sent messages: their headers must have room for the
        trace.
        """
        self._limits = limits
        self._tracer = trace.get_tracer("durable", __version__, provider)

    # ------------------------------------------------------------------ messages: the two onions

    def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
        with self._span("create", name_of(type(outgoing.message)), SpanKind.PRODUCER) as span:
            message_id = call_next(_with_trace_context(outgoing, self._limits()))
            if message_id is not None and span.is_recording():
                conversation = outgoing.caused_by.correlation_id if outgoing.caused_by else message_id
                span.set_attributes({MESSAGE_ID: str(message_id), CONVERSATION_ID: str(conversation)})
            return message_id

    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        context = incoming.context
        parent, links = _NOWHERE, list[Link]()
        attributes: dict[str, str | int] = {FUNCTION: incoming.handler}
        if isinstance(incoming.message, list):
            links = _links(context.headers for context in incoming.contexts)
            attributes |= {BATCH_COUNT: len(incoming.contexts)}
        else:
            parent = _W3C.extract(context.headers, _NOWHERE)
            attributes |= {
                MESSAGE_ID: str(context.id),
                CONVERSATION_ID: str(context.correlation_id),
                ATTEMPT: incoming.attempt,
            }
        with self._span("process", context.message_type, SpanKind.CONSUMER, parent, attributes, links):
            return await call_next(incoming)

    # ------------------------------------------------------------------ batches: durable.telemetry.BatchSpans

    def sending(self, destination: str, batch: Sequence[Envelope]) -> AbstractContextManager[Span]:
        return self._batch_span("send", destination, batch)

    def receiving(self, endpoint: str, batch: Sequence[Envelope]) -> AbstractContextManager[Span]:
        return self._batch_span("receive", endpoint, batch)

    def _batch_span(self, operation: str, name: str, batch: Sequence[Envelope]) -> AbstractContextManager[Span]:
        links = _links(envelope.headers for envelope in batch)
        return self._span(operation, name, SpanKind.CLIENT, _NOWHERE, {BATCH_COUNT: len(batch)}, links)

    @contextmanager
    def _span(
        self,
        operation: str,
        name: str,
        kind: SpanKind,
        parent: TraceContext | None = None,
        attributes: Mapping[str, str | int] | None = None,
        links: Sequence[Link] = (),
    ) -> Iterator[Span]:
        """The current span inside the block, as a child of `parent`, or of what is current. Tells of its error."""
        told = {SYSTEM: "durable", OPERATION_NAME: operation, OPERATION_TYPE: operation, DESTINATION: name}
        with self._tracer.start_as_current_span(
            f"{operation} {name}",
            parent,
            kind,
            {**told, **(attributes or {})},
            links,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as error:
                _tell(span, error)
                raise


def _with_trace_context(outgoing: Outgoing, limits: Limits) -> Outgoing:
    """Put the current context into the headers, if they have room: tracing must not make a message unfit."""
    context: dict[str, str] = {}
    _W3C.inject(context)
    headers = outgoing.headers
    size = sum(utf8_bytes(name) + utf8_bytes(value) for name, value in headers.items())
    if len(headers) + 2 > limits["max_headers"] or size + _LONGEST_CONTEXT > limits["max_header_bytes"]:
        return outgoing
    if not context:
        return outgoing
    return outgoing.with_headers(context)


def _links(headers: Iterable[Mapping[str, str]]) -> list[Link]:
    """Return links to the spans that the messages were created in."""
    contexts = [_span_context(each["traceparent"]) for each in headers if "traceparent" in each]
    return [Link(context) for context in contexts if context is not None and context.is_valid]


def _span_context(traceparent: str) -> SpanContext | None:
    """Read a span context as the propagator does, without tracestate and in a quarter of the time."""
    if not (found := _TRACEPARENT.fullmatch(traceparent)):
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))


def _tell(span: Span, error: BaseException) -> None:
    error = told_by(error)
    if isinstance(error, Verdict) and not isinstance(error, Reject):  # the handler's decision, and nobody's fault
        span.set_attribute(VERDICT, type(error).__name__)
        return
    span.record_exception(error)
    span.set_attribute(ERROR_TYPE, type(error).__qualname__)
    span.set_status(Status(StatusCode.ERROR, text_of(error)))
