"""What a bus in memory forgets with time, as the maintenance does on Postgres."""

from __future__ import annotations

from datetime import timedelta

import httpx
import msgspec
import pytest

from durable import Bus, Context, Reject, StillWaiting, message
from durable.testing import InMemoryBus

DAY = timedelta(days=1)


@message("retention.ask")
class Ask(msgspec.Struct):
    number: int


@message("retention.told")
class Told(msgspec.Struct):
    number: int


def asked() -> tuple[Bus, list[int]]:
    bus, seen = Bus("shop"), list[int]()
    bus.expects(Told)

    @bus.handles(Ask)
    async def answer(asked: Ask, ctx: Context) -> None:
        if asked.number < 0:
            raise Reject("a number is not negative")
        seen.append(asked.number)
        ctx.reply(Told(asked.number))

    return bus, seen


@pytest.mark.parametrize(("days", "handled"), [(7.9, [1]), (8.1, [1, 2])])
async def test_key_is_free_after_the_time_of_the_ids(days: float, handled: list[int]) -> None:
    bus, seen = asked()
    async with InMemoryBus(bus) as memory:
        for number in (1, 2):
            async with bus.unit_of_work() as uow:
                uow.request(Ask(number), Told, id_from="monthly")
            await memory.drain()
            memory.clock.advance(days * DAY)
    assert seen == handled


@pytest.mark.parametrize(("days", "is_kept"), [(6.9, True), (7.1, False)])
async def test_answer_is_kept_for_its_retention(days: float, is_kept: bool) -> None:
    bus, _ = asked()
    async with InMemoryBus(bus) as memory:
        async with bus.unit_of_work() as uow:
            request = uow.request(Ask(1), Told)
        await memory.drain()
        memory.clock.advance(days * DAY)
        if is_kept:
            assert await bus.wait_for(request, Told) == Told(1)
            return
        with pytest.raises(StillWaiting):
            await bus.wait_for(request, Told, timeout=0.05)


async def test_new_request_over_http_has_an_answer_when_the_former_one_was_discarded() -> None:
    bus, seen = asked()
    async with InMemoryBus(bus) as memory:
        app = httpx.ASGITransport(app=bus.asgi(allow_local=True), client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=app, base_url="http://127.0.0.1") as client:
            await client.put("/requests/weekly?type=retention.ask", json={"number": -1})
            await memory.drain()
            await client.delete("/requests/weekly")
            memory.discard(reason="a test")
            put = await client.put("/requests/weekly?type=retention.ask", json={"number": 2})
            await memory.drain()
            assert put.status_code == 201
            assert (await client.get("/requests/weekly/result")).json() == {"number": 2}
    assert seen == [2]
