"""Requests with answers over HTTP, for clients that know nothing of durable."""

from __future__ import annotations

import asyncio
import base64
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import quote
from uuid import UUID

import httpx
import msgspec
import pytest
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from durable import Bus, Context, Reject, message
from durable.embedded import Embedded
from durable.errors import DurableError, Forged, MissingKey
from durable.storage import dead_letters
from durable.storage.dead_letters import LetterRange, Selection
from durable.testing import eventually
from tests.support.tables import Tables, shared_tables

SECRET = "a secret of sixteen letters, or more"
OTHER_SECRET = "another secret of sixteen letters, or more"
JSON = {"content-type": "application/json"}
BOUND = 30  # seconds; no measure


@message("requests.charge")
class Charge(msgspec.Struct):
    cents: int


@message("requests.charged")
class Charged(msgspec.Struct):
    cents: int
    number: int


@message("requests.unexpected")
class Unexpected(msgspec.Struct):
    cents: int = 0


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@dataclass
class Till:
    """A service that charges, and a client of it."""

    bus: Bus
    client: httpx.AsyncClient
    tables: Tables
    charged: list[int] = field(default_factory=list)

    @property
    def url(self) -> str:
        node = self.bus.runtime.node
        assert node is not None
        return node.listeners[0].address

    async def put(
        self, request_id: str, cents: int = 5, kind: str = "requests.charge", **headers: str
    ) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"{self.url}/requests/{request_id}"
        return await self.client.put(url, params={"type": kind}, json={"cents": cents}, headers=named)

    async def result(self, request_id: str, **headers: str) -> httpx.Response:
        return await self.client.get(f"{self.url}/requests/{request_id}/result", headers=headers, timeout=BOUND)

    async def forget(self, request_id: str) -> httpx.Response:
        return await self.client.delete(f"{self.url}/requests/{request_id}")

    async def pause(self) -> None:
        await self.bus.pause(Charge)
        await eventually(lambda: self.bus.statistics().handling["requests.charge"].paused, what="the pause")


@asynccontextmanager
async def open_till(tables: Tables, **settings: Any) -> AsyncIterator[Till]:
    bus = Bus("till", tables.url, poll_interval=timedelta(milliseconds=30), **settings)
    bus.listen("http://127.0.0.1:0")
    bus.expects(Charged)
    async with httpx.AsyncClient() as client:
        till = Till(bus, client, tables)

        @bus.handles(Charge)
        async def charge(charge: Charge, ctx: Context) -> None:
            if charge.cents < 0:
                raise Reject("nothing to charge")
            till.charged.append(charge.cents)
            ctx.reply(Charged(charge.cents, len(till.charged)) if charge.cents else Unexpected())

        async with bus:
            yield till


@pytest.fixture
async def till(database: Tables) -> AsyncIterator[Till]:
    database.clear()
    async with open_till(database) as till:
        yield till


@pytest.mark.parametrize("request_id", ["a%41", "a b", "a?b", "a#b", "100%", "...", "a%2fb", 'a"b', "a+b", "a;b,c=d&e"])
async def test_location_leads_to_the_answer_of_any_id(till: Till, request_id: str) -> None:
    stored = await till.put(quote(request_id, safe=""))
    assert (stored.status_code, stored.json()["id"]) == (201, request_id)
    answer = await till.client.get(f"{till.url}{stored.headers['location']}", headers={"prefer": "wait=10"})
    assert (answer.status_code, answer.json()) == (200, {"cents": 5, "number": 1})


@pytest.mark.parametrize("request_id", ["%2E", "%2E%2E"])
async def test_id_of_dots_is_refused(till: Till, request_id: str) -> None:
    refused = await till.put(request_id)
    assert (refused.status_code, "clients take it for another path" in refused.text) == (400, True)


async def test_repeated_request_is_handled_once_and_answered_as_often_as_asked(till: Till) -> None:
    first = await till.put("order-17")
    assert (first.status_code, first.headers["location"]) == (201, "/requests/order-17/result")
    assert first.json() | {"message": ""} == {"id": "order-17", "type": "requests.charge", "message": ""}
    answers = [await till.result("order-17", prefer="wait=20") for _ in range(3)]
    for answer in answers:
        assert (answer.status_code, answer.json()) == (200, {"cents": 5, "number": 1})
        assert answer.headers["durable-message-type"] == "requests.charged"
        assert (answer.headers["content-type"], answer.headers["cache-control"]) == ("application/json", "no-store")
    again = await till.put("order-17")
    assert (again.status_code, again.json()) == (200, first.json())
    assert (await till.result("order-17")).json() == {"cents": 5, "number": 1}
    assert till.charged == [5]
    outcome = await till.client.get(f"{till.url}/messages/{first.json()['message']}")
    assert outcome.json()["outcome"] == "handled"


