"""A running node under attack: it goes on serving a good peer, holds nothing of an exchange, and logs no traceback.

The node runs in a thread of its own, on a real Postgres; the attacker is a plain socket in this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

import psutil

from durable import Bus
from durable.envelope import Envelope
from durable.errors import TransportError
from durable.outcomes import STORED
from durable.settings import load_settings
from durable.transports.base import Sender
from durable.transports.http.transport import HttpTransport
from durable.transports.tcp.transport import TcpTransport
from tests.support.http_shop import Counted, Sold
from tests.support.receivers import envelope

T = TypeVar("T")

SECRET = "correct horse battery"
SECURED = {"shared_secret": SECRET}
PATIENCE = 30.0
LARGE = b'{"number": 1, "note": "%s"}' % (b"x" * 100_000)
SETTINGS = {
    "buffer_bytes": 1 << 16,  # less than LARGE: a peer is only given room for that when nobody holds any
    "max_message_bytes": 1 << 17,
    "max_frame_bytes": 1 << 18,
    "poll_interval": timedelta(milliseconds=50),
}
ANSWERS = {"200", "202", "204", "400", "401", "403", "404", "405", "408", "413", "415", "421", "422", "429", "503"}

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Z]")
_QUIET_SECONDS = 0.03
_SPARE = (
    20  # descriptors and tasks of pools and agents, which come and go; an exchange that leaves one is found in time
)

Ending = Literal["reset", "half-close", "leave"]


class Exchange(NamedTuple):
    """What an attacker says, in which pieces, and how he goes."""

    pieces: list[bytes]
    ending: Ending


class _Log(logging.Handler):
    """Keeps what must not be logged: tracebacks, and characters that a terminal would obey."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info or not text.isprintable():
            self.faults.append(logging.Formatter().format(record))


class Node:
    """A running bus with one listener, and a good peer that is connected to it."""

    def __init__(self, database_url: str, scheme: str, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: self._log.faults.append(str(context)))
        self._log = _Log()
        self._scheme, self._settings, self._url = scheme, {**SETTINGS, **settings}, database_url
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"a node with {scheme}")

    def __enter__(self) -> Node:
        logging.getLogger().addHandler(self._log)
        self._thread.start()
        self.run(self._open())
        self.is_unharmed()
        self._tasks, self._descriptors = len(asyncio.all_tasks(self._loop)), _descriptors()
        self._connections = self._served()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            logging.getLogger().removeHandler(self._log)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run this in the loop of the node."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * PATIENCE)

    def attack(self, exchange: Exchange) -> bytes:
        """Have the exchange, and return what was answered."""
        heard: list[bytes] = []
        with socket.create_connection(self._at, timeout=PATIENCE) as attacker:
            try:
                _talk(attacker, exchange, heard)
            except TimeoutError:
                if exchange.ending != "leave":
                    raise AssertionError("the connection stays open") from None
            except OSError:  # the node has closed the connection
                pass
        return b"".join(heard)

    def is_unharmed(self) -> None:
        """A peer who was connected before, and one who comes now, have messages stored; nothing is left behind."""
        self.run(self._serves_peers())
        assert not self._log.faults, self._log.faults

    def holds_nothing(self) -> None:
        """Nothing of the exchanges is left."""
        _until(lambda: self._served() <= self._connections, "connections")
        _until(lambda: len(asyncio.all_tasks(self._loop)) <= self._tasks + _SPARE, "tasks")
        _until(lambda: _descriptors() <= self._descriptors + _SPARE, "descriptors")

    async def _open(self) -> None:
        self._bus = Bus("shop", self._url, **self._settings)
        self._bus.listen(f"{self._scheme}://127.0.0.1:0")

        @self._bus.handles(Sold)
        async def sell(_: Sold) -> None:
            pass

        @self._bus.handles(Counted)
        async def count(_: Counted) -> None:
            pass

        await self._bus.__aenter__()
        node = self._bus.runtime.node
        assert node is not None
        self.address = node.listeners[0].address
        parts = urlsplit(self.address)
        self._at = str(parts.hostname), int(parts.port or 0)
        self._old_peer = await self._peer().__aenter__()

    async def _close(self) -> None:
        await self._old_peer.__aexit__(None, None, None)
        await self._bus.__aexit__(None, None, None)

    def _peer(self) -> Sender:
        shared = {name: value for name, value in self._settings.items() if name in SECURED}
        settings = load_settings(**shared, send_timeout=timedelta(seconds=PATIENCE))
        if self._scheme == "tcp":
            return TcpTransport(settings, "till", 1).sender(self.address)
        return HttpTransport(settings, service="till", messages=dict).sender(self.address)

    async def _serves_peers(self) -> None:
        await self._has_stored(self._old_peer, envelope("web.sold", b'{"number": 1}'))
        async with self._peer() as newcomer:
            await self._has_stored(newcomer, envelope("web.sold", LARGE))

    async def _has_stored(self, peer: Sender, sent: Envelope) -> None:
        """Send again while the room is taken by an exchange that is just ending."""
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(TransportError):
                    if await peer.send([sent]) == [STORED]:
                        return
                await asyncio.sleep(0.01)

    def _served(self) -> int:
        """Return the number of connections at the listener's end."""
        found = psutil.Process().net_connections("tcp4")
        return sum(each.laddr == self._at and each.status != psutil.CONN_LISTEN for each in found)


def _talk(attacker: socket.socket, exchange: Exchange, heard: list[bytes]) -> None:
    attacker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for piece in exchange.pieces:
        attacker.sendall(piece)
    match exchange.ending:
        case "reset":
            attacker.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        case "half-close":
            attacker.shutdown(socket.SHUT_WR)
        case "leave":
            attacker.settimeout(_QUIET_SECONDS)
    while part := attacker.recv(1 << 16):
        heard.append(part)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, f"{what} of an exchange are left behind"
        time.sleep(0.005)


@contextmanager
def attacked(database_url: str, scheme: str, **settings: Any) -> Iterator[Callable[[Exchange], str]]:
    """A check of exchanges with a running node."""
    with Node(database_url, scheme, **settings) as node:

        def check(exchange: Exchange) -> str:
            heard = node.attack(exchange)
            node.is_unharmed()
            node.holds_nothing()
            if scheme == "tcp":
                return f"{exchange.ending} {'answered' if heard else 'silence'}"
            statuses = [status.decode() for status in _STATUS.findall(heard)]
            assert set(statuses) <= ANSWERS, heard
            return " ".join([exchange.ending, *statuses[:3]])

        yield check
