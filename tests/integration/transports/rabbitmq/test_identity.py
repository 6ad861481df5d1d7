"""Attacks on the identity of publishers: a program that may publish to the queue of a running node claims to be
another service, changes what another has signed, or takes an id away.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from msgspec.structs import replace
from pamqp.commands import Basic

from durable.embedded import Embedded
from durable.envelope import Envelope
from durable.errors import InvalidSetting
from durable.outcomes import STORED
from durable.settings import load_settings
from durable.testing import eventually
from durable.transports.peers import Credentials
from durable.transports.rabbitmq.message import properties
from durable.transports.rabbitmq.signatures import SIGNATURE, Signer
from durable.transports.rabbitmq.transport import RabbitTransport
from tests.support.rabbit_shop import WITHIN, RabbitShop, rabbit_shop
from tests.support.receivers import envelope
from tests.support.servers import EMBEDDED, AnyBroker, Names
from tests.support.tables import Tables, shared_tables

SECRET, OTHER = "correct horse battery", "staple staple staple"
TYPE = "rabbit.sold"
PEERS: dict[str, Any] = {"orders": SECRET, "mallory": OTHER}

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(EMBEDDED)) as tables:
        yield tables


@pytest.fixture
def opened(database: Tables, broker: AnyBroker, queue_name: Names) -> Open:
    """Opens a shop on a queue of its own, with these settings."""

    @asynccontextmanager
    async def open_(options: str = "", **settings: Any) -> AsyncIterator[RabbitShop]:
        queue, exchange = queue_name("identity"), queue_name("exchange")
        async with rabbit_shop(
            database, queue, broker.url, options=options, amqp_exchange=exchange, **settings
        ) as shop:
            yield shop

    return open_


def sold(number: int = 17, **changed: Any) -> Envelope:
    return replace(envelope(TYPE, body=b'{"number":%d}' % number), **changed)


async def send(shop: RabbitShop, *batch: Envelope, service: str = "orders", **own: Any) -> None:
    """Send as another service does, by the sending end of durable."""
    settings = load_settings(amqp_url=shop.bus.settings.amqp_url, **own)
    transport = RabbitTransport(settings, service=service, messages=dict)
    async with transport.sender(at(shop)) as sender:
        assert await sender.send([replace(each, destination=at(shop)) for each in batch]) == [STORED] * len(batch)


def at(shop: RabbitShop) -> str:
    return f"rabbitmq://default/queue/{shop.queue}"


def shop_at(shop: RabbitShop, secrets: dict[str, str] | str = SECRET) -> dict[str, Any]:
    secrets = {"1": secrets} if isinstance(secrets, str) else secrets
    return {"shop": {"secrets": secrets, "at": [at(shop)]}}


def known(shop: RabbitShop) -> set[str]:
    return set(shop.tables.rows("SELECT endpoint FROM durable.received_ids"))


def signed(shop: RabbitShop, sold: Envelope, destination: str = "") -> tuple[Basic.Properties, bytes]:
    about = properties(replace(sold, destination=destination or at(shop)))
    Signer("orders", Credentials(SECRET, "1", "shop")).sign(about, sold.body)
    return about, sold.body


async def publish(shop: RabbitShop, about: Basic.Properties, body: bytes) -> None:
    names = ("content_type", "headers", "delivery_mode", "correlation_id", "message_id", "message_type", "app_id")
    given = {name: getattr(about, name) for name in names}
    await shop.publish(body, **{name: value for name, value in given.items() if value is not None})


async def test_ids_of_peers_are_their_own(opened: Open) -> None:
    async with opened(peers=PEERS) as shop:
        real = sold(17)
        taken = replace(real, body=b'{"number":666}', execution_time=datetime.now(UTC) + timedelta(days=5))
        await send(shop, taken, service="mallory", peers=shop_at(shop, OTHER))
        await eventually(lambda: known(shop) == {"shop<-mallory"}, within=WITHIN, what="the attack")
        await send(shop, real, peers=shop_at(shop))
        await send(shop, real, peers=shop_at(shop))
        await send(shop, sold(18), peers=shop_at(shop))
        await shop.has_seen(17, 18)
        assert known(shop) == {"shop<-orders", "shop<-mallory"}
        assert shop.tables.count("dead_letters") == 0


def unsigned(about: Basic.Properties) -> None:
    assert about.headers is not None
    del about.headers[SIGNATURE]


def of_another_secret(about: Basic.Properties) -> None:
    unsigned(about)
    Signer("orders", Credentials(OTHER, "1", "shop")).sign(about, b'{"number":17}')


def of_an_unknown_name(about: Basic.Properties) -> None:
    unsigned(about)
    Signer("stranger", Credentials(OTHER, "1", "shop")).sign(about, b'{"number":17}')


def of_a_shared_secret(about: Basic.Properties) -> None:
    unsigned(about)
    Signer("orders", Credentials(SECRET)).sign(about, b'{"number":17}')


def unreadable(about: Basic.Properties) -> None:
    assert about.headers is not None
    about.headers[SIGNATURE] = "x"


def no_text(about: Basic.Properties) -> None:
    assert about.headers is not None
    about.headers[SIGNATURE] = {"a": 1}


def with_another_id(about: Basic.Properties) -> None:
    about.message_id = str(uuid4())


def with_another_type(about: Basic.Properties) -> None:
    about.message_type = "rabbit.bought"


def with_another_source(about: Basic.Properties) -> None:
    about.app_id = "billing"


def with_another_header(about: Basic.Properties) -> None:
    assert about.headers is not None
    about.headers["reply-to"] = "tcp://10.0.0.7:1"


def with_a_deadline(about: Basic.Properties) -> None:
    assert about.headers is not None
    about.headers["durable-deliver-by"] = "2000-01-01T00:00:00+00:00"


def with_odd_headers(about: Basic.Properties) -> None:
    assert about.headers is not None
    about.headers["odd"] = [None, {"a": datetime.now(UTC)}]


FORGED = [
    unsigned, of_another_secret, of_an_unknown_name, of_a_shared_secret, unreadable, no_text, with_another_id,
    with_another_type, with_another_source, with_another_header, with_a_deadline, with_odd_headers,
]  # fmt: skip


async def test_forged_message_is_a_dead_letter_with_a_reason(opened: Open) -> None:
    async with opened(peers=PEERS) as shop:
        for forge in FORGED:
            about, body = signed(shop, sold(17))
            forge(about)
            await publish(shop, about, body)
        about, _ = signed(shop, sold(17))
        await publish(shop, about, b'{"number":66}')
        letters = await shop.letters(len(FORGED) + 1)
        for forge, (_, reason, body, _) in zip(FORGED, letters, strict=False):
            expected = "is not signed" if forge in (unsigned, no_text) else "the signature does not fit"
            assert (forge.__name__, expected in reason, body) == (forge.__name__, True, b'{"number":17}')
        assert "the signature does not fit" in letters[-1][1]
        await publish(shop, *signed(shop, sold(18)))
        await shop.has_seen(18)


async def test_message_signed_for_another_way_is_a_dead_letter(opened: Open) -> None:
    async with opened(peers=PEERS) as shop:
        elsewhere = [
            "rabbitmq://default/queue/billing",
            "rabbitmq://default/topic",
            f"rabbitmq://default/exchange/other/{shop.queue}",
            "rabbitmq://default/topic/orders",
            "rabbitmq:",
            "http://127.0.0.1:8001",
            "local",
        ]
        for destination in elsewhere:
            await publish(shop, *signed(shop, sold(17), destination))
        letters = await shop.letters(len(elsewhere))
        for destination, (_, reason, body, _) in zip(elsewhere, letters, strict=True):
            assert f"is signed for {destination}, and came through {shop.queue}" in reason
            assert body == b'{"number":17}'
        await publish(shop, *signed(shop, sold(18), f"rabbitmq://another/queue/{shop.queue}"))
        await shop.has_seen(18)


async def test_signed_message_of_a_topic_is_taken_from_its_queue_alone(
    database: Tables, broker: AnyBroker, queue_name: Names
) -> None:
    exchange, queue = queue_name("exchange"), f"shop:{TYPE}"
    queue_name.also(queue)
    own: dict[str, Any] = {"peers": {"orders": SECRET}, "amqp_exchange": exchange}
    topic = f"rabbitmq://default/exchange/{exchange}/orders:{TYPE}"  # as routes to rabbitmq://default/topic resolve it
    listen = "rabbitmq://default/topic/orders"
    async with rabbit_shop(database, queue, broker.url, listen=listen, **own) as shop:
        envelope = sold(1, source="orders", destination=topic)
        transport = RabbitTransport(load_settings(amqp_url=broker.url, **own), service="orders", messages=dict)
        async with transport.sender(topic) as sender:
            assert await sender.send([envelope]) == [STORED]
        await shop.has_seen(1)
        await publish(shop, *signed(shop, replace(envelope, id=uuid4()), topic))
        [(_, reason, _, _)] = await shop.letters()
        assert f"is signed for {topic}, and came through {queue}" in reason
        assert known(shop) == {"shop<-orders"}


async def test_unsigned_message_is_refused_unless_its_queue_is_open(opened: Open) -> None:
    async with opened(peers=PEERS) as shop:
        await shop.sell(1)
        [(_, reason, _, _)] = await shop.letters()
        assert "is not signed" in reason
        assert shop.seen == []
    async with opened("?unsigned=yes", peers=PEERS) as shop:
        await shop.sell(2)
        about, body = signed(shop, sold(3))
        with_another_id(about)
        await publish(shop, about, body)
        await send(shop, sold(4), peers=shop_at(shop))
        await shop.letters()
        await shop.has_seen(2, 4)
        assert known(shop) | set(shop.tables.rows("SELECT endpoint FROM durable.undated_ids")) == {
            "shop", "shop<-orders"
        }  # fmt: skip


async def test_secret_of_a_peer_is_changed_without_a_pause(opened: Open) -> None:
    old, both, new = {"1": SECRET}, {"1": SECRET, "2": OTHER}, {"2": OTHER}
    async with opened(peers={"orders": {"secrets": both}}) as shop:
        for number, secrets in enumerate([old, both, {"2": OTHER, "1": SECRET}, new]):
            await send(shop, sold(number), peers=shop_at(shop, secrets))
        await shop.has_seen(0, 1, 2, 3)
        assert known(shop) == {"shop<-orders"}
    async with opened(peers={"orders": {"secrets": new}}) as shop:
        await send(shop, sold(4), peers=shop_at(shop, old))
        [(_, reason, _, _)] = await shop.letters()
        assert "the signature does not fit" in reason


async def test_shared_secret_lets_in_without_a_name(opened: Open) -> None:
    async with opened(shared_secret=OTHER, previous_shared_secret=SECRET) as shop:
        await send(shop, sold(1), shared_secret=SECRET)
        await send(shop, sold(2), shared_secret=OTHER)
        await shop.has_seen(1, 2)
        assert known(shop) == {"shop"}


async def test_peer_sends_only_its_types_to_its_endpoints(opened: Open) -> None:
    may = {
        "orders": {"secrets": {"1": SECRET}, "types": ["other.*"]},
        "mallory": {"secrets": {"1": OTHER}, "endpoints": ["elsewhere"]},
    }
    async with opened(peers=may) as shop:
        await send(shop, sold(1), peers=shop_at(shop))
        await send(shop, sold(2), service="mallory", peers=shop_at(shop, OTHER))
        reasons = {reason for _, reason, _, _ in await shop.letters(2)}
        assert reasons == {
            "orders may not send messages of type rabbit.sold to shop",
            "mallory may not send to shop: see endpoints in peers",
        }
        assert shop.seen == []


async def test_own_secret_signs_for_every_subscriber_of_a_topic(opened: Open) -> None:
    async with opened(peers={"orders": SECRET}) as shop:
        await send(shop, sold(1), peers={"orders": SECRET})
        await shop.has_seen(1)
        assert known(shop) == {"shop<-orders"}


def test_indistinguishable_peers_are_an_invalid_setting() -> None:
    settings = load_settings(peers={"orders": SECRET, "shop": SECRET})
    with pytest.raises(InvalidSetting, match=r"^peers: orders and shop have the same secret"):
        RabbitTransport(settings, service="shop", messages=dict)
