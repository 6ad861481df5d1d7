"""Addresses of TCP and Unix sockets: `tcp://127.0.0.1:2301` or `unix:///run/orders.sock`.

Several nodes of one service on a machine can share a port: each listens on `tcp://127.0.0.1:2301?reuse_port=1`, and
the kernel deals out new connections among them (SO_REUSEPORT). The option is for listeners; senders ignore it.

Only this machine can be named: the connections are neither encrypted nor authenticated yet, so any process that reaches
the port may send. A Unix socket is for its user alone (mode 0600). An existing socket file is replaced if no process
listens on it any more, as after a crash; never when a process does, nor when the file is no socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from durable.errors import InvalidSetting

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

READ_BYTES: Final = 1 << 18
_LONGEST_PATH: Final = 107  # bytes in sun_path, less its final NUL
_PROBE_SECONDS: Final = 1.0
_BACKLOG: Final = 100  # connections that wait to be accepted; asyncio's own default
_REUSE_PORT: Final = "reuse_port=1"


@dataclass(frozen=True, slots=True)
class Bound:
    """A listening socket, and the URI that reaches it."""

    socket: socket.socket
    uri: str
    socket_file: tuple[str, int] | None = None  # its path and inode

    def release(self) -> None:
        """Remove the socket file if it is still this one."""
        if self.socket_file is None:
            return
        path, inode = self.socket_file
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == inode:
                os.unlink(path)


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int
    reuse_port: bool = False

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    async def connect(self) -> Streams:
        """Connect to the address. Raises OSError."""
        return await asyncio.open_connection(self.host, self.port, limit=READ_BYTES)

    def bind(self) -> Bound:
        """Bind the address. Raises InvalidSetting when it cannot be bound."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listening = socket.create_server(
                (self.host, self.port), family=family, backlog=_BACKLOG, reuse_port=self.reuse_port
            )
        except OSError as error:
            raise InvalidSetting(f"{self}: cannot listen here: {error.strerror or error}") from error
        return Bound(listening, str(TcpAddress(self.host, listening.getsockname()[1])))


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: str

    def __str__(self) -> str:
        return f"unix://{self.path}"

    async def connect(self) -> Streams:
        """Connect to the address. Raises OSError."""
        return await asyncio.open_unix_connection(self.path, limit=READ_BYTES)

    def bind(self) -> Bound:
        """Bind the address. Raises InvalidSetting when it cannot be bound, or is taken."""
        listening = self._socket()
        listening.listen(_BACKLOG)
        return Bound(listening, str(self), (self.path, os.stat(self.path).st_ino))

    def _socket(self) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._remove_stale()
            listening.bind(self.path)
            os.chmod(self.path, 0o600)  # before it listens: until then nobody can connect
        except OSError as error:
            listening.close()
            raise InvalidSetting(f"{self}: cannot listen here: {error.strerror or error}") from error
        except InvalidSetting:
            listening.close()
            raise
        return listening

    def _remove_stale(self) -> None:
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise InvalidSetting(f"{self}: there is a file that is not a socket; choose another path or move the file")
        if self._is_alive():
            raise InvalidSetting(f"{self}: another process listens here; stop it or choose another path")
        os.unlink(self.path)

    def _is_alive(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_SECONDS)
            # Anything but a refusal may come from a listener: one with a full backlog does not answer either.
            return probe.connect_ex(self.path) != errno.ECONNREFUSED


Address = TcpAddress | UnixAddress


def parse(uri: str) -> Address:
    """Parse the address. Raises InvalidSetting with one sentence: the fault, and the text to write instead."""
    try:
        parts = urlsplit(uri)
        parts.port  # noqa: B018  it is parsed, and may fail, only when read
    except ValueError as error:
        raise InvalidSetting(f"{uri}: not a valid address: {error}") from None
    if parts.fragment or "@" in parts.netloc:
        raise InvalidSetting(f"{uri}: an address has no user and no fragment; write {_example(parts)}")
    if parts.query and (parts.scheme, parts.query) != ("tcp", _REUSE_PORT):
        raise InvalidSetting(f"{uri}: the only option is tcp://...?{_REUSE_PORT}; write {_example(parts)}")
    match parts.scheme:
        case "tcp":
            return _tcp(uri, parts)
        case "unix":
            return _unix(uri, parts)
        case _:
            raise InvalidSetting(f"{uri}: unknown scheme; write tcp://127.0.0.1:2301 or unix:///path/to.sock")


def _tcp(uri: str, parts: SplitResult) -> TcpAddress:
    if parts.hostname is None or parts.port is None or parts.path not in ("", "/"):
        raise InvalidSetting(f"{uri}: write a host and a port and nothing else, as in {_example(parts)}")
    if not _is_loopback(parts.hostname):
        raise InvalidSetting(
            f"{uri}: {parts.hostname} is not this machine, and these connections are not encrypted or authenticated;"
            " use 127.0.0.1, ::1 or localhost, with a tunnel or proxy of your own between machines"
        )
    # One name, one socket: `localhost` could stand for two addresses, with a port each.
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    return TcpAddress(host, parts.port, reuse_port=bool(parts.query))


def _unix(uri: str, parts: SplitResult) -> UnixAddress:
    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise InvalidSetting(f"{uri}: write three slashes and the path of a file, as in {_example(parts)}")
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise InvalidSetting(
            f"{uri}: the path of a Unix socket has at most {_LONGEST_PATH} bytes; choose a shorter one"
        )
    return UnixAddress(path)


def _is_loopback(host: str) -> bool:
    """An IPv4 address within an IPv6 one is none: 127.0.0.1 would have two names."""
    try:
        address = ipaddress.ip_address(host)
        return address.is_loopback and getattr(address, "ipv4_mapped", None) is None
    except ValueError:
        return host == "localhost"


def _example(parts: SplitResult) -> str:
    return "unix:///path/to.sock" if parts.scheme == "unix" else "tcp://127.0.0.1:2301"
