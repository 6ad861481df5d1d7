"""The rule for connections that others can read: to another host only where the settings say so."""

from __future__ import annotations

import ipaddress

from durable.errors import InvalidSetting
from durable.settings import Settings


def require_plaintext_allowed(settings: Settings, address: str, encrypted: str) -> None:
    """Raise InvalidSetting unless `allow_plaintext` is set. `address` is shown; `encrypted` is the scheme to use
    instead.
    """
    if not settings.allow_plaintext:
        raise InvalidSetting(
            f"allow_plaintext: {address} is not this machine, and not encrypted: everybody on the way could read the"
            f" messages; use {encrypted}, or set allow_plaintext=True"
        )


def is_loopback(host: str) -> bool:
    """True for a name or an address of this machine that no other machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
