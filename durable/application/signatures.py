"""Signatures of handlers and their providers: rules that are checked when they are declared.

Functions that look right and would do something else are refused here: generators as handlers, Depends as a default,
parameters that can only be given by position.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin

from durable.errors import InvalidSetting

_SEVERAL = (list, tuple)
"""The classes in which a handler may return several messages."""


def dotted_name(function: Any) -> str:
    """Return the module and the name of a function, or of any other object."""
    plain = function.func if isinstance(function, functools.partial) else function
    if isinstance(plain, type) or inspect.isroutine(plain):
        return f"{plain.__module__}.{plain.__qualname__}"
    return repr(function)


def refuse_unfit(function: Any, of: str) -> None:
    """Raise InvalidSetting for an object that can be no handler."""
    if not inspect.isroutine(function):
        raise InvalidSetting(f"handler {of}: give a function, plain or async, not {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidSetting(f"handler {of}: must not yield; return its messages, several of them in a list")


def refuse_parameter(parameter: inspect.Parameter, hint: Any, given: Sequence[type], of: str) -> None:
    """Raise InvalidSetting for a parameter that looks as if it were given something, and is not.

    `given` are the classes that a parameter is known by.
    """
    name, default = parameter.name, parameter.default
    marks = [extra for extra in extras(hint) if _is_depends(extra)]
    if _is_depends(default) or marks:
        written = short_name(_provider(default if _is_depends(default) else marks[0]))
        kind = short_name(hint if not marks else get_args(hint)[0])
        kind = "T" if hint is None else kind
        raise InvalidSetting(
            f"handler {of}: parameter {name!r}: write {name}: Annotated[{kind}, Depends({written})], "
            "with Depends of durable"
        )
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise InvalidSetting(f"handler {of}: parameter {name!r} is given by its name; remove the '/' behind it")
    within = [each for each in _parts(hint) if each in given]
    if default is not inspect.Parameter.empty and within and hint is not within[0]:
        only = short_name(within[0])
        raise InvalidSetting(
            f"handler {of}: parameter {name!r} would always be {default!r}: annotate it with {only} alone"
        )


def hints_of(function: Callable[..., Any], of: str) -> dict[str, Any]:
    """Return the annotations of a function, or of a factory of instances of a class. Raises InvalidSetting."""
    if isinstance(function, functools.partial):
        return hints_of(function.func, of)
    if isinstance(function, type):
        return _hints(function, of) | _hints(vars(function).get("__init__", object.__init__), of)
    return _hints(function if inspect.isroutine(function) else type(function).__call__, of)


def returned_classes(hint: Any) -> list[type]:
    """The classes of the messages that a function returns whose return annotation this is."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType, *_SEVERAL):
        return [cls for each in args for cls in returned_classes(each)]
    if origin is Annotated:
        return returned_classes(args[0])
    nothing = (type(None), Any, object, NoReturn, typing.Never, *_SEVERAL)
    return [hint] if isinstance(hint, type) and origin is None and hint not in nothing else []


def extras(hint: Any) -> tuple[Any, ...]:
    """Return the metadata of an Annotated type."""
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def _hints(function: Any, of: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # annotations are evaluated, and may raise anything
        raise InvalidSetting(f"handler {of}: an annotation cannot be resolved: {error}") from error


def _is_depends(value: Any) -> bool:
    """True for a Depends, of durable or of FastAPI, or the class itself."""
    cls = value if isinstance(value, type) else type(value)
    return any(base.__name__ == "Depends" for base in cls.__mro__)


def _provider(depends: Any) -> Any:
    return getattr(depends, "provider", None) or getattr(depends, "dependency", None)


def _parts(hint: Any) -> list[Any]:
    """The types of a union, or the one type."""
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def short_name(value: Any) -> str:
    """The name of a function or class, for an error."""
    return "provider" if value is None else str(getattr(value, "__qualname__", value))
