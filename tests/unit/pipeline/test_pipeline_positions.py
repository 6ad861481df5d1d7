"""Positions sort as the values do that they are made of, whatever these are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.pipeline.positions import encoded, positions

TIMES = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=st.just(UTC))
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "bigint": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "tinyint": (pa.int8(), st.integers(-128, 127)),
    "boolean": (pa.bool_(), st.booleans()),
    "double": (pa.float64(), st.floats()),
    "float": (pa.float32(), st.floats(width=32)),
    "decimal": (pa.decimal128(38, 4), st.decimals(-(10**33), 10**33, places=4)),
    "small decimal": (pa.decimal128(5, 2), st.decimals(-999, 999, places=2)),
    "date": (pa.date32(), st.dates()),
    "timestamp": (pa.timestamp("us", tz="UTC"), TIMES),
    "string": (pa.string(), st.text(st.characters(exclude_categories=["Cs"]))),
    "few strings": (pa.string(), st.text("a\0\1b", max_size=4)),
    "binary": (pa.binary(), st.binary(max_size=6)),
}


def rank(value: Any) -> Any:
    """As Spark sorts it, ascending: NULL first, NaN last, texts by their bytes."""
    if value is None:
        return (0,)
    if isinstance(value, tuple):
        return (1, *map(rank, value))
    if isinstance(value, float):
        return (1, math.isnan(value), 0 if math.isnan(value) else value)
    return (1, value.encode()) if isinstance(value, str) else (1, value)


def follows(values: Sequence[Any], made: Sequence[bytes]) -> bool:
    return all(
        (a < b) == (rank(one) < rank(other)) and (a == b) == (rank(one) == rank(other))
        for one, a in zip(values, made, strict=True)
        for other, b in zip(values, made, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_column_of_order_sorts_by_its_positions(kind: str, data: st.DataObject) -> None:
    type_, values = KINDS[kind]
    drawn = data.draw(st.lists(st.none() | values, max_size=8))
    before = data.draw(st.integers(0, len(drawn)))
    column = pa.array(drawn, type_)
    taken = column.to_pylist()[before:]  # a float of 32 bits is another than was drawn
    assert follows(taken, encoded(column.slice(before)).to_pylist())


@given(data=st.data(), names=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3))
def test_several_columns_of_order_are_compared_one_by_one(data: st.DataObject, names: list[str]) -> None:
    kinds = [KINDS[name] for name in names]
    rows = data.draw(st.lists(st.tuples(*(st.none() | values for _, values in kinds)), max_size=8))
    columns = [pa.array([row[index] for row in rows], type_) for index, (type_, _) in enumerate(kinds)]
    struct = pa.StructArray.from_arrays(columns, names=[f"order_{index}" for index in range(len(kinds))])
    taken = list(zip(*(column.to_pylist() for column in columns), strict=True))
    assert follows(taken, encoded(struct).to_pylist())


def test_rows_with_equal_values_keep_their_positions() -> None:
    level = pa.array([datetime(2030, 1, 1, tzinfo=UTC)] * 300, pa.timestamp("us", tz="UTC"))
    made = [
        *positions(level, partition=0, first_row=0, count=300).to_pylist(),
        *positions(level, partition=0, first_row=300, count=300).to_pylist(),
        *positions(level, partition=1, first_row=0, count=300).to_pylist(),
        *positions(level, partition=300, first_row=0, count=300).to_pylist(),
    ]
    assert made == sorted(set(made))
    later = pa.array([level[0].as_py() + timedelta(microseconds=1)], level.type)
    assert positions(later, partition=0, first_row=0, count=1)[0].as_py() > made[-1]


def test_rows_without_a_column_of_order_keep_their_positions() -> None:
    made = [*positions(None, partition=0, first_row=9, count=300), *positions(None, partition=1, first_row=0, count=9)]
    assert [each.as_py() for each in made] == sorted({each.as_py() for each in made})


def test_struct_without_fields_is_level_and_a_null_struct_is_first() -> None:
    struct = pa.array(
        [None, {"a": None, "b": 1}, {"a": Decimal(1), "b": None}], pa.struct({"a": pa.decimal128(3, 0), "b": pa.int8()})
    )
    made = encoded(struct).to_pylist()
    assert made == sorted(made)
    assert made[0] < made[1]
    assert encoded(pa.array([{}, {}], pa.struct([]))).to_pylist() == [b"", b""]


def test_dates_before_1970_sort_before_1970() -> None:
    made = encoded(pa.array([date(1969, 12, 31), date(1970, 1, 1)], pa.date32())).to_pylist()
    assert made == sorted(made)
