"""One connected peer of a listener: its lease, what it announces, and the directory that it is told.

    CONNECT --> pushes of the directory begin, and the longest lease
    ANNOUNCE --> the offers of the peer, instead of those before; the lease goes on
    RESET --> the next lease

The directory is told as a whole: at once, and after each change, changes of PUSH_SECONDS together. A large one is told
less often. A peer that reads slowly holds up its own pushes alone: the next one is made when the last one is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from durable.errors import InvalidMessage, ProtocolViolation, TransportError
from durable.redaction import shown
from durable.telemetry import log
from durable.transports.announcements import Announcer
from durable.transports.base import Directory
from durable.transports.directories import parts_of
from durable.transports.frames import Announce, Connect, Frame, Listing, Refused, Reset
from durable.transports.tcp.server_side import Register, ServerSide
from durable.transports.tcp.stream import FrameStream
from durable.transports.watchdog import Watchdog
from durable.transports.wire import encode

PUSH_SECONDS: Final = 0.25
_BYTES_A_SECOND: Final = 8 << 20  # of pushes to one peer, about


class Connected:
    """Place of one connection in the directory."""

    def __init__(self, directory: Directory | None, stream: FrameStream, side: ServerSide) -> None:
        self._directory = directory
        self._stream = stream
        self._side = side
        self._loop = asyncio.get_running_loop()
        self._watchdog: Watchdog | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._unwatch: Callable[[], None] | None = None
        self.end_of_lease = ""
        """Why the connection ended, if that is why."""

    def hear(self, said: Register, tasks: asyncio.TaskGroup) -> Frame | None:
        """Act on a frame. Returns the refusal, if there is one. Raises ProtocolViolation before CONNECT."""
        try:
            self._act(said, tasks)
        except InvalidMessage as error:
            return Frame(Refused(str(error)), said.channel)
        return None

    def close(self) -> None:
        """Forget what the peer has announced, at the end of its connection."""
        for task in self._tasks:
            task.cancel()
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        if self._directory is not None and self._watchdog is not None:
            self._directory.end(self)

    def _act(self, said: Register, tasks: asyncio.TaskGroup) -> None:
        if self._directory is None:
            raise InvalidMessage("the listener has no directory; connect to a hub")
        match said.content:
            case Connect() as connect:
                self._connect(self._directory, connect, tasks)
            case _ if self._watchdog is None:
                raise ProtocolViolation("unexpected frame: a client says CONNECT before it announces or resets")
            case Announce(listings):
                self._directory.announce(self, self._announcer(), listings, said.size_bytes)
            case Reset(lease):
                if refusal := self._watchdog.reset(lease, self._loop.time()):
                    raise InvalidMessage(refusal)

    def _connect(self, directory: Directory, connect: Connect, tasks: asyncio.TaskGroup) -> None:
        if self._watchdog is not None:
            raise ProtocolViolation("malformed frame: a client says CONNECT once")
        self._watchdog = Watchdog(directory.bounds, self._loop.time())
        self._unwatch = directory.watch(self._tell_of_change)
        self._tasks = [
            tasks.create_task(self._push(directory), name=f"directory for {self._side.peer}"),
            tasks.create_task(self._watch(self._watchdog), name=f"lease of {self._side.peer}"),
        ]
        log.info("peer %s is connected: %s, durable %s", self._side.peer, shown(connect.name), shown(connect.program))

    def _announcer(self) -> Announcer:
        hello = self._side.hello
        assert hello is not None
        host = self._stream.peer_host
        return Announcer(hello.service, hello.node, self._side.proven, host, tuple(self._stream.names))

    def _tell_of_change(self) -> None:
        """Called in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _push(self, directory: Directory) -> None:
        """Tell the directory, now and after each change."""
        told: Sequence[Listing] | None = None
        while True:
            self._changed.clear()
            listings = directory.listings(self._side.proven)
            if listings != told:
                told = listings
                try:
                    size_bytes = await self._tell(listings)
                except TransportError:
                    return  # who reads the connection finds out
                await asyncio.sleep(max(PUSH_SECONDS, size_bytes / _BYTES_A_SECOND))
            await self._changed.wait()

    async def _tell(self, listings: Sequence[Listing]) -> int:
        """Write the directory, a part when the one before is sent. Returns its size in bytes."""
        size_bytes = 0
        for part in parts_of(listings, self._side.peer_max_frame_bytes):
            data = encode(Frame(part))
            size_bytes += len(data)
            await self._stream.write(data)
        return size_bytes

    async def _watch(self, watchdog: Watchdog) -> None:
        """End the connection when its lease is over."""
        elapsed = False
        while not elapsed:
            await asyncio.sleep(watchdog.pause(self._loop.time()))
            elapsed = watchdog.has_elapsed(self._loop.time())
        self.end_of_lease = f"the lease of {watchdog.lease:g} s is over: no reset came"
        if self._directory is not None:
            self._directory.end(self)
        self._stream.post(encode(Frame(Refused(self.end_of_lease))))
        await self._stream.close()
