"""HTTP addresses, to send to or to listen on: `http://127.0.0.1:8001`, `https://billing.example/durable`.

The endpoints lie below the path: a batch goes to `/batches` there. Senders may leave out the port (80, or 443 for
https); listeners may not, and take port 0 for any that is free. Several nodes of one service on a machine can share a
port: each listens on `http://127.0.0.1:8001?reuse_port=1`, and the kernel deals out new connections among them. To a
sender this option means nothing.

An address has one spelling, whichever was parsed: see host_in() and normal_escapes(); the port of its scheme and a
slash at the end are left out. Dot segments are refused, also when they are escaped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import SplitResult

from durable.errors import InvalidSetting
from durable.transports.hosts import fault_of_host, host_in
from durable.transports.plaintext import is_loopback
from durable.transports.uris import normal_escapes, port_of, split

SCHEMES: Final = ("http", "https")

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_REUSE_PORT: Final = "reuse_port=1"
_EXAMPLE: Final = "write it as in http://127.0.0.1:8001 or https://billing.example/durable"
_PATH: Final = re.compile(r"(/([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})+)*")  # RFC 3986, without empty segments


@dataclass(frozen=True, slots=True)
class HttpAddress:
    scheme: str
    host: str
    port: int
    path: str = ""
    reuse_port: bool = False

    def __str__(self) -> str:
        port = "" if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{self._written_host}{port}{self.path}"

    @property
    def origin(self) -> str:
        """Scheme, host and port, the port always written."""
        return f"{self.scheme}://{self._written_host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """True when the address names this machine and no other."""
        return is_loopback(self.host)

    @property
    def is_encrypted(self) -> bool:
        return self.scheme == "https"

    def on_port(self, port: int) -> HttpAddress:
        return replace(self, port=port)

    @property
    def _written_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def parse(uri: str) -> HttpAddress:
    """Parse the address. Raises InvalidSetting with one sentence: the fault, and the text to write instead."""
    parts = split(uri, _EXAMPLE)
    port = port_of(uri, parts, _EXAMPLE)
    if parts.scheme not in SCHEMES:
        raise InvalidSetting(f"{uri}: unknown scheme; {_EXAMPLE}")
    if "@" in parts.netloc or parts.fragment:
        raise InvalidSetting(
            f"{uri}: an address has no user and no fragment; secrets belong in shared_secret; {_EXAMPLE}"
        )
    if parts.query not in ("", _REUSE_PORT):
        raise InvalidSetting(f"{uri}: the only option is ?{_REUSE_PORT}; {_EXAMPLE}")
    path = normal_escapes(parts.path.removesuffix("/"))
    if not _PATH.fullmatch(path) or {".", ".."} & set(path.split("/")):
        raise InvalidSetting(f"{uri}: the path is not one of plain, percent-encoded segments; {_EXAMPLE}")
    port = _DEFAULT_PORTS[parts.scheme] if port is None else port
    return HttpAddress(parts.scheme, _host(uri, parts), port, path, reuse_port=bool(parts.query))


def parse_source(uri: str) -> HttpAddress:
    """Parse an address to listen on. Raises InvalidSetting as parse() does, and where no port is written."""
    address = parse(uri)
    if split(uri, _EXAMPLE).port is None:
        raise InvalidSetting(f"{uri}: write the port to listen on, as in http://127.0.0.1:8001")
    if "%" in address.path:
        raise InvalidSetting(f"{uri}: write a path to listen on without percent-encoding")
    return address


def parse_destination(uri: str) -> HttpAddress:
    """Parse an address to send to. Raises InvalidSetting as parse() does, and for port 0."""
    address = parse(uri)
    if address.port == 0:
        raise InvalidSetting(f"{uri}: port 0 cannot be reached; write the port of the listener")
    return address


def _host(uri: str, parts: SplitResult) -> str:
    if parts.scheme == "https" and parts.hostname in ("localhost", "localhost."):
        return "localhost"  # its certificate names it, and tells it from any other program of the machine
    if host := host_in(parts):
        return host
    raise InvalidSetting(f"{uri}: {fault_of_host(parts) if parts.netloc else 'no host'}; {_EXAMPLE}")
