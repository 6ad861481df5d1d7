"""What is sent is what is read: messages that hold what their annotations do not allow."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from durable import InvalidMessage, message
from durable.clock import SystemClock
from durable.envelope import JSON
from durable.messages.codec import decode
from durable.messages.codecs.cloudevents import CloudEventsCodec
from durable.messages.routing import Routes
from durable.outbox.envelope_factory import EnvelopeFactory
from durable.settings import load_settings

CONTENT_TYPES = [JSON, "application/msgpack", CloudEventsCodec.content_type]


NUMBER_SEVEN = UUID(int=7)


class Colour(Enum):
    RED = "red"


class Coloured(Enum):
    """Has the values of Colour."""

    RED = "red"


@dataclass
class Part:
    number: int = 1


@dataclass
class Painted(Part):
    colour: str = "red"


@dataclass(eq=False)
class Unequal:
    number: float = 1


@dataclass
class Fields:
    """One of everything, with a value that fits."""

    whole: int = 1
    number: float = 1.5
    text: str = "a"
    flag: bool = True
    data: bytes = b"a"
    id: UUID = NUMBER_SEVEN
    amount: Decimal = Decimal("1.50")
    clock: time = time(9, tzinfo=UTC)
    hidden: Part = field(default_factory=Part, compare=False)
    moment: datetime = datetime(2030, 1, 1, tzinfo=UTC)
    day: date = date(2030, 1, 1)
    span: timedelta = timedelta(seconds=1.5)
    colour: Colour = Colour.RED
    part: Part = field(default_factory=Part)
    unequal: Unequal = field(default_factory=Unequal)
    parts: list[Part] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    anything: Any = None
    either: int | str = 1
    maybe: Part | None = None


def made(base: str, content_type: str) -> type[Any]:
    """A message class of one kind with these fields, encoded in this way."""
    annotations = Fields.__annotations__
    namespace = vars(Fields())
    fields = [(name, annotations[name], value) for name, value in namespace.items()]
    name = f"faithful.{base}.{CONTENT_TYPES.index(content_type)}".replace(".0", ".a").replace(".1", ".b")
    name = name.replace(".2", ".c")
    cls: type[Any]
    if base == "struct":
        cls = msgspec.defstruct("Struct", [(n, hint, _default(value)) for n, hint, value in fields], module=__name__)
    elif base == "attrs":
        cls = attrs.make_class("Attrs", {n: attrs.field(type=hint, default=v) for n, hint, v in fields})
        cls.__annotations__ = dict(annotations)
        cls.__module__ = __name__
    elif base == "model":
        definitions: dict[str, Any] = {n: (hint, value) for n, hint, value in fields}
        cls = pydantic.create_model("Model", __module__=__name__, **definitions)
        return message(name, content_type=content_type)(cls)
    else:
        cls = dataclass(type("Data", (Fields,), {"__module__": __name__}))
    return message(name, content_type=content_type)(cls)


def _default(value: Any) -> Any:
    return msgspec.field(default_factory=lambda: value)


BASES = ("dataclass", "struct", "attrs", "model")
CLASSES = {(base, kind): made(base, kind) for base in BASES for kind in CONTENT_TYPES}
VALUES = [
    17, 1.5, "text", "17", True, None, b"bytes", uuid4(), Decimal("2.5"), datetime(2031, 1, 1, tzinfo=UTC),
    datetime(2031, 1, 1), date(2031, 1, 1), timedelta(1), Colour.RED, Part(2), Painted(2), Part("x"),  # type: ignore[arg-type]
    Unequal(2), [Part(2)], (Part(2),), [17], {"a": 1}, {1: "a"}, {"a": "b"}, {1, 2}, object(), object,
    time(9), time(9, tzinfo=UTC), time(9, tzinfo=ZoneInfo("Europe/Vienna")), Decimal("NaN"), Decimal("-Infinity"),
    time(8, tzinfo=timezone(timedelta(hours=1))), [Unequal(3)], {"a": Part(2)}, SecretStr("a"), math.nan, Coloured.RED,
    datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Vienna")),
]  # fmt: skip


def envelope_factory(**settings: Any) -> EnvelopeFactory:
    return EnvelopeFactory("faithful", Routes(), load_settings(**settings), SystemClock())


TO = "tcp://127.0.0.1:2302"


@pytest.mark.parametrize(("base", "content_type"), CLASSES)
def test_message_of_fitting_values_is_sent(base: str, content_type: str) -> None:
    cls = CLASSES[base, content_type]

    envelope = envelope_factory().command(cls(), to=TO)

    assert envelope.content_type == content_type
    assert repr(decode(envelope.body, cls, content_type)).count("number=1") == repr(cls()).count("number=1")


@pytest.mark.parametrize(("base", "content_type"), CLASSES)
@given(st.dictionaries(st.sampled_from(list(Fields.__annotations__)), st.sampled_from(VALUES), max_size=3))
def test_message_is_read_unchanged_or_refused(base: str, content_type: str, values: dict[str, Any]) -> None:
    cls = CLASSES[base, content_type]
    sent = cls.model_construct(**values) if issubclass(cls, pydantic.BaseModel) else cls(**values)

    try:
        envelope = envelope_factory().command(sent, to=TO)
    except InvalidMessage:
        assert values, "the class's own values fit"
        return

    read = decode(envelope.body, cls, content_type)
    for name, value in values.items():
        arrived = getattr(read, name)
        assert _as_sent(value, arrived), (name, value, arrived)


def _as_sent(value: Any, arrived: Any) -> bool:
    if isinstance(value, datetime) and value.tzinfo:
        return isinstance(arrived, datetime) and abs(value.timestamp() - arrived.timestamp()) < 1e-6
    if isinstance(value, time):
        zones = (value.tzinfo is None) == (arrived.tzinfo is None) and value.utcoffset() == arrived.utcoffset()
        return zones and value.replace(tzinfo=None) == arrived.replace(tzinfo=None)
    if isinstance(value, Unequal):
        return isinstance(arrived, Unequal) and arrived.number == value.number
    if isinstance(value, list | tuple):
        return len(value) == len(arrived) and all(map(_as_sent, value, arrived))
    if isinstance(value, float | Decimal) and value != value:  # NaN
        return str(value).lower() == str(arrived).lower()
    if isinstance(value, bool):
        return value is arrived
    return bool(value == arrived)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"whole": "no number"}, r"Expected `int`, got `str` - at `\$.whole`"),
        ({"part": Painted(2)}, r"Data.part would arrive as Part\(number=2\), not as Painted"),
        ({"anything": uuid4()}, r"Data.anything would arrive as '"),
        ({"hidden": Painted(2)}, r"Data.hidden would arrive as Part\(number=2\), not as Painted"),
        (
            {"clock": time(9, tzinfo=ZoneInfo("Europe/Vienna"))},
            r"Data.clock would arrive as datetime.time\(9, 0\), not",
        ),
        ({"anything": {"a": [Part(2)]}}, r"Data.anything\['a'\]\[0\] would arrive as \{'number': 2\}"),
    ],
)
def test_value_unfit_for_its_annotation_is_refused_with_its_field(values: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidMessage, match=told):
        envelope_factory().command(CLASSES["dataclass", JSON](**values), to=TO)


def test_validation_is_turned_off_by_its_setting() -> None:
    envelope = envelope_factory(validate_sent=False).command(CLASSES["dataclass", JSON](whole="no number"), to=TO)

    with pytest.raises(InvalidMessage):
        decode(envelope.body, CLASSES["dataclass", JSON])


@message("faithful.nan", content_type="application/msgpack")
@dataclass
class Measured:
    value: float


def test_nan_is_sent_when_its_codec_has_an_encoding() -> None:
    envelope = envelope_factory().command(Measured(math.nan), to=TO)

    assert math.isnan(decode(envelope.body, Measured, "application/msgpack").value)


@attrs.define
class Compared:
    seen: int = 1
    unseen: Part = attrs.field(factory=Part, eq=False)


@message("faithful.holder")
@dataclass
class Holder:
    """Classes whose own comparison leaves fields out, in all that may hold them."""

    one: Compared = field(default_factory=Compared)
    some: list[Compared] = field(default_factory=list)
    named: dict[str, Compared] = field(default_factory=dict)
    amount: Decimal = Decimal(1)


@pytest.mark.parametrize(
    ("sent", "path"),
    [
        (Holder(one=Compared(1, Painted(1))), "Holder.one.unseen"),
        (Holder(some=[Compared(), Compared(1, Painted(1))]), r"Holder.some\[1\].unseen"),
        (Holder(named={"a": Compared(1, Painted(1))}), r"Holder.named\['a'\].unseen"),
    ],
)
def test_field_left_out_of_the_comparison_of_its_class_is_compared(sent: Holder, path: str) -> None:
    with pytest.raises(InvalidMessage, match=rf"{path} would arrive as Part\(number=1\), not as Painted"):
        envelope_factory().command(sent, to=TO)


@pytest.mark.parametrize("amount", ["NaN", "-NaN", "sNaN", "NaN12", "Infinity"])
def test_decimal_nan_and_infinity_arrive_unchanged(amount: str) -> None:
    envelope = envelope_factory().command(Holder(amount=Decimal(amount)), to=TO)

    assert str(decode(envelope.body, Holder).amount) == amount


@message("faithful.nested")
@dataclass
class Nested:
    inner: Any = None


def test_endlessly_nested_message_is_refused() -> None:
    sent = Nested()
    for _ in range(600):
        sent = Nested([sent.inner])

    with pytest.raises(InvalidMessage, match=r"Nested cannot be sent, as .*recursion"):
        envelope_factory().command(sent, to=TO)
