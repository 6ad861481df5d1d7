"""Callers that wait while something of durable is missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import make_url

from durable import Bus, Context, StorageUnavailable, message
from tests.support.roles import runtime_role
from tests.support.tables import Tables


@message("lacking.ask")
class Ask(msgspec.Struct):
    number: int


@message("lacking.told")
class Told(msgspec.Struct):
    number: int


LACKS = {
    table: (f"ALTER TABLE durable.{table} RENAME TO renamed", f"ALTER TABLE durable.renamed RENAME TO {table}")
    for table in ("answers", "dead_letters", "envelope_history", "incoming_envelopes", "outgoing_envelopes")
} | {"the schema": ("REVOKE USAGE ON SCHEMA durable FROM {role}", "GRANT USAGE ON SCHEMA durable TO {role}")}
"""Statements that take something away, and give it back."""


def service(url: str, released: asyncio.Event) -> Bus:
    # A heartbeat amid a lack would end the membership.
    bus = Bus("shop", url, poll_interval="100ms", heartbeat_interval="10m", heartbeat_stale="30m")
    bus.expects(Told)

    @bus.handles(Ask)
    async def answer(ask: Ask, ctx: Context) -> None:
        await released.wait()
        ctx.reply(Told(ask.number))

    return bus


@pytest.mark.parametrize("lack", LACKS)
async def test_caller_waits_through_a_lack(tables: Tables, caplog: pytest.LogCaptureFixture, lack: str) -> None:
    takes, gives_back = LACKS[lack]
    released = asyncio.Event()
    with runtime_role(tables.url) as url:
        role = make_url(url).username
        async with service(url, released) as bus:
            async with bus.unit_of_work() as uow:
                request = uow.request(Ask(1), Told)
            waiting = asyncio.create_task(bus.wait_for(request, Told, timeout=60), name="wait")
            await asyncio.sleep(0.3)
            await tables.change(takes.format(role=role))
            await asyncio.sleep(1)
            try:
                assert not waiting.done()
                with pytest.raises(StorageUnavailable, match="run: durable-agent migrate"):
                    await bus.wait_for(request, Told, timeout=0.5)
            finally:
                await tables.change(gives_back.format(role=role))
            released.set()
            assert await waiting == Told(1)
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


CALLS: dict[str, Callable[[Bus, UUID], Awaitable[object]]] = {
    "cancel": lambda bus, message: bus.cancel(message),
    "reschedule": lambda bus, message: bus.reschedule(message, delay=timedelta(hours=2)),
    "pause": lambda bus, _: bus.pause(Ask, reason="test"),
    "resume": lambda bus, _: bus.resume(Ask),
}


@pytest.mark.parametrize("call", CALLS)
async def test_call_names_a_lack_with_its_advice(tables: Tables, call: str) -> None:
    with runtime_role(tables.url) as url:
        role = make_url(url).username
        async with service(url, asyncio.Event()) as bus:
            async with bus.unit_of_work() as uow:
                later = uow.send(Ask(1), delay=timedelta(hours=1))
            await tables.change(f"REVOKE USAGE ON SCHEMA durable FROM {role}")
            try:
                with pytest.raises(StorageUnavailable, match=r"schema durable; .*--grant-to ROLE$"):
                    await CALLS[call](bus, later)
            finally:
                await tables.change(f"GRANT USAGE ON SCHEMA durable TO {role}")
