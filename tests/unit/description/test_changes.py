"""Which changes of an application others notice: contracts and messages, before and after."""

from __future__ import annotations

from dataclasses import make_dataclass
from enum import Enum
from typing import Any, Literal

import msgspec
import pytest

from durable import Bus, message, upcaster
from durable.calls import service
from durable.description.changes import Change, changes
from durable.description.document import Description, read
from durable.description.survey import describe
from durable.errors import InvalidSetting
from durable.messages import registry, upcasting

pytestmark = pytest.mark.usefixtures("no_messages")
"""Each test declares its messages anew, twice under one name."""


class Colour(Enum):
    RED = "red"


class MoreColours(Enum):
    RED = "red"
    BLUE = "blue"


def described(bus: Bus) -> Description:
    """The description, as it comes out of a file."""
    found = msgspec.json.encode(describe(bus.application, {}))
    registry._by_name.clear()
    upcasting._steps.clear()
    return read(found, "old.json")


def offering(version: str = "1.2", **methods: Any) -> Description:
    bus = Bus("shop")
    cls = type("Inventory", (), methods)
    bus.listen("tcp://127.0.0.1:2304")
    bus.offer(service("inventory", version=version)(cls), cls())
    return described(bus)


def handling(
    fields: dict[str, Any], *, is_sent: bool = False, version: int = 1, since: int | None = None
) -> Description:
    """An application that handles a message with these fields, or sends it; `since`: and the versions from this on."""
    bus = Bus("shop")
    cls: Any = message("shop.order", version=version)(make_dataclass("Order", list(fields.items())))
    for older in range(since or version, version):
        old: Any = message("shop.order", version=older)(make_dataclass(f"Order{older}", list(fields.items())))

        def newer(order: Any) -> Any:
            return cls(**vars(order))

        upcaster(old, to=cls)(newer)
    if is_sent:
        bus.route(cls, to="tcp://127.0.0.1:2305")
    else:

        async def handle(order: Any) -> None: ...

        handle.__annotations__["order"] = cls
        bus.handles(cls)(handle)
    return described(bus)


async def reserve(self: Any, sku: str) -> int:
    raise NotImplementedError


async def reserve_count(self: Any, sku: str, count: int = 1) -> int:
    raise NotImplementedError


async def reserve_needed(self: Any, sku: str, count: int) -> int:
    raise NotImplementedError


async def reserve_number(self: Any, sku: int) -> int:
    raise NotImplementedError


async def reserve_fraction(self: Any, sku: str) -> float:
    raise NotImplementedError


async def reserve_bool(self: Any, sku: str | None) -> int:
    raise NotImplementedError


async def move(self: Any, source: str, target: str) -> None:
    raise NotImplementedError


async def move_back(self: Any, target: str, source: str) -> None:
    raise NotImplementedError


async def move_renamed(self: Any, source: str, place: str) -> None:
    raise NotImplementedError


async def colour(self: Any) -> Colour:
    raise NotImplementedError


async def colours(self: Any) -> MoreColours:
    raise NotImplementedError


for _function in (reserve_count, reserve_needed, reserve_number, reserve_fraction, reserve_bool):
    _function.__name__ = "reserve"
move_back.__name__ = move_renamed.__name__ = "move"
colours.__name__ = "colour"


@pytest.mark.parametrize(
    ("version", "methods", "told"),
    [
        ("1.2", {"reserve": reserve}, None),
        ("1.3", {"reserve": reserve}, None),
        ("1.3", {"reserve": reserve_count}, None),
        ("1.3", {"reserve": reserve_bool}, None),
        ("1.3", {"reserve": reserve, "colour": colour}, None),
        ("1.2", {"reserve": reserve, "colour": colour}, "raise the version to 1.3"),
        ("1.2", {"reserve": reserve_count}, "raise the version to 1.3"),
        ("1.1", {"reserve": reserve}, "give a version above 1.2"),
        ("2.0", {"reserve": reserve}, "callers of 1.2 are refused"),
        ("1.3", {"colour": colour}, "reserve: is removed"),
        ("1.3", {"reserve": reserve_needed}, "argument count: is required"),
        ("1.3", {"reserve": reserve_number}, "argument sku: text may be written, and an integer is read"),
        ("1.3", {"reserve": reserve_fraction}, "result the whole: a number may be written"),
    ],
)
def test_change_of_a_service_is_told_when_callers_notice(
    version: str, methods: dict[str, Any], told: str | None
) -> None:
    check(changes(offering("1.2", reserve=reserve), offering(version, **methods)), told)


