"""The description of the endpoints is valid OpenAPI 3.1, and says of each message what its class says."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import attrs
import msgspec
import pytest
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from pydantic import BaseModel

from durable.messages import codec
from durable.transports.http import headers as http_headers
from durable.transports.http.openapi import describe
from tests.support.kinds import draft


class Line(msgspec.Struct):
    """One article."""

    article: str
    price: Decimal


class Order(msgspec.Struct):
    order_id: UUID
    lines: list[Line]


@dataclass
class Parcel:
    weight: float
    line: Line


@attrs.define
class Note:
    text: str


class Tree(BaseModel):
    name: str
    children: list[Tree] = []


class Opaque:
    pass


class Undescribable(msgspec.Struct):
    opaque: Opaque


MESSAGES = {"shop.order": Order, "shop.parcel": Parcel, "shop.note": Note, "shop.tree": Tree}
LINE = Line("tea", Decimal("4.20"))
SENT = [
    ("shop.order", Order(uuid4(), [LINE])),
    ("shop.parcel", Parcel(1.5, LINE)),
    ("shop.note", Note("hello")),
    ("shop.tree", Tree(name="root", children=[Tree(name="leaf")])),
]


def schema_of(document: Any, path: str, content_type: str = "application/json") -> dict[str, Any]:
    """The schema of what is posted there, with all that it may refer to."""
    posted = document["paths"][path]["post"]["requestBody"]["content"][content_type]["schema"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "components": document["components"], **posted}


def accepts(schema: dict[str, Any], body: object) -> bool:
    return bool(OAS31Validator(schema).is_valid(body))


@pytest.mark.parametrize("messages", [MESSAGES, {}, {"shop.undescribable": Undescribable}], ids=["some", "none", "odd"])
def test_the_description_is_valid(messages: dict[str, type]) -> None:
    OpenAPIV31SpecValidator(describe("shop", messages)).validate()


@pytest.mark.parametrize(("message_type", "message"), SENT)
def test_a_message_fits_the_schema_of_its_type_and_no_other(message_type: str, message: object) -> None:
    document = describe("shop", MESSAGES)
    body = msgspec.json.decode(codec.encode(message, draft()))

    assert [name for name in MESSAGES if accepts(schema_of(document, f"/messages/{name}"), body)] == [message_type]


@pytest.mark.parametrize(("message_type", "message"), SENT)
def test_an_event_fits_when_its_data_fits_its_type(message_type: str, message: object) -> None:
    schema = schema_of(describe("shop", MESSAGES), "/messages", "application/cloudevents+json")
    event = {"specversion": "1.0", "id": "1", "source": "/shop", "type": message_type, "attempt": 1}
    data = msgspec.json.decode(codec.encode(message, draft()))

    assert accepts(schema, event | {"data": data})
    assert accepts(schema, event | {"data_base64": "e30="})
    assert not accepts(schema, event | {"data": data, "data_base64": "e30="})
    assert not accepts(schema, event | {"data": data, "type": "shop.unknown"})
    assert not accepts(schema, event | {"data": data, "orderId": 1})
    assert not accepts(schema, event | {"data": 17})


def test_classes_of_one_name_have_separate_schemas() -> None:
    document = describe("shop", {"shop.order": Order, "shop.parcel": Parcel})

    assert {"shop.order.Line", "shop.parcel.Line"} < set(document["components"]["schemas"])


def test_undescribable_class_is_named() -> None:
    document = describe("shop", {"shop.undescribable": Undescribable, **MESSAGES})

    assert schema_of(document, "/messages/shop.undescribable")["description"] == (
        "Undescribable cannot be described: TypeError"
    )


def test_every_known_header_is_described() -> None:
    parameters = describe("shop", MESSAGES)["paths"]["/messages/shop.order"]["post"]["parameters"]

    described = {parameter["name"].lower() for parameter in parameters}
    assert described == {http_headers.KEY, *http_headers.OPTIONS}


def test_credentials_are_required_with_a_secret() -> None:
    assert describe("shop", MESSAGES, secured=True)["security"] == [{"signature": []}, {"bearer": []}]
    assert describe("shop", MESSAGES, secured=False)["security"] == []


def test_health_is_open_to_all() -> None:
    paths = describe("shop", MESSAGES, secured=True)["paths"]

    assert [path for path, item in paths.items() if any("security" in operation for operation in item.values())] == [
        "/health/live",
        "/health/ready",
    ]
