"""The receiving end of TCP: a bound address, its connections, and the batches under way on them.

Each connection is a task that reads; each batch is a task that has it stored and answers, so that answers come in the
order in which batches are stored. Everything that a peer can make us hold is bounded: connections by a limit, batches
by the credit granted on each connection, their bytes by one budget for the whole listener. When the budget is spent,
connections are not read, and TCP makes the peers wait.

Room is shared: each connection is granted credit for its part of what the receiver has room for. Answers carry new
credit; what becomes free without an answer is granted by a task that looks every CREDIT_SECONDS.

A connection that breaks the protocol or a deadline is dropped, counted and logged, without what it sent. Batches
under way on it are stored all the same: their sender, not knowing, sends them again, and they are duplicates then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import Final, NoReturn

from durable.envelope import Envelope
from durable.errors import ConnectionFailed, TransportError
from durable.failpoints import failpoint
from durable.outcomes import Outcome
from durable.settings import Settings
from durable.tasks.crew import raise_if_cancelled
from durable.telemetry import log
from durable.transports.base import Receiver
from durable.transports.deadlines import counted_anew
from durable.transports.frames import Refused
from durable.transports.tcp.address import Address
from durable.transports.tcp.conversation import Deliver, Leave, Probe, Reply, ServerSide, ServerState, TurnAway
from durable.transports.tcp.entrance import Entrance
from durable.transports.tcp.stream import LINGER_SECONDS, FrameStream, translated
from durable.transports.tcp.unix import Bound, OnConnection
from durable.transports.tls import Context
from durable.transports.wire import encode

CREDIT_SECONDS: Final = 0.05


class TcpListener:
    """A `durable.transports.base.Listener` for one `tcp://` or `unix://` address."""

    def __init__(
        self,
        address: Address,
        entrance: Entrance,
        endpoint: str,
        settings: Settings,
        service: str,
        node: Callable[[], int],
    ) -> None:
        self._uri = str(address)
        self._address = address
        self._entrance = entrance
        self._endpoint = endpoint
        self._settings = settings
        self._service = service
        self._node = node
        self._max_connections = settings.tcp_connections
        self._counts: Counter[str] = Counter(connections=0, dropped=0, batches=0, envelopes=0, refused=0)
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        self._bound: Bound | None = None
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def address(self) -> str:
        """The URI that peers send to; with the port that was bound, once serve() has returned."""
        return self._uri

    def statistics(self) -> Mapping[str, int]:
        """Return the counters since serve(): connections, dropped, batches, envelopes, refused."""
        return dict(self._counts)

    async def serve(self, receiver: Receiver) -> None:
        """Bind and return; raises InvalidSetting when the address cannot be bound."""
        tasks = await asyncio.TaskGroup().__aenter__()
        intake = _Intake(self._endpoint, receiver, self._settings, self._counts, self._connections)

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._accept(tasks, intake, FrameStream((reader, writer), self._settings))

        self._tasks = tasks
        try:
            self._bound = await self._bind(accept)
        except BaseException:
            self._tasks = None
            await tasks.__aexit__(None, None, None)
            raise
        self._uri = self._bound.uri
        self._granting = tasks.create_task(intake.grant_credit(), name=f"credit of {self._uri}")

    async def _bind(self, accept: OnConnection) -> Bound:
        users = self._entrance.users
        return await self._address.bind(accept, 0o600 if users is None else users.mode)

    async def close(self) -> None:
        """Accept nothing new, say GOODBYE, answer the batches under way within `drain_timeout`, and close."""
        if self._bound is None or self._tasks is None:
            return
        tasks, self._tasks = self._tasks, None
        self._bound.release()
        self._granting.cancel()
        try:
            async with asyncio.timeout(self._settings.drain_timeout.total_seconds()), asyncio.TaskGroup() as leaving:
                for connection in self._connections:
                    leaving.create_task(connection.leave(), name=f"goodbye to {connection.peer}")
        except TimeoutError:
            log.warning("listener %s closes with batches under way, which were not stored in time", self._uri)
        finally:
            for connection, task in self._connections.items():
                connection.abort()  # here, because a task that has not begun yet is never told that it is cancelled
                task.cancel()
            await tasks.__aexit__(None, None, None)

    def _accept(self, tasks: asyncio.TaskGroup, intake: _Intake, stream: FrameStream) -> None:
        self._counts["connections"] += 1
        if self._tasks is None:  # it was accepted just before the server closed
            stream.abort()
        elif len(self._connections) >= self._max_connections:
            stream.abort()
            self._count_dropped("a stranger", "there are too many connections")
        else:
            stream.pause()
            context, proof = self._entrance.for_listener()
            side = ServerSide(self._service, self._node(), self._settings.max_frame_bytes, proof)
            connection = _Connection(intake, stream, side, self._settings, _Admission(self._entrance, context))
            task = tasks.create_task(self._converse(connection), name=f"connection at {self._uri}")
            self._connections[connection] = task

    async def _converse(self, connection: _Connection) -> None:
        try:
            await connection.run()
        except TransportError as error:
            self._count_dropped(connection.peer, error)
        except BaseException as error:
            raise_if_cancelled(error)
            # A fault of ours, perhaps in the receiver: it costs this connection, not the others.
            self._counts["dropped"] += 1
            log.exception("listener %s dropped the connection of %s: internal error", self._uri, connection.peer)
        finally:
            del self._connections[connection]

    def _count_dropped(self, peer: str, reason: object) -> None:
        self._counts["dropped"] += 1
        log.warning("listener %s dropped the connection of %s: %s", self._uri, peer, reason)


class _Intake:
    """Intake that the connections of a listener share: the receiver, its room, the bytes under way."""

    def __init__(
        self,
        endpoint: str,
        receiver: Receiver,
        settings: Settings,
        counts: Counter[str],
        connections: Collection[_Connection],
    ) -> None:
        self.endpoint = endpoint
        self.receiver = receiver
        self.counts = counts
        self._connections = connections
        self._most_envelopes = settings.buffer_size
        self._most_bytes = settings.buffer_bytes
        self._bytes = 0
        self._freed = asyncio.Event()

    def room(self) -> int:
        """Return the number of envelopes that one connection may have under way."""
        room = min(self.receiver.credit(), self._most_envelopes)
        return max(1, room // max(1, len(self._connections))) if room > 0 else 0

    async def reserve(self, size_bytes: int) -> None:
        """Wait until these bytes may be under way. A batch larger than the budget goes alone."""
        while self._bytes and self._bytes + size_bytes > self._most_bytes:
            self._freed.clear()
            await self._freed.wait()
        self._bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        self._bytes -= size_bytes
        self._freed.set()

    async def grant_credit(self) -> NoReturn:
        while True:
            await asyncio.sleep(CREDIT_SECONDS)
            for connection in self._connections:
                connection.grant_credit()


class _Admission:
    """Demands on one accepted connection, before anything is read."""

    def __init__(self, entrance: Entrance, context: Context | None) -> None:
        self._entrance = entrance
        self._context = context

    async def admit(self, stream: FrameStream) -> str | None:
        """Return the name in the client's certificate, if it had to show one. Raises ConnectionFailed."""
        if refusal := self._entrance.refusal_of_user(stream):
            raise ConnectionFailed(refusal)
        if self._context is None:
            stream.resume()
            return None
        await stream.secure(self._context)
        names = stream.names
        if refusal := self._entrance.refusal(names):
            raise ConnectionFailed(refusal)
        return names[0] if names else None


