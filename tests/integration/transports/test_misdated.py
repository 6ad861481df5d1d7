"""Envelopes with impossible dates and ids at each door of a running node: quarantined, and their neighbours stored."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from durable import Bus
from durable.outcomes import STORED
from tests.contract.bus.orders import OrderPlaced, arriving
from tests.contract.bus.test_arriving import MISDATED, Misdate
from tests.support.tables import Tables

QUICK: dict[str, Any] = {"poll_interval": timedelta(milliseconds=30)}


@pytest.mark.parametrize("door", ["tcp://127.0.0.1:0", "http://127.0.0.1:0"])
@pytest.mark.parametrize("misdate", MISDATED, ids=lambda misdate: misdate.__name__)
async def test_misdated_envelope_is_quarantined_at_every_door(tables: Tables, door: str, misdate: Misdate) -> None:
    bus = Bus("shop", tables.url, **QUICK)
    bus.listen(door)

    @bus.handles(OrderPlaced)
    async def place(order: OrderPlaced) -> None: ...

    async with bus:
        assert bus.runtime.node is not None
        address = bus.runtime.node.listeners[0].address
        changed, reason = misdate(datetime.now(UTC))
        bad, good = replace(arriving(), destination=address, **changed), replace(arriving(), destination=address)
        async with bus.runtime.transports.of(address).sender(address) as sender:
            outcomes = await sender.send([bad, good])
        assert outcomes[1] == STORED
        assert [reason in said for said in tables.rows("SELECT reason FROM durable.dead_letters")] == [True]
        assert b'{"number":1}' in tables.one("SELECT body FROM durable.dead_letters"), "it, or all of its envelope"
