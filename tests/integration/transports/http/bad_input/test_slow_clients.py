"""Slow clients are cut at their deadlines."""

from __future__ import annotations

import asyncio

import pytest

from durable.envelope import Envelope
from durable.outcomes import Outcome, Rejected
from durable.testing import eventually
from durable.transports.http.wire import BATCH, encode_batch
from tests.integration.transports.http.bad_input.houses import GOOD, House, post, signed
from tests.support.raw_http import request
from tests.support.receivers import envelopes


@pytest.mark.parametrize("before", [0, 1], ids=["at once", "after a good request"])
async def test_slow_head_is_cut_at_its_deadline(hasty_house: House, before: int) -> None:
    async with hasty_house.mallory() as mallory:
        for _ in range(before):
            assert (await mallory.ask(request("/in/health/live", method="GET"))).status == 204
        gone = asyncio.ensure_future(mallory.cut())
        for byte in post(GOOD):
            mallory.say(bytes([byte]))
            await asyncio.wait([gone], timeout=0.05)  # a sixth of the deadline
            if gone.done():
                break
        assert gone.result() == b""
    await hasty_house.is_unharmed(dropped=1)


async def test_slow_body_gets_408_at_its_deadline(hasty_house: House) -> None:
    async with hasty_house.mallory() as mallory:
        mallory.say(request("/in/batches", length=len(GOOD), content_type=BATCH, authorization=signed(GOOD)))
        answered = asyncio.ensure_future(mallory.hear())
        for byte in GOOD:
            mallory.say(bytes([byte]))
            await asyncio.wait([answered], timeout=0.05)
            if answered.done():
                break
        assert (await answered).problem["status"] == 408
        assert await mallory.cut() == b""
    await hasty_house.is_unharmed(refused=1)


async def test_silent_client_is_cut(hasty_house: House) -> None:
    async with hasty_house.mallory() as mallory:
        assert await mallory.cut() == b""
    await hasty_house.is_unharmed(dropped=1)


async def test_client_pausing_between_two_requests_is_not_cut(hasty_house: House) -> None:
    async with hasty_house.mallory() as mallory:
        assert (await mallory.ask(post(GOOD))).status == 200
        for _ in range(6):
            await asyncio.sleep(0.25)  # longer than a request may take, all together
        assert (await mallory.ask(post(GOOD))).status == 200


async def test_client_reading_no_answers_is_cut_at_their_deadline(
    hasty_house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reject_strangers(endpoint: str, received: list[Envelope]) -> list[Outcome]:
        return [Rejected("x" * 1_000)] * len(received)

    with monkeypatch.context() as patched:
        patched.setattr(hasty_house.receiver, "receive", reject_strangers)
        async with hasty_house.mallory() as mallory:
            for _ in range(200):  # 20 MB of answers: more than socket buffers hold
                mallory.say(post(encode_batch(envelopes(100))))
            await eventually(lambda: hasty_house.listener.statistics()["dropped"] == 1, what="the cut")
    await hasty_house.is_unharmed(dropped=1)
