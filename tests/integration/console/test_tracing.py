"""The way of a conversation over two services, as the page of messages shows it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from html import unescape
from urllib.parse import urlencode
from uuid import UUID

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from durable import Bus, Context, Retry, message
from durable.console import console_app, tracing
from durable.embedded import Embedded
from durable.envelope import new_id
from durable.testing import eventually
from tests.integration.console.visiting import OPERATOR, TOKENS, VIEWER, bearer, browser, submit
from tests.support.history import add_history
from tests.support.tables import Tables, shared_tables


@message("tracing.ordered")
class Ordered(msgspec.Struct):
    number: int


@message("tracing.reserve")
class Reserve(msgspec.Struct):
    number: int


@message("tracing.reserved")
class Reserved(msgspec.Struct):
    number: int


class Pair:
    """A shop that asks a stock over TCP, and is told by it; both run."""

    def __init__(self, shop: Bus, stock: Bus, tables: Tables, others: Tables) -> None:
        self.shop, self.stock, self.tables, self.others = shop, stock, tables, others
        self.away = Bus("away", "postgresql://nobody@127.0.0.1:1/none")
        buses = (shop, stock, self.away)
        self.app = Starlette(routes=[Mount("/console", console_app(*buses, tokens=TOKENS))])


@pytest.fixture
async def pair(tables: Tables, servers: Callable[[int], Embedded]) -> AsyncIterator[Pair]:
    with shared_tables(servers(18)) as others:
        stock = Bus("stock", others.url, poll_interval="50ms")
        stock.listen("tcp://127.0.0.1:0")

        @stock.handles(Reserve, retry=Retry(immediate=0, delays=[]))
        async def reserve(wanted: Reserve, ctx: Context) -> None:
            ctx.send(Reserved(wanted.number))

        @stock.handles(Reserved, retry=Retry(immediate=0, delays=[]))
        async def note(reserved: Reserved) -> None:
            raise LookupError("no such shelf")

        async with stock:
            assert stock.runtime.node is not None
            shop = Bus("shop", tables.url, poll_interval="50ms")
            shop.route(Reserve, to=stock.runtime.node.listeners[0].address)

            @shop.handles(Ordered)
            async def place(ordered: Ordered, ctx: Context) -> None:
                ctx.send(Reserve(ordered.number), key="customer 17")

            async with shop:
                yield Pair(shop, stock, tables, others)


async def ordered(pair: Pair) -> str:
    """The id of an order whose conversation has ended."""
    async with pair.shop.unit_of_work() as uow:
        order = uow.send(Ordered(17))
    await eventually(lambda: pair.others.count("dead_letters") == 1, what="the last message of the conversation")
    await eventually(lambda: pair.tables.count("envelope_history") == 2, what="the shop has ended both")
    return str(order)


def rows(page: str) -> list[tuple[str, str, str]]:
    """Service and place, depth, and state of each step."""
    found = re.findall(
        r'class="name depth-(\d)">.*?<span class="why">(.*?)</td>.*?<span class="tag[^>]*>(.*?)<', page, re.S
    )
    places = [re.sub(r"127.0.0.1:\d+", "stock", re.sub(r"<[^>]*>", "", place)) for _, place, _ in found]
    return [(place, depth, state) for place, (depth, _, state) in zip(places, found, strict=True)]


WHOLE = [
    ("shop: inbox of local", "0", "handled"),
    ("shop: outbox to tcp://stock", "1", "sent"),
    ("stock: inbox of stock", "1", "handled"),
    ("stock: inbox of local", "2", "dead-lettered"),
]


async def test_conversation_is_shown_over_all_services(pair: Pair) -> None:
    order = await ordered(pair)
    async with bearer(pair.app, VIEWER) as client:
        for service in ("shop", "stock"):
            page = (await client.get(f"/{service}/messages?conversation={order}")).text
            assert rows(page) == WHOLE
            assert "away is missing here" in page
        page = (await client.get(f"/shop/messages?id={order}")).text
        assert rows(page) == WHOLE
        assert page.count('class="chosen"') == 1
        assert re.findall(r'href="(/console/[^"]*\?id=[^"]*)"', page)[-1].startswith("/console/stock/messages?id=")
        assert "no such shelf" not in page


async def test_messages_of_a_key_are_shown_over_all_services(pair: Pair) -> None:
    await ordered(pair)
    async with bearer(pair.app, VIEWER) as client:
        page = (await client.get("/shop/messages?key=customer+17")).text
        assert rows(page) == [(place, "0", state) for place, _, state in WHOLE[1:3]]
        assert "/console/shop/dead-letters/all?key=customer%2017" in page
        page = (await client.get("/shop/messages?key=nobody")).text
        assert (rows(page), "No message with this key" in page) == ([], True)
        page = (await client.get(f"/shop/messages?conversation={new_id()}")).text
        assert (rows(page), "No service here knows a message" in page) == ([], True)
        assert (await client.get("/shop/messages?conversation=17")).status_code == 422
        assert (await client.get("/shop/messages?key=%00")).status_code == 422


async def test_many_messages_of_a_key_are_shown_in_pages(pair: Pair) -> None:
    key = "customer 17 & 4"
    add_history(pair.tables.connection, 120, outcome="handled")
    pair.tables.execute("UPDATE durable.envelope_history SET partition_key = %s", key)
    async with bearer(pair.app, VIEWER) as client:
        here, numbers = f"?{urlencode({'key': key})}", list[int]()
        for page, steps in enumerate(("1 to 50", "51 to 100", "101 to 120"), start=1):
            shown = (await client.get(f"/shop/messages{here}")).text
            numbers += [int(number, 16) for number in re.findall(r"\?id=0{8}-0000-0000-0000-([0-9a-f]{12})", shown)]
            assert (f"{steps} of 120." in shown, 'rel="prev"' in shown) == (True, page > 1)
            following = re.search(r'rel="next" href="([^"]*)"', shown)
            here = unescape(following[1]) if following else ""
        assert (numbers, here) == ([*range(1, 121)], "")
        assert "There is no page 7." in (await client.get("/shop/messages", params={"key": key, "page": "7"})).text


async def test_every_message_of_a_key_is_reached_from_the_newest_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MOST_STEPS", 7)
    for side in ("incoming", "outgoing"):
        for tables, first in ((pair.tables, 1), (pair.others, 4)):
            add_history(tables.connection, 8, first=first, side=side)
    for tables in (pair.tables, pair.others):
        tables.execute(
            "UPDATE durable.envelope_history SET partition_key = 'customer 17', "
            "sent_at = date_trunc('minute', now()) + make_interval("
            "secs => CAST('x' || right(CAST(id AS text), 2) AS bit(8))::integer / 2)"
        )
    parts: list[list[str]] = []
    async with bearer(pair.app, VIEWER) as client:
        here = "?key=customer+17"
        while here:
            shown = (await client.get(f"/shop/messages{here}")).text
            parts.append(re.findall(r"/(?:shop|stock)/messages\?id=([0-9a-f-]{36})", shown))
            earlier = re.search(r'href="([^"]*)">The steps before these', shown)
            here = unescape(earlier[1]) if earlier else ""
        assert (await client.get("/shop/messages?key=customer+17&before=now")).status_code == 422
    assert len(parts) > 3
    steps = [UUID(each).int for part in reversed(parts) for each in part]
    assert steps == sorted(steps)
    assert Counter(steps) == {number: 4 if 4 <= number <= 8 else 2 for number in range(1, 12)}


async def test_message_is_shown_on_the_page_of_its_step(pair: Pair) -> None:
    add_history(pair.tables.connection, 120, outcome="handled")
    pair.tables.execute("UPDATE durable.envelope_history SET correlation_id = %s", UUID(int=1))
    async with bearer(pair.app, VIEWER) as client:
        page = (await client.get(f"/shop/messages?id={UUID(int=70)}")).text
        assert ("51 to 100 of 120." in page, page.count('class="chosen"')) == (True, 1)


async def test_destination_is_pinged_on_demand(pair: Pair) -> None:
    (address,) = pair.shop.application.destinations()
    async with browser(pair.app) as client:
        await submit(client, "/shop/login", "/shop/login", token=OPERATOR)
        page = await submit(client, "/shop/circuits", "/shop/circuits/ping", **{"packed-key": json.dumps(address)})
        assert (page.status_code, f"{address} takes messages" in page.text) == (200, True)
        await pair.stock.runtime.stop()
        page = await submit(client, "/shop/circuits", "/shop/circuits/ping", **{"packed-key": json.dumps(address)})
        assert (page.status_code, f"{address} takes no messages" in page.text) == (200, True)
        for unknown in ("tcp://127.0.0.1:22", "", "local\n"):
            page = await submit(client, "/shop/circuits", "/shop/circuits/ping", **{"packed-key": json.dumps(unknown)})
            assert (page.status_code, "no message waits for this destination" in page.text) == (422, True)
    async with bearer(pair.app, VIEWER) as client:
        assert (await client.post("/shop/circuits/ping", data={"packed-key": json.dumps(address)})).status_code == 403
