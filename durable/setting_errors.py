"""Words for what pydantic refuses in a setting: `batch_size: give a whole number, not 'many'`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from durable.duration import SUCH_AS

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_GIVE: Final[Mapping[str, str]] = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "text",
    "path_type": "the path of a file",
    "tuple_type": "a list",
    "dict_type": 'a JSON object, such as {{"name": "value"}}, or a dict',
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "a name",
    "string_too_long": "text of at most {max_length} characters",
}
"""What to give instead, by the type of pydantic's error, with its bounds."""


def described(error: ValidationError, may_hold_a_secret: Callable[[str], bool]) -> str:
    """The first thing that is wrong, with the value unless it may be a secret."""
    first = error.errors()[0]
    if not first["loc"]:
        return _reason(first)
    name = str(first["loc"][0])
    if first["type"].startswith("time_delta"):
        return f"{name}: {first['input']!r} is no length of time; give {SUCH_AS}"
    return f"{name}: {_reason(first)}" + ("" if may_hold_a_secret(name) else f", not {first['input']!r}")


def _reason(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return f"unknown name {error['loc'][-1]!r}"
    if (give := _GIVE.get(error["type"])) is None:
        return error["msg"].removeprefix("Value error, ")
    return f"give {give.format(**error.get('ctx', {}))}"
