"""The calling end of TCP: one address, one connection at a time, many calls under way on it.

The connection is for calls alone, so that no batch delays them, and they delay no batch. Calls that begin in one turn
of the event loop leave in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from durable.errors import ConnectionFailed, InvalidMessage, TransportError, again
from durable.settings import Settings
from durable.transports.base import Answer
from durable.transports.frames import Call, Frame, Goodbye, Lookup, Offers
from durable.transports.tcp.address import Address
from durable.transports.tcp.calling import CallingSide, Ended, Told
from durable.transports.tcp.client_side import ClientState, Unsendable
from durable.transports.tcp.conversation import Reply
from durable.transports.tcp.dialer import Dialer, fail
from durable.transports.tcp.entrance import Entrance
from durable.transports.tcp.stream import FrameStream
from durable.transports.wire import encode


class TcpCaller:
    """A `durable.transports.base.Caller` for one `tcp://` or `unix://` address."""

    def __init__(
        self, address: Address, entrance: Entrance, settings: Settings, service: str, node: Callable[[], int]
    ) -> None:
        self._dialer = Dialer(
            address,
            entrance,
            settings,
            side=lambda proof: CallingSide(service, node(), settings.max_frame_bytes, proof),
            connection=lambda stream, side: _Connection(stream, side, settings, str(address)),
        )

    async def __aenter__(self) -> Self:
        await self._dialer.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._dialer.__aexit__(kind, error, trace)

    async def offers(self) -> Offers:
        """Return what can be called there now. Raises TransportError when the address cannot be reached."""
        return (self._dialer.open or await self._dialer.dial()).offers

    async def call(self, call: Call, sent: Callable[[], None]) -> Answer:
        """Send the call once, and return its answer. Raises as `durable.transports.base.Caller` says."""
        return await (self._dialer.open or await self._dialer.dial()).call(call, sent)


class _Connection:
    """Connection of a caller, from HELLO to its end."""

    def __init__(self, stream: FrameStream, side: CallingSide, settings: Settings, peer: str) -> None:
        self.offers = Offers([])
        self._stream = stream
        self._side = side
        self._peer = peer
        self._quiet_seconds = settings.idle_timeout.total_seconds() / 3
        self._waiting: dict[int, asyncio.Future[Answer]] = {}  # by channel
        self._loop = asyncio.get_running_loop()
        self._has_offers = False
        self._end: TransportError | None = None

    @property
    def is_usable(self) -> bool:
        """True while new calls may be made on the connection."""
        return self._end is None and self._side.state is ClientState.OPEN

    async def greet(self) -> None:
        """Say HELLO, hear WELCOME, and learn what can be called. Raises TransportError when that fails."""
        try:
            await self._stream.say(self._side.greet())
            while self._side.state is ClientState.GREETING:
                await self._hear_more()
            await self._stream.say(Frame(Lookup()))
            while not self._has_offers:
                await self._hear_more()
            if not self.is_usable:
                raise ConnectionFailed(f"{self._peer}: the peer is stopping")
        except BaseException:
            self._stream.abort()
            raise

    async def run(self) -> None:
        """Read and keep alive until the peer, an error or cancellation ends it; then tell those who wait."""
        try:
            async with asyncio.TaskGroup() as tasks:
                heartbeat = tasks.create_task(self._beat(), name=f"heartbeat to {self._peer}")
                await self._read()
                heartbeat.cancel()
        finally:
            if self._end is None:
                self._stream.post(encode(Frame(Goodbye())))
                self._finish(ConnectionFailed(f"{self._peer}: the caller was closed"))
            await self._stream.close()

    async def call(self, call: Call, sent: Callable[[], None]) -> Answer:
        """Send the call, and wait for its answer; a cancelled caller cancels the call that it waits for."""
        while self._stream.is_backed_up and self._end is None:
            await self._stream.flush()  # what waits here costs nothing when its time is up
        if self._end is not None:
            raise again(self._end)
        sendable = self._side.call(call)
        if isinstance(sendable, Unsendable):
            raise InvalidMessage(f"{sendable.reason}; raise max_frame_bytes there, or send less")
        channel = sendable.channel
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[channel] = answer
        sent()
        self._stream.post_soon(sendable.data)
        try:
            if self._stream.is_backed_up:
                await self._stream.flush()
            return await answer
        except BaseException:
            cancel = self._side.cancel(channel)
            if cancel is not None and call.awaited and self._end is None:
                self._stream.post_soon(encode(cancel))
            raise
        finally:
            self._waiting.pop(channel, None)

    async def _read(self) -> None:
        try:
            # The peer that said GOODBYE waits for us to close, once everything is answered.
            while self._side.state is not ClientState.LEAVING or self._side.outstanding:
                await self._hear_more()
        except TransportError as error:
            self._drop(error)

    async def _hear_more(self) -> None:
        received = await self._stream.read()
        if not received:
            raise ConnectionFailed(f"{self._peer}: the peer closed the connection")
        for item in received:
            match self._side.listen(item):
                case Ended(channel, answer):
                    waiter = self._waiting.pop(channel, None)
                    if waiter is not None and not waiter.done():
                        waiter.set_result(answer)
                case Told(offers):
                    self.offers, self._has_offers = offers, True
                case Reply(frame):
                    await self._stream.say(frame)
                case _:  # a pong, or the answer to a call that was cancelled
                    pass

    async def _beat(self) -> None:
        while self._end is None:
            quiet = self._loop.time() - self._stream.written_at
            if quiet < self._quiet_seconds:
                await asyncio.sleep(self._quiet_seconds - quiet)
                continue
            try:
                await self._stream.say(self._side.ping())
            except TransportError as error:
                self._drop(error)

    def _drop(self, error: TransportError) -> None:
        self._finish(error)
        self._stream.abort()

    def _finish(self, error: TransportError) -> None:
        if self._end is not None:
            return
        self._end = error
        for waiter in self._waiting.values():
            fail(waiter, error)
