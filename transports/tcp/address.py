"""Addresses of TCP and Unix sockets: `tcp://10.0.0.7:2301` or `unix:///run/orders.sock`.

Several nodes of one service on a machine can share a port: each listens on `tcp://127.0.0.1:2301?reuse_port=1`, and
the kernel deals out new connections among them (SO_REUSEPORT). The option is for listeners; senders ignore it.

Beyond this machine the connection is encrypted. On it, `?tls=1` or `?tls=0` says whether; otherwise it is when this
service has a certificate.

An address has one spelling, whichever was parsed: see host_in(). The path of a socket is that of its file, without
empty segments and single dots; `..` stays, as the system may follow a link before it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, unquote

from durable.errors import InvalidSetting
from durable.transports.hosts import fault_of_host, host_in
from durable.transports.plaintext import is_loopback
from durable.transports.tcp.unix import BACKLOG, LONGEST_PATH, READ_BYTES, Bound, Streams, UnixAddress
from durable.transports.uris import cannot_listen, port_of, split

SCHEMES: Final = ("tcp", "unix")

_REUSE_PORT: Final = "reuse_port"
_TLS: Final = "tls"
_FORMS: Final = "write tcp://127.0.0.1:2301 or unix:///path/to.sock"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """`tls` is None where the URI does not say whether the connection is encrypted."""

    host: str
    port: int
    reuse_port: bool = False
    tls: bool | None = None

    def __str__(self) -> str:
        tls = "" if self.tls is None else f"?{_TLS}={int(self.tls)}"
        return f"tcp://[{self.host}]:{self.port}{tls}" if ":" in self.host else f"tcp://{self.host}:{self.port}{tls}"

    @property
    def is_local(self) -> bool:
        """True when the address names this machine and no other."""
        return is_loopback(self.host)

    async def connect(self, tls: ssl.SSLContext | None = None) -> Streams:
        """Connect to the address, and prove its name by its certificate. Raises OSError."""
        name = self.host if tls is not None else None
        return await asyncio.open_connection(self.host, self.port, limit=READ_BYTES, ssl=tls, server_hostname=name)

    def bind(self, _mode: int = 0) -> Bound:
        """Bind the address. Raises InvalidSetting when it cannot be bound."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listening = socket.create_server(
                (self.host, self.port), family=family, backlog=BACKLOG, reuse_port=self.reuse_port
            )
        except OSError as error:
            raise cannot_listen(str(self), error, shares_port=self.reuse_port) from error
        return Bound(listening, str(TcpAddress(self.host, listening.getsockname()[1], tls=self.tls)))

    def check_bindable(self) -> None:
        """Raise InvalidSetting for a name: it may stand for several addresses, each with a port of its own."""
        if not _is_address(self.host):
            raise InvalidSetting(f"{self}: listen on an address of this machine, such as 0.0.0.0 for all of them")


Address = TcpAddress | UnixAddress


def parse_destination(uri: str) -> Address:
    """Parse an address to send to. Raises InvalidSetting as parse() does, and for port 0."""
    address = parse(uri)
    if isinstance(address, TcpAddress) and address.port == 0:
        raise InvalidSetting(f"{uri}: port 0 cannot be reached; write the port of the listener")
    return address


def parse(uri: str) -> Address:
    """Parse the address. Raises InvalidSetting with one sentence: the fault, and the text to write instead."""
    parts = split(uri, _FORMS)
    port_of(uri, parts, _FORMS)  # it is parsed, and may fail, only when read
    if parts.fragment or "@" in parts.netloc:
        raise InvalidSetting(f"{uri}: an address has no user and no fragment; write {_example(parts)}")
    if parts.query and parts.scheme != "tcp":
        raise InvalidSetting(f"{uri}: only tcp:// has options; write {_example(parts)}")
    match parts.scheme:
        case "tcp":
            return _tcp(uri, parts)
        case "unix":
            return _unix(uri, parts)
        case _:
            raise InvalidSetting(f"{uri}: unknown scheme; {_FORMS}")


def _tcp(uri: str, parts: SplitResult) -> TcpAddress:
    host = host_in(parts)
    if parts.hostname is None or parts.port is None or parts.path not in ("", "/"):
        raise InvalidSetting(f"{uri}: write a host and a port and nothing else, as in {_example(parts)}")
    if not host:
        raise InvalidSetting(f"{uri}: {fault_of_host(parts)}; write a host and a port, as in {_example(parts)}")
    options = _options(uri, parts)
    return TcpAddress(host, parts.port, reuse_port=options.get(_REUSE_PORT, False), tls=options.get(_TLS))


def _options(uri: str, parts: SplitResult) -> dict[str, bool]:
    options: dict[str, bool] = {}
    for option in parts.query.split("&") if parts.query else []:
        name, _, value = option.partition("=")
        if name in options or (name, value) not in ((_REUSE_PORT, "1"), (_TLS, "1"), (_TLS, "0")):
            raise InvalidSetting(
                f"{uri.partition('?')[0]}: the only options are {_REUSE_PORT}=1 and {_TLS}=1 or {_TLS}=0;"
                f" write {_example(parts)}"
            )
        options[name] = value == "1"
    return options


def _unix(uri: str, parts: SplitResult) -> UnixAddress:
    try:
        path = unquote(parts.path, errors="strict")
    except UnicodeDecodeError:
        raise InvalidSetting(f"{uri}: the path is not UTF-8; percent-encode it as such, as in %C3%A9") from None
    segments = path.split("/")
    if parts.netloc or segments[0] or segments[-1] in ("", ".", "..") or "\0" in path:
        raise InvalidSetting(f"{uri}: write three slashes and the path of a file, as in {_example(parts)}")
    path = "/" + "/".join(each for each in segments if each not in ("", "."))
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise InvalidSetting(f"{uri}: the path of a Unix socket has at most {LONGEST_PATH} bytes; choose a shorter one")
    return UnixAddress(path)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _example(parts: SplitResult) -> str:
    return "unix:///path/to.sock" if parts.scheme == "unix" else "tcp://127.0.0.1:2301"
