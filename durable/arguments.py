"""Arguments are checked where they are given: one error that names the function, the parameter and what to give.

    @checked
    def route(self, cls: type, *, to: str, ordered: bool = False) -> None: ...

    bus.route(OrderPlaced, ot="tcp://...")   InvalidSetting: route: unknown parameter 'ot'; did you mean 'to'?
    bus.route(OrderPlaced, to=17)            InvalidSetting: route: to=17: give text

The annotations say what fits; `Unpack` of a TypedDict names options. The function itself checks what is beyond kinds,
such as a range.
"""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar, Unpack, get_args, get_origin

from durable import kinds
from durable.duration import Duration, duration, within_calendar
from durable.errors import DurableError, InvalidSetting
from durable.grammar import several, suggestion

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

_FROM_NOW: Final = {"delay"}
"""Parameters and options that hold a time from now, which is not negative."""


class Argument(NamedTuple):
    """A value that was given for a parameter or an option."""

    name: str
    value: Any
    hint: Any


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse calls that do not fit the signature of this function, with InvalidSetting."""
    name = _name(function)
    signature = inspect.signature(function)

    def check(args: Sequence[Any], given: Mapping[str, Any]) -> None:
        refuse_misfits(name, _arguments(name, signature, _hints(function), args, given))

    return _after(check, function)


def checked_names(function: Callable[P, R]) -> Callable[P, R]:
    """checked(), for a function that says by itself what is wrong with the values."""
    name = _name(function)
    signature = inspect.signature(function)

    @functools.lru_cache(maxsize=128)
    def check_shape(count: int, names: tuple[str, ...]) -> None:
        list(_arguments(name, signature, {}, (None,) * count, dict.fromkeys(names)))

    def check(args: Sequence[Any], given: Mapping[str, Any]) -> None:
        check_shape(len(args), tuple(given))

    return _after(check, function)


def checked_class(cls: C) -> C:
    """checked(), for the parameters of a class."""
    cls.__init__ = checked(cls.__init__)  # type: ignore[misc]
    return cls


def refuse_misfits(of: str, arguments: Iterable[Argument], error: type[DurableError] = InvalidSetting) -> None:
    """Raise for the first value that does not fit the annotation of its parameter."""
    for name, value, hint in arguments:
        if not kinds.fits(value, hint):
            raise error(f"{of}: {name}={kinds.shown(value)}: give {kinds.told(hint)}")
        if name in _FROM_NOW and _is_negative(value):
            raise error(f"{of}: {name}={kinds.shown(value)} is negative; give 0 or more")


def refuse_unknown(of: str, given: Iterable[str], known: Collection[str], what: str = "parameter") -> None:
    """Raise InvalidSetting for the first name that is not known, with the nearest that is."""
    for name in given:
        if name not in known:
            near = suggestion(name, known) or f"; known: {', '.join(known)}"
            raise InvalidSetting(f"{of}: unknown {what} {name!r}{near}")


def length_of_time(of: str, name: str, value: Duration) -> timedelta:
    """duration(), for an argument; raises InvalidSetting."""
    try:
        span = duration(value)
    except ValueError as error:
        raise InvalidSetting(f"{of}: {name}: {error}") from None
    if span > within_calendar(span):
        raise InvalidSetting(f"{of}: {name}={value!r} from now lies outside the calendar")
    return span


def refuse_empty_period(since: date | None, until: date | None, *, dashes: str = "") -> None:
    """Raise InvalidSetting for two times, or two days, between which there is nothing. `dashes`: those of the
    options of a command.
    """
    if since is not None and until is not None and not since < until:
        raise InvalidSetting(
            f"{dashes}since: {since} is not before {dashes}until, {until}, and nothing is between them; "
            f"give an earlier {dashes}since"
        )


def _is_negative(value: Any) -> bool:
    try:
        return value is not None and duration(value) < timedelta(0)
    except ValueError:  # the function itself tells of it
        return False


def _after(check: Callable[[Sequence[Any], Mapping[str, Any]], None], function: Callable[P, R]) -> Callable[P, R]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaiting(*args: P.args, **given: P.kwargs) -> Any:
            check(args, given)
            return await function(*args, **given)

        return typing.cast(Callable[P, R], awaiting)

    @functools.wraps(function)
    def calling(*args: P.args, **given: P.kwargs) -> R:
        check(args, given)
        return function(*args, **given)

    return calling


@functools.cache
def annotations_of(kind: type) -> Mapping[str, Any]:
    """The annotations of a TypedDict or dataclass, by name."""
    names = vars(sys.modules[kind.__module__])
    return {name: _resolved(hint, names) for name, hint in kind.__annotations__.items()}


@functools.cache
def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    names = getattr(inspect.unwrap(function), "__globals__", {})
    return {name: _resolved(hint, names) for name, hint in inspect.get_annotations(function).items()}


def _resolved(hint: Any, names: Mapping[str, Any]) -> Any:
    """An annotation that is text, as what it says; Any where it names what only type checkers import."""
    text = getattr(hint, "__forward_arg__", hint)
    if not isinstance(text, str):
        return hint
    try:
        return eval(text, dict(names))
    except NameError:
        return Any


def _name(function: Callable[..., Any]) -> str:
    """Return the name of a function as people write it: `route`, `Retry`."""
    *_, owner, name = ("", *function.__qualname__.split("."))
    return owner if name == "__init__" else name


def _arguments(
    of: str,
    signature: inspect.Signature,
    hints: Mapping[str, Any],
    args: Sequence[Any],
    given: Mapping[str, Any],
) -> Iterator[Argument]:
    """Return the value of each parameter and option; raises InvalidSetting for an unknown or missing name."""
    parameters = signature.parameters
    rest = next((each.name for each in parameters.values() if each.kind is each.VAR_KEYWORD), None)
    options = _options(hints.get(rest)) if rest is not None else {}
    if options is not None:
        refuse_unknown(of, given, [name for name in (*parameters, *options) if name not in ("self", rest)])
    _refuse_too_many(of, parameters.values(), len(args))
    try:
        bound = signature.bind(*args, **given).arguments
    except TypeError as error:
        raise InvalidSetting(f"{of}: {error}") from None
    for name, value in bound.items():
        if name == rest:
            yield from (Argument(each, item, (options or {}).get(each, Any)) for each, item in value.items())
        elif parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            yield from (Argument(name, item, hints.get(name, Any)) for item in value)
        else:
            yield Argument(name, value, hints.get(name, Any))


def _refuse_too_many(of: str, parameters: Iterable[inspect.Parameter], count: int) -> None:
    """Raise InvalidSetting for more arguments without a name than the function takes."""
    kinds_given = {each.name: each.kind for each in parameters}
    if inspect.Parameter.VAR_POSITIONAL in kinds_given.values():
        return
    by_place = [
        name
        for name, kind in kinds_given.items()
        if kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    if count > len(by_place):
        names = [name for name in by_place if name != "self"]
        taken = f"{several(len(names), 'arguments')} without a name ({', '.join(names)})"
        given = count - (len(by_place) - len(names))
        raise InvalidSetting(f"{of}: takes {taken if names else 'no argument without a name'}, and got {given}")


def _options(hint: Any) -> Mapping[str, Any] | None:
    """Return the names of `**options: Unpack[Options]`; None where any name will do."""
    return annotations_of(get_args(hint)[0]) if get_origin(hint) is Unpack else None
