"""Places that are called: an address, or this process itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from durable.calls.links import Links
from durable.calls.provider import CallProvider
from durable.errors import WiringError
from durable.transports.base import Answer, Caller
from durable.transports.frames import Call, Offers


class Elsewhere:
    """An address. `links` returns the connections of the running bus, or None."""

    def __init__(self, at: str, links: Callable[[], Links | None]) -> None:
        self.name = at
        self._links = links

    async def caller(self) -> Caller:
        links = self._links()
        if links is None:
            raise WiringError(f"the bus does not run: call {self.name} within `async with bus`")
        return await links.to(self.name)


class Here:
    """Offers of this process: a call has the same checks, limits and encoding as from elsewhere, and no connection."""

    name = "this process"

    def __init__(self, provider: Callable[[], CallProvider]) -> None:
        self._provider = provider

    async def caller(self) -> Caller:
        return _LocalCaller(self._provider())


class _LocalCaller:
    """A `durable.transports.base.Caller` of this process."""

    def __init__(self, provider: CallProvider) -> None:
        self._provider = provider

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def offers(self) -> Offers:
        return self._provider.offers()

    async def call(self, call: Call) -> Answer:
        """Run the call. One that nobody waits for goes on when its caller is cancelled."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        cancel = self._provider.begin(call, None, lambda answer: _set(answered, answer))
        try:
            return await answered
        except asyncio.CancelledError:
            if call.awaited:
                cancel()
            raise


def _set(future: asyncio.Future[Answer], answer: Answer) -> None:
    if not future.done():
        future.set_result(answer)
