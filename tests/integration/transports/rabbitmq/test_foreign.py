"""Programs that know nothing of durable: what they may publish to a service, and what they get from one.

They are plain aio-pika; the service is a bus on a real Postgres and a real broker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote
from uuid import UUID, uuid4

import pytest

from durable.embedded import Embedded
from durable.testing import eventually
from tests.support.rabbit_shop import WITHIN, RabbitShop, Sold, rabbit_shop
from tests.support.servers import EMBEDDED, AnyBroker, Names
from tests.support.tables import Tables, shared_tables

TYPE = "rabbit.sold"
JSON = "application/json"


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(EMBEDDED)) as tables:
        yield tables


@pytest.fixture
async def shop(
    request: pytest.FixtureRequest,
    database: Tables,
    broker: AnyBroker,
    queue_name: Names,
) -> AsyncIterator[RabbitShop]:
    """It listens on a queue of its own, with what a test gives as the options of its address."""
    options = getattr(request, "param", "")
    async with rabbit_shop(
        database, queue_name("shop"), broker.url, options=options, amqp_exchange=queue_name("exchange")
    ) as shop:
        yield shop


def listening(options: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("shop", [options], indirect=True)


# ---------------------------------------------------------------- foreign publishers


async def test_json_with_an_id_and_a_type_is_handled_like_any_message(shop: RabbitShop) -> None:
    id_, correlation_id = uuid4(), uuid4()

    await shop.client.publish(
        shop.queue,
        b'{"number":1,"note":"from elsewhere"}',
        message_id=str(id_),
        type=TYPE,
        content_type="application/json; charset=utf-8",
        correlation_id=str(correlation_id),
        app_id="crm",
        timestamp=datetime.now(UTC),
        headers={"tenant": "north", "attempt": 3, "urgent": True},
    )

    await shop.has_seen(1)
    assert shop.seen == [Sold(1, "from elsewhere")]
    [context] = shop.contexts
    assert (context.id, context.correlation_id, context.source) == (id_, correlation_id, "crm")
    assert context.headers == {"tenant": "north", "attempt": "3", "urgent": "True"}


async def test_message_published_twice_under_one_id_is_handled_once(shop: RabbitShop) -> None:
    for _ in range(3):
        await shop.client.publish(shop.queue, b'{"number":1}', message_id=str(UUID(int=7)), type=TYPE)
    await shop.client.publish(shop.queue, b'{"number":2}', message_id=str(UUID(int=8)), type=TYPE)

    await shop.has_seen(1, 2)


async def test_message_id_of_any_text_is_recognised(shop: RabbitShop) -> None:
    for message_id in ("order 17", "order 18", "order 17", "ordre 19 é"):
        await shop.client.publish(shop.queue, message_id[6:8].encode().join([b'{"number":', b"}"]),
                                  message_id=message_id, type=TYPE)  # fmt: skip

    await shop.has_seen(17, 18, 19)
    assert len({context.id for context in shop.contexts}) == 3


async def test_delivery_without_a_type_becomes_a_dead_letter(shop: RabbitShop) -> None:
    await shop.client.publish(shop.queue, b'{"number":1}', message_id="order-1", headers={"tenant": "north"})

    [(id_, reason, body, facts)] = await shop.letters()
    assert (id_, body) == (None, b'{"number":1}')
    assert reason == "the delivery has no type: send one, or configure one for the queue (?message_type=)"
    assert (facts["queue"], facts["message-id"]) == (shop.queue, "order-1")


@listening(f"?message_type={TYPE}")
async def test_the_type_of_plain_json_can_be_configured_for_a_queue(shop: RabbitShop) -> None:
    await shop.client.publish(shop.queue, b'{"number":1}', message_id="order-1")
    await shop.client.publish(shop.queue, b'{"number":2}', message_id="order-2", type="rabbit.other")
    await shop.client.publish(shop.queue, b'{"number":3}', message_id="order-3")

    await shop.has_seen(1, 3)
    [letter] = await shop.letters()
    assert "rabbit.other" in letter[1]


@listening("?type=classic&max_length=100&prefetch=1")
async def test_a_small_prefetch_slows_down_and_loses_nothing(shop: RabbitShop) -> None:
    for number in range(20):
        await shop.client.publish(shop.queue, b'{"number":%d}' % number, message_id=str(number), type=TYPE)

    await shop.has_seen(*range(20))


async def test_foreign_publisher_can_replace_a_service_on_the_topic_exchange(
    database: Tables, broker: AnyBroker, queue_name: Names
) -> None:
    exchange, queue = queue_name("exchange"), "shop:rabbit.sold"
    queue_name.also(queue)
    async with rabbit_shop(
        database, queue, broker.url, listen="rabbitmq://default/topic/crm", amqp_exchange=exchange
    ) as shop:
        await shop.client.publish(f"crm:{TYPE}", b'{"number":1}', exchange=exchange, message_id="order-1")
        await shop.has_seen(1)


async def test_publishers_of_one_topic_queue_number_their_messages_alike(
    database: Tables, broker: AnyBroker, queue_name: Names
) -> None:
    exchange, queue = queue_name("exchange"), "shop:rabbit.sold"
    queue_name.also(queue)
    async with rabbit_shop(
        database, queue, broker.url, listen="rabbitmq://default/topic/pos", amqp_exchange=exchange
    ) as shop:
        await shop.client.bind(queue, exchange, f"web:{TYPE}")
        for publisher in ("pos", "web", "pos"):
            await shop.client.publish(f"{publisher}:{TYPE}", b'{"number":7}', exchange=exchange, message_id="1")
        await shop.client.publish(f"pos:{TYPE}", b'{"number":8}', exchange=exchange, message_id="2")

        await eventually(lambda: Sold(8) in shop.seen, within=WITHIN)
        await shop.has_seen(7, 7, 8)


# ---------------------------------------------------------------- foreign consumers


async def test_a_consumer_gets_json_standard_properties_and_the_headers_of_the_application(
    shop: RabbitShop, queue_name: Names
) -> None:
    queue = queue_name("crm")
    await shop.client.declare(queue)

    async with shop.bus.unit_of_work():
        sent = shop.bus.send(
            Sold(1, "für dich"), to=f"rabbitmq://default/queue/{queue}", headers={"tenant": "north"}, key="order-1",
            deliver_by=timedelta(hours=1),
        )  # fmt: skip

    arrived = await eventually(lambda: shop.client.get(queue), within=WITHIN)
    assert arrived is not None
    assert arrived.body == '{"number":1,"note":"für dich"}'.encode()
    assert (arrived.content_type, arrived.delivery_mode, arrived.type, arrived.app_id) == (JSON, 2, TYPE, "shop")
    assert (arrived.message_id, arrived.correlation_id) == (str(sent), str(sent))
    assert arrived.timestamp is not None
    assert abs(datetime.now(UTC) - arrived.timestamp) < timedelta(minutes=1)
    assert arrived.expiration is None
    assert "durable-deliver-by" in arrived.headers
    theirs = {name: value for name, value in arrived.headers.items() if not name.startswith("durable-")}
    assert theirs == {"tenant": "north"}


async def test_a_consumer_binds_a_queue_of_its_own_to_the_topic_exchange(shop: RabbitShop, queue_name: Names) -> None:
    exchange, everything, other = shop.bus.settings.amqp_exchange, queue_name("all"), queue_name("other")
    await shop.client.declare(everything)
    await shop.client.declare(other)
    await shop.client.bind(everything, exchange, "#")
    await shop.client.bind(other, exchange, f"billing:{TYPE}")
    shop.bus.subscribe(Sold, to="rabbitmq://default/topic")

    async with shop.bus.unit_of_work():
        sent = shop.bus.publish(Sold(1))

    arrived = await eventually(lambda: shop.client.get(everything), within=WITHIN)
    assert arrived is not None
    assert (arrived.exchange, arrived.routing_key) == (exchange, f"shop:{TYPE}")
    assert arrived.message_id == str(sent)
    assert await shop.client.count(other) == 0


async def test_messages_can_be_sent_to_any_exchange(shop: RabbitShop, queue_name: Names) -> None:
    queue, exchange = queue_name("crm"), queue_name("fan out/#1")
    await shop.client.declare(queue)
    await shop.client.bind(queue, exchange, "ignored", type="fanout")

    async with shop.bus.unit_of_work():
        shop.bus.send(Sold(1), to=f"rabbitmq://default/exchange/{quote(exchange, safe='')}/")

    arrived = await eventually(lambda: shop.client.get(queue), within=WITHIN)
    assert arrived is not None
    assert (arrived.exchange, arrived.routing_key) == (exchange, "")


async def test_answer_of_a_foreign_consumer_is_a_message_of_the_conversation(
    shop: RabbitShop, queue_name: Names
) -> None:
    """A program between two services: it answers with an id of its own, and keeps the correlation id."""
    queue = queue_name("crm")
    await shop.client.declare(queue)
    async with shop.bus.unit_of_work():
        sent = shop.bus.send(Sold(1), to=f"rabbitmq://default/queue/{queue}")
    question = await eventually(lambda: shop.client.get(queue), within=WITHIN)
    assert question is not None

    properties: dict[str, Any] = {"message_id": str(uuid4()), "type": TYPE, "correlation_id": question.correlation_id}
    await shop.client.publish(shop.queue, question.body, **properties)

    await shop.has_seen(1)
    assert shop.contexts[0].correlation_id == sent


async def test_message_moved_by_the_broker_to_another_queue_is_still_an_envelope(
    shop: RabbitShop, queue_name: Names
) -> None:
    """A dead-letter exchange or a shovel adds headers of its own, which are none of the application's."""
    delayed = queue_name("delayed")
    await shop.client.declare(delayed, message_ttl=1, dead_letter_exchange="", dead_letter_routing_key=shop.queue)

    async with shop.bus.unit_of_work():
        sent = shop.bus.send(Sold(1), to=f"rabbitmq://default/queue/{delayed}", headers={"tenant": "north"})

    await shop.has_seen(1)
    assert (shop.contexts[0].id, shop.contexts[0].headers) == (sent, {"tenant": "north"})
