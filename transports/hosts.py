"""Hosts in addresses: names as in DNS, and IP addresses."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")


def is_host(text: str) -> bool:
    """Tell whether this is a name or an IP address; each label of a name has at most 63 characters, as in DNS."""
    return _is_address(text) or all(_LABEL.fullmatch(label) for label in text.removesuffix(".").split("."))


def _is_address(text: str) -> bool:
    try:
        return "%" not in str(ipaddress.ip_address(text))
    except ValueError:
        return False
