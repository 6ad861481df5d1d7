"""One message in each kind of class that durable takes, with a field of each type that must arrive as it was."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID, uuid4

import attrs
import msgspec
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from durable.envelope import JSON, Envelope


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Struct(msgspec.Struct):
    id: UUID
    number: int
    total: Decimal
    ratio: float | None
    at: datetime
    day: date
    wait: timedelta
    note: str
    parts: list[str]
    picture: bytes
    tags: set[int]
    colour: Colour
    by_name: dict[str, UUID]


@dataclass
class DataClass:
    id: UUID
    number: int
    total: Decimal
    ratio: float | None
    at: datetime
    day: date
    wait: timedelta
    note: str
    parts: list[str]
    picture: bytes
    tags: set[int]
    colour: Colour
    by_name: dict[str, UUID]


@attrs.define
class Attrs:
    id: UUID
    number: int
    total: Decimal
    ratio: float | None
    at: datetime
    day: date
    wait: timedelta
    note: str
    parts: list[str]
    picture: bytes
    tags: set[int]
    colour: Colour
    by_name: dict[str, UUID]


class Model(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
    id: UUID
    number: int
    total: Decimal
    ratio: float | None
    at: datetime
    day: date
    wait: timedelta
    note: str
    parts: list[str]
    picture: bytes
    tags: set[int]
    colour: Colour
    by_name: dict[str, UUID]


class StrictModel(Model):
    model_config = ConfigDict(strict=True)


KINDS: list[type[Any]] = [Struct, DataClass, Attrs, Model, StrictModel]

texts = st.text(st.characters(codec="utf-8"), max_size=20)
zones = st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=30))])
fields = st.fixed_dictionaries(
    {
        "id": st.uuids(),
        "number": st.integers(-(2**63), 2**63 - 1),
        "total": st.decimals(allow_nan=False, allow_infinity=False),
        "ratio": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "at": st.datetimes(datetime(1900, 1, 1), datetime(9000, 1, 1), timezones=zones),
        "day": st.dates(),
        "wait": st.timedeltas(timedelta(days=-10_000), timedelta(days=10_000)),
        "note": texts,
        "parts": st.lists(texts, max_size=3),
        "picture": st.binary(max_size=20),
        "tags": st.sets(st.integers(-(2**63), 2**63 - 1), max_size=3),
        "colour": st.sampled_from(Colour),
        "by_name": st.dictionaries(texts, st.uuids(), max_size=2),
    }
)


def some_fields(**changed: Any) -> dict[str, Any]:
    """Any values will do."""
    return {
        "id": uuid4(),
        "number": 1,
        "total": Decimal("10.10"),
        "ratio": None,
        "at": datetime.now(UTC),
        "day": date(2024, 2, 29),
        "wait": timedelta(seconds=90),
        "note": "ü",
        "parts": [],
        "picture": b"\xff\x00",
        "tags": {1},
        "colour": Colour.BLUE,
        "by_name": {},
        **changed,
    }


def draft(content_type: str = JSON, **changed: Any) -> Envelope:
    """An envelope that has no body yet."""
    facts = {
        "id": UUID("019b76da-a800-7cc1-8a2f-2b1c0d9a3e41"),
        "message_type": "orders.order-placed",
        "destination": "",
        "source": "orders",
        "correlation_id": UUID("019b76da-a800-7cc1-8a2f-2b1c0d9a3e41"),
        "body": b"",
        "sent_at": datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        "content_type": content_type,
    }
    return Envelope(**{**facts, **changed})
