"""The rule for requests without credentials: a program on this machine has sent them, and nobody through it.

A proxy, a tunnel and a page in a browser all connect from this machine, for somebody else. They are known by what they
add to a request, or what they must leave in it:

    proxies, tunnels    Forwarded, X-Forwarded-..., Via and their like
    browsers            Origin, Sec-Fetch-Site; by DNS rebinding a page names this machine by a Host of its own

A proxy that adds none of these looks like a program: without a secret there must be none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

from durable.transports.plaintext import is_loopback

_OF_PROXIES: Final = frozenset(
    {
        b"forwarded",
        b"via",
        b"x-real-ip",
        b"x-client-ip",
        b"x-cluster-client-ip",
        b"x-original-host",
        b"x-original-forwarded-for",
        b"true-client-ip",
        b"cf-connecting-ip",
        b"cf-ray",
        b"fly-client-ip",
    }
)
_HTTP_PORT: Final = 80
_LOCALHOST: Final = frozenset({"127.0.0.1", "::1"})
_OF_PROXIES_PREFIX: Final = b"x-forwarded"
_HOST: Final = re.compile(r"(?:\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<name>[a-zA-Z0-9.-]+))(?::[0-9]{0,5})?")
_OF_BROWSERS: Final = frozenset({b"origin", b"sec-fetch-site"})


def is_local(scope: Mapping[str, Any]) -> bool:
    """True when both ends of the connection are this machine."""
    return all(scope.get(end) and is_loopback(str(scope[end][0])) for end in ("server", "client"))


def is_elsewhere(scope: Mapping[str, Any], origin: str) -> bool:
    """Tell whether this connection of one machine with itself goes to another address or port than its client has
    signed, or over TLS when its client has signed a plain address.

    Requests that were signed for a plain address of loopback alone are judged: over https the certificate says who is
    there, and a tunnel to another machine is the client's own. What proxies say is not looked at, as everybody can say
    it.
    """
    host, port = scope.get("server") or ("", None)
    client, _ = scope.get("client") or ("", None)
    try:
        parts = urlsplit(origin)
        signed_port = parts.port or _HTTP_PORT
    except ValueError:
        return True
    signed_host = parts.hostname or ""
    is_of_one_machine = client == host or (is_loopback(str(host)) and is_loopback(str(client)))
    if parts.scheme != "http" or port is None or not is_of_one_machine or not is_loopback(signed_host):
        return False
    signed_hosts = _LOCALHOST if signed_host == "localhost" else {str(ip_address(signed_host))}
    return scope.get("scheme") == "https" or str(host) not in signed_hosts or signed_port != port


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return why a request was not sent by a program on this machine for itself, or nothing."""
    hosts: list[str] = []
    for raw_name, value in headers:
        name = raw_name.lower()
        if name in _OF_PROXIES or name.startswith(_OF_PROXIES_PREFIX):
            return f"the header {name.decode()} is of a proxy"
        if name in _OF_BROWSERS:
            return f"the header {name.decode()} is of a browser"
        if name == b"host":
            hosts.append(value.decode("latin-1"))
    if len(hosts) != 1 or not _names_this_machine(hosts[0]):
        return "the header host does not name this machine"
    return ""


def _names_this_machine(host: str) -> bool:
    """Tell whether this is a name of this machine, with or without a port; urlsplit takes `[::1]evil` for `::1`."""
    found = _HOST.fullmatch(host)
    return found is not None and is_loopback((found["ipv6"] or found["name"]).lower())
