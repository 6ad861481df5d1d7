"""Logging middleware: a line for each message sent, and each handled: ids, type, attempt and time.

    sent type=orders.order-placed kind=command id=0192... cause=None ms=0.02
    handled type=orders.order-placed id=0192... correlation=0192... attempt=1 handler=orders.app.reserve ms=3.18
    failed type=orders.order-placed id=0192... correlation=0192... attempt=2 handler=... ms=1.02 error=LookupError

The line is written within the transaction; the history shows whether that transaction committed. The same fields are in
the record's `durable`, for formatters that write JSON. Only the class of an error is logged, because its text may quote
the body.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from uuid import UUID

from durable.application.incoming import Incoming
from durable.application.middleware import HandleNext, Middleware, SendNext
from durable.errors import told_by
from durable.messages.registry import name_of
from durable.outbox.envelope_factory import Outgoing
from durable.telemetry import messages_log


class _Fields(dict[str, object]):
    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.items())


class Logging(Middleware):
    """Middleware that logs messages to `logger` (default: "durable.messages") at `level`, and failures as warnings."""

    def __init__(self, logger: logging.Logger | None = None, *, level: int = logging.INFO) -> None:
        self._logger = logger or messages_log
        self._level = level

    def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
        began = time.perf_counter()
        try:
            sent = call_next(outgoing)
        except Exception as error:
            refused = {"class": type(outgoing.message).__qualname__, "kind": outgoing.kind}
            self._write(logging.WARNING, "refused", refused, began, error=type(error).__name__)
            raise
        event = "dropped" if sent is None else "sent"
        cause = outgoing.caused_by.id if outgoing.caused_by else None
        type_ = name_of(type(outgoing.message))
        self._write(self._level, event, {"type": type_, "kind": outgoing.kind, "id": sent, "cause": cause}, began)
        return sent

    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        began = time.perf_counter()
        try:
            result = await call_next(incoming)
        except Exception as error:
            self._write_each(logging.WARNING, "failed", incoming, began, error=type(told_by(error)).__name__)
            raise
        self._write_each(self._level, "handled", incoming, began)
        return result

    def _write_each(self, level: int, event: str, incoming: Incoming, began: float, **more: object) -> None:
        for context in incoming.contexts:
            fields = {
                "type": context.message_type,
                "id": context.id,
                "correlation": context.correlation_id,
                "attempt": context.attempt,
                "handler": incoming.handler,
            }
            self._write(level, event, fields, began, **more)

    def _write(self, level: int, event: str, fields: Mapping[str, object], began: float, **more: object) -> None:
        if self._logger.isEnabledFor(level):
            all_fields = _Fields(fields, ms=round((time.perf_counter() - began) * 1000, 3), **more)
            self._logger.log(level, "%s %s", event, all_fields, extra={"durable": {"event": event, **all_fields}})
