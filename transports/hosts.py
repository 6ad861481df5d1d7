"""Hosts in addresses: names as in DNS, and IP addresses."""

from __future__ import annotations

import ipaddress
import re
from typing import Final
from urllib.parse import SplitResult

_THIS_MACHINE: Final = "127.0.0.1"
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")

_AUTHORITY: Final = re.compile(r"(.*@)?(\[[^\[\]]*:[^\[\]]*\]|[^\[\]]*)(:[0-9]*)?", re.ASCII)


def host_in(parts: SplitResult) -> str:
    """Return the host of an address in its one spelling, as normal_host(); empty where there is none."""
    return normal_host(parts.hostname or "") if is_whole(parts) else ""


def is_whole(parts: SplitResult) -> bool:
    """Tell whether urlsplit leaves nothing out and changes nothing: text beside the brackets of IPv6, other text within
    them, and letters beyond ASCII, some of which are others in lower case.
    """
    return parts.netloc.isascii() and _AUTHORITY.fullmatch(parts.netloc) is not None


def fault_of_host(parts: SplitResult) -> str:
    """Say why host_in() has found none."""
    if not parts.netloc.isascii():
        return "a host has ASCII letters only, an international name those of punycode, as in xn--bcher-kva.example"
    if ".." in parts.netloc:
        return "the host has two dots in a row"
    return "the host is neither a name nor an address"


def normal_host(text: str) -> str:
    """Return the one spelling of a host: lower case, without the dot of the root, addresses of IPv6 compressed.

    Empty for text that is no host, and for an address that has a spelling as IPv4: 127.1, 0x7f000001, ::ffff:7f00:1.

    `localhost` is 127.0.0.1; HTTPS leaves it, because its certificate names it. Other names stay: what they stand for
    may change, but durable binds `localhost` at that address alone, so both are one place. A lookup could find ::1 as
    well, where any program of the machine may listen on the same port and take the messages. Who means that address
    writes [::1].
    """
    name = text.lower().removesuffix(".")
    if name == "localhost":
        return _THIS_MACHINE
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        is_name = ":" not in name and is_host(text) and not _NUMBER.fullmatch(name.rpartition(".")[2])
        return name if is_name else ""
    is_mapped = getattr(address, "ipv4_mapped", None) is not None
    return "" if is_mapped or not _is_address(text) else str(address)


def is_host(text: str) -> bool:
    """Tell whether this is a name or an IP address; each label of a name has at most 63 characters, as in DNS."""
    return _is_address(text) or all(_LABEL.fullmatch(label) for label in text.removesuffix(".").split("."))


def _is_address(text: str) -> bool:
    try:
        return "%" not in str(ipaddress.ip_address(text))
    except ValueError:
        return False
