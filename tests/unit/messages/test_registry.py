"""Names of message types: stable, unique, and never a way to import anything."""

from __future__ import annotations

import sys

import msgspec
import pytest

from durable.errors import InvalidSetting, UnknownMessageType
from durable.messages.registry import class_of, message, name_of, registered
from tests.support.subclasses import TEXTS

pytestmark = pytest.mark.usefixtures("no_messages")


class Placed(msgspec.Struct):
    number: int


class Shipped(msgspec.Struct):
    number: int


def test_a_class_is_found_by_its_name_and_a_name_by_its_class() -> None:
    assert message("orders.order-placed")(Placed) is Placed
    assert (name_of(Placed), class_of("orders.order-placed")) == ("orders.order-placed", Placed)
    assert list(registered()) == [("orders.order-placed", Placed)]


def test_a_new_version_is_a_type_of_its_own() -> None:
    message("orders.placed")(Placed)
    message("orders.placed", version=2)(Shipped)
    assert name_of(Shipped) == "orders.placed.v2"
    assert class_of("orders.placed") is Placed


@pytest.mark.parametrize("name", TEXTS.values(), ids=list(TEXTS))
def test_version_of_a_name_of_a_subclass_has_plain_text(name: str) -> None:
    message(name, version=2)(Placed)
    assert name_of(Placed) == "acme.v2"


@pytest.mark.parametrize("name", ["a", "a.b", "orders.order-placed", "a1.b2-c3", "x" * 200])
def test_dotted_lower_case_words_are_names(name: str) -> None:
    message(name)(Placed)
    assert class_of(name) is Placed


@pytest.mark.parametrize(
    "name",
    [
        "",
        "A",
        "a.",
        ".a",
        "a..b",
        "1a",
        "a b",
        "a_b",
        "a/b",
        "a\n",
        "a\0",
        "é",
        "-a",
        "os.System",
        "a.b\r\n",
    ],
)
def test_other_forms_are_refused(name: str) -> None:
    with pytest.raises(InvalidSetting, match="dotted lower-case words"):
        message(name)


def test_a_version_counts_from_1() -> None:
    with pytest.raises(InvalidSetting, match="at least 1"):
        message("a", version=0)


def test_two_classes_cannot_have_one_name() -> None:
    message("a")(Placed)
    with pytest.raises(InvalidSetting, match=r"taken by .*Placed"):
        message("a")(Shipped)
    assert class_of("a") is Placed


def test_module_loaded_again_registers_its_class_again() -> None:
    message("a")(Placed)
    again = type("Placed", (msgspec.Struct,), {"__module__": Placed.__module__})
    message("a")(again)
    assert class_of("a") is again


def test_unnamed_class_is_refused_with_advice() -> None:
    with pytest.raises(UnknownMessageType, match=r"decorate it with @message\(name\)"):
        name_of(Placed)


def test_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    message("orders.order-placed")(Placed)
    with pytest.raises(UnknownMessageType, match=r"did you mean 'orders\.order-placed'\?"):
        class_of("orders.order-place")


@pytest.mark.parametrize("name", ["os.system", "antigravity", "this", "builtins.eval"])
def test_name_of_a_type_imports_nothing(name: str) -> None:
    before = set(sys.modules)
    with pytest.raises(UnknownMessageType):
        class_of(name)
    assert set(sys.modules) == before


def test_name_beyond_the_limit_is_told_the_limit() -> None:
    with pytest.raises(InvalidSetting, match="the name has 201 characters; give 200 at most"):
        message("a" * 201)
