"""What is sent is what is read: pydantic models, whose fields may be written otherwise than they are read."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from typing import Annotated, Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    AliasChoices,
    AliasGenerator,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    PlainSerializer,
    RootModel,
    SecretBytes,
    SecretStr,
    SerializeAsAny,
    computed_field,
    create_model,
)
from pydantic.alias_generators import to_camel

from durable import InvalidMessage, message
from durable.clock import SystemClock
from durable.envelope import JSON
from durable.messages.codec import decode
from durable.messages.codecs.cloudevents import CloudEventsCodec
from durable.messages.routing import Routes
from durable.outbox.envelope_factory import EnvelopeFactory
from durable.settings import load_settings

CONTENT_TYPES = [JSON, "application/msgpack", CloudEventsCodec.content_type]
TO = "tcp://127.0.0.1:2302"
SOME_ID = UUID(int=7)


class Part(BaseModel):
    number: int = 0
    note: str = Field(default="", alias="partNote")


class Painted(Part):
    colour: str = "red"


class Computed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: int

    @computed_field
    def twice(self) -> int:
        return 2 * self.number


class Numbers(RootModel[list[int]]):
    pass


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    number: int = 0


Revealed = Annotated[SecretStr, PlainSerializer(lambda secret: secret.get_secret_value())]
Doubled = Annotated[int, BeforeValidator(lambda number: 2 * number)]
Dotted = Annotated[datetime, PlainSerializer(lambda moment: moment.strftime("%d.%m.%Y"))]
MOMENT = datetime(2030, 1, 2, tzinfo=UTC)
VIA_ALIAS = ConfigDict(alias_generator=to_camel)
BOTH_WAYS = ConfigDict(
    alias_generator=AliasGenerator(validation_alias=to_camel, serialization_alias=to_camel), extra="forbid"
)

# annotation, field, configuration, value
CARRIED: dict[str, tuple[Any, Any, ConfigDict, Any]] = {
    "alias": (int, Field(alias="theValue"), ConfigDict(), 7),
    "alias with a default": (int, Field(0, alias="theValue"), ConfigDict(), 7),
    "alias and no extras": (int, Field(0, alias="theValue"), ConfigDict(extra="forbid"), 7),
    "validation alias": (int, Field(0, validation_alias="theValue"), ConfigDict(), 7),
    "choice of aliases": (int, Field(0, validation_alias=AliasChoices("theValue", "value")), ConfigDict(), 7),
    "path of an alias": (int, Field(0, validation_alias=AliasPath("values", 0)), ConfigDict(), 7),
    "generated alias": (int, Field(0), VIA_ALIAS, 7),
    "generated aliases": (int, Field(0), BOTH_WAYS, 7),
    "alias or name": (int, Field(0, alias="theValue"), ConfigDict(populate_by_name=True), 7),
    "alias that is written": (int, Field(0, alias="theValue"), ConfigDict(serialize_by_alias=True), 7),
    "alias of a part": (Part, ..., ConfigDict(), Part.model_validate({"number": 1, "partNote": "a"})),
    "aliases of parts": (list[Part], [], ConfigDict(), [Part(), Part.model_validate({"number": 1, "partNote": "a"})]),
    "text of JSON": (Json[dict[str, int]], ..., ConfigDict(), {"a": 1}),
    "text of JSON in a list": (list[Json[Any]], ..., ConfigDict(), [{"a": [1]}, None]),
    "computed field": (Computed, ..., ConfigDict(), Computed(number=2)),
    "root model": (Numbers, ..., ConfigDict(), Numbers([1, 2])),
    "revealed secret": (Revealed, ..., ConfigDict(), SecretStr("hunter2")),
    "empty secret": (SecretStr, ..., ConfigDict(), SecretStr("")),
    "extra fields": (Open, ..., ConfigDict(), Open.model_validate({"number": 1, "more": {"a": [1]}})),
    "strict": (UUID, ..., ConfigDict(strict=True), SOME_ID),
    "moment": (datetime, ..., ConfigDict(), MOMENT),
    "anything that JSON has": (Any, None, ConfigDict(), {"a": [1, None, "b"]}),
}
REFUSED: dict[str, tuple[Any, Any, ConfigDict, Any]] = {
    "alias that is not read": (int, Field(0, serialization_alias="theValue"), ConfigDict(), 7),
    "required alias that is not read": (int, Field(serialization_alias="value_"), ConfigDict(extra="forbid"), 7),
    "secret": (SecretStr, SecretStr(""), ConfigDict(), SecretStr("hunter2")),
    "secret bytes": (SecretBytes | None, None, ConfigDict(), SecretBytes(b"hunter2")),
    "secret in a list": (list[SecretStr], [], ConfigDict(), [SecretStr("hunter2")]),
    "subclass": (Part, Part(), ConfigDict(), Painted(number=1)),
    "subclass in a list": (list[Part], [], ConfigDict(), [Part(), Painted()]),
    "subclass with its fields": (SerializeAsAny[Part], Part(), ConfigDict(), Painted(number=1)),
    "any UUID": (Any, None, ConfigDict(), SOME_ID),
    "any Decimal": (Any, None, ConfigDict(), Decimal("1.10")),
    "any model": (Any, None, ConfigDict(), Part()),
    "extra Decimal": (Open, Open(), ConfigDict(), Open.model_validate({"more": Decimal("1.1")})),
    "excluded": (int, Field(0, exclude=True), ConfigDict(), 5),
    "required and excluded": (int, Field(exclude=True), ConfigDict(), 5),
    "serializer": (Dotted, ..., ConfigDict(), MOMENT),
    "validator that changes it": (Doubled, 0, ConfigDict(), 2),
    "value of a wrong type": (int, 0, ConfigDict(), "no number"),
    "value that is only like it": (int, 0, ConfigDict(), "17"),
    "truth for a number": (int, 0, ConfigDict(), True),
    "text that is another date": (datetime | str, "", ConfigDict(), b"2030-01-01"),
}


FEATURES = CARRIED | REFUSED


@cache
def model_class(feature: str, content_type: str) -> type[BaseModel]:
    """A message with this feature in its field `the_value`."""
    hint, default, config, _ = FEATURES[feature]
    cls = create_model("Model", __config__=config, __module__=__name__, the_value=(hint, default))
    name = f"faithful-models.{feature.lower().replace(' ', '-')}.{'jmc'[CONTENT_TYPES.index(content_type)]}"
    return message(name, content_type=content_type)(cls)


def model(feature: str, content_type: str, value_of: str = "") -> BaseModel:
    """A message with the value of this feature, or with that of another, which nobody has checked."""
    made = model_class(feature, content_type).model_construct()
    made.the_value = FEATURES[value_of or feature][3]  # type: ignore[attr-defined]
    return made


def composed(sent: object) -> bytes:
    return EnvelopeFactory("faithful", Routes(), load_settings(), SystemClock()).command(sent, to=TO).body


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
@pytest.mark.parametrize("feature", CARRIED)
def test_model_is_read_unchanged(feature: str, content_type: str) -> None:
    sent: Any = model(feature, content_type)

    read = decode(composed(sent), type(sent), content_type)

    assert type(read.the_value) is type(sent.the_value)
    assert read.the_value == sent.the_value


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
@pytest.mark.parametrize("feature", REFUSED)
def test_model_read_differently_is_refused_with_its_field(feature: str, content_type: str) -> None:
    with pytest.raises(InvalidMessage, match=r"(?s)Model cannot be sent.*(the_value|value_)"):
        composed(model(feature, content_type))


def test_secret_is_refused_without_being_shown() -> None:
    with pytest.raises(InvalidMessage, match=r"the_value is a secret, .* stars") as refused:
        composed(model("secret", JSON))

    assert "hunter2" not in str(refused.value)


def test_alias_is_the_name_sent() -> None:
    assert composed(model("alias", JSON)) == b'{"theValue":7}'


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
@given(st.sampled_from(list(FEATURES)), st.sampled_from(list(FEATURES)))
def test_model_with_any_two_features_is_read_unchanged_or_refused(content_type: str, feature: str, other: str) -> None:
    sent: Any = model(feature, content_type, other)

    try:
        body = composed(sent)
    except InvalidMessage:
        assert feature != other or feature in REFUSED
        return

    read = decode(body, type(sent), content_type)
    assert type(read.the_value) is type(sent.the_value)
    assert read.the_value == sent.the_value
