"""Arguments and results come out as they went in, whatever they are made of."""

from __future__ import annotations

import contextlib
import enum
import string
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AliasChoices, BaseModel, Field, RootModel, SecretBytes, SecretStr, create_model, field_serializer

from durable.calls.payload import Payload
from durable.errors import InvalidMessage


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Box(msgspec.Struct):
    colour: Colour
    sizes: tuple[int, float]


@dataclass
class Parcel:
    boxes: list[Box]
    weight: Decimal
    sent: datetime | None = None


@attrs.define
class Label:
    text: str
    codes: frozenset[int]


class Model(BaseModel):
    name: str
    price: Decimal
    seal: bytes = b""
    parts: list["Model"] = []  # noqa: UP037 -- pydantic resolves it


_zones = st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(
    lambda offset: timezone(timedelta(minutes=offset // timedelta(minutes=1)))
)
_colours = st.sampled_from(Colour)
_numbers = st.integers(-(2**63), 2**64 - 1)
_decimals = st.decimals(allow_nan=False)
_times = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=_zones)
_boxes = st.builds(Box, colour=_colours, sizes=st.tuples(_numbers, st.floats(allow_nan=False)))
_parcels = st.builds(Parcel, boxes=st.lists(_boxes, max_size=3), weight=_decimals, sent=st.none() | _times)
_labels = st.builds(Label, text=st.text(), codes=st.frozensets(_numbers, max_size=3))
_leaves = st.builds(Model, name=st.text(string.printable), price=st.decimals(allow_nan=False, allow_infinity=False),
                    seal=st.binary(), parts=st.just([]))  # fmt: skip
_models = st.builds(Model, name=st.text(), price=st.just(Decimal("1.50")), parts=st.lists(_leaves, max_size=3))

KINDS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (None, st.none()),
    (bool, st.booleans()),
    (int, _numbers),
    (float, st.floats(allow_nan=False)),
    (str, st.text()),
    (bytes, st.binary()),
    (Decimal, _decimals),
    (UUID, st.uuids()),
    (datetime, _times),
    (date, st.dates()),
    (time, st.times()),
    (timedelta, st.timedeltas(timedelta(days=-9999), timedelta(days=9999))),
    (Colour, _colours),
    (Box, _boxes),
    (Parcel, _parcels),
    (Label, _labels),
    (Model, _models),
    (set[str], st.sets(st.text())),
    (tuple[int, str], st.tuples(_numbers, st.text())),
    (int | str | None, _numbers | st.text() | st.none()),
    (dict[str, Decimal], st.dictionaries(st.text(), _decimals)),
    (dict[UUID, list[Model]], st.dictionaries(st.uuids(), st.lists(_models, max_size=2), max_size=2)),
    (list[Box | None], st.lists(_boxes | st.none())),
]


@pytest.mark.parametrize(("kind", "values"), KINDS, ids=[str(kind) for kind, _ in KINDS])
@given(data=st.data())
def test_value_comes_out_unchanged(kind: Any, values: st.SearchStrategy[Any], data: st.DataObject) -> None:
    value = data.draw(values)
    payload = Payload(kind)
    assert payload.read(payload.write(value)) == value


@given(body=st.binary(max_size=60))
@pytest.mark.parametrize("kind", [kind for kind, _ in KINDS], ids=[str(kind) for kind, _ in KINDS])
def test_bytes_of_anybody_are_a_value_or_refused(kind: Any, body: bytes) -> None:
    payload = Payload(kind)
    with contextlib.suppress(InvalidMessage):
        read = payload.read(body)
        assert payload.read(payload.write(read)) == read or read != read


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, object(), {object(): 1}, [[object()]]])
def test_value_without_an_encoding_is_refused(value: object) -> None:
    with pytest.raises(InvalidMessage, match="cannot be encoded"):
        Payload(int).write(value)


# ---------------------------------------------------------------- models that lose something


class Shown(BaseModel):
    secret: SecretStr

    @field_serializer("secret")
    def show(self, secret: SecretStr) -> str:
        return secret.get_secret_value()


LOSSY: list[tuple[Any, str]] = [
    (create_model("Lossy", a=(SecretStr, ...)), "Lossy.a is a secret"),
    (create_model("Lossy", a=(SecretBytes, ...)), "Lossy.a is a secret"),
    (create_model("Lossy", a=(dict[str, list[SecretStr | None]], {})), "Lossy.a is a secret"),
    (RootModel[SecretStr], "is a secret"),
    (create_model("Lossy", a=(int, Field(0, exclude=True))), "Lossy.a has exclude=True"),
    (create_model("Lossy", a=(int, Field(validation_alias="x", serialization_alias="y"))), "Lossy.a is written as 'y'"),
    (create_model("Lossy", a=(int, Field(serialization_alias="y"))), "Lossy.a is written as 'y'"),
]
WHOLE: list[tuple[Any, Any]] = [
    (Shown, Shown(secret=SecretStr("correct horse"))),
    (create_model("Whole", a=(int, Field(alias="x"))), {"x": 1}),
    (create_model("Whole", a=(int, Field(validation_alias="x"))), {"x": 1}),
    (create_model("Whole", a=(int, Field(validation_alias=AliasChoices("x", "y"), serialization_alias="y"))), {"x": 1}),
]


@pytest.mark.parametrize(("model", "fault"), LOSSY)
def test_model_is_refused_when_a_field_would_be_lost(model: Any, fault: str) -> None:
    listed: Any = list[model]
    within: Any = create_model("Outer", inner=(listed, []))
    keyed: Any = dict[str, within]
    for kind in (model, listed, within, keyed, msgspec.defstruct("Struct", [("a", model)])):
        with pytest.raises(TypeError, match=fault):
            Payload(kind)


@pytest.mark.parametrize(("model", "value"), WHOLE)
def test_model_comes_out_unchanged(model: Any, value: Any) -> None:
    payload = Payload(model)
    made = model.model_validate(value)
    assert payload.read(payload.write(made)) == made
