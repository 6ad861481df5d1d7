"""Declarations of services: what is refused, with the method's name, and which versions serve which callers."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
import pytest
from pydantic import BaseModel, SecretStr

from durable import Bus
from durable.calls import call, service
from durable.calls.contract import contract_of, refuse_misfit
from durable.errors import IncompatibleService, InvalidSetting, NoProvider
from tests.support.calling import Inventory, Stock

T = TypeVar("T")


class Opaque:
    """No encoding."""


class NotAsync:
    def count(self) -> int: ...  # type: ignore[empty-body]


class Property:
    @property
    def count(self) -> int: ...  # type: ignore[empty-body]


class Attribute:
    count = 3


class Static:
    @staticmethod
    async def count() -> int: ...  # type: ignore[empty-body]


class Several:
    async def count(self, *skus: str) -> int: ...  # type: ignore[empty-body]


class Named:
    async def count(self, **skus: str) -> int: ...  # type: ignore[empty-body]


class Bare:
    async def count(self, sku) -> int: ...  # type: ignore[no-untyped-def, empty-body]


class NoResult:
    async def count(self, sku: str): ...  # type: ignore[no-untyped-def]


class NoSelf:
    async def count() -> int: ...  # type: ignore[misc, empty-body]


class OfOpaque:
    async def count(self, sku: Opaque) -> int: ...  # type: ignore[empty-body]


class ReturnsOpaque:
    async def count(self) -> list[Opaque]: ...  # type: ignore[empty-body]


class Mutable:
    async def count(self, skus: list[str] = ["A"]) -> int: ...  # type: ignore[empty-body]  # noqa: B006


class OfNone:
    async def count(self, sku: str = None) -> int: ...  # type: ignore[assignment, empty-body]  # noqa: RUF013


class OfAnotherType:
    async def count(self, skus: list[int] = ("A",)) -> int: ...  # type: ignore[assignment, empty-body]


class TooLarge:
    async def count(self, most: int = 2**64) -> int: ...  # type: ignore[empty-body]


class Secret(BaseModel):
    word: SecretStr


class OfSecret:
    async def count(self, secret: Secret) -> int: ...  # type: ignore[empty-body]


class ReturnsSecret:
    async def count(self) -> list[Secret]: ...  # type: ignore[empty-body]


class Forgotten:
    @call(fire_and_forget=True)
    async def count(self) -> int: ...  # type: ignore[empty-body]


class Box(msgspec.Struct, Generic[T]):
    held: T


class BoxModel(BaseModel, Generic[T]):
    held: T


class Base(Generic[T]):
    async def count(self, sku: T) -> None: ...


class OfVariable(Base[Decimal]): ...


class OfListOfVariable:
    async def count(self, skus: list[T]) -> None: ...


class OfBox:
    async def count(self, box: Box) -> None: ...  # type: ignore[type-arg]


class ReturnsBoxModel:
    async def count(self) -> BoxModel: ...  # type: ignore[type-arg, empty-body]


class OfClassVariable:
    async def count(self, sku: ClassVar[int]) -> None: ...  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]


class Days(enum.Enum):
    FIRST = date(2026, 1, 1)


class Dated(BaseModel):
    day: Days


class OfDays:
    async def count(self, dated: Dated) -> None: ...


@pytest.mark.parametrize(
    "cls",
    [
        OfVariable, OfListOfVariable, OfBox, ReturnsBoxModel, OfClassVariable, OfDays,
        NotAsync, Property, Attribute, Static, Several, Named, Bare, NoResult, NoSelf, OfOpaque, ReturnsOpaque, Mutable,
        OfNone, OfAnotherType, TooLarge, OfSecret, ReturnsSecret, Forgotten,
    ],
)  # fmt: skip
def test_uncallable_declaration_is_refused_with_the_name_of_its_method(cls: type) -> None:
    with pytest.raises(InvalidSetting, match=rf"^{cls.__name__}\.count: .*"):
        service("stock")(cls)


@pytest.mark.parametrize(
    ("cls", "advice"), [(Mutable, r"could be changed by a call; give None"), (OfNone, "the default None does not fit")]
)
def test_refused_default_is_told_with_its_value(cls: type, advice: str) -> None:
    with pytest.raises(InvalidSetting, match=advice):
        service("stock")(cls)


def test_default_of_its_type_is_taken() -> None:
    class Defaults:
        async def count(
            self,
            a: int | None = None,
            b: list[str] = [],  # noqa: B006
            c: float = 1,
            d: tuple[int, ...] = (1, 2),
        ) -> int:
            raise NotImplementedError

    assert contract_of(service("stock")(Defaults)).methods["count"].described.text.startswith("count(a: int | None")


def test_class_without_methods_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="no public method"):
        service("stock")(type("Empty", (), {}))


@pytest.mark.parametrize("version", ["1", "1.2.3", "v1.2", "1.-2", "", "1.2 ", "\u0661.\u0662", "1.\uff12"])
def test_version_of_other_than_two_numbers_is_refused(version: str) -> None:
    with pytest.raises(InvalidSetting, match="two numbers"):
        service("stock", version=version)


@pytest.mark.parametrize("name", ["", " stock", "a/b", "x" * 101, "-a"])
def test_name_of_other_characters_is_refused(name: str) -> None:
    with pytest.raises(InvalidSetting, match="is no name"):
        service(name)


def test_name_of_the_traffic_is_reserved() -> None:
    with pytest.raises(InvalidSetting, match="durable's own"):
        service("durable.traffic")


@pytest.mark.parametrize("options", [{"timeout": 0}, {"expiry": -1}, {"timeout": "soon"}])
def test_time_of_a_call_is_above_zero(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match="call: "):
        call(**options)


def test_class_without_declaration_is_no_service() -> None:
    class Child(Inventory): ...

    for cls in (Stock, Child, 3):
        with pytest.raises(InvalidSetting, match="is no service"):
            contract_of(cls)


def test_caller_of_an_object_is_told_to_give_a_class() -> None:
    with pytest.raises(InvalidSetting, match="give a class declared with @service"):
        Bus("orders").caller(Stock())  # type: ignore[arg-type]


def test_caller_at_an_empty_address_is_told_so() -> None:
    with pytest.raises(InvalidSetting, match=r"^'': no transport has this scheme"):
        Bus("orders").caller(Inventory, at="")


def test_name_of_a_service_is_refused_as_an_address_with_advice() -> None:
    with pytest.raises(
        InvalidSetting, match=r"^billing: .*give an address such as tcp://.*, not the name of a service"
    ):
        Bus("orders").caller(Inventory, at="billing")


# ---------------------------------------------------------------- implementations


class Missing:
    pass


class Fewer(Stock):
    async def reserve(self, sku: str) -> Any: ...  # type: ignore[override]


class More(Stock):
    async def reserve(self, sku: str, count: int, place: str) -> Any: ...  # type: ignore[override]


class Blocking(Stock):
    def reserve(self, sku: str, count: int) -> Any: ...


class Exchanged(Stock):
    async def reserve(self, count: int, sku: str) -> Any: ...  # type: ignore[override]


class Renamed(Stock):
    async def reserve(self, article: str, count: int) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]


class ExchangedPositional:
    async def reserve(self, count: str, sku: str) -> Any: ...


class RenamedPositional(Stock):
    async def reserve(self, article: str, count: int, /) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]


@pytest.mark.parametrize("cls", [Missing, Fewer, More, Blocking, Exchanged, Renamed, RenamedPositional])
def test_object_without_a_method_is_refused_with_its_name(cls: type) -> None:
    with pytest.raises(InvalidSetting, match=rf"^{cls.__name__}\.reserve: "):
        refuse_misfit(contract_of(Inventory), cls())


def test_object_with_exchanged_names_is_refused_where_the_contract_takes_none() -> None:
    class Positional:
        async def reserve(self, sku: str, count: str, /) -> Any: ...

    service("exchanged", version="1.0")(Positional)
    with pytest.raises(InvalidSetting, match=r"^ExchangedPositional\.reserve: "):
        refuse_misfit(contract_of(Positional), ExchangedPositional())


def test_contract_of_a_parametrised_class_is_taken() -> None:
    class OfBoxes:
        async def count(self, box: Box[int], model: BoxModel[Decimal]) -> None: ...

    assert contract_of(service("boxes", version="1.0")(OfBoxes)).offer.service == "boxes"


def test_object_with_the_methods_is_taken() -> None:
    refuse_misfit(contract_of(Inventory), Stock())


class Further(Stock):
    async def reserve(self, sku: str, count: int, place: str = "north") -> Any: ...


class Gathering(Stock):
    async def reserve(self, *arguments: Any) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]


def test_names_of_further_arguments_are_free() -> None:
    for cls in (Further, Gathering):
        refuse_misfit(contract_of(Inventory), cls())


def test_names_are_free_where_the_contract_takes_none() -> None:
    class Positional:
        async def count(self, sku: str, /) -> int:
            raise NotImplementedError

    class Own:
        async def count(self, article: str) -> int:
            raise NotImplementedError

    refuse_misfit(contract_of(service("stock")(Positional)), Own())


# ---------------------------------------------------------------- versions


@dataclass
class Small:
    a: int


@dataclass
class Large:
    a: int
    b: int = 0


def declared(version: str, argument: Any = int, result: Any = int, also: str | None = None) -> type:
    """A service with a method `get`, and perhaps another."""

    async def get(self: object, key: Any) -> Any: ...

    get.__annotations__ = {"key": argument, "return": result}
    methods: dict[str, Callable[..., Any]] = {"get": get}
    if also is not None:

        async def other(self: object) -> None: ...

        other.__name__ = also
        methods[also] = other
    return service("shelf", version=version)(type("Shelf", (), methods))


@pytest.mark.parametrize(
    ("caller", "provider", "difference"),
    [
        (declared("1.0"), declared("1.0"), None),
        (declared("1.0"), declared("1.3"), None),
        (declared("1.0"), declared("1.1", argument=int | str), None),  # a later version answers for itself
        (declared("1.0"), declared("1.0", also="put"), None),
        (declared("1.0"), declared("2.0"), "another first number"),
        (declared("2.0"), declared("1.9"), "another first number"),
        (declared("1.4"), declared("1.3"), "older than the caller"),
        (declared("1.0", also="put"), declared("1.0"), "it has no put"),
        (declared("1.0", also="put"), declared("1.1"), "it has no put"),
        (declared("1.0"), declared("1.0", argument=str), "here get(.*int.*), there get(.*str.*)"),
        (declared("1.0"), declared("1.0", result=str), "here get(.*), there get(.*)"),
        (declared("1.0", result=Small), declared("1.0", result=Large), "here get(.*Small.*), there get(.*Large.*)"),
    ],
)
def test_provider_serves_callers_of_its_version(caller: type, provider: type, difference: str | None) -> None:
    contract, offer = contract_of(caller), contract_of(provider).offer
    if difference is None:
        contract.check(offer, "tcp://127.0.0.1:1")
        return
    with pytest.raises(IncompatibleService, match=difference):
        contract.check(offer, "tcp://127.0.0.1:1")


def test_class_with_other_fields_is_told() -> None:
    first, second = (
        declared("1.0", result=msgspec.defstruct("Box", fields)) for fields in ([("a", int)], [("a", int), ("b", str)])
    )
    with pytest.raises(IncompatibleService, match="declared otherwise there"):
        contract_of(first).check(contract_of(second).offer, "tcp://127.0.0.1:1")


def test_words_of_a_class_do_not_make_another_version() -> None:
    plain = msgspec.defstruct("Box", [("a", int)])
    told = msgspec.defstruct("Box", [("a", int)], namespace={"__doc__": "A box."})
    contract_of(declared("1.0", result=plain)).check(contract_of(declared("1.0", result=told)).offer, "here")


def test_unoffered_service_has_no_provider() -> None:
    with pytest.raises(NoProvider, match="not offered at here"):
        contract_of(Inventory).check(None, "here")


@service("later")
class Later(Protocol):
    async def get(self) -> Below: ...


class Below(msgspec.Struct):
    a: int


def test_class_is_found_when_declared_below_its_service() -> None:
    assert "Below" in contract_of(Later).offer.signatures[0].text
