"""Classes that no codec can encode are refused where they are declared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import attrs
import msgspec
import pytest
from pydantic import BaseModel

from durable import InvalidSetting, message
from durable.envelope import JSON
from durable.messages.codecs.cloudevents import CloudEventsCodec

CONTENT_TYPES = [JSON, "application/msgpack", CloudEventsCodec.content_type]


class Plain:
    """No kind of message."""


class Keyed(TypedDict):
    number: int


class Text(str):
    """A kind of text."""


@dataclass
class One:
    number: int = 1


@dataclass
class Other:
    number: int = 1


@dataclass
class HoldsPlain:
    inner: Plain


@dataclass
class HoldsPlainDeep:
    inner: dict[str, list[HoldsPlain | None]] = field(default_factory=dict)


@dataclass
class HoldsEither:
    either: One | Other


@dataclass
class Tree:
    children: list[Tree] = field(default_factory=list)


@attrs.define
class Attrs:
    tree: Tree | None = None


@attrs.define
class Private:
    _number: int = 1


@attrs.define(slots=False)
class PrivateOutright:
    _number: int


@dataclass
class HoldsPrivate:
    privates: list[Private] = field(default_factory=list)


@attrs.define
class Remembers:
    number: int = 1
    _seen: int = attrs.field(init=False, default=0)


@dataclass(slots=True)
class PrivateData:
    _number: int = 1


class Model(BaseModel):
    number: int = 1


class Row(NamedTuple):
    number: int = 1


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
@pytest.mark.parametrize(
    ("cls", "told"),
    [
        (Plain, "no msgspec Struct, dataclass, attrs class or pydantic model; put @message above @dataclass"),
        (Keyed, "no msgspec Struct"),
        (Text, "no msgspec Struct"),
        (int, "no msgspec Struct"),
        (HoldsPlain, r"HoldsPlain\.inner is of class Plain, which has no encoding"),
        (HoldsPlainDeep, r"HoldsPlainDeep\.inner\.inner is of class Plain"),
        (HoldsEither, "more than one"),
        (Private, r"Private\._number is a private field of an attrs class, .*name it 'number'"),
        (PrivateOutright, r"PrivateOutright\._number is a private field"),
        (HoldsPrivate, r"HoldsPrivate\.privates\._number is a private field"),
    ],
)
def test_class_without_an_encoding_is_refused(cls: type, told: str, content_type: str) -> None:
    with pytest.raises(InvalidSetting, match=rf"@message\('classes.refused'\): .*{told}"):
        message("classes.refused", content_type=content_type)(cls)


@pytest.mark.parametrize("value", [17, "name", One()])
def test_value_other_than_a_class_is_refused(value: Any) -> None:
    with pytest.raises(InvalidSetting, match="is no class"):
        message("classes.refused")(value)


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
@pytest.mark.parametrize("cls", [One, Tree, Attrs, Remembers, PrivateData, Model, Row])
def test_class_with_an_encoding_is_taken(cls: type, content_type: str) -> None:
    letter = "abc"[CONTENT_TYPES.index(content_type)]
    assert message(f"classes.taken-{cls.__name__.lower()}-{letter}", content_type=content_type)(cls) is cls


def test_class_naming_a_later_one_is_accepted_until_the_start() -> None:
    @message("classes.later")
    class Early(msgspec.Struct):
        part: Later

    assert Early.__name__ == "Early"


@message("classes.a-later-one")
class Later(msgspec.Struct):
    number: int = 1