async def test_many_at_once_under_one_id_are_one_request(till: Till) -> None:
    stored = await asyncio.gather(*(till.put("rush", 7) for _ in range(20)))
    assert sorted(each.status_code for each in stored) == [200] * 19 + [201]
    assert (await till.result("rush", prefer="wait=20")).json()["cents"] == 7
    assert till.charged == [7]


@pytest.mark.parametrize("changed", [{"cents": 6}, {"durable_partition_key": "k"}])
async def test_other_request_under_one_id_is_a_conflict(till: Till, changed: dict[str, Any]) -> None:
    await till.put("order-18")
    refused = await till.put("order-18", **changed)
    assert refused.status_code == 409
    assert "this id of a request was used with another body" in refused.json()["detail"]
    assert (await till.result("order-18", prefer="wait=20")).json()["cents"] == 5


async def test_result_is_202_until_there_is_an_answer(till: Till) -> None:
    await till.pause()
    await till.put("slow")
    waiting = await till.result("slow")
    assert (waiting.status_code, waiting.json()) == (202, {"id": "slow", "outcome": "waiting"})
    assert (waiting.headers["location"], waiting.headers["retry-after"]) == ("/requests/slow/result", "1")
    held = asyncio.create_task(till.result("slow", prefer="wait=20"))
    await asyncio.sleep(0.1)
    assert not held.done()
    await till.bus.resume(Charge)
    answered = await held
    assert (answered.status_code, answered.headers["preference-applied"]) == (200, "wait=20")


async def test_result_of_a_dead_letter_is_a_conflict_with_its_reason(till: Till) -> None:
    await till.put("bad", -1)
    refused = await till.result("bad", prefer="wait=20")
    assert refused.status_code == 409
    assert "dead-lettered: " in refused.json()["detail"]
    assert "nothing to charge" in refused.json()["detail"]


async def test_result_of_an_expired_request_is_gone(till: Till) -> None:
    await till.pause()
    await till.put("late", durable_time_to_live="0.05")
    refused = await till.result("late", prefer="wait=20")
    assert (refused.status_code, "expired" in refused.json()["detail"]) == (410, True)


async def test_answer_of_an_unexpected_class_makes_the_request_a_dead_letter(till: Till) -> None:
    await till.put("odd", 0)
    refused = await till.result("odd", prefer="wait=20")
    assert refused.status_code == 409
    assert "requests.unexpected is not expected here" in refused.json()["detail"]


async def test_forgotten_answer_is_gone_and_the_request_is_not_handled_again(till: Till) -> None:
    await till.put("secret")
    assert (await till.result("secret", prefer="wait=20")).status_code == 200
    assert [(await till.forget("secret")).status_code for _ in range(2)] == [204, 204]
    assert (await till.result("secret")).status_code == 410
    assert (await till.put("secret")).status_code == 200
    assert (await till.result("secret", prefer="wait=1")).status_code == 410
    assert till.charged == [5]


@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_new_request_under_a_forgotten_id_has_its_own_answer(till: Till, is_forgotten: bool) -> None:
    await till.put("weekly", 5)
    assert (await till.result("weekly", prefer="wait=20")).json() == {"cents": 5, "number": 1}
    if is_forgotten:
        assert (await till.forget("weekly")).status_code == 204
    await till.tables.change("DELETE FROM durable.undated_ids")
    assert (await till.put("weekly", 0, durable_time_to_live="x")).status_code == 400
    assert (await till.result("weekly")).status_code == (410 if is_forgotten else 200)
    await till.pause()
    assert (await till.put("weekly", 6)).status_code == 201
    assert (await till.result("weekly")).status_code == 202
    await till.bus.resume(Charge)
    assert (await till.result("weekly", prefer="wait=20")).json() == {"cents": 6, "number": 2}
    assert (await till.put("weekly", 6)).status_code == 200
    assert (await till.result("weekly")).json() == {"cents": 6, "number": 2}


