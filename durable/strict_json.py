"""JSON of which parsers make different things: refused, wherever an operator or a peer has written it.

    a key that stands twice in one object     which of its values counts (RFC 8259, section 4)
    half of a character, such as \\ud800       whether that is text (section 8.2); no encoding has it

Most bodies repeat no key at all, which a look over the strings tells; only the others are parsed once more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

T = TypeVar("T")

_STRINGS: Final = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")([ \t\r\n]*:)?')
_ESCAPES: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def read(decode: Callable[[bytes], T], body: bytes) -> T:
    """Decode a body by a parser of JSON that knows no half of a character. Raises ValueError, and what it raises."""
    try:
        value = decode(body)
    except Exception:
        _refuse_half_characters(body)
        raise
    _refuse_repeated_keys(body)
    return value


def _refuse_half_characters(body: bytes) -> None:
    """Raise ValueError for an escape that the other half of its pair does not follow."""
    for escape in _ESCAPES.finditer(body):
        if half := escape["half"]:
            raise ValueError(
                f"\\{half.decode()} at byte {escape.start()} is a lone surrogate, half of a character; "
                "send whole characters"
            )


def _refuse_repeated_keys(body: bytes) -> None:
    """Raise ValueError for an object with a key that stands in it twice. The body must be JSON."""
    keys = [string for string, colon in _STRINGS.findall(body) if colon]
    if len(set(keys)) < len(keys) or (b"\\" in body and any(b"\\" in key for key in keys)):
        json.loads(body, object_pairs_hook=_unique, parse_int=len, parse_float=len)


def _unique(pairs: Sequence[tuple[str, Any]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {key[:100]!r} stands twice in one object; send each key once")
        seen.add(key)
