"""Connections to the addresses that are called, each opened by the first call and closed with the bus.

Providers come and go, and so do their addresses. When a new one is opened, those are closed that nobody has called for
a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Final, Protocol, Self

from durable.errors import ConnectionFailed, InvalidSetting
from durable.transports.base import Answer, Caller, Transport
from durable.transports.frames import Call, Offers

_IDLE: Final = timedelta(minutes=10)


class _Calling(Protocol):
    """A transport that can call."""

    def caller(self, uri: str) -> Caller: ...


class Links:
    """Callers by address. `transport_of` returns the transport of an address, or raises InvalidSetting."""

    def __init__(self, transport_of: Callable[[str], Transport], *, idle: timedelta = _IDLE) -> None:
        self.transport_of = transport_of
        self._idle_seconds = idle.total_seconds()
        self._links: dict[str, _Link] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._entering = asyncio.Lock()
        self.is_open = True

    def __len__(self) -> int:
        """Return the number of addresses that are kept."""
        return len(self._links)

    def check(self, at: str) -> None:
        """Raise InvalidSetting for an address that cannot be called."""
        self._make(at)

    async def to(self, at: str) -> Caller:
        """Return the caller of an address."""
        found = self._links.get(at)
        if found is not None:
            found.use()
            return found
        async with self._entering:
            if not self.is_open:
                raise ConnectionFailed(f"{at}: the bus is stopping")
            if at not in self._links:
                self._close_idle()
                self._links[at] = await _Link(self._make(at)).__aenter__()
        return self._links[at]

    async def close(self) -> None:
        """Close the connections, for good; calls that were sent end as ProviderGone."""
        async with self._entering:
            self.is_open = False
            links, self._links = self._links, {}
        await asyncio.gather(*map(_close, links.values()), *self._closing)

    def _close_idle(self) -> None:
        """Close them in tasks of their own: whoever opens another connection may be cancelled meanwhile."""
        idle = [at for at, link in self._links.items() if link.is_idle_for(self._idle_seconds)]
        for link in [self._links.pop(at) for at in idle]:
            closing = asyncio.create_task(_close(link), name="close an idle connection")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _make(self, at: str) -> Caller:
        transport = self.transport_of(at)
        make = getattr(transport, "caller", None)
        if make is None:
            raise InvalidSetting(f"{at}: cannot be called; give a tcp://, unix:// or http:// address")
        caller: Caller = make(at)
        return caller


async def _close(link: _Link) -> None:
    await link.__aexit__(None, None, None)


class _Link:
    """Caller that knows for how long nobody has used it."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._under_way = 0
        self.use()

    def use(self) -> None:
        self._used_at = asyncio.get_running_loop().time()

    def is_idle_for(self, seconds: float) -> bool:
        return not self._under_way and asyncio.get_running_loop().time() - self._used_at > seconds

    async def __aenter__(self) -> Self:
        await self._caller.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._caller.__aexit__(kind, error, trace)

    async def offers(self) -> Offers:
        return await self._caller.offers()

    async def call(self, call: Call, sent: Callable[[], None]) -> Answer:
        self._under_way += 1
        try:
            return await self._caller.call(call, sent)
        finally:
            self._under_way -= 1
            self.use()
