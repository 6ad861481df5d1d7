"""Schemes of addresses, which may be written in capitals."""

from __future__ import annotations


def normal_scheme(uri: str) -> str:
    """Return the address with its scheme in small letters, as in RFC 3986, 6.2.2.1; other text as it is."""
    scheme, separator, place = uri.partition("://")
    return f"{scheme.lower()}{separator}{place}" if separator else uri