class _Connection:
    """Connection of a listener, from accept to close."""

    def __init__(
        self, intake: _Intake, stream: FrameStream, side: ServerSide, settings: Settings, admission: _Admission
    ) -> None:
        self._intake = intake
        self._admission = admission
        self._stream = stream
        self._side = side
        self._handshake_seconds = settings.connect_timeout.total_seconds()
        self._answered = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def peer(self) -> str:
        return self._side.peer

    async def run(self) -> None:
        """Serve one connection until the peer closes it. Raises TransportError when it is dropped; batches under way
        are finished first.
        """
        broken: TransportError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    await self._converse(tasks)
                except TransportError as error:
                    broken = error
                    self._stream.abort()
                self._ended.set()
        finally:
            self._ended.set()
            await self._stream.close()
        if broken is not None:
            raise broken

    def abort(self) -> None:
        self._stream.abort()

    async def leave(self) -> None:
        """Say GOODBYE, wait for the batches under way and for the peer to close; then, soon, close."""
        if self._side.state is not ServerState.OPEN:
            self._stream.abort()
            return
        with contextlib.suppress(TransportError):  # the peer has gone already
            await self._stream.say(self._side.leave())
        while self._side.under_way:
            self._answered.clear()
            await self._answered.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await self._ended.wait()
        self._stream.abort()

    def grant_credit(self) -> None:
        """Grant free credit that no answer could carry."""
        if self._side.state is not ServerState.OPEN or self._ended.is_set():
            return
        frame = self._side.grant(self._intake.room())
        if frame is not None:
            self._stream.post(encode(frame))

    async def _converse(self, tasks: asyncio.TaskGroup) -> None:
        with translated("waiting for HELLO"):
            async with asyncio.timeout(self._handshake_seconds):
                self._side.certified_as = await self._admission.admit(self._stream)
                while self._side.is_greeting:
                    if not await self._hear_more(tasks):
                        return
        while await self._hear_more(tasks):
            pass

    async def _hear_more(self, tasks: asyncio.TaskGroup) -> bool:
        """Act on the next frame; False when the peer is done."""
        received = await self._stream.read()
        for item in received:
            match self._side.hear(item, self._intake.room()):
                case Reply(frame):
                    self._intake.counts["refused"] += isinstance(frame.content, Refused)
                    await self._stream.say(frame)
                case TurnAway(frame, reason):
                    self._intake.counts["refused"] += 1
                    await self._stream.say(frame)
                    await self._stream.close()
                    raise ConnectionFailed(reason)
                case Deliver() as batch:
                    await self._intake.reserve(batch.size_bytes)
                    tasks.create_task(self._store(batch), name=f"batch {batch.channel} of {self.peer}")
                case Probe(channel):
                    tasks.create_task(self._pong(channel), name=f"ping {channel} of {self.peer}")
                case Leave():
                    return False
        return bool(received)

    async def _store(self, batch: Deliver) -> None:
        try:
            stored = await self._receive(counted_anew(batch.envelopes, batch.clock, datetime.now(UTC)))
            failpoint("C10")
            self._intake.counts["batches"] += 1
            self._intake.counts["envelopes"] += len(batch.envelopes)
            answer = self._side.answer(batch.channel, batch.outcomes(stored), self._intake.room())
            with contextlib.suppress(TransportError):  # the peer has gone; it will send the batch again
                await self._stream.say(answer)
        finally:
            self._intake.release(batch.size_bytes)
            self._answered.set()

    async def _receive(self, envelopes: list[Envelope]) -> list[Outcome]:
        return await self._intake.receiver.receive(self._intake.endpoint, envelopes) if envelopes else []

    async def _pong(self, channel: int) -> None:
        ready = await self._intake.receiver.ready()
        with contextlib.suppress(TransportError):
            await self._stream.say(self._side.pong(channel, ready))
