"""The receiving end of TCP: a bound address, its connections, and the batches under way on them.

Each connection is a task that reads; each batch is a task that has it stored and answers, so that answers come in the
order in which batches are stored. Everything that a peer can make us hold is bounded: connections by the doorkeeper,
batches by the credit granted on each connection, their bytes by one budget for the whole listener, from which a large
frame takes its size before the rest of it is read. When the budget is spent, connections are not read, and TCP makes
the peers wait.

Room is shared by the peers that have said HELLO: each is granted credit for its part of it. Answers carry new
credit; what becomes free without an answer is granted by a task that looks every CREDIT_SECONDS.

A connection that breaks the protocol or a deadline is dropped, counted and logged, without what it sent. Batches
under way on it are stored all the same: their sender, not knowing, sends them again, and they are duplicates then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Final, NoReturn

from durable.envelope import Envelope
from durable.errors import ConnectionFailed, PeerTimeout, TransportError
from durable.failpoints import failpoint
from durable.outcomes import Outcome
from durable.settings import Settings
from durable.tasks.cancelling import raise_if_cancelled
from durable.tasks.waiting import is_set_within
from durable.telemetry import log
from durable.transports import peers
from durable.transports.base import Receiver, Services
from durable.transports.deadlines import counted_anew
from durable.transports.doorkeeper import Doorkeeper
from durable.transports.frames import Announce, Frame, Refused
from durable.transports.gate import Gate
from durable.transports.tcp.address import SCHEMES, Address
from durable.transports.tcp.answering import Calls
from durable.transports.tcp.budget import Budget
from durable.transports.tcp.connected_peer import Connected
from durable.transports.tcp.conversation import Reply
from durable.transports.tcp.entrance import Admission, Entrance
from durable.transports.tcp.pace import Pace
from durable.transports.tcp.proofs import NO_PROOF
from durable.transports.tcp.server_side import (
    Abandon,
    Begin,
    Deliver,
    Leave,
    Probe,
    Register,
    ServerSide,
    ServerState,
    Tell,
    TurnAway,
)
from durable.transports.tcp.stream import LINGER_SECONDS, SMALL_FRAME_BYTES, FrameStream, translated
from durable.transports.tcp.unix import READ_BYTES, Bound
from durable.transports.visits import Visit
from durable.transports.wire import encode

CREDIT_SECONDS: Final = 0.05
_READ_AHEAD_BYTES: Final = READ_BYTES // 4  # of each connection, besides the frames that have room


_NO_SERVICES: Final = Services()


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
        *,
        services: Services = _NO_SERVICES,
    ) -> None:
        self._services = services
        self._uri = str(address)
        self._address = address
        self._entrance = entrance
        self._endpoint = endpoint
        self._settings = settings
        self._service = service
        self._node = node
        self._counts: Counter[str] = Counter(connections=0, dropped=0, batches=0, envelopes=0, calls=0, refused=0)
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        self._bound: Bound | None = None
        self._keeper: Doorkeeper | None = None
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def address(self) -> str:
        """The URI that peers send to; with the port that was bound, once serve() has returned."""
        return self._uri

    def statistics(self) -> Mapping[str, int]:
        """Return the counters since serve(): connections, dropped, batches, envelopes, calls, refused."""
        return dict(self._counts)

    async def serve(self, receiver: Receiver) -> None:
        """Bind and return; raises InvalidSetting when the address cannot be bound."""
        users = self._entrance.users
        bound = self._address.bind(0o600 if users is None else users.mode)
        self._bound, self._uri = bound, bound.uri
        self._tasks = tasks = await asyncio.TaskGroup().__aenter__()
        gate = Gate(receiver, self._endpoint, self._service, self._settings, SCHEMES)
        intake = _Intake(gate, self._settings, self._counts, self._services)
        keeper = Doorkeeper(self._uri, self._settings, self._counts, known=self._settings.tcp_connections)

        def greet(visit: Visit) -> asyncio.StreamReaderProtocol:
            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                stream = FrameStream((reader, writer), self._settings, max_frame_bytes=SMALL_FRAME_BYTES)
                self._accept(tasks, intake, keeper, visit, stream)

            return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=_READ_AHEAD_BYTES), accept)

        self._keeper = keeper
        keeper.open(bound.socket, tasks, greet)
        self._granting = tasks.create_task(intake.grant_credit(), name=f"credit of {self._uri}")

    async def close(self) -> None:
        """Accept nothing new, say GOODBYE, answer the batches under way within `drain_timeout`, and close."""
        if self._bound is None or self._keeper is None or self._tasks is None:
            return
        tasks, self._tasks = self._tasks, None
        self._bound.release()
        self._keeper.close()
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

    def _accept(
        self, tasks: asyncio.TaskGroup, intake: _Intake, keeper: Doorkeeper, visit: Visit, stream: FrameStream
    ) -> None:
        if self._tasks is None or visit.is_over:  # it was accepted just before the listener closed, or gave way
            stream.abort()
            return
        visit.cut = stream.abort
        stream.pause()
        context = self._entrance.for_listener()
        proof = self._entrance.proof_of_listener(stream, context)
        most_bytes, directory = self._settings.max_frame_bytes, self._services.directory
        told = (None, "") if directory is None else (directory.bounds, directory.name)
        side = ServerSide(self._service, self._node(), most_bytes, proof, *told)

        def prove() -> bool:
            visit.is_idle = False  # a peer that has nothing to send now keeps its connection
            return keeper.prove(visit)

        admission = Admission(self._entrance, context, prove)
        connection = _Connection(intake, stream, side, self._settings, admission)
        task = tasks.create_task(self._converse(connection, keeper, visit), name=f"connection at {self._uri}")
        self._connections[connection] = task

    async def _converse(self, connection: _Connection, keeper: Doorkeeper, visit: Visit) -> None:
        try:
            await connection.run()
        except TransportError as error:
            visit.name = connection.peer
            keeper.drop(visit, error)
        except BaseException as error:
            raise_if_cancelled(error)
            # A fault of ours, perhaps in the receiver: it costs this connection, not the others.
            self._counts["dropped"] += 1
            log.exception("listener %s dropped the connection of %s: internal error", self._uri, connection.peer)
        finally:
            keeper.leave(visit)
            del self._connections[connection]


class _Intake:
    """Intake that the connections of a listener share: the receiver, its room, the bytes under way."""

    def __init__(self, gate: Gate, settings: Settings, counts: Counter[str], services: Services) -> None:
        self.gate = gate
        self.services = services
        self.receiver = gate.receiver
        self.counts = counts
        self.open: set[_Connection] = set()
        """Connections whose peers have proved who they are: strangers have no share of the room."""
        self._most_envelopes = settings.buffer_size
        self.budget = Budget(settings.buffer_bytes)

    def room(self, connection: _Connection) -> int:
        """Return the number of envelopes that this connection may have under way."""
        room = min(self.receiver.credit(), self._most_envelopes)
        sharing = len(self.open) + (connection not in self.open)
        return max(1, room // sharing) if room > 0 else 0

    async def grant_credit(self) -> NoReturn:
        while True:
            await asyncio.sleep(CREDIT_SECONDS)
            for connection in self.open:
                connection.grant_credit()


class _Connection:
    """Connection of a listener, from accept to close."""

    def __init__(
        self,
        intake: _Intake,
        stream: FrameStream,
        side: ServerSide,
        settings: Settings,
        admission: Admission,
    ) -> None:
        self._intake = intake
        self._admission = admission
        self._max_frame_bytes = settings.max_frame_bytes
        self._stream = stream
        self._side = side
        self._handshake_seconds = settings.connect_timeout.total_seconds()
        self._reserved_bytes = 0  # of the frame that is being read
        stream.reserve = self._reserve
        self._answered = asyncio.Event()
        self._ended = asyncio.Event()
        self._calls = Calls(intake.services.provider, stream, side, settings, intake.counts, self._answered)
        self._connected = Connected(intake.services.directory, stream, side)
        self._pace = Pace(asyncio.get_running_loop().time)
        self._has_joined = False

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
                finally:
                    self._connected.close()
                self._ended.set()
        finally:
            self._give_back()
            self._calls.close()
            self._intake.open.discard(self)
            self._ended.set()
            await self._stream.close()
        if reason := self._connected.end_of_lease:
            raise PeerTimeout(reason)
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
        while self._side.under_way or self._side.calls_under_way:
            self._answered.clear()
            await self._answered.wait()
        await is_set_within(self._ended, LINGER_SECONDS)
        self._stream.abort()

    def grant_credit(self) -> None:
        """Grant free credit that no answer could carry."""
        if self._side.state is not ServerState.OPEN or self._ended.is_set():
            return
        frame = self._side.grant(self._intake.room(self))
        if frame is not None:
            self._stream.post(encode(frame))

    async def _converse(self, tasks: asyncio.TaskGroup) -> None:
        with translated("waiting for HELLO"):
            async with asyncio.timeout(self._handshake_seconds):
                self._side.proven = await self._admission.admit(self._stream)
                while self._side.is_greeting:
                    if not await self._hear_more(tasks):
                        if self._side.state is ServerState.AWAITING_PROOF:
                            raise ConnectionFailed(NO_PROOF)
                        return
        while await self._hear_more(tasks):
            pass

    async def _hear_more(self, tasks: asyncio.TaskGroup) -> bool:
        """Act on the next frame; False when the peer is done."""
        received = await self._stream.read()
        self._pace.begin()
        for item in received:
            while self._pace.is_over():
                await asyncio.sleep(0)
                self._pace.begin()
            action = self._side.hear(item, self._intake.room(self))
            if self._side.state is ServerState.OPEN and not self._has_joined:
                await self._join()
            match action:
                case Reply(frame):
                    self._intake.counts["refused"] += isinstance(frame.content, Refused)
                    await self._stream.say(frame)
                case TurnAway(frame, reason):
                    self._intake.counts["refused"] += 1
                    await self._stream.say(frame)
                    await self._stream.close()
                    raise ConnectionFailed(reason)
                case Deliver() as batch:
                    if not self._reserved_bytes:
                        await self._intake.budget.take(batch.size_bytes)
                    storing = tasks.create_task(self._store(batch), name=f"batch {batch.channel} of {self.peer}")
                    self._reserved_bytes = 0  # the end of the task gives it back: it may be cancelled before it begins
                    storing.add_done_callback(partial(self._stored, batch.size_bytes))
                case Probe(channel):
                    tasks.create_task(self._pong(channel), name=f"ping {channel} of {self.peer}")
                case Begin() as begun:
                    if not self._calls.begin(begun):
                        self._pace.miss()
                case Abandon(channel):
                    self._calls.cancel(channel)
                case Tell():
                    self._pace.ask()
                    self._intake.open.discard(self)  # it sends no batches, so it has no share of their room
                    self._calls.tell_offers()
                case Register() as said:
                    self._pace.ask(announces=isinstance(said.content, Announce))
                    self._intake.open.discard(self)
                    if (refusal := self._connected.hear(said, tasks)) is not None:
                        self._intake.counts["refused"] += 1
                        await self._stream.say(refusal)
                case Leave():
                    return False
            self._give_back()
        if self._stream.is_backed_up:
            await self._stream.flush()
        return bool(received)

    async def _reserve(self, size_bytes: int) -> None:
        await self._intake.budget.take(size_bytes)
        self._reserved_bytes = size_bytes

    def _give_back(self) -> None:
        """Give back the room of a frame that brought no batch."""
        if self._reserved_bytes:
            self._intake.budget.give_back(self._reserved_bytes)
            self._reserved_bytes = 0

    async def _join(self) -> None:
        """Share the room with the others, now that the peer has proved who it is."""
        gate, name = self._intake.gate, self._side.proven
        if not peers.may_use(gate.settings, name, gate.endpoint):
            reason = f"{name} may not send to {gate.endpoint}: see endpoints in peers"
            await self._stream.say(Frame(Refused(reason)))
            await self._stream.close()
            raise ConnectionFailed(reason)
        if not self._admission.prove():
            raise ConnectionFailed("too many connections: all tcp_connections are taken; raise it, or close some")
        self._stream.allow(self._max_frame_bytes)
        self._has_joined = True
        self._intake.open.add(self)

    async def _store(self, batch: Deliver) -> None:
        stored = await self._receive(counted_anew(batch.envelopes, batch.clock, datetime.now(UTC)))
        failpoint("C10")
        self._intake.counts["batches"] += 1
        self._intake.counts["envelopes"] += len(batch.envelopes)
        answer = self._side.answer(batch.channel, batch.outcomes(stored), self._intake.room(self))
        with contextlib.suppress(TransportError):  # the peer has gone; it will send the batch again
            await self._stream.say(answer)

    def _stored(self, size_bytes: int, _task: asyncio.Task[None]) -> None:
        self._intake.budget.give_back(size_bytes)
        self._answered.set()

    async def _receive(self, envelopes: list[Envelope]) -> list[Outcome]:
        return await self._intake.gate.receive(envelopes, self._side.proven) if envelopes else []

    async def _pong(self, channel: int) -> None:
        ready = await self._intake.receiver.ready()
        with contextlib.suppress(TransportError):
            await self._stream.say(self._side.pong(channel, ready))
