"""What each bad input gets on RabbitMQ: a dead letter and then the acknowledgement, an exception, or no start at all.

What is bad travels between messages that are good. Those are handled, and nothing of it comes back from the broker.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from durable import Bus, InvalidMessage, message
from durable.embedded import Embedded
from durable.errors import InvalidSetting
from durable.testing import eventually
from tests.support.broker import Foreign, foreign
from tests.support.command import Agent
from tests.support.rabbit_shop import WITHIN, RabbitShop, Sold, rabbit_shop
from tests.support.servers import EMBEDDED, AnyBroker, Names
from tests.support.tables import Tables, shared_tables

LIMIT = 10_000
ID = "9b2f3a52-7c1d-4e6a-8f10-2d9c5b7e4a61"
SOLD = {"message_type": "rabbit.sold"}
OURS = {
    "durable-destination": "rabbitmq://default/queue/shop",
    "durable-sent-at": datetime.now(UTC).isoformat(),
}


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(EMBEDDED)) as tables:
        yield tables


@pytest.fixture
async def shop(database: Tables, broker: AnyBroker, queue_name: Names) -> AsyncIterator[RabbitShop]:
    async with rabbit_shop(database, queue_name("shop"), broker.url, max_message_bytes=LIMIT) as shop:
        yield shop


# ---------------------------------------------------------------- arriving


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        pytest.param(SOLD, "the delivery has no message_id", id="no id"),
        pytest.param(SOLD | {"message_id": ID, "headers": {"x-death": [{"count": 60}, {"count": 41}]}},
                     "queues have dead-lettered it 101 times", id="a circle of queues"),
        pytest.param(SOLD | {"message_id": ID, "headers": {"x-death": [{"count": 101}]} | OURS},
                     "queues have dead-lettered it 101 times", id="a circle of queues, of ours"),
        pytest.param(SOLD | {"message_id": ID, "headers": {"x-death": ["no table"] * 101}},
                     "queues have dead-lettered it 101 times", id="deaths that are none"),
        pytest.param({"message_id": ID}, "the delivery has no type: send one, or configure one", id="no type"),
        pytest.param(SOLD | {"message_id": "order-17", "app_id": "crm", "headers": OURS},
                     "message_id is no UUID: 'order-17'", id="an id of ours that is no UUID"),
        pytest.param(SOLD | {"app_id": "crm", "headers": OURS}, "message_id is no UUID: ''", id="no id of ours"),
        pytest.param({"message_id": ID, "headers": OURS}, "no type", id="no type of ours"),
        pytest.param(SOLD | {"message_id": ID, "headers": {"durable-sent-at": "yesterday"}}, "is no time",
                     id="a time that is none"),
        pytest.param(SOLD | {"message_id": ID, "headers": {"durable-sent-at": "2026-01-01T00:00:00"}}, "no time zone",
                     id="a time without a zone"),
        pytest.param(SOLD | {"message_id": ID, "headers": {"durable-sent-at": 17}}, "is not text", id="a number"),
        pytest.param(SOLD | {"message_id": ID, "headers": {"durable-unheard-of": "1"}}, "no durable-sent-at",
                     id="half a message of ours"),
        pytest.param(SOLD | {"message_id": ID, "content_encoding": "gzip"}, "content_encoding 'gzip'", id="compressed"),
    ],
)  # fmt: skip
async def test_invalid_delivery_is_a_dead_letter_with_its_bytes_and_known_facts(
    shop: RabbitShop, properties: dict[str, Any], reason: str
) -> None:
    body = b'{"number":17}\xff'

    await shop.sell(1)
    await shop.publish(body, **properties)
    await shop.sell(2, 3)

    await shop.has_seen(1, 2, 3)
    [letter] = await shop.letters()
    assert letter[:1] + letter[2:3] == (None, body)
    assert reason in letter[1]
    assert letter[3]["queue"] == shop.queue
    assert letter[3].get("message-id") == properties.get("message_id")
    assert letter[3].get("type") == properties.get("message_type")


async def test_dead_letter_of_a_body_over_the_limit_keeps_size_and_hash(shop: RabbitShop) -> None:
    body = b"x" * (LIMIT + 1)

    await shop.sell(1)
    await shop.publish(body, message_id=ID, app_id="crm", **SOLD)
    await shop.publish(b'{"number":2,"note":"' + b"x" * (LIMIT - 22) + b'"}', message_id=str(uuid4()), **SOLD)
    await shop.sell(3)

    await shop.has_seen(1, 2, 3)
    [(_, reason, kept, facts)] = await shop.letters()
    assert reason == f"the body has {LIMIT + 1} bytes, more than max_message_bytes ({LIMIT}); send less"
    assert kept == b""
    assert facts == {
        "queue": shop.queue, "exchange": "", "routing-key": shop.queue, "message-id": ID, "type": "rabbit.sold",
        "app-id": "crm", "body-bytes": str(LIMIT + 1), "body-sha256": hashlib.sha256(body).hexdigest(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("properties", "body", "reason"),
    [
        pytest.param({}, b"\0", "JSON", id="no JSON"),
        pytest.param({}, b'{"number":17,"note":"\xff"}', "utf-8", id="no UTF-8"),
        pytest.param({}, b'{"number":NaN}', "JSON", id="NaN"),
        pytest.param({}, b"[" * 5_000 + b"]" * 5_000, "", id="nesting"),
        pytest.param({"content_type": "application/x-python-pickle"}, b"\x80\x04\x95", "", id="a pickle"),
        pytest.param({"message_type": "os.system"}, b'"true"', "os.system", id="os.system"),
        pytest.param({"message_type": "rabbit.unknown"}, b"{}", "rabbit.unknown", id="unknown type"),
        pytest.param({"message_type": "x" * 255}, b"{}", "", id="the longest type"),
        pytest.param({"headers": {str(n): "" for n in range(1_000)}}, b'{"number":17}', "1,000 headers",
                     id="1,000 headers"),
        pytest.param({"headers": {"a": "x" * 100_000}}, b'{"number":17}', "8192", id="a header of 100 kB"),
        pytest.param({"headers": {"a": "b\0"}}, b'{"number":17}', "control character", id="NUL in a header"),
        pytest.param({"headers": {"a": "b\r\nc: d"}}, b'{"number":17}', "control character", id="CRLF in a header"),
        pytest.param({"app_id": "\0"}, b'{"number":17}', "source", id="NUL in the source"),
    ],
)  # fmt: skip
async def test_undecodable_envelope_is_a_dead_letter_under_its_id(
    shop: RabbitShop, properties: dict[str, Any], body: bytes, reason: str
) -> None:
    await shop.sell(1)
    await shop.publish(body, **(SOLD | {"message_id": ID} | properties))
    await shop.sell(2, 3)

    await shop.has_seen(1, 2, 3)
    [letter] = await shop.letters()
    assert reason in letter[1]
    assert body in letter[2]


async def test_another_body_under_a_known_id_is_kept_as_a_dead_letter(shop: RabbitShop) -> None:
    await shop.publish(b'{"number":1}', message_id=ID, **SOLD)
    await shop.has_seen(1)

    await shop.publish(b'{"number":17}', message_id=ID, **SOLD)
    await shop.publish(b'{"number":1}', message_id=ID, **SOLD)
    await shop.sell(2)

    await shop.has_seen(1, 2)
    [letter] = await shop.letters()
    assert letter[1:3] == ("another message was received under the same id before", b'{"number":17}')


# ---------------------------------------------------------------- sent


@message("rabbit." + "x" * 180)
class LongNamed(msgspec.Struct):
    number: int


@pytest.fixture
async def sender(database: Tables, broker: AnyBroker) -> AsyncIterator[Bus]:
    """A bus that does not run: what it sends stays in its outbox."""
    database.clear()
    bus = Bus("s" * 100, database.url, amqp_url=broker.url)
    yield bus
    await bus.runtime.stop()


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({"a": math.nan}, id="NaN in a header"),
        pytest.param({"a": "x" * 200_000}, id="a header of 200 kB"),
        pytest.param({"a" * 200_000: ""}, id="a header's name of 200 kB"),
        pytest.param({"a": b"bytes"}, id="bytes in a header"),
        pytest.param({"a": "b\r\nc"}, id="CRLF in a header"),
        pytest.param({"a": "b\0"}, id="NUL in a header"),
    ],
)
async def test_headers_unfit_for_amqp_raise_at_send_and_the_unit_of_work_proceeds(
    database: Tables, sender: Bus, headers: Any
) -> None:
    async with sender.unit_of_work():
        sender.send(Sold(1), to="rabbitmq://default/topic")
        with pytest.raises(InvalidMessage, match="header"):
            sender.send(Sold(17), to="rabbitmq://default/topic", headers=headers)
        sender.send(Sold(2), to="rabbitmq://default/topic")

    bodies = database.rows("SELECT body FROM durable.outgoing_envelopes ORDER BY id")
    assert [msgspec.json.decode(body)["number"] for body in bodies] == [1, 2]


async def test_too_long_routing_key_is_refused_by_route_and_by_send(sender: Bus) -> None:
    too_long = "has 288 bytes, more than the 255 of AMQP"

    with pytest.raises(InvalidSetting, match=too_long):
        sender.route(LongNamed, to="rabbitmq://default/topic")
    with pytest.raises(InvalidSetting, match=too_long):
        sender.subscribe(LongNamed, to="rabbitmq://default/topic")
    async with sender.unit_of_work():
        with pytest.raises(InvalidSetting, match=too_long):
            sender.send(LongNamed(1), to="rabbitmq://default/topic")
        with pytest.raises(InvalidSetting, match="has 256 bytes"):
            sender.send(Sold(1), to=f"rabbitmq://default/exchange/durable/{'k' * 256}")


# ---------------------------------------------------------------- unroutable


@pytest.fixture
async def client(broker: AnyBroker) -> AsyncIterator[Foreign]:
    async with foreign(broker.url) as client:
        yield client


def outgoing(shop: RabbitShop) -> list[Any]:
    return shop.tables.rows("SELECT id FROM durable.outgoing_envelopes")


@pytest.mark.parametrize("form", ["queue", "topic"])
async def test_unroutable_message_stays_in_the_outbox_until_a_queue_is_bound(
    shop: RabbitShop, queue_name: Names, broker: AnyBroker, form: str
) -> None:
    exchange, later = queue_name("exchange"), queue_name("later")
    to = {"queue": f"rabbitmq://default/queue/{later}", "topic": f"rabbitmq://default/exchange/{exchange}/a"}[form]
    here = f"rabbitmq://default/queue/{shop.queue}"
    if form == "topic":
        await shop.client.bind(shop.queue, exchange, "another")  # makes the exchange

    async with shop.bus.unit_of_work():
        sent = shop.bus.send(Sold(17), to=to)
        shop.bus.send(Sold(1), to=here)
    circuit = await eventually(lambda: shop.tables.rows("SELECT key, reason FROM durable.circuits"), within=WITHIN)
    assert [key for key, _ in circuit] == [to]
    assert "no queue" in circuit[0][1]
    async with shop.bus.unit_of_work():
        shop.bus.send(Sold(2), to=here)
    await shop.has_seen(1, 2)
    await eventually(lambda: outgoing(shop) == [sent], within=WITHIN)

    await shop.client.declare(later)
    if form == "topic":
        await shop.client.bind(later, exchange, "a")

    arrived = await eventually(lambda: shop.client.get(later), within=WITHIN)
    assert arrived is not None
    assert (arrived.message_id, arrived.body) == (str(sent), b'{"number":17,"note":null}')
    await eventually(lambda: shop.tables.count("outgoing_envelopes") == 0, within=WITHIN)
    await eventually(lambda: shop.tables.count("circuits") == 0, within=WITHIN)


# ---------------------------------------------------------------- refuses to start


async def test_a_bus_does_not_start_on_a_queue_with_other_arguments(
    database: Tables, broker: AnyBroker, client: Foreign, queue_name: Names
) -> None:
    queue = queue_name("other")
    await client.declare(queue, type="classic")
    bus = Bus("shop", database.url, amqp_url=broker.url)
    bus.listen(f"rabbitmq://default/queue/{queue}")

    with pytest.raises(InvalidSetting, match=f"queue {queue}: its x-queue-type is classic, and quorum was asked for"):
        async with bus:
            raise AssertionError("it started")


def test_run_refuses_to_start_on_a_queue_with_other_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    database: Tables,
    broker: AnyBroker,
    queue_name: Names,
) -> None:
    agent, queue = Agent(tmp_path, monkeypatch, capsys), queue_name("other")
    monkeypatch.setenv("DURABLE_DATABASE_URL", database.url)
    monkeypatch.setenv("DURABLE_AMQP_URL", broker.url)
    declare = f'bus.listen("rabbitmq://default/queue/{queue}?type=classic&max_length=5")'
    assert agent("topology", f"{agent.application(declare)}:bus", "--apply").code == 0

    ended = agent("run", f"{agent.application(declare.replace('=5', '=6'))}:bus")

    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert f"queue {queue}: its x-max-length is 5, and 6 was asked for; write max_length=5 in its address" in ended.err
