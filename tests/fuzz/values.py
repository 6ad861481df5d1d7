"""Values of any type that msgspec decodes, made from the type itself: a field that is added is fuzzed at once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

texts = st.text(st.characters(codec="utf-8"), max_size=20)
_MOST = 2**63 - 1
_ZONES = [UTC, timezone(timedelta(hours=14)), timezone(-timedelta(hours=12))]
_EDGES = [
    datetime(1, 1, 2),
    datetime(1969, 12, 31, 23, 59, 59, 999_999),
    datetime(2038, 1, 19, 3, 14, 8),
    datetime(9999, 12, 30),
]
moments = st.builds(
    datetime.replace,
    st.sampled_from(_EDGES) | st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)),
    tzinfo=st.sampled_from(_ZONES),
)


@cache
def of(kind: Any) -> st.SearchStrategy[Any]:
    """Values that this type allows, those at its limits among them."""
    return _of(inspect.type_info(kind))


def _of(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.IntType(ge=least, le=most):
            first, last = -_MOST if least is None else least, _MOST if most is None else most
            return st.sampled_from([first, last]) | st.integers(first, last)
        case inspect.FloatType(gt=below, le=most):
            return st.floats(below, most, exclude_min=below is not None, allow_nan=False)
        case inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case inspect.StrType(max_length=most):
            return texts if most is None else texts | st.just("x" * most)
        case inspect.BytesType(max_length=most):
            return st.binary(max_size=200 if most is None else most)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.UUIDType():
            return st.uuids()
        case inspect.DateTimeType():
            return moments
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return st.lists(_of(item), max_size=4)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_of(key), _of(value), max_size=3)
        case inspect.UnionType(types=types):
            return st.one_of(*map(_of, types))
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: _of(field.type) for field in fields})
        case _:
            raise TypeError(f"no values of {info}: add them here")


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | texts
    | st.binary(max_size=20)
    | moments
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=16)),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts | st.integers(-5, 300), inner, max_size=4),
    max_leaves=12,
)
"""Values of msgpack without a rule."""

encode = msgspec.msgpack.Encoder(uuid_format="bytes").encode


@st.composite
def almost(draw: st.DrawFn, kind: Any) -> bytes:
    """A value of this array-like struct in msgpack, some of its fields replaced, left out or added."""
    fields = list(msgspec.structs.astuple(draw(of(kind))))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(fields)))
        fields[at : at + draw(st.integers(0, 2))] = draw(st.lists(anything, max_size=2))
    return encode(fields)
