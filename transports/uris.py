"""Addresses of every scheme, split into their parts."""

from __future__ import annotations

import errno
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
