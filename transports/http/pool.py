"""Connections to one address, each with one request at a time: the one that was used last is used first.

Each is a transport of httpx with room for one connection. One transport for all of them would look at every connection
and at every waiting request twice for each request.

    take --> one that is open, or a new one --> give back --> open, until it has not been used for a while
               '--most are in use: wait                 '--failed, or the pool was closed: closed

A request on a connection that the server closes at that moment is lost, and nobody can tell whether it was run. So a
connection is kept for half of the time that the server tells of, which leaves the other half to clocks and networks.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import httpx


class _Idle(NamedTuple):
    connection: httpx.AsyncHTTPTransport
    until: float


class Pool:
    """Connections with one state of the certificates, at most so many, each idle for `idle_seconds` at most."""

    def __init__(self, tls: ssl.SSLContext, most_connections: int, idle_seconds: float) -> None:
        self.tls = tls
        self.requests = 0
        """Requests that have a connection, or wait for one."""
        self._places = asyncio.Semaphore(most_connections)
        self._idle_seconds = self._longest_idle_seconds = idle_seconds
        self._one = httpx.Limits(max_connections=1, keepalive_expiry=idle_seconds)
        self._idle: deque[_Idle] = deque()  # in the order of their last use
        self._kept = 0
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Return the number of connections that are in use, or kept for the next request."""
        return self._kept

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[httpx.AsyncHTTPTransport]:
        """A connection for one request. It is opened by the request if need be, and closed when that fails."""
        async with self._places:
            connection = self._open_one() or self._make()
            try:
                yield connection
            except BaseException:
                self._close(connection)
                raise
            now = asyncio.get_running_loop().time()
            self._idle.append(_Idle(connection, now + self._idle_seconds))
            while self._idle and self._idle[0].until <= now:
                self._close(self._idle.popleft().connection)

    def heed(self, server_seconds: float) -> None:
        """Keep idle connections for less time than the server does."""
        self._idle_seconds = min(self._longest_idle_seconds, server_seconds / 2)

    async def aclose(self) -> None:
        """Close all connections, on which no request is under way."""
        while self._idle:
            self._close(self._idle.pop().connection)
        await asyncio.gather(*self._closing)

    def _open_one(self) -> httpx.AsyncHTTPTransport | None:
        """Take the one that was used last; those whose time is over are closed."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection, until = self._idle.pop()
            if until > now:
                return connection
            self._close(connection)
        return None

    def _make(self) -> httpx.AsyncHTTPTransport:
        self._kept += 1
        return httpx.AsyncHTTPTransport(verify=self.tls, trust_env=False, limits=self._one)

    def _close(self, connection: httpx.AsyncHTTPTransport) -> None:
        """Close it in a task of its own: this one may be cancelled meanwhile."""
        self._kept -= 1
        closing = asyncio.create_task(connection.aclose(), name="close a connection")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
