"""Rules that tell whether a value fits an annotation, and that describe it for people: the base of durable.arguments.

fits(3, Retry)           False
fits("10s", Duration)    True
told(Duration)           "seconds, a timedelta, or text such as ..."

An annotation of a kind that is not known here, such as a type variable, fits every value.
"""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from durable.duration import SUCH_AS, Duration, duration
from durable.grammar import with_article

_LENGTH_OF_TIME = get_args(Duration)[1]
_WORDS: Mapping[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    datetime: "an aware datetime",
    type(None): "None",
}
_MOST_SHOWN = 80
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")
"""The place of an object in memory, as in `<function reserve at 0x7f5d1c0a4d60>`."""


def fits(value: object, hint: Any) -> bool:
    """True for a value of the annotation, as far as it can be told without using it."""
    if is_length_of_time(hint):
        return _is_length_of_time(value)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return fits(value, args[0])
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in args)
    if origin is Literal:
        return isinstance(value, str | int) and value in args
    if origin is type or hint is type:
        return isinstance(value, type) and (not args or _is_any(args[0]) or issubclass(value, args[0]))
    if origin is Callable or hint is Callable:
        return callable(value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(k, args[0]) and fits(v, args[1]) for k, v in value.items())
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return _is_sequence(value) and all(fits(each, args[0]) for each in typing.cast(Sequence[Any], value))
    return _is_of_class(value, origin or hint)


def told(hint: Any) -> str:
    """Return what to give, for an error: "a Retry", "text or None"."""
    if is_length_of_time(hint):
        return SUCH_AS
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next((each for each in args[1:] if isinstance(each, str)), None) or told(args[0])
    if origin in (Union, types.UnionType):
        return " or ".join(told(each) for each in args if each is not type(None))
    if origin is Literal:
        return " or ".join(filter(None, (", ".join(map(repr, args[:-1])), repr(args[-1]))))
    if origin is type or hint is type:
        return f"a class of {args[0].__name__}" if args and not _is_any(args[0]) else "a class"
    if origin is Callable or hint is Callable:
        return "a function"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping of {told(args[0])} to {told(args[1])}"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"a list of {told(args[0])}"
    return _WORDS.get(hint) or with_article(getattr(hint, "__name__", str(hint)))


def shown(value: object) -> str:
    """The value in an error; bytes and long texts are cut."""
    try:
        text = _ADDRESS.sub("", repr(value))
    except BaseException:  # the application's own
        text = with_article(type(value).__qualname__)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def is_length_of_time(hint: Any) -> bool:
    return get_origin(hint) is Annotated and _LENGTH_OF_TIME in get_args(hint)[1:]


def _is_length_of_time(value: Any) -> bool:
    try:
        duration(value)
    except (ValueError, TypeError):
        return False
    return True


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _is_of_class(value: object, hint: Any) -> bool:
    if hint is None:
        return value is None
    if _is_any(hint):
        return True
    if hint is bool:
        return isinstance(value, bool)
    if hint in (int, float):
        kinds = int if hint is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    if getattr(hint, "_is_protocol", False):
        return all(hasattr(value, name) for name in _members(hint))
    return isinstance(value, hint)


def _is_any(hint: Any) -> bool:
    """True for an annotation that says nothing to check."""
    return hint in (object, Any) or not isinstance(hint, type)


def _members(protocol: type) -> set[str]:
    """Return the members that an object of this protocol must have."""
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False) and base is not typing.Protocol]
    names = {name for base in bases for name in (*vars(base), *inspect.get_annotations(base))}
    return {name for name in names if not name.startswith("_")} | (names & {"__call__"})
