"""Addresses of every scheme, split into their parts."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from durable.errors import InvalidSetting
from durable.redaction import printable


def split(uri: str, hint: str) -> SplitResult:
    """Split an address. Raises InvalidSetting, which ends with the hint.

    An address is stored, sent and shown. urlsplit would leave out tabs and line ends, and the address would be another
    than the one that was written; no database can hold a lone surrogate.
    """
    if not uri.isprintable():
        raise InvalidSetting(
            f"{printable(uri)}: an address has printable characters only; percent-encode the others; {hint}"
        )
    try:
        return urlsplit(uri)
    except ValueError as error:
        raise InvalidSetting(f"{uri}: not a valid address: {error}; {hint}") from None


def port_of(uri: str, parts: SplitResult, hint: str) -> int | None:
    """Return the port, or None where none is written. Raises InvalidSetting, which ends with the hint."""
    try:
        return parts.port
    except ValueError as error:
        raise InvalidSetting(f"{uri}: not a valid address: {error}; {hint}") from None
