"""A service that listens on HTTP, and a client of it that knows nothing of durable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
from pydantic import BaseModel

from durable import Bus, Context, message
from durable.testing import eventually
from tests.support.tables import Tables

SOLD = "/messages/web.sold"
COUNTED = "/messages/web.counted"
JSON = {"content-type": "application/json"}
STRUCTURED = {"content-type": "application/cloudevents+json"}


@message("web.sold")
class Sold(msgspec.Struct):
    number: int
    total: Decimal | None = None
    note: Any = None


@message("web.counted")
class Counted(BaseModel, strict=True):
    number: float
    numbers: list[int] = []
    note: Any = None


@message("web.known-but-not-handled")
class KnownButNotHandled(msgspec.Struct):
    number: int


@dataclass(frozen=True)
class Handled:
    """A message, and what its handler was told of it."""

    message: Any
    context: Context


class HttpShop:
    """A bus that runs on a real Postgres, and everything that its handlers have seen."""

    def __init__(self, tables: Tables, **settings: Any) -> None:
        self.tables = tables
        self.seen: list[Handled] = []
        self.bus = Bus("shop", tables.url, poll_interval=timedelta(milliseconds=30), **settings)
        self.bus.listen("http://127.0.0.1:0")
        self.client = httpx.AsyncClient()

        @self.bus.handles(Sold)
        async def sell(sold: Sold, context: Context) -> None:
            self.seen.append(Handled(sold, context))

        @self.bus.handles(Counted)
        async def count(counted: Counted, context: Context) -> None:
            self.seen.append(Handled(counted, context))

    @property
    def url(self) -> str:
        node = self.bus.runtime.node
        assert node is not None
        return node.listeners[0].address

    async def post(self, path: str, content: bytes | str, headers: Any = None) -> httpx.Response:
        """`headers` are added to the content type of JSON, or replace it."""
        return await self.client.post(self.url + path, content=content, headers={**JSON, **(headers or {})})

    async def sell(self, number: int = 1, **headers: str) -> httpx.Response:
        """A message like any other, with these headers."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.post(SOLD, f'{{"number": {number}}}', named)

    async def raw(self, request: bytes) -> bytes:
        """What the server answers to these bytes until it closes the connection, or has answered once."""
        address = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            async with asyncio.timeout(30):
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
                )
                return head + await reader.readexactly(length)
        finally:
            writer.close()
            await writer.wait_closed()

    async def handled(self, *numbers: float) -> list[Handled]:
        """Everything that was handled, which are messages with these numbers, when nothing waits any more."""
        await eventually(lambda: self.tables.count("incoming_envelopes") == 0, within=30)
        assert sorted(one.message.number for one in self.seen) == sorted(numbers)
        return self.seen


@asynccontextmanager
async def open_shop(tables: Tables, **settings: Any) -> AsyncIterator[HttpShop]:
    """A running shop on emptied tables."""
    tables.clear()
    shop = HttpShop(tables, **settings)
    async with shop.client, shop.bus:
        yield shop


def event(number: int = 1, **attributes: Any) -> dict[str, Any]:
    """A CloudEvent in JSON."""
    given = {"specversion": "1.0", "id": f"E-{number}", "source": "/till/1", "type": "web.sold", **attributes}
    return {"data": {"number": number}, **given}


def event_headers(number: int = 1, **attributes: str) -> dict[str, str]:
    """The same in binary mode."""
    given = {name: value for name, value in event(number, **attributes).items() if name != "data"}
    return {f"ce-{name}": value for name, value in given.items()}
