"""The outcome of a message over HTTP, for clients that know nothing of durable."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest
from openapi_schema_validator import OAS31Validator

from durable import Bus
from durable.embedded import Embedded
from durable.envelope import new_id
from durable.requests import watch
from durable.testing import eventually
from durable.testing.transports.proxy import ChaosProxy
from durable.transports.http import receipts
from tests.support.http_shop import SOLD, HttpShop, Sold, open_shop
from tests.support.servers import address_of
from tests.support.tables import Tables, shared_tables

SECRET = "a secret of sixteen letters, or more"
OTHER_SECRET = "another secret of sixteen letters, or more"
BEARER = {"authorization": f"Bearer {SECRET}"}
BOUND = 30  # seconds; no measure


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
async def shop(database: Tables) -> AsyncIterator[HttpShop]:
    async with open_shop(database) as shop:
        yield shop


async def pause(shop: HttpShop) -> None:
    await shop.bus.pause(Sold)
    await eventually(lambda: shop.bus.statistics().handling["web.sold"].paused, what="the pause")


async def ask(shop: HttpShop, message: object, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await shop.client.get(f"{shop.url}/messages/{message}", headers=named, timeout=BOUND)


async def test_outcome_is_202_while_the_message_waits_and_200_at_its_end(shop: HttpShop) -> None:
    await pause(shop)
    sent = (await shop.sell()).json()["id"]
    waiting = await ask(shop, sent)
    assert (waiting.status_code, waiting.json()) == (202, {"id": sent, "outcome": "waiting"})
    assert (waiting.headers["location"], waiting.headers["retry-after"]) == (f"/messages/{sent}", "1")
    assert "preference-applied" not in waiting.headers

    await shop.bus.resume(Sold)
    ended = await ask(shop, sent, prefer="wait=20")
    assert (ended.status_code, ended.headers["preference-applied"]) == (200, "wait=20")
    assert ended.json()["outcome"] == "handled"
    assert ended.json()["deliveries"][0]["address"] == "shop"
    assert "location" not in ended.headers
    assert (await ask(shop, sent)).json() == ended.json()


async def test_preference_to_wait_ends_with_202_when_the_message_waits_longer(shop: HttpShop) -> None:
    await pause(shop)
    sent = (await shop.sell()).json()["id"]
    answer = await ask(shop, sent, prefer="respond-async, WAIT = 1; x")
    assert (answer.status_code, answer.headers["preference-applied"]) == (202, "wait=1")


async def test_preference_to_wait_is_capped(shop: HttpShop) -> None:
    sent = (await shop.sell()).json()["id"]
    answer = await ask(shop, sent, prefer="wait=999999999")
    assert (answer.status_code, answer.headers["preference-applied"]) == (200, "wait=60")


async def test_question_is_answered_at_once_when_many_others_wait(
    shop: HttpShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, "_MOST_WAITING", 1)
    await pause(shop)
    sent = (await shop.sell()).json()["id"]
    waits = asyncio.create_task(ask(shop, sent, prefer="wait=20"))
    await eventually(lambda: shop.bus.runtime.watch._watched, what="the first question")
    answer = await ask(shop, sent, prefer="wait=20")
    assert (answer.status_code, "preference-applied" in answer.headers) == (202, False)
    await shop.bus.resume(Sold)
    assert (await waits).status_code == 200


@pytest.mark.parametrize("prefer", ["wait=-1", "wait=ten", "wait=", "wait=1e3", "wait=9999999999", "wait=\u0661", ","])
async def test_preference_is_ignored_when_malformed(shop: HttpShop, prefer: str) -> None:
    await pause(shop)
    sent = (await shop.sell()).json()["id"]
    url = f"{shop.url}/messages/{sent}"
    answer = await shop.client.get(url, headers=[(b"prefer", prefer.encode())], timeout=BOUND)
    assert answer.status_code == 202
    assert "preference-applied" not in answer.headers


async def test_expired_message_is_told_as_such(shop: HttpShop) -> None:
    await pause(shop)
    sent = (await shop.sell(durable_time_to_live="1")).json()["id"]
    answer = await ask(shop, sent, prefer="wait=20")
    assert (answer.status_code, answer.json()["outcome"]) == (200, "expired")


@pytest.mark.parametrize("unknown", [new_id(), uuid4(), "00000000-0000-0000-0000-000000000000"])
async def test_unknown_id_gets_404(shop: HttpShop, unknown: object) -> None:
    for prefer in ("", "wait=20"):
        answer = await ask(shop, unknown, prefer=prefer)
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")


@pytest.mark.parametrize("wrong", ["web.sold", "17", "x" * 5_000, "0b54d5f5-8d4b-4e57-a43a-0b4ddf1b9f0"])
async def test_text_without_the_form_of_an_id_gets_405(shop: HttpShop, wrong: str) -> None:
    """It names a type of message: there messages are posted."""
    answer = await ask(shop, wrong)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def test_body_of_a_question_gets_413(shop: HttpShop) -> None:
    answer = await shop.client.request("GET", f"{shop.url}/messages/{new_id()}", content=b"x")
    assert answer.status_code == 413


async def test_answers_match_the_description(shop: HttpShop) -> None:
    document = (await shop.client.get(shop.url + "/openapi.json")).json()
    responses = document["paths"]["/messages/{id}"]["get"]["responses"]
    await pause(shop)
    sent = (await shop.sell()).json()["id"]
    waiting = await ask(shop, sent)
    await shop.bus.resume(Sold)
    for answer in (waiting, await ask(shop, sent, prefer="wait=20")):
        schema = responses[str(answer.status_code)]["content"]["application/json"]["schema"]
        OAS31Validator({**schema, "components": document["components"]}).validate(answer.json())
    assert "404" in responses


async def test_outcome_is_told_to_curl(shop: HttpShop) -> None:
    sent = (await shop.sell()).json()["id"]
    command = ["curl", "-sS", "-i", "-H", "Prefer: wait=20", f"{shop.url}/messages/{sent}"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=BOUND)
    assert done.stdout.startswith("HTTP/1.1 200 ")
    assert '"outcome":"handled"' in done.stdout


class TestStrangers:
    async def test_client_without_the_secret_gets_401(self, database: Tables) -> None:
        async with open_shop(database, shared_secret=SECRET) as shop:
            sent = (await shop.post(SOLD, '{"number": 1}', BEARER)).json()["id"]
            assert (await ask(shop, sent)).status_code == 401
            assert (await ask(shop, sent, authorization=f"Bearer {OTHER_SECRET}")).status_code == 401
            assert (await ask(shop, sent, prefer="wait=20", **BEARER)).status_code == 200

    async def test_mounted_app_without_a_secret_refuses_questions(self, database: Tables) -> None:
        database.clear()
        bus = Bus("shop", database.url)
        bus.handles(Sold)(_nothing)
        async with bus, httpx.AsyncClient(transport=httpx.ASGITransport(bus.asgi()), base_url="http://shop") as client:
            assert (await client.get(f"/messages/{new_id()}")).status_code == 401

    async def test_peer_sees_its_own_messages_alone(self, database: Tables) -> None:
        peers: dict[str, Any] = {"orders": SECRET, "billing": OTHER_SECRET}
        async with open_shop(database, peers=peers) as shop:
            await pause(shop)
            sent = (await shop.post(SOLD, '{"number": 1}', BEARER)).json()["id"]
            other = {"authorization": f"Bearer {OTHER_SECRET}"}
            assert [(await ask(shop, sent, **each)).status_code for each in (BEARER, other)] == [202, 404]
            await shop.bus.resume(Sold)
            own = await ask(shop, sent, prefer="wait=20", **BEARER)
            assert [each["address"] for each in own.json()["deliveries"]] == ["shop<-orders"]
            assert (await ask(shop, sent, prefer="wait=20", **other)).status_code == 404


async def test_question_gets_503_when_the_database_is_away(database: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_ONE_LOOK", timedelta(hours=1))  # the outage is told, not waited for
    database.clear()
    async with ChaosProxy(address_of(database.url)) as proxy:
        port = proxy.uri.rpartition(":")[2]
        behind = f"postgresql://{database.url.partition('://')[2].partition('@')[0]}@127.0.0.1:{port}"
        behind += f"/{database.one('SELECT current_database()')}"
        bus = Bus("shop", behind, mode="send-only")
        async with (
            bus,
            httpx.AsyncClient(
                transport=httpx.ASGITransport(bus.asgi(allow_local=True), client=("127.0.0.1", 1)),
                base_url="http://127.0.0.1",
                timeout=BOUND,
            ) as client,
        ):
            assert (await client.get(f"/messages/{new_id()}")).status_code == 404
            proxy.refuse()
            for prefer in ("", "wait=2"):
                async with asyncio.timeout(BOUND):
                    answer = await client.get(f"/messages/{new_id()}", headers={"prefer": prefer})
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            proxy.restore()


async def _nothing(sold: Sold) -> None: ...
