"""Memory as a transport: it must do what the others do, for it stands in for them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from durable.testing.transports import DirectContract, Link
from tests.contract.links import memory_link


class TestMemory(DirectContract):
    impossible_uris = ("memory://", "memory://a/b", "memory:/a", "memory://a?b=c")

    @pytest.fixture
    async def link(self) -> AsyncIterator[Link]:
        async with memory_link() as link:
            yield link
