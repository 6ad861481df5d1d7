"""What the onion adds to each message: two core and two user components that only pass on, against none.

Nothing is in its middle, neither the composing of a message nor a handler, so that nothing else is measured.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import UUID

from durable import HandleNext, Incoming, Middleware, Outgoing, SendNext
from durable.application.middleware import MiddlewareStack
from tests.benchmarks.rows import Cost

_ID = UUID(int=1)
_NOTHING: Any = None


class PassesOn(Middleware):
    def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
        return call_next(outgoing)

    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        return await call_next(incoming)


class Onions:
    """The costs of both onions."""

    def __init__(self, count: int) -> None:
        self._count = count
        components = "two core and two user components"
        self.costs = [Cost(f"send through {components}"), Cost(f"handle within {components}")]

    def run_round(self) -> None:
        sending, handling = self.costs
        sending.measured(self._send(MiddlewareStack()), self._send(_full()))
        handling.measured(asyncio.run(self._handle(MiddlewareStack())), asyncio.run(self._handle(_full())))

    def _send(self, onion: MiddlewareStack) -> float:
        send, outgoing = onion.around_sending(lambda _: _ID), Outgoing("message")
        began = time.perf_counter()
        for _ in range(self._count):
            send(outgoing)
        return self._microseconds_since(began)

    async def _handle(self, onion: MiddlewareStack) -> float:
        async def core(_: Incoming) -> object:
            return None

        handle, incoming = onion.around_handling(core), Incoming("message", _NOTHING, ())
        began = time.perf_counter()
        for _ in range(self._count):
            await handle(incoming)
        return self._microseconds_since(began)

    def _microseconds_since(self, began: float) -> float:
        return (time.perf_counter() - began) / self._count * 1e6


def _full() -> MiddlewareStack:
    onion = MiddlewareStack()
    onion.use(PassesOn(), "before")
    onion.use(PassesOn(), "core")
    onion.use(PassesOn(), "core")
    onion.use(PassesOn(), "after")
    return onion
