"""Keys of JSON objects, each once: parsers differ in which value of a repeated key they take (RFC 8259, section 4).

Most bodies repeat no key at all, which a look over the strings tells; only the others are parsed once more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

_STRINGS: Final = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")([ \t\r\n]*:)?')


def refuse_repeated_keys(body: bytes) -> None:
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
