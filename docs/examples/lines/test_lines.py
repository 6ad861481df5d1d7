from collections.abc import AsyncIterator

import pytest_asyncio
from lines import LineTransport

from durable.testing.transports import ChaosProxy, DirectContract, Link, Way


class TestLines(DirectContract):
    impossible_uris = ("lines://", "lines://127.0.0.1", "lines://127.0.0.1:2301/path", "lines://127.0.0.1:99999")

    @pytest_asyncio.fixture
    async def link(self) -> AsyncIterator[Link]:
        async with Link(LineTransport, "lines://127.0.0.1:0") as link, ChaosProxy(link.listener.address) as proxy:
            link.send_to = proxy.uri.replace("tcp://", "lines://")
            link.way = Way.through(proxy)
            yield link
