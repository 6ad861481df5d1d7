"""Forms of addresses to send to, of every scheme that comes with durable, by the parsers of the transports themselves.

For those who write destinations without a service: only the form is checked. Which hosts and brokers may be sent to is
in the settings of the service, and its transports say it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from durable.errors import InvalidSetting
from durable.grammar import suggestion
from durable.schemes import normal_scheme
from durable.transports import memory
from durable.transports.http import address as http
from durable.transports.rabbitmq import address as rabbitmq
from durable.transports.tcp import address as tcp

_PARSERS: Final[Mapping[str, Callable[[str], object]]] = {
    "tcp": tcp.parse_destination,
    "unix": tcp.parse_destination,
    "http": http.parse_destination,
    "https": http.parse_destination,
    "rabbitmq": rabbitmq.parse_destination,
    "memory": memory.parse_destination,
}
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*")


def canonical(uri: str) -> str:
    """Return the one spelling of an address to send to, under which messages, pauses and latches are stored.

    Raises InvalidSetting when no service could send there, whatever its settings are. An application may have
    transports with schemes of its own: of these only the scheme is looked at.
    """
    scheme, separator, place = normal_scheme(uri).partition("://")
    if parser := _PARSERS.get(scheme if separator else ""):
        return str(parser(uri))
    near = suggestion(scheme, _PARSERS)
    if not separator or not place or near or not _SCHEME.fullmatch(scheme):
        hint = near.removeprefix("; ") or "write such as 'tcp://billing:2301', or 'local' for this service's inbox"
        raise InvalidSetting(f"{uri!r} is no address that a transport understands; {hint}")
    return normal_scheme(uri)


def canonical_name(name: str) -> str:
    """Return an address to send to in its one spelling, and any other name as it is."""
    try:
        return canonical(name)
    except InvalidSetting:
        return name


def spellings(name: str) -> list[str]:
    """Return the spellings under which an address may be stored: the present one, and the written one, which may be
    that of an older release.
    """
    return list(dict.fromkeys([canonical_name(name), name]))


def as_stored(keys: Sequence[str], name: str, stored: Collection[str]) -> Sequence[str]:
    """Return the keys of a name in their present spelling, or the name as it was written where that alone is stored."""
    return [name] if name in stored and set(keys).isdisjoint(stored) else keys
