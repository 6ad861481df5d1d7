"""Doorkeeper of a listening socket: every connection is counted from its accept, its TLS handshake included.

    accept --> arrive --> TLS handshake --> connection of the listener --> prove --> ... --> leave
      |           '--> another visit gives way (durable.transports.visits)
      '--> no descriptors left: the visit that does the least harm is closed; the next accept after a pause

asyncio's own servers accept without a limit, count nothing before a TLS handshake has ended, and log a traceback for
each failed accept.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NoReturn

from durable.errors import said
from durable.settings import Settings
from durable.tasks.cancelling import raise_if_cancelled
from durable.telemetry import log
from durable.transports.drops import Drops
from durable.transports.visits import Visit, Visits

Greet = Callable[[Visit], asyncio.BaseProtocol]
"""Makes the protocol of a new connection."""

_EXHAUSTED: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 1.0
_TELL_AGAIN_SECONDS: Final = 60.0
_GOODBYE_SECONDS: Final = 1.0  # for the end of a TLS connection


class Doorkeeper:
    """Accepts the connections of one listener. `known` is the number of those whose peers have proved who they are;
    `tls` returns the context of the next one.
    """

    def __init__(
        self,
        listener: str,
        settings: Settings,
        counts: Counter[str],
        *,
        known: int,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._listener = listener
        self._counts = counts
        self._tls = tls
        self._handshake_seconds = settings.connect_timeout.total_seconds()
        self._visits = Visits(
            known=known, strangers=settings.stranger_connections, per_address=settings.connections_per_address
        )
        self._drops = Drops(listener, counts)
        self._accepting: asyncio.Task[NoReturn] | None = None
        self._told_at = -_TELL_AGAIN_SECONDS

    def open(self, listening: socket.socket, tasks: asyncio.TaskGroup, greet: Greet) -> None:
        """Accept from now on, by tasks of this group."""
        listening.setblocking(False)
        self._accepting = tasks.create_task(
            self._accept(listening, tasks, greet), name=f"accept connections of {self._listener}"
        )
        # Not before: until the task has ended, the event loop watches the descriptor, which may be another's by then.
        self._accepting.add_done_callback(lambda _: listening.close())

    def close(self) -> None:
        """Accept nothing more. The connections go on."""
        if self._accepting is not None:
            self._accepting.cancel()
        self._drops.close()

    def prove(self, visit: Visit) -> bool:
        """Give the visit a place among the known; False when there is none, and the visit stays a stranger's."""
        leaving = self._visits.prove(visit)
        if leaving is not None and leaving.visit is not visit:
            self.drop(leaving.visit, leaving.reason)
        return visit.is_known

    def leave(self, visit: Visit) -> None:
        """Forget a connection that has ended."""
        visit.is_over = True
        self._visits.leave(visit)

    def drop(self, visit: Visit, reason: object) -> None:
        """Close a connection at once, count it and log why. Nothing happens to one that is over."""
        if visit.is_over:
            return
        self.leave(visit)
        self.count(visit, reason)
        visit.cut()

    def count(self, visit: Visit, reason: object) -> None:
        """Count and log a connection that its listener closes by itself."""
        self._drops.tell(visit.name, reason)

    # ------------------------------------------------------------------ accepting

    async def _accept(self, listening: socket.socket, tasks: asyncio.TaskGroup, greet: Greet) -> NoReturn:
        pause = _PAUSE_SECONDS
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._make_room(error)
                    await asyncio.sleep(pause)
                    pause = min(_LONGEST_PAUSE_SECONDS, pause * 2)
                else:  # the client has gone already
                    await asyncio.sleep(0)
                continue
            pause = _PAUSE_SECONDS
            visit = self._admit(accepted, address)
            if not visit.is_over:
                tasks.create_task(self._meet(visit, accepted, greet), name=f"greet a visitor of {self._listener}")
            await asyncio.sleep(0)  # accepting does not wait while connections are there: others have their turn

    def _admit(self, accepted: socket.socket, address: Any) -> Visit:
        self._counts["connections"] += 1
        visit = Visit(address[0] if isinstance(address, tuple) else "", lambda: _shut(accepted))
        leaving = self._visits.arrive(visit)
        if leaving is not None:
            self.drop(*leaving)
        if visit.is_over:
            accepted.close()
        return visit

    async def _meet(self, visit: Visit, accepted: socket.socket, greet: Greet) -> None:
        """Do the TLS handshake and hand the connection over."""
        try:
            tls = self._tls() if self._tls is not None else None
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: greet(visit),
                accepted,
                ssl=tls,
                ssl_handshake_timeout=self._handshake_seconds if tls else None,
                ssl_shutdown_timeout=_GOODBYE_SECONDS if tls else None,
            )
        except OSError as error:  # ssl.SSLError is one
            self.drop(visit, error.strerror or said(error))
        except BaseException as error:
            raise_if_cancelled(error)
            log.exception("listener %s dropped the connection of %s: internal error", self._listener, visit.name)
            self.drop(visit, said(error))

    def _make_room(self, error: OSError) -> None:
        """Close one connection for want of descriptors, which may be those of the whole process."""
        now = asyncio.get_running_loop().time()
        if now - self._told_at >= _TELL_AGAIN_SECONDS:
            self._told_at = now
            log.error("listener %s cannot accept connections: %s", self._listener, error.strerror)
        leaving = self._visits.least()
        if leaving is not None:
            self.drop(leaving, f"another connection could not be accepted: {error.strerror}")


def _shut(accepted: socket.socket) -> None:
    """End a connection in its handshake: asyncio, which reads the socket, then closes it."""
    with contextlib.suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)
