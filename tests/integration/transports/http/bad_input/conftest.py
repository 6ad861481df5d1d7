"""Houses: one that is patient, and one that is not."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.transports.http.bad_input.houses import HASTY, SETTINGS, House, open_house


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async for house in open_house(SETTINGS):
        yield house


@pytest.fixture
async def hasty_house() -> AsyncIterator[House]:
    async for house in open_house(HASTY):
        yield house
