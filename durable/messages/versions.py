"""Versions in the names of message types: "orders.order-placed.v2" is version 2 of "orders.order-placed".

The ids that are made of a business key, or of what caused a message, are those of all versions: two releases that send
the same message send it under one id.
"""

from __future__ import annotations

import re
from typing import Final

_VERSIONS: Final = re.compile(r"(?<=.)(\.v[0-9]+)+\Z")


def versioned(name: str, version: int) -> str:
    """Return the name of a version; the first has none of its own."""
    return name if version == 1 else f"{name}.v{version}"


def unversioned(message_type: str) -> str:
    """Return the name that all versions of a message type have in common."""
    return _VERSIONS.sub("", message_type)
