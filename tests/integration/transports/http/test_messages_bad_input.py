"""Requests of strangers: each is refused with a reason, nothing of it is stored, and the next good one is handled."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from durable.embedded import Embedded
from durable.testing import eventually
from tests.support.http_shop import COUNTED, SOLD, STRUCTURED, HttpShop, event, event_headers, open_shop
from tests.support.tables import Tables, shared_tables

EVENTS = "/messages"
GOOD = b'{"number": 1}'
DEEP = b"[" * 100_000 + b"]" * 100_000
SURROGATE = b'"\\ud800"'


# One service for all of them, and so one loop: what a request leaves behind would be in the way of the next.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shop(database: Tables) -> AsyncIterator[HttpShop]:
    async with open_shop(database) as shop:
        yield shop


async def refused(shop: HttpShop, status: int, reason: str, path: str, body: bytes, headers: Any = None) -> None:
    """This request gets this answer, and leaves nothing behind."""
    async with nothing_stored(shop):
        response = await shop.post(path, body, headers)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert set(response.json()) == {"type", "title", "status", "detail"}
    assert reason in response.json()["detail"]
    assert len(response.content) < 5_000


@asynccontextmanager
async def nothing_stored(shop: HttpShop) -> AsyncIterator[None]:
    """What is done in this block leaves nothing in the database, and a good message is handled afterwards."""
    stored = [shop.tables.count("received_ids"), shop.tables.count("dead_letters")]
    yield
    assert [shop.tables.count("received_ids"), shop.tables.count("dead_letters")] == stored
    handled = len(shop.seen)
    assert (await shop.sell()).status_code == 202
    await eventually(lambda: len(shop.seen) == handled + 1)


def note(raw: bytes) -> bytes:
    return b'{"number": 1, "note": %s}' % raw


def told(data: bytes = GOOD, **attributes: Any) -> bytes:
    """An event in JSON with this data; None leaves an attribute out."""
    given = {name: value for name, value in event(**attributes).items() if name != "data" and value is not None}
    return json.dumps(given).encode()[:-1] + b', "data": %s}' % data


def aged(age: timedelta) -> str:
    """A UUIDv7 that was made so long ago."""
    made_ms = int((datetime.now(UTC) - age).timestamp() * 1000)
    return str(uuid.UUID(int=(made_ms << 80) | (7 << 76) | (2 << 62) | 1))


class TestABody:
    @pytest.mark.parametrize("path", [SOLD, COUNTED])
    @pytest.mark.parametrize(
        "body",
        [
            pytest.param(b"", id="nothing"),
            pytest.param(b"{", id="half"),
            pytest.param(GOOD + b"{}", id="more after it"),
            pytest.param(b"[]", id="a list"),
            pytest.param(b"{}", id="no field"),
            pytest.param(b'{"number": "one"}', id="a field of another type"),
            pytest.param(b'{"number": NaN}', id="NaN"),
            pytest.param(note(b"NaN"), id="NaN where anything goes"),
            pytest.param(note(b"-Infinity"), id="infinity where anything goes"),
            pytest.param(note(SURROGATE), id="lone surrogate"),
            pytest.param(note(b'"\xff"'), id="invalid UTF-8"),
            pytest.param(note(DEEP), id="100k nesting"),
            pytest.param(b'{"number": %s}' % (b"1" * 5_000), id="5,000 digits"),
            pytest.param(note(b"1" * 5_000), id="5,000 digits where anything goes"),
        ],
    )
    async def test_undecodable_body_is_refused(self, shop: HttpShop, path: str, body: bytes) -> None:
        await refused(shop, 422, "the body is no", path, body)

    async def test_body_with_a_hundred_thousand_faults_is_answered_briefly(self, shop: HttpShop) -> None:
        body = b'{"number": 1, "numbers": [%s]}' % b",".join([b'"a"'] * 100_000)

        await refused(shop, 422, "the body is no Counted: 100000 validation errors", COUNTED, body)

    async def test_body_over_the_limit_is_refused(self, shop: HttpShop) -> None:
        await refused(shop, 413, "at most 1048576 bytes", SOLD, note(b'"%s"' % (b"x" * (1 << 20))))

    async def test_body_over_the_limit_inside_an_event_is_refused(self, shop: HttpShop) -> None:
        await refused(shop, 413, "at most 1048576 bytes", EVENTS, told(note(b'"%s"' % (b"x" * (1 << 20)))), STRUCTURED)


class TestAType:
    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("web.unknown-to-all", "no message type 'web.unknown-to-all' is handled here"),
            ("web.solt", "no message type 'web.solt' is handled here; did you mean 'web.sold'?"),
            ("web.known-but-not-handled", "is handled here"),
            ("os.system", "no message type 'os.system' is handled here"),
            ("antigravity", "is handled here"),
            ("WEB.SOLD", "is handled here"),
            ("web.sold%00", "is handled here"),
            ("%F0%9F%92%A5%0d%0a", "is handled here"),
            ("x" * 6_000, "is handled here"),
        ],
        ids=lambda value: value[:30],
    )
    async def test_unhandled_type_is_refused(self, shop: HttpShop, name: str, reason: str) -> None:
        await refused(shop, 404, reason, f"/messages/{name}", GOOD)
        assert "antigravity" not in sys.modules

    @pytest.mark.parametrize("path", ["/messages/", "/messages/web.sold/", "/messages/web/sold", "/messages/..", "/"])
    async def test_path_without_a_type_is_refused(self, shop: HttpShop, path: str) -> None:
        await refused(shop, 404, "Not Found", path, GOOD)

    @pytest.mark.parametrize("name", ["os.system", "web.solt", "antigravity", "x" * 6_000], ids=lambda name: name[:30])
    async def test_event_of_an_unhandled_type_is_refused(self, shop: HttpShop, name: str) -> None:
        await refused(shop, 422, "is handled here", EVENTS, told(type=name), STRUCTURED)
        assert "antigravity" not in sys.modules


class TestAContentType:
    @pytest.mark.parametrize("path", [SOLD, EVENTS])
    @pytest.mark.parametrize(
        "kind",
        [
            "text/plain",
            "application/x-www-form-urlencoded",
            "application/json; charset=iso-8859-1",
            "application/jsonp",
            "application/vnd.durable.batch+msgpack",
            "application/cloudevents+avro",
            "",
        ],
    )
    async def test_unknown_content_type_is_refused(self, shop: HttpShop, path: str, kind: str) -> None:
        await refused(shop, 415, "Content-Type must be application/json", path, GOOD, {"content-type": kind})

    async def test_batch_of_events_is_refused(self, shop: HttpShop) -> None:
        batch = {"content-type": "application/cloudevents-batch+json; charset=utf-8"}
        await refused(shop, 415, "send each event in a request of its own", EVENTS, b"[%s]" % told(), batch)

    async def test_structured_event_posted_as_a_message_is_refused(self, shop: HttpShop) -> None:
        await refused(shop, 415, "Content-Type must be application/json", SOLD, told(), STRUCTURED)

    async def test_event_with_data_other_than_json_is_refused(self, shop: HttpShop) -> None:
        await refused(
            shop, 415, "must be application/json", EVENTS, told(b'"<a/>"', datacontenttype="text/xml"), STRUCTURED
        )

    async def test_compressed_body_is_refused(self, shop: HttpShop) -> None:
        await refused(shop, 415, "without Content-Encoding", SOLD, GOOD, {"content-encoding": "gzip"})


class TestAHeader:
    @pytest.mark.parametrize(
        ("header", "reason"),
        [
            ({"idempotency-key": ""}, "Idempotency-Key must be one text"),
            ({"idempotency-key": "k" * 201}, "Idempotency-Key must be one text"),
            ({"idempotency-key": "k" * 12_000}, "Idempotency-Key must be one text"),
            ({"idempotency-key": '"unfinished'}, "Idempotency-Key must be one text"),
            ({"idempotency-key": "café".encode()}, "Idempotency-Key must be one text"),
            ({"durable-deliver-by": "2030-01-31T12:00:00"}, "Expected `datetime` with a timezone"),
            ({"durable-execute-at": "2030-01-31T12:00:00"}, "Expected `datetime` with a timezone"),
            ({"durable-deliver-by": "tomorrow"}, "durable-deliver-by"),
            ({"durable-deliver-by": "2030-02-30T12:00:00Z"}, "durable-deliver-by"),
            ({"durable-correlation-id": "17"}, "durable-correlation-id"),
            ({"durable-correlation-id": "../../etc/passwd"}, "durable-correlation-id"),
            ({"durable-partition-key": ""}, "durable-partition-key"),
            ({"durable-partition-key": b"\xff"}, "'durable-partition-key' is not in UTF-8"),
            ({"durable-header-note": b"\xed\xa0\x80"}, "'durable-header-note' is not in UTF-8"),
            ({"durable-delivery-by": "2030-01-31T12:00:00Z"}, "did you mean 'durable-deliver-by'?"),
            ({"durable-owner-id": "7"}, "unknown header: 'durable-owner-id'"),
            ({"ce-specversion": "1.0"}, "post it to /messages"),
        ],
        ids=lambda value: str(value)[:60],
    )
    async def test_malformed_header_is_refused(self, shop: HttpShop, header: dict[str, Any], reason: str) -> None:
        await refused(shop, 400, reason, SOLD, GOOD, header)

    @pytest.mark.parametrize(
        ("header", "reason"),
        [
            ({"durable-partition-key": "k" * 1_001}, "partition_key is longer than 1000 bytes in UTF-8"),
            ({"durable-source": "s" * 1_001}, "source is longer than 1000 bytes in UTF-8"),
            ({"durable-header-note": "x" * 9_000}, "the headers have more than max_header_bytes (8192)"),
            ({f"durable-header-{number}": "" for number in range(101)}, "101 headers, more than max_headers (100)"),
            ({"durable-deliver-by": "0001-01-01T00:00:00+14:00"}, "deliver_by lies outside the calendar"),
            ({"durable-execute-at": "9999-12-31T23:59:59-14:00"}, "execution_time lies outside the calendar"),
            ({"durable-execute-at": "2900-01-01T00:00:00Z"}, "put off for longer than duplicates are remembered"),
            ({"idempotency-key": aged(timedelta(days=8))}, "it is older than duplicates are remembered"),
            ({"idempotency-key": aged(timedelta(days=-2))}, "the time in its id is more than clock_lead"),
            ({"idempotency-key": str(uuid.UUID(int=0))}, "is no id of a message"),
            ({"idempotency-key": str(uuid.UUID(int=2**128 - 1))}, "is no id of a message"),
        ],
        ids=[
            *("key", "source", "header", "headers", "deliver-by", "execute-at", "far off", "old id", "future id"),
            *("nil", "max"),
        ],
    )
    async def test_header_unfit_for_an_envelope_is_refused(
        self, shop: HttpShop, header: dict[str, Any], reason: str
    ) -> None:
        await refused(shop, 422, reason, SOLD, GOOD, header)

    @pytest.mark.parametrize("name", ["idempotency-key", "durable-source", "durable-header-a"])
    async def test_repeated_header_is_refused(self, shop: HttpShop, name: str) -> None:
        twice = [(name, "a"), (name, "a"), ("content-type", "application/json")]
        async with nothing_stored(shop):
            response = await shop.client.post(shop.url + SOLD, content=GOOD, headers=twice)

        assert response.status_code == 400, response.text


class TestAnEvent:
    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            pytest.param(b"", "no CloudEvent in JSON", id="nothing"),
            pytest.param(GOOD, "lacks the attribute 'specversion'", id="a plain message"),
            pytest.param(b"[%s]" % told(), "no CloudEvent in JSON", id="a list"),
            pytest.param(told(b"NaN"), "no CloudEvent in JSON", id="NaN"),
            pytest.param(told(note(SURROGATE)), "no CloudEvent in JSON", id="lone surrogate"),
            pytest.param(told(DEEP), "no CloudEvent in JSON", id="100k nesting"),
            pytest.param(told(type=None), "lacks the attribute 'type'", id="no type"),
            pytest.param(told(id=""), "lacks the attribute 'id'", id="an empty id"),
            pytest.param(told(specversion="0.3"), "only '1.0' is understood", id="an old version"),
            pytest.param(told(time="2030-01-31T12:00:00"), "time is no time as in RFC 3339", id="a naive time"),
            pytest.param(told(ownerId="7"), "named 'ownerId'", id="a name that is none"),
            pytest.param(told(data_base64="e30="), "data and data_base64", id="data twice"),
            pytest.param(told(attempt=1.5), "'attempt' is no text", id="a number with a fraction"),
        ],
    )
    async def test_malformed_event_is_refused(self, shop: HttpShop, body: bytes, reason: str) -> None:
        await refused(shop, 400, reason, EVENTS, body, STRUCTURED)

    @pytest.mark.parametrize(
        ("headers", "reason"),
        [
            pytest.param({}, "post it to /messages/{type}", id="a plain message"),
            pytest.param(event_headers(specversion="2"), "only '1.0' is understood", id="a later version"),
            pytest.param(event_headers() | {"ce-subject": "%C0%A0"}, "not percent-encoded UTF-8", id="overlong UTF-8"),
            pytest.param(event_headers() | {"ce-time": "now"}, "time is no time", id="no time"),
            pytest.param(event_headers() | {"ce-datacontenttype": "a/b"}, "Content-Type", id="its type twice"),
            pytest.param(event_headers() | {"idempotency-key": "a"}, "not for CloudEvents", id="a key"),
            pytest.param(event_headers() | {"durable-source": "a"}, "not for CloudEvents", id="an option"),
        ],
    )
    async def test_malformed_event_in_binary_mode_is_refused(self, shop: HttpShop, headers: Any, reason: str) -> None:
        await refused(shop, 400, reason, EVENTS, GOOD, headers)

    @pytest.mark.parametrize(
        ("headers", "reason"),
        [
            pytest.param({"ce-subject": "a%0D%0Ab"}, "'ce-subject' has a control character", id="CRLF"),
            pytest.param({"ce-subject": "a%00b"}, "'ce-subject' has a control character", id="NUL"),
            pytest.param({"ce-source": "a%00b"}, "source has a control character", id="NUL in the source"),
            pytest.param({"ce-source": "s" * 1_001}, "source is longer than 1000", id="a long source"),
            pytest.param(
                {"ce-time": "2020-01-01T00:00:00Z"}, "it is older than duplicates are remembered", id="too old"
            ),
            pytest.param({"ce-time": "2100-01-01T00:00:00Z"}, "its sent_at is more than clock_lead", id="too early"),
        ],
    )
    async def test_event_unfit_for_an_envelope_is_refused(self, shop: HttpShop, headers: Any, reason: str) -> None:
        await refused(shop, 422, reason, EVENTS, GOOD, event_headers() | headers)

    async def test_event_with_data_of_another_class_is_refused(self, shop: HttpShop) -> None:
        await refused(shop, 422, "the body is no Sold", EVENTS, told(b'{"number": "one"}'), STRUCTURED)


class TestAMethod:
    @pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"])
    @pytest.mark.parametrize("path", [SOLD, EVENTS])
    async def test_other_method_than_post_is_refused(self, shop: HttpShop, method: str, path: str) -> None:
        async with nothing_stored(shop):
            response = await shop.client.request(method, shop.url + path)

        assert (response.status_code, response.headers["allow"]) == (405, "POST")


HEAD = b"POST %s HTTP/1.1\r\nhost: localhost\r\n"


class TestAConnection:
    @pytest.mark.parametrize(
        ("head", "body"),
        [
            pytest.param(b"durable-partition-key: a\0b", GOOD, id="NUL in a header"),
            pytest.param(b"durable-partition-key: a\rb", GOOD, id="CR in a header"),
            pytest.param(b"durable-partition-key : a", GOOD, id="a space before the colon"),
            pytest.param(b"durable partition key: a", GOOD, id="spaces in a name"),
            pytest.param(b"durable-header-a: " + b"x" * 100_000, GOOD, id="100 kB of a header"),
            pytest.param(b"transfer-encoding: chunked", b"5\r\nhello\r\n0\r\n\r\n", id="two lengths"),
            pytest.param(b"content-length: 5", GOOD, id="another length"),
            pytest.param(b"durable-source: a\r\n durable-owner: b", GOOD, id="a folded header"),
        ],
    )
    async def test_request_breaking_http_is_refused(self, shop: HttpShop, head: bytes, body: bytes) -> None:
        length = b"content-length: %d" % len(GOOD)
        request = HEAD + b"content-type: application/json\r\n%s\r\n%s\r\n\r\n%s"
        async with nothing_stored(shop):
            answer = await shop.raw(request % (SOLD.encode(), length, head, body))

        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 422 ", b"HTTP/1.1 431 ")), answer

    async def test_connection_closed_within_the_body_stores_nothing(self, shop: HttpShop) -> None:
        address = urlsplit(shop.url)
        async with nothing_stored(shop):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % SOLD.encode())
            writer.write(b"content-length: 14\r\n\r\n" + GOOD)
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    async def test_endless_body_is_refused(self, shop: HttpShop) -> None:
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        request = HEAD + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        async with nothing_stored(shop):
            answer = await shop.raw(request % SOLD.encode() + chunk * 17)

        assert answer.startswith(b"HTTP/1.1 413 "), answer
