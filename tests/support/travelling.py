"""Types of arguments, results and messages, each with values that try its limits."""

from __future__ import annotations

import enum
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import attrs
from msgspec import UNSET, Meta, UnsetType, defstruct
from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NaiveDatetime,
    PastDate,
    computed_field,
    create_model,
)

NAIVE = datetime(2020, 1, 1)
AWARE = datetime(2020, 1, 1, tzinfo=UTC)
DAY = date(2020, 1, 1)


class Number(enum.Enum):
    ONE = 1
    TWO = 2


class One(enum.Enum):
    ONE = 1


class Letter(enum.Enum):
    A = "a"
    B = "b"


class Ordinal(enum.IntEnum):
    ONE = 1


class Flags(enum.Flag):
    ONE = 1
    TWO = 2


class MoreFlags(enum.Flag):
    ONE = 1
    TWO = 2
    FOUR = 4


class IntFlags(enum.IntFlag):
    ONE = 1


@dataclass
class Record:
    a: int
    b: int = 1


@dataclass
class Optionals:
    a: int | None = None


@dataclass
class Fraction:
    a: float


class Dict(TypedDict):
    a: int


class Partial(TypedDict, total=False):
    a: int


class Pair(NamedTuple):
    a: int
    b: int = 1


class Swapped(NamedTuple):
    b: int
    a: int = 1


@attrs.define
class Attrs:
    a: int
    b: int = 2


Plain: Any = defstruct("Plain", [("a", int)])
Closed: Any = defstruct("Closed", [("a", int)], forbid_unknown_fields=True)
Upper: Any = defstruct("Upper", [("a", int)], rename="upper")
Omitting: Any = defstruct("Omitting", [("a", int, 0)], omit_defaults=True)
Array: Any = defstruct("Array", [("a", int), ("b", int, 1)], array_like=True)
Reversed: Any = defstruct("Reversed", [("b", int), ("a", int, 1)], array_like=True)
Longer: Any = defstruct("Longer", [("a", int), ("b", int), ("c", int, 3)], array_like=True)
Tagged: Any = defstruct("Tagged", [("a", int)], tag="t")
Unset: Any = defstruct("Unset", [("a", int | UnsetType, UNSET)])
Empty: Any = defstruct("Empty", [])
Text: Any = defstruct("Text", [("a", str, "x")])
Exact: Any = defstruct("Exact", [("a", Decimal)])
Keyed: Any = defstruct("Keyed", [("a", dict[int, int])])

DICT: Any = dict  # of types that are values here
ANY: Any = Any

NATIVE: list[tuple[Any, Sequence[Any]]] = [
    (int, [-5, 2**64 - 1, 0]),
    (float, [1.5, math.nan, math.inf, 2.0]),
    (str, ["", "abc", "5"]),
    (bool, [True]),
    (bytes, [b"\xff", b""]),
    (None, [None]),
    (Decimal, [Decimal("1.5"), Decimal("NaN"), Decimal("1E+500")]),
    (date, [DAY]),
    (datetime, [NAIVE, AWARE]),
    (time, [time(1), time(1, tzinfo=UTC)]),
    (timedelta, [timedelta(1.5)]),
    (uuid.UUID, [uuid.UUID(int=5)]),
    (Annotated[datetime, Meta(tz=True)], [AWARE]),
    (Annotated[datetime, Meta(tz=False)], [NAIVE]),
    (Any, [1, "a", [1], {1: 2}, b"x", None]),
    (list, [[1], ["a"]]),
    (list[int], [[1], []]),
    (list[float], [[1.5]]),
    (set[int], [{1}, set()]),
    (tuple[int, ...], [(1, 2)]),
    (tuple[int, int], [(1, 2)]),
    (tuple[int, str], [(1, "a")]),
    (list[tuple[int, int]], [[(1, 2), (1, 2)]]),
    (set[tuple[int, int]], [{(1, 2)}]),
    (dict, [{1: 2}, {"a": 1}]),
    (DICT[ANY, int], [{1: 1}, {"a": 1}, {None: 1}]),
    *((DICT[key, int], [{value: 1}]) for key, value in [
        (str, "a"), (int, 1), (float, 1.5), (bool, True), (bytes, b"a"), (date, DAY), (datetime, AWARE),
        (datetime, NAIVE), (tuple[int, int], (1, 2)), (Number, Number.TWO), (Letter, Letter.B), (Literal["a"], "a"),
        (int | str, 1),
        (Annotated[str, Meta(min_length=2)], "ab"),
    ]),
    (dict[str, Any], [{"a": b"x"}]),
    (Mapping[str, int], [{"a": 1}]),
    (Sequence[int], [[1]]),
    *((cls, list(cls)) for cls in (Number, One, Letter, Ordinal)),
    (Flags, [Flags.ONE, Flags.ONE | Flags.TWO, Flags(0)]),
    (MoreFlags, [MoreFlags.FOUR, MoreFlags(7)]),
    (IntFlags, [IntFlags.ONE, IntFlags(8)]),
    (Literal[1], [1]),
    (Literal[1, 2], [1, 2]),
    (Literal["a"], ["a"]),
    (Literal["a", 1], ["a", 1]),
    (int | None, [1, None]),
    (int | str, [1, "a"]),
    (float | int, [1, 1.5]),
    (Decimal | float, [Decimal(1), 1.5]),
    (str | None, [None, "a"]),
    (dict[str, int] | None, [None, {"a": 1}]),
    (datetime | None, [None, AWARE]),
    (date | int, [DAY, 1]),
    (Number | None, [Number.TWO, None]),
    (Literal[1] | str, [1, "x"]),
    (Annotated[int, Meta(ge=0)], [0, 5]),
    (Annotated[int, Meta(gt=0)], [1]),
    (Annotated[int, Meta(lt=10)], [9, -100]),
    (Annotated[int, Meta(multiple_of=2)], [2]),
    (Annotated[int, Meta(multiple_of=4)], [4]),
    (Annotated[float, Meta(ge=0)], [0.5, math.inf]),
    (Annotated[str, Meta(min_length=1)], ["a"]),
    (Annotated[str, Meta(max_length=3)], ["abc"]),
    (Annotated[str, Meta(pattern="^a")], ["ab"]),
    (Annotated[bytes, Meta(min_length=1)], [b"a"]),
    (Annotated[bytes, Meta(min_length=2)], [b"ab"]),
    (Annotated[list[int], Meta(max_length=1)], [[1], []]),
    (Annotated[dict[str, int], Meta(min_length=1)], [{"a": 1}]),
    *((cls, [cls(a=1)]) for cls in (
        Plain, Closed, Upper, Omitting, Array, Tagged, Unset, Record, Attrs, Dict, Partial, Pair,
    )),
    (Longer, [Longer(1, 2)]),
    (Reversed, [Reversed(1, 2)]),
    (Swapped, [Swapped(1, 2)]),
    (Optionals, [Optionals(), Optionals(1)]),
    (Unset, [Unset()]),
    (Partial, [{}]),
    (Fraction, [Fraction(1.5), Fraction(math.nan)]),
    (Empty, [Empty()]),
    (Text, [Text(), Text("5")]),
    (Exact, [Exact(Decimal("1.5")), Exact(Decimal("NaN"))]),
    (Keyed, [Keyed({1: 1})]),
]  # fmt: skip

