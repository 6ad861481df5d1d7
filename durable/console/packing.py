"""Names and selections that a page has shown, as its forms send them back: in the ASCII of JSON.

A browser changes line ends, and people cannot see spaces at an end: so a name that nobody types travels packed.
"""

from __future__ import annotations

import json
import unicodedata
from dataclasses import asdict, fields
from datetime import datetime
from typing import Any, Final

from starlette.exceptions import HTTPException

from durable.storage.dead_letters import Selection

_LONGEST: Final = 32_000  # of a selection by every filter, each as long as it may be
_TIMES: Final = ("since", "until")
_CHOSEN: Final = {each.name for each in fields(Selection)} - {"letters", "ids", "up_to", "resolved"}


def packed(value: object) -> str:
    """Write a name, or a selection of letters."""
    if isinstance(value, Selection):
        given = {name: each for name, each in asdict(value).items() if each is not None and name != "resolved"}
        return json.dumps({name: each.isoformat() if name in _TIMES else each for name, each in given.items()})
    return json.dumps(value)


def unpacked_text(text: str) -> str:
    """Read a name. Raises HTTPException (422)."""
    found = _read(text)
    if not isinstance(found, str) or "\0" in found:
        raise HTTPException(422, "this form is not from here: load the page again")
    return found


def unpacked(text: str) -> Selection:
    """Read a selection of letters, which has an end. Raises HTTPException (422)."""
    found = _read(text)
    try:
        if isinstance(found, dict) and isinstance(found.get("up_to"), int) and 0 <= found["up_to"] < 2**63:
            times = {name: datetime.fromisoformat(found[name]) for name in _TIMES if name in found}
            given = found.keys() - {"up_to"}
            if given <= _CHOSEN and all(isinstance(found[name], str) and "\0" not in found[name] for name in given):
                return Selection(**{**found, **times})
    except (TypeError, ValueError):
        pass
    raise HTTPException(422, "selection: this form is not from here: load the page again")


def is_line(text: str) -> bool:
    """Tell whether a text is one line without control characters; spaces of every kind may be in it."""
    return all(char.isprintable() or unicodedata.category(char) == "Zs" for char in text)


def _read(text: str) -> Any:
    try:
        return json.loads(text) if len(text) <= _LONGEST else None
    except (ValueError, RecursionError):
        return None
