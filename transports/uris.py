"""Addresses of every scheme, split into their parts."""

from __future__ import annotations

import errno
import re
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from durable.errors import InvalidSetting
from durable.redaction import printable

_ESCAPE: Final = re.compile(r"%[0-9A-Fa-f]{2}")
_UNRESERVED: Final = re.compile(r"[A-Za-z0-9._~-]")


def normal_escapes(text: str) -> str:
    """Return the one spelling of a part of an address, as in RFC 3986, 6.2.2: unreserved characters are written out,
    and all others stay escaped, in upper case, for `%2F` is no slash.
    """
    return _ESCAPE.sub(lambda found: _normal_escape(found[0]), text)


def _normal_escape(escape: str) -> str:
    character = unquote(escape)
    return character if _UNRESERVED.fullmatch(character) else escape.upper()


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


def cannot_listen(uri: str, error: OSError, *, shares_port: bool) -> InvalidSetting:
    """Return the error for an address that cannot be bound, with advice where another process has it."""
    fault = f"{uri}: cannot listen here: {error.strerror or error}"
    if error.errno != errno.EADDRINUSE:
        return InvalidSetting(fault)
    if shares_port:
        return InvalidSetting(f"{fault}; another process listens here without ?reuse_port=1; stop it, or add it there")
    return InvalidSetting(
        f"{fault}; another process listens here; stop it or choose another port; for several nodes on one machine, "
        "add ?reuse_port=1 to the address of each"
    )
