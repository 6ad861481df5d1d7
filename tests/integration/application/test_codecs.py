"""Messages of each codec on their whole way: sent, stored, over the network, handled; and into the HTTP endpoints."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import pytest
from pydantic import BaseModel

from durable import Bus, Envelope, InvalidSetting, JsonCodec, message, register_codec, upcaster
from durable.embedded.ports import free_port
from durable.messages import codec
from durable.messages.cloudevents import STRUCTURED
from durable.messages.codecs.msgpack import MSGPACK
from durable.testing import eventually
from durable.transports.http.openapi import describe
from tests.failure.workbench import QUICK
from tests.support.tables import Tables

VENDOR = "application/vnd.acme.order+json"
LINES = "text/x-lines"


@message("codecs.json")
class Plain(msgspec.Struct):
    number: int


@message("codecs.msgpack", content_type=MSGPACK)
class Packed(BaseModel):
    number: int
    picture: bytes = bytes(range(256))


@message("codecs.event", content_type=STRUCTURED)
class Event(msgspec.Struct):
    number: int


@message("codecs.vendor", content_type=VENDOR)
class Vendor(msgspec.Struct):
    number: int


@message("codecs.lines", content_type=LINES)
class Lines:
    """A class that only its own codec understands."""

    def __init__(self, *lines: str) -> None:
        self.lines = lines

    @property
    def number(self) -> int:
        return len(self.lines)


class LinesCodec:
    content_type = LINES

    def encode(self, message: object, envelope: Envelope) -> bytes:
        assert isinstance(message, Lines)
        return "\n".join(message.lines).encode()

    def decode(self, body: bytes, cls: type[Lines]) -> Lines:
        return cls(*body.decode().splitlines())


@message("codecs.placed")
class PlacedV1(msgspec.Struct):
    total: str


@message("codecs.placed", version=2)
class Placed(msgspec.Struct):
    number: int


@upcaster(PlacedV1, to=Placed)
def to_number(old: PlacedV1) -> Placed:
    return Placed(int(old.total))


CLASSES: list[type[Any]] = [Plain, Packed, Event, Vendor, Lines, Placed]


class Shop:
    """Receives over TCP and HTTP."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.handled: list[Any] = []
        self.bus = Bus("shop", tables.url, **QUICK)
        self.tcp = f"tcp://127.0.0.1:{free_port()}"
        self.http = f"http://127.0.0.1:{free_port()}"
        self.bus.listen(self.tcp)
        self.bus.listen(self.http)
        for cls in CLASSES:
            self.bus.handles(cls)(self._handler(cls))

    def _handler(self, cls: type) -> Callable[..., Any]:
        async def handle(arrived: Any) -> None:
            self.handled.append(arrived)

        handle.__annotations__["arrived"] = cls
        return handle

    async def post(self, path: str, body: bytes, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with httpx.AsyncClient() as client:
            return await client.post(f"{self.http}{path}", content=body, headers=named)


@pytest.fixture
async def shop(shared: Tables, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shop]:
    monkeypatch.setattr(codec, "_codecs", dict(codec._codecs))
    register_codec(JsonCodec(VENDOR))
    register_codec(LinesCodec())
    shared.clear()
    shop = Shop(shared)
    async with shop.bus:
        yield shop


async def test_message_of_each_codec_arrives_unchanged(shop: Shop, make_database: Callable[[str], str]) -> None:
    sender = Bus("orders", make_database("orders"), **QUICK)
    async with sender:
        async with sender.unit_of_work() as uow:
            for each in (Plain(1), Packed(number=2), Event(3), Vendor(4), Lines("a", "b", "c", "d", "e")):
                uow.send(each, to=shop.tcp)
        await eventually(lambda: sorted(each.number for each in shop.handled) == [1, 2, 3, 4, 5])
    [packed] = [each for each in shop.handled if isinstance(each, Packed)]
    assert packed.picture == bytes(range(256))


async def test_message_of_each_codec_is_stored_under_its_own_content_type(shop: Shop) -> None:
    await shop.bus.pause(Event)
    await eventually(
        lambda: (
            shop.bus.runtime.node is not None and shop.bus.runtime.node.agents.handlers["codecs.event"].circuit.is_open
        )
    )
    async with shop.bus.unit_of_work() as uow:
        sent = uow.send(Event(3), key="k")
    [(content_type, body)] = shop.tables.rows("SELECT content_type, body FROM durable.incoming_envelopes")
    assert content_type == STRUCTURED
    event = json.loads(body)
    assert (event["id"], event["source"], event["type"]) == (str(sent), "shop", "codecs.event")
    assert (event["data"], event["partitionkey"]) == ({"number": 3}, "k")


async def test_unknown_content_type_is_a_dead_letter_naming_the_known_ones(shop: Shop) -> None:
    async with shop.bus.unit_of_work() as uow:
        uow.send(Lines("a"))
        codec._codecs.pop(LINES)
        await uow.session.flush()
    [(kind, _, reason, _)] = await eventually(shop.tables.dead_letters)
    assert kind == "codecs.lines"
    assert (
        reason
        == f"content type '{LINES}' is not understood; known: application/json, {MSGPACK}, {STRUCTURED}, {VENDOR}"
    )


async def test_node_with_a_message_class_without_a_codec_refuses_to_start(shared: Tables) -> None:
    bus = Bus("shop", shared.url)
    bus.route(Lines, to="tcp://127.0.0.1:1")
    with pytest.raises(InvalidSetting, match=rf"no codec is registered for '{LINES}'.*register_codec"):
        async with bus:
            pass


class TestHttp:
    async def test_message_is_accepted_in_every_content_type_with_a_codec(self, shop: Shop) -> None:
        bodies = {
            MSGPACK: (b"\x81\xa6number\x01", "/messages/codecs.json"),
            "application/json": (b'{"number": 2, "picture": "eA=="}', "/messages/codecs.msgpack"),
            VENDOR: (b'{"number": 3}', "/messages/codecs.json"),
            LINES: (b"a\nb\nc\nd", "/messages/codecs.lines"),
        }
        for content_type, (body, path) in bodies.items():
            answer = await shop.post(path, body, content_type=content_type)
            assert (content_type, answer.status_code, answer.text) == (content_type, 202, answer.text)
        await eventually(lambda: sorted(each.number for each in shop.handled) == [1, 2, 3, 4])

    @pytest.mark.parametrize(
        ("content_type", "body", "status"),
        [
            ("application/x-pickle", b"", 415),
            (STRUCTURED, b"{}", 415),
            (MSGPACK, b"\x81\xa6number", 422),
            (MSGPACK, b'{"number": 1}', 422),
            (VENDOR, b"\x81\xa6number\x01", 422),
            (f"{MSGPACK}; charset=latin-1", b"\x81\xa6number\x01", 415),
        ],
    )
    async def test_undecodable_message_is_refused(
        self, shop: Shop, content_type: str, body: bytes, status: int
    ) -> None:
        assert (await shop.post("/messages/codecs.json", body, content_type=content_type)).status_code == status
        assert shop.tables.count("incoming_envelopes") == 0

    async def test_the_data_of_an_event_may_be_of_another_codec(self, shop: Shop) -> None:
        facts = {"specversion": "1.0", "id": "1", "source": "till", "type": "codecs.json"}
        packed = {"datacontenttype": MSGPACK, "data_base64": base64.b64encode(b"\x81\xa6number\x01").decode()}
        answer = await shop.post("/messages", json.dumps({**facts, **packed}).encode(), content_type=STRUCTURED)
        assert answer.status_code == 202, answer.text
        vendor = {"datacontenttype": VENDOR, "data": {"number": 2}, "id": "2", "type": "codecs.vendor"}
        answer = await shop.post("/messages", json.dumps({**facts, **vendor}).encode(), content_type=STRUCTURED)
        assert answer.status_code == 202, answer.text
        answer = await shop.post(
            "/messages",
            b"\x81\xa6number\x03",
            content_type=MSGPACK,
            ce_specversion="1.0",
            ce_id="3",
            ce_source="till",
            ce_type="codecs.json",
        )
        assert answer.status_code == 202, answer.text
        await eventually(lambda: sorted(each.number for each in shop.handled) == [1, 2, 3])

    async def test_old_version_is_accepted_when_upcasting_succeeds(self, shop: Shop) -> None:
        kind = {"content_type": "application/json"}
        assert (await shop.post("/messages/codecs.placed", b'{"total":"7"}', **kind)).status_code == 202
        refused = await shop.post("/messages/codecs.placed", b'{"total":"a lot"}', **kind)
        assert (refused.status_code, "to_number failed" in refused.text) == (422, True)
        await eventually(lambda: [each.number for each in shop.handled] == [7])

    def test_each_version_is_described_as_its_own_class_and_each_codec_named(self) -> None:
        described = describe("shop", {"codecs.placed": Placed, "codecs.placed.v2": Placed, "codecs.msgpack": Packed})
        bodies = {
            path: item["post"]["requestBody"]["content"]
            for path, item in described["paths"].items()
            if "post" in item and "codecs" in path
        }
        schemas = described["components"]["schemas"]

        def fields(path: str) -> list[str]:
            schema = bodies[path]["application/json"]["schema"]
            return list(schemas[schema["$ref"].rpartition("/")[2]]["properties"])

        assert fields("/messages/codecs.placed") == ["total"]
        assert fields("/messages/codecs.placed.v2") == ["number"]
        assert set(bodies["/messages/codecs.msgpack"]) == {MSGPACK, "application/json"}