async def test_new_request_after_a_discarded_one_has_an_answer(till: Till) -> None:
    await till.put("mended", -1)
    assert (await till.result("mended", prefer="wait=20")).status_code == 409
    assert (await till.forget("mended")).status_code == 204
    await till.bus.runtime.database.transaction(
        dead_letters.discard, Selection(), LetterRange(0, 2**62, 100), actor="ada", reason="a test"
    )
    assert (await till.put("mended", 6)).status_code == 201
    assert (await till.result("mended", prefer="wait=20")).json() == {"cents": 6, "number": 1}


async def test_late_answer_is_not_kept_when_its_request_was_forgotten(till: Till) -> None:
    await till.pause()
    await till.put("hasty")
    assert (await till.forget("hasty")).status_code == 204
    await till.bus.resume(Charge)
    await eventually(lambda: till.charged == [5])
    assert (await till.result("hasty", prefer="wait=1")).status_code == 410


async def test_unknown_requests_and_unfit_ones_are_refused(till: Till) -> None:
    statuses = {
        "result": (await till.result("never")).status_code,
        "forget": (await till.forget("never")).status_code,
        "no type": (await till.put("x", kind="")).status_code,
        "no handler": (await till.put("x", kind="requests.unknown")).status_code,
        "no id": (await till.put("%7F")).status_code,
        "long id": (await till.put("x" * 2_000)).status_code,
        "unfit": (
            await till.client.put(f"{till.url}/requests/x?type=requests.charge", json={"cents": "a"})
        ).status_code,
        "no JSON": (await till.client.put(f"{till.url}/requests/x?type=requests.charge", content=b"{}")).status_code,
        "post": (await till.client.post(f"{till.url}/requests/x?type=requests.charge", json={})).status_code,
    }
    assert statuses == {
        "result": 404,
        "forget": 404,
        "no type": 400,
        "no handler": 404,
        "no id": 400,
        "long id": 400,
        "unfit": 422,
        "no JSON": 415,
        "post": 405,
    }
    assert till.charged == []


async def test_answer_is_encrypted_in_the_table_and_readable_for_its_client(database: Tables) -> None:
    database.clear()
    keys = {"first": base64.b64encode(bytes(range(32))).decode()}
    async with open_till(database, encryption_keys=keys, encrypt_all=True) as till:
        await till.put("sealed", 1234)
        assert (await till.result("sealed", prefer="wait=20")).json() == {"cents": 1234, "number": 1}
        [stored] = database.rows("SELECT body FROM durable.answers")
        assert b"1234" not in bytes(stored)


FIRST, OTHER = (base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2))


class Unreadable(NamedTuple):
    """An encrypted answer that cannot be opened: the keys of now, its body, and what is said of it."""

    keys: dict[str, str]
    body: str
    status: int
    error: type[DurableError]
    told: str


UNREADABLE = {
    "its key is gone": Unreadable({"second": OTHER}, "body", 503, MissingKey, "no encryption key 'first' here"),
    "no key at all": Unreadable({}, "body", 503, MissingKey, "no encryption key 'first' here"),
    "its key has other bytes": Unreadable({"first": OTHER}, "body", 500, Forged, "or this key has other bytes"),
    "a byte was changed": Unreadable(
        {"first": FIRST}, "set_byte(body, length(body) - 1, get_byte(body, length(body) - 1) # 1)", 500, Forged, "chang"
    ),
    "it was broken off": Unreadable({"first": FIRST}, "substring(body for 20)", 500, Forged, "is broken off"),
}


