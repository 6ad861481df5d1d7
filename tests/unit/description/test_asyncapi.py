"""The AsyncAPI document is valid by the models of its specification, its references lead somewhere, and it tells no
secrets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from openapi_schema_validator import OAS31Validator
from pydantic import BaseModel

from durable import Bus, message
from durable.calls import service
from durable.cli.topology import needed
from durable.description.asyncapi import asyncapi
from durable.description.survey import describe
from durable.messages.schemas import Json
from tests.support.asyncapi import refuse_invalid


class Line(msgspec.Struct):
    article: str
    price: Decimal


class Placed(msgspec.Struct):
    lines: list[Line]
    at: datetime


class Tree(BaseModel):
    name: str
    children: list[Tree] = []


class Shipped(msgspec.Struct):
    id: int


@service("inventory", version="1.2")
class Inventory:
    async def reserve(self, line: Line, *, count: int = 1) -> Tree:
        raise NotImplementedError

    async def reserve_all(self, lines: list[Line]) -> dict[str, Decimal]:
        raise NotImplementedError


DRAFT = "https://json-schema.org/draft/2020-12/schema"
LINE = {"article": "tea", "price": "1.50"}


@pytest.fixture
def document(no_messages: None) -> Json:
    bus = Bus("shop", amqp_url="amqp://ada:lovelace@localhost:5672/shop")
    for name, cls in (("orders.placed", Placed), ("orders.tree", Tree), ("orders.shipped", Shipped)):
        message(name)(cls)
    for uri in ("tcp://127.0.0.1:2304", "unix:///run/shop", "http://127.0.0.1:8080", "rabbitmq://default/topic/orders"):
        bus.listen(uri)
    bus.handles(Placed)(place)
    bus.handles(Tree)(plant)
    bus.subscribe(Shipped, to="rabbitmq://default/topic")
    bus.subscribe(Shipped, to="tcp://127.0.0.1:2305")
    bus.route(Placed, to="rabbitmq://default/queue/mail")
    bus.offer(Inventory, Inventory())
    bus.caller(Inventory, at="tcp://127.0.0.1:2306")
    brokers = {"default": "amqp://localhost:5672/shop"}
    return asyncapi(describe(bus.application, needed(bus)), brokers)


async def place(placed: Placed) -> None: ...


async def plant(tree: Tree) -> None: ...


def references(part: Any) -> Iterator[str]:
    match part:
        case dict():
            for key, value in part.items():
                if key == "$ref":
                    yield value
                else:
                    yield from references(value)
        case list():
            for value in part:
                yield from references(value)
        case _:
            pass


def followed(document: Json, reference: str) -> Any:
    part: Any = document
    for name in reference.removeprefix("#/").split("/"):
        part = part[name]
    return part


def test_document_is_valid(document: Json) -> None:
    refuse_invalid(document)
    channel = next(iter(document["channels"].values()))
    with pytest.raises(ValueError, match="adress"):
        refuse_invalid({**document, "channels": {"one": channel | {"adress": "tcp://127.0.0.1:1"}}})


def test_references_lead_somewhere(document: Json) -> None:
    found = list(references(document))
    assert len(found) > 40
    for reference in found:
        followed(document, reference)


def test_operations_use_the_messages_of_their_channels(document: Json) -> None:
    for operation in document["operations"].values():
        for each in [operation, *([operation["reply"]] if "reply" in operation else [])]:
            of = each["channel"]["$ref"]
            assert all(message["$ref"].startswith(f"{of}/messages/") for message in each["messages"])


def test_queues_have_the_bindings_of_amqp(document: Json) -> None:
    queues = {
        each["bindings"]["amqp"]["queue"]["name"]: each for each in document["channels"].values() if is_queue(each)
    }
    assert queues.keys() == {"shop:orders.placed", "shop:orders.tree", "mail"}
    assert queues["shop:orders.tree"]["x-queue-arguments"]["x-queue-type"] == "quorum"
    assert queues["shop:orders.tree"]["x-queue-bindings"] == ["durable orders:orders.tree"]
    assert [*queues["shop:orders.tree"]["messages"]] == ["orders_tree"]


def is_queue(channel: Json) -> bool:
    return bool(channel.get("bindings", {}).get("amqp", {}).get("is") == "queue")


def test_users_and_passwords_are_not_told(document: Json) -> None:
    assert "lovelace" not in json.dumps(document)
    assert "ada" not in json.dumps(document["servers"])
    assert document["servers"]["rabbitmq-default"] == {
        "host": "localhost:5672",
        "protocol": "amqp",
        "pathname": "/shop",
    }


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "orders_placed",
            {"lines": [{"article": "tea", "price": "1.50"}], "at": "2026-01-01T00:00:00Z"},
            {"lines": []},
        ),
        ("orders_tree", {"name": "a", "children": [{"name": "b"}]}, {"name": "a", "children": [{"name": 1}]}),
        ("offers_inventory_reserve_arguments", [LINE, 2], [{"article": "tea"}]),
        ("offers_inventory_reserve_all_result", {"tea": "1.50"}, {"tea": 1}),
    ],
)
def test_payloads_have_the_schemas_of_their_classes(document: Json, name: str, good: object, bad: object) -> None:
    payload = document["components"]["messages"][name]["payload"]
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "components": document["components"],
        **payload,
    }
    assert OAS31Validator(schema).is_valid(good)
    assert not OAS31Validator(schema).is_valid(bad)
