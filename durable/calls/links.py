"""Connections to the addresses that are called, each opened by the first call and closed with the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from durable.errors import InvalidSetting
from durable.transports.base import Caller, Transport


class _Calling(Protocol):
    """A transport that can call."""

    def caller(self, uri: str) -> Caller: ...


class Links:
    """Callers by address. `transport_of` returns the transport of an address, or raises InvalidSetting."""

    def __init__(self, transport_of: Callable[[str], Transport]) -> None:
        self.transport_of = transport_of
        self._callers: dict[str, Caller] = {}
        self._entering = asyncio.Lock()

    def check(self, at: str) -> None:
        """Raise InvalidSetting for an address that cannot be called."""
        self._make(at)

    async def to(self, at: str) -> Caller:
        """Return the caller of an address."""
        found = self._callers.get(at)
        if found is not None:
            return found
        async with self._entering:
            if at not in self._callers:
                self._callers[at] = await self._make(at).__aenter__()
        return self._callers[at]

    async def close(self) -> None:
        """Close the connections; calls under way end as ProviderGone."""
        callers, self._callers = self._callers, {}
        for caller in callers.values():
            await caller.__aexit__(None, None, None)

    def _make(self, at: str) -> Caller:
        transport = self.transport_of(at)
        make = getattr(transport, "caller", None)
        if make is None:
            raise InvalidSetting(f"{at}: cannot be called; give a tcp://, unix:// or http:// address")
        caller: Caller = make(at)
        return caller
