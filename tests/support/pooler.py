"""A stand-in for a connection pooler in front of Postgres: it tells each client a process id of its own making.

with pooler("unix:///tmp/socket/.s.PGSQL.5432") as port:
    ...                                             # connect to 127.0.0.1:port
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

INVENTED_PID = 4_000_000


@contextlib.contextmanager
def pooler(address: str) -> Iterator[int]:
    """Listens on a port of this machine and passes everything on to the server at `unix:///path` or `tcp://host:port`."""
    with ExitStack() as sockets:
        listening = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=_accept, args=(listening, address, sockets), daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


def _accept(listening: socket.socket, address: str, sockets: ExitStack) -> None:
    with contextlib.suppress(OSError):
        while True:
            client = sockets.enter_context(listening.accept()[0])
            server = sockets.enter_context(_connection(address))
            threading.Thread(target=_pump, args=(client, server), daemon=True).start()
            threading.Thread(target=_answer, args=(server, client), daemon=True).start()


def _connection(address: str) -> socket.socket:
    parts = urlsplit(address)
    if parts.scheme == "tcp":
        return socket.create_connection((parts.hostname or "", parts.port or 0))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(parts.path)
    return connection


def _answer(server: socket.socket, client: socket.socket) -> None:
    """What the server says, with another process id in its BackendKeyData; from there on as it is."""
    with contextlib.suppress(OSError), server.makefile("rb") as said:
        while (kind := said.read(1)) != b"K":
            if kind == b"N":  # the refusal of TLS: one byte, and no message
                client.sendall(kind)
                continue
            length = said.read(4)
            client.sendall(kind + length + said.read(struct.unpack("!i", length)[0] - 4))
        client.sendall(kind + said.read(4) + struct.pack("!i", INVENTED_PID))
        said.read(4)
        while data := said.read1():
            client.sendall(data)
        client.shutdown(socket.SHUT_WR)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
