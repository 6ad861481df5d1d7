"""Values that pydantic knows and msgspec does not, as JSON has them."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any
from zoneinfo import ZoneInfo

from pydantic_core import to_jsonable_python


def jsonable(value: object) -> Any:
    """Return a value as JSON has it, as `enc_hook` of msgspec. Raises PydanticSerializationError where it has none."""
    return str(value) if isinstance(value, PurePath | ZoneInfo) else to_jsonable_python(value)
