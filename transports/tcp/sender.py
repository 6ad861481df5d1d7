"""The sending end of TCP: one destination, one connection at a time, several batches under way on it.

A connection is opened by the first send or ping that needs one. It reads what the peer says, and pings when it has
written nothing for a third of the idle timeout. Whoever waits for an answer holds a future for its channel. When the
connection ends, all of them learn why, and the next send opens another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from durable.envelope import Envelope
from durable.errors import ConnectionFailed, PeerTimeout, TransportError, again
from durable.failpoints import failpoint, is_armed
from durable.grammar import several
from durable.outcomes import BUSY, Outcome, Rejected, all_settled
from durable.settings import Settings
from durable.telemetry import log
from durable.transports.frames import Frame, Goodbye
from durable.transports.idle import IdleConnections
from durable.transports.tcp.address import Address
from durable.transports.tcp.client_side import Answered, ClientSide, ClientState, Ponged, Sendable, Stray, Unsendable
from durable.transports.tcp.conversation import Reply
from durable.transports.tcp.dialer import Dialer, fail
from durable.transports.tcp.entrance import Entrance
from durable.transports.tcp.stream import FrameStream
from durable.transports.wire import encode


class TcpSender:
    """A `durable.transports.base.Sender` for one `tcp://` or `unix://` address."""

    keeps_order = True

    def __init__(
        self,
        address: Address,
        entrance: Entrance,
        settings: Settings,
        service: str,
        node: Callable[[], int],
        *,
        idle: IdleConnections,
    ) -> None:
        self._address = address
        self._idle = idle
        self._uses = 0
        self._dialer = Dialer(
            address,
            entrance,
            settings,
            side=lambda proof: ClientSide(service, node(), settings.max_frame_bytes, proof),
            connection=lambda stream, side: _Connection(stream, side, settings, str(address)),
        )

    async def __aenter__(self) -> Self:
        await self._dialer.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._idle.forget(self)
        await self._dialer.__aexit__(kind, error, trace)

    def close_if_idle(self) -> bool:
        """Close the connection; False when something is under way on it. The next send opens another."""
        if self._uses:
            return False
        self._dialer.hang_up()
        return True

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """A peer that is down has no connection: to ping it costs no other peer its own."""
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            if self._dialer.open is not None:
                self._idle.used(self)
            elif not self._uses:
                self._idle.forget(self)

    async def send(self, batch: Sequence[Envelope]) -> list[Outcome]:
        """Deliver the batch, in parts if it is larger than the peer takes at once, and return the outcomes in order.

        An envelope that alone is too large for the peer, or cannot be encoded, is Rejected. All that is left is Busy
        when the peer grants no credit within `send_timeout`, or did not store what came before. Raises
        ConnectionFailed, PeerTimeout or ProtocolViolation when the fate of the batch, or of a part of it, is unknown:
        send all of it again, the peer knows duplicates.
        """
        outcomes: list[Outcome] = []
        with self._in_use():
            while len(outcomes) < len(batch):
                if not all_settled(outcomes):
                    return outcomes + [BUSY] * (len(batch) - len(outcomes))
                connection = await self._dialer.dial()
                outcomes += await connection.send(batch[len(outcomes) :] if outcomes else batch)
        return outcomes

    async def ping(self) -> None:
        """Ask the peer whether it could store a batch now; raise TransportError unless it says so in time."""
        with self._in_use():
            connection = await self._dialer.dial()
            is_ready = await connection.ping()
        if not is_ready:
            raise TransportError(f"{self._address}: the peer cannot store anything now")


class _Connection:
    """Connection of a sender, from HELLO to its end."""

    def __init__(self, stream: FrameStream, side: ClientSide, settings: Settings, peer: str) -> None:
        self._stream = stream
        self._side = side
        self._peer = peer
        self._send_seconds = settings.send_timeout.total_seconds()
        self._quiet_seconds = settings.idle_timeout.total_seconds() / 3
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # by channel
        self._turn = asyncio.Lock()  # for credit: without it small batches would keep a large one waiting
        self._heard = asyncio.Event()
        self._end: TransportError | None = None
        self._strays = 0

    @property
    def is_usable(self) -> bool:
        """True while new batches may be sent on the connection."""
        return self._end is None and self._side.state is ClientState.OPEN

    async def greet(self) -> None:
        """Say HELLO and hear WELCOME. Raises TransportError, and closes the connection, when that fails."""
        try:
            await self._stream.say(self._side.greet())
            while self._side.state is ClientState.GREETING:
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
                self._finish(ConnectionFailed(f"{self._peer}: the sender was closed"))
            if self._strays > 1:
                log.warning(
                    "answers of %s ignored: %s not under way", self._peer, several(self._strays, "batches", "were")
                )
            await self._stream.close()

    async def send(self, envelopes: Sequence[Envelope]) -> list[Outcome]:
        """Send the first of these envelopes, as many as the peer takes at once, and return their outcomes."""
        match await self._offer(envelopes):
            case Sendable(channel, data):
                outcomes: list[Outcome] = await self._exchange(channel, self._write_batch(data))
                return outcomes
            case Unsendable(reason):
                return [Rejected(reason)]
            case None:
                return [BUSY] * len(envelopes)

    async def ping(self) -> bool:
        """Could the peer store something now?"""
        ping = self._side.ping()
        ready: bool = await self._exchange(ping.channel, self._stream.say(ping))
        return ready

    async def _offer(self, envelopes: Sequence[Envelope]) -> Sendable | Unsendable | None:
        """Return the bytes to write; None when the peer grants no credit in time, or takes nothing new."""
        try:
            async with asyncio.timeout(self._send_seconds), self._turn:
                while (offer := self._side.offer(envelopes, datetime.now(UTC))) is None and self.is_usable:
                    self._heard.clear()
                    await self._heard.wait()
                return offer
        except TimeoutError:
            return None

    async def _exchange(self, channel: int, writing: Coroutine[Any, Any, None]) -> Any:
        """Write, and wait for the answer on the channel. A cancelled caller's answer is dropped when it comes."""
        answer = self._waiting[channel] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._send_seconds):
                await writing
                if self._end is not None:
                    raise again(self._end)
                return await answer
        except TimeoutError:
            self._drop(ConnectionFailed(f"{self._peer}: dropped, because something was not answered in time"))
            raise PeerTimeout(f"{self._peer}: no answer within {self._send_seconds:g} seconds") from None
        finally:
            self._waiting.pop(channel, None)

    async def _write_batch(self, data: bytes) -> None:
        if is_armed("C6"):
            half = len(data) // 2
            self._stream.post(data[:half])
            failpoint("C6")
            data = data[half:]
        await self._stream.write(data)
        failpoint("C7")

    async def _read(self) -> None:
        try:
            # The peer that said GOODBYE waits for us to close, once everything is answered.
            while self._side.state is not ClientState.LEAVING or self._side.outstanding or self._waiting:
                await self._hear_more()
        except TransportError as error:
            self._drop(error)

    async def _hear_more(self) -> None:
        received = await self._stream.read()
        if not received:
            raise ConnectionFailed(f"{self._peer}: the peer closed the connection{self._advice}")
        for item in received:
            match self._side.hear(item):
                case Reply(frame):
                    await self._stream.say(frame)
                case Answered(channel, outcomes):
                    failpoint("C11")
                    self._resolve(channel, outcomes)
                case Ponged(channel, ready):
                    self._resolve(channel, ready)
                case Stray(channel):
                    self._note_stray(channel)
                case None:
                    pass
        self._heard.set()

    @property
    def _advice(self) -> str:
        """Say where to look when the peer closes before WELCOME: what it did not accept is in its log alone."""
        return "" if self._side.state is not ClientState.GREETING else " before WELCOME; its log says why"

    def _note_stray(self, channel: int) -> None:
        """An answer to a batch that is not under way: the first is logged, the others are counted until the end."""
        self._strays += 1
        if self._strays == 1:
            log.warning("answer of %s ignored, like all that follow: batch %d is not under way", self._peer, channel)

    def _resolve(self, channel: int, answer: list[Outcome] | bool) -> None:
        waiter = self._waiting.pop(channel, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    async def _beat(self) -> None:
        clock = asyncio.get_running_loop().time
        while self._end is None:
            quiet = clock() - self._stream.written_at
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
        self._heard.set()