@pytest.mark.parametrize("version", ["1.2", "1.3"])
def test_exchanged_and_renamed_arguments_are_told(version: str) -> None:
    old = offering("1.2", move=move)
    exchanged, renamed = offering(version, move=move_back), offering(version, move=move_renamed)
    check(changes(old, exchanged), "argument target: is called 'source' where it is written, and 'target' where it is")
    check(changes(old, exchanged), "argument source: is called 'target' where it is written, and 'source' where it is")
    check(changes(old, renamed), "argument place: is called 'target' where it is written, and 'place' where it is read")


def test_changed_version_of_a_service_is_told() -> None:
    found = changes(offering("1.2", reserve=reserve), offering("1.3", reserve=reserve))
    assert [each.what for each in found] == ["is offered as 1.3, and no longer as 1.2"]


def test_new_value_of_an_enum_in_a_result_is_noticed_and_a_removed_one_is_not() -> None:
    check(changes(offering("1.0", colour=colour), offering("1.1", colour=colours)), "'blue' is not known")
    check(changes(offering("1.0", colour=colours), offering("1.1", colour=colour)), None)


def test_withdrawn_service_is_noticed() -> None:
    check(changes(offering(reserve=reserve), described(Bus("shop"))), "is offered no more")
    check(changes(described(Bus("shop")), offering(reserve=reserve)), None)


@pytest.mark.parametrize(
    ("old", "new", "when_handled", "when_sent"),
    [
        ({"id": int}, {"id": int}, None, None),
        ({"id": int}, {"id": int, "item": str}, "item: is required", None),
        ({"id": int, "item": str}, {"id": int}, None, "item: is required"),
        ({"id": int}, {"id": float}, None, "id: a number may be written"),
        ({"id": float}, {"id": int}, "id: a number may be written", None),
        ({"id": Literal["a"]}, {"id": Literal["a", "b"]}, None, "id: 'b' is not known"),
        ({"id": Colour}, {"id": MoreColours}, None, "id: 'blue' is not known"),
        ({"id": MoreColours}, {"id": Colour}, "id: 'blue' is not known", None),
        ({"id": int}, {"id": int | None}, None, "id: null may be written"),
        ({"id": list[int]}, {"id": list[str]}, "id[]: an integer may be", "id[]: text may be written"),
    ],
)
def test_change_of_a_message_is_told_when_others_notice(
    old: dict[str, Any], new: dict[str, Any], when_handled: str | None, when_sent: str | None
) -> None:
    check(changes(handling(old), handling(new)), when_handled)
    check(changes(handling(old, is_sent=True), handling(new, is_sent=True)), when_sent)


def test_message_is_noticed_when_handled_no_more() -> None:
    check(changes(handling({"id": int}), described(Bus("shop"))), "handle it until nobody sends it")
    check(changes(handling({"id": int}, is_sent=True), described(Bus("shop"))), "is sent no more")


def test_new_version_of_a_message_needs_an_upcaster_when_handled() -> None:
    old = handling({"id": int})
    check(changes(old, handling({"id": int}, version=2)), "shop.order.v2 is, without an upcaster")
    check(changes(old, handling({"id": int}, version=2, since=1)), None)


def test_new_version_of_a_message_is_noticed_when_sent() -> None:
    new = handling({"id": int}, version=2, is_sent=True)
    check(changes(handling({"id": int}, is_sent=True), new), "deploy receivers that handle shop.order.v2 first")


def test_changed_destination_of_a_message_is_told() -> None:
    old = handling({"id": int}, is_sent=True)
    new = msgspec.json.decode(msgspec.json.encode(old).replace(b"2305", b"2306"), type=Description)
    found = changes(old, new)
    assert [each.what for each in found] == [
        "is sent to tcp://127.0.0.1:2305 no more",
        "is sent to tcp://127.0.0.1:2306",
    ]


def check(found: list[Change], told: str | None) -> None:
    bad = [f"{each.subject}: {each.what}; {each.advice}" for each in found if not each.is_compatible]
    assert (told is None and not bad) or any(told is not None and told in each for each in bad), found


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"format": 1}', b"[" * 100_000])
def test_invalid_description_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidSetting, match=r"old.json: is no description: .*; make one with"):
        read(content, "old.json")


def test_description_of_a_later_durable_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="format 2, made by a later durable"):
        read(b'{"format": 2}', "old.json")