FIELDS: list[tuple[Any, Sequence[Any]]] = [
    (int, [1, -5]),
    (float, [1.5, math.nan]),
    (FiniteFloat, [1.5]),
    (str, ["", "abc", "5"]),
    (bytes, [b"abc"]),
    (bool, [True]),
    (None, [None]),
    (Any, [1, "a", b"x"]),
    (Decimal, [Decimal("1.5")]),
    (Annotated[Decimal, Field(max_digits=3)], [Decimal("1.5")]),
    (Annotated[Decimal, Field(decimal_places=1)], [Decimal("1.5")]),
    (Annotated[Decimal, Field(ge=0)], [Decimal(0)]),
    (Annotated[Decimal, Field(allow_inf_nan=True)], [Decimal("NaN")]),
    (date, [DAY]),
    (PastDate, [DAY]),
    (datetime, [NAIVE, AWARE]),
    (AwareDatetime, [AWARE]),
    (NaiveDatetime, [NAIVE]),
    (Annotated[datetime, Field(gt=NAIVE)], [NAIVE + timedelta(1)]),
    (time, [time(1)]),
    (timedelta, [timedelta(1)]),
    (uuid.UUID, [uuid.UUID(int=5)]),
    (dict, [{1: 1}, {"a": 1}]),
    (DICT[ANY, int], [{1: 1}, {"a": 1}]),
    *((DICT[key, int], [{value: 1}]) for key, value in [
        (str, "a"), (str, "5"), (int, 1), (date, DAY), (tuple[int, int], (1, 2)), (Number, Number.TWO),
        (Letter, Letter.B), (Literal["a"], "a"), (Annotated[str, Field(min_length=2)], "ab"),
        (Annotated[str, Field(pattern="^a")], "ab"),
    ]),
    (list[int], [[1]]),
    (set[int], [{1}]),
    (tuple[int, int], [(1, 2)]),
    (Pair, [Pair(1, 2)]),
    (Swapped, [Swapped(1, 2)]),
    (int | None, [1, None]),
    (int | str, [1, "a"]),
    (Number, list(Number)),
    (Flags, [Flags.ONE, Flags(3)]),
    (MoreFlags, [MoreFlags(7)]),
    (Literal[1, "a"], [1, "a"]),
    (Annotated[int, Field(gt=0)], [1]),
    (Annotated[str, Field(min_length=1)], ["a"]),
    (Annotated[str, Field(pattern="^a")], ["ab"]),
]  # fmt: skip


class Computed(BaseModel):
    a: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def twice(self) -> int:
        return 2 * self.a


def _models() -> list[tuple[Any, Sequence[Any]]]:
    made: list[tuple[Any, Sequence[Any]]] = []
    for number, (kind, values) in enumerate(FIELDS):
        model: Any = create_model(f"Model{number}", a=(kind, ...))
        made.append((model, [model(a=value) for value in values]))
    for number, config in enumerate([ConfigDict(extra="forbid"), ConfigDict(allow_inf_nan=False)]):
        model = create_model(f"Configured{number}", __config__=config, a=(float, ...))
        made.append((model, [model(a=1.5)]))
    aliased: Any = create_model("Aliased", b=(int, Field(alias="a")))
    return [*made, (aliased, [aliased(a=1)]), (Computed, [Computed(a=1)])]


KINDS: list[tuple[Any, Sequence[Any]]] = [*NATIVE, *_models()]
"""Types, each with values; a type may stand there twice."""