@pytest.mark.parametrize("unreadable", UNREADABLE.values(), ids=UNREADABLE)
async def test_unreadable_answer_is_told_as_such_and_forgotten_unopened(
    database: Tables, unreadable: Unreadable, caplog: pytest.LogCaptureFixture
) -> None:
    database.clear()
    async with open_till(database, encryption_keys={"first": FIRST}, encrypt_all=True) as till:
        request = UUID((await till.put("sealed")).json()["message"])
        assert (await till.result("sealed", prefer="wait=20")).status_code == 200
    database.execute(f"UPDATE durable.answers SET body = {unreadable.body}")
    async with open_till(database, encryption_keys=unreadable.keys) as till:
        refused = await till.result("sealed")
        assert (refused.status_code, refused.headers["content-type"]) == (unreadable.status, "application/problem+json")
        assert unreadable.told in refused.json()["detail"]
        assert ("retry-after" in refused.headers) is (unreadable.status == 503)
        with pytest.raises(unreadable.error, match=unreadable.told):
            await till.bus.wait_for(request, Charged)
        assert (await till.forget("sealed")).status_code == 204
        assert (await till.result("sealed")).status_code == 410
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def test_answer_is_told_when_its_key_is_back(database: Tables) -> None:
    database.clear()
    async with open_till(database, encryption_keys={"first": FIRST}, encrypt_all=True) as till:
        await till.put("sealed")
        assert (await till.result("sealed", prefer="wait=20")).status_code == 200
    statuses = []
    for keys in ({"second": OTHER}, {"second": OTHER, "first": FIRST}):
        async with open_till(database, encryption_keys=keys) as till:
            statuses.append((await till.result("sealed")).status_code)
    assert statuses == [503, 200]


async def test_clients_with_names_have_ids_of_their_own(database: Tables) -> None:
    database.clear()
    async with open_till(database, peers={"one": SECRET, "two": OTHER_SECRET}) as till:
        one, two = ({"authorization": f"Bearer {each}"} for each in (SECRET, OTHER_SECRET))
        assert (await till.put("order-1", 1, **one)).status_code == 201
        assert (await till.result("order-1", prefer="wait=20", **one)).json()["cents"] == 1
        assert (await till.result("order-1", **two)).status_code == 404
        assert (await till.put("order-1", 2, **two)).status_code == 201
        assert (await till.result("order-1", prefer="wait=20", **two)).json()["cents"] == 2
        assert (await till.result("order-1", **one)).json()["cents"] == 1
        assert (await till.put("order-1", 1)).status_code == 401


async def test_answer_of_a_stranger_takes_no_place(till: Till) -> None:
    await till.pause()
    message_id = (await till.put("order-19")).json()["message"]
    forged = {"durable-header-in-reply-to": message_id}
    url = f"{till.url}/messages/requests.charged"
    assert (await till.client.post(url, json={"cents": 0, "number": 0}, headers=forged)).status_code == 202
    await eventually(lambda: till.tables.count("answers") == 1, what="the forged answer")
    assert (await till.result("order-19")).status_code == 202
    await till.bus.resume(Charge)
    assert (await till.result("order-19", prefer="wait=20")).json()["cents"] == 5


async def test_description_matches_the_answers(till: Till) -> None:
    document = (await till.client.get(f"{till.url}/openapi.json")).json()
    OpenAPIV31SpecValidator(document).validate()
    await till.pause()
    put, result = document["paths"]["/requests/{id}"]["put"], document["paths"]["/requests/{id}/result"]["get"]
    seen = [(put, await till.put("told")), (put, await till.put("told")), (put, await till.put("told", 9))]
    seen += [(result, await till.result("told")), (result, await till.result("never"))]
    assert [response.status_code for _, response in seen] == [201, 200, 409, 202, 404]
    for operation, response in seen:
        described = operation["responses"][str(response.status_code)]
        if "$ref" in described:
            described = document["components"]["responses"][str(response.status_code)]
        [(content_type, content)] = described["content"].items()
        assert response.headers["content-type"] == content_type
        OAS31Validator({**content["schema"], "components": document["components"]}).validate(response.json())
    assert put["parameters"][1]["schema"]["enum"] == ["requests.charge", "requests.charged"]


async def test_curl_gets_an_answer(till: Till) -> None:
    def curl(*arguments: str) -> str:
        done = subprocess.run(["curl", "-sS", *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    url = f"{till.url}/requests/from-curl"
    put = ["-X", "PUT", f"{url}?type=requests.charge", "-H", "Content-Type: application/json", "-d", '{"cents": 3}']
    stored = msgspec.json.decode(await asyncio.to_thread(curl, *put))
    assert (stored["id"], stored["type"]) == ("from-curl", "requests.charge")
    answer = await asyncio.to_thread(curl, f"{url}/result", "-H", "Prefer: wait=20")
    assert msgspec.json.decode(answer) == {"cents": 3, "number": 1}
