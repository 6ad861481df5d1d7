"""HTTP as a transport: uvicorn at one end, httpx at the other, a proxy between them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from durable.testing.transports import DirectContract, Link
from tests.contract.links import http_link


class TestHttp(DirectContract):
    impossible_uris = ("http://", "http://127.0.0.1:99999", "http://127.0.0.1:8001/?query", "http://user@127.0.0.1:1")

    @pytest.fixture
    async def link(self) -> AsyncIterator[Link]:
        async with http_link() as link:
            yield link
