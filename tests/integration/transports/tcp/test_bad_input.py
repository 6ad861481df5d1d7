"""What each bad input gets on a TCP connection: dropped, or a negative answer and the connection goes on.

After each of them: nothing of it is stored, the listener serves on, and a good neighbour's connection never noticed.
The other way round, a sender takes nothing from a bad server and finds a good one later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Self

import msgspec
import pytest

from durable.envelope import Envelope
from durable.errors import ConnectionFailed, PeerTimeout, ProtocolViolation, TransportError
from durable.outcomes import BUSY, STORED, Outcome, Rejected
from durable.settings import load_settings
from durable.testing import eventually
from durable.transports.base import Listener, Sender
from durable.transports.frames import (
    MAX_ENVELOPES,
    Batch,
    Content,
    Credit,
    Frame,
    FrameKind,
    Hello,
    Outcomes,
    Ping,
    Pong,
    Received,
    Refused,
    Welcome,
)
from durable.transports.tcp.budget import Budget
from durable.transports.tcp.conversation import MAX_PINGS
from durable.transports.tcp.transport import TcpTransport
from durable.transports.wire import MAGIC, Decoder, encode
from tests.support.frames import batch_of, raw_frame
from tests.support.receivers import REJECTED_TYPE, MemoryReceiver, envelope, envelopes

LIMIT = 1 << 20
SECRET = b"the body of a message, which belongs in no log"
SETTINGS = load_settings(
    connect_timeout=timedelta(seconds=0.5),
    send_timeout=timedelta(seconds=2),
    idle_timeout=timedelta(seconds=1.2),
    frame_timeout=timedelta(seconds=0.3),
    drain_timeout=timedelta(seconds=1),
    max_frame_bytes=LIMIT,
    max_message_bytes=LIMIT // 2,
)
HELLO = encode(Frame(Hello([1], "mallory", 66, LIMIT)))
BATCH = encode(Frame(Batch(1, [envelope(body=SECRET)]), 1))


class RawClient:
    """A client that says what the test wants. An async context manager."""

    def __init__(self, uri: str) -> None:
        self._port = int(uri.rpartition(":")[2])
        self._decoder = Decoder(LIMIT)
        self._heard: list[Received] = []

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def greet(self) -> Welcome:
        self.say(MAGIC + HELLO)
        match await self.hear():
            case Frame(Welcome() as welcome):
                return welcome
            case other:
                pytest.fail(f"unexpected: {other}")

    def say(self, data: bytes) -> None:
        self._writer.write(data)

    async def flush(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    async def hear(self) -> Received:
        while not self._heard:
            data = await self._reader.read(1 << 16)
            assert data, "the listener closed the connection"
            self._heard += self._decoder.feed(data)
        return self._heard.pop(0)

    async def dropped(self) -> bytes:
        """What came before the listener closed the connection."""
        try:
            return await self._reader.read()
        except ConnectionResetError:
            return b""


@dataclass
class House:
    """A listener, a good neighbour who is connected to it, and what was received."""

    listener: Listener
    receiver: MemoryReceiver
    neighbour: Sender
    from_neighbour: list[Envelope] = field(default_factory=list)

    def mallory(self) -> RawClient:
        return RawClient(self.listener.address)

    async def greet_neighbour(self) -> None:
        batch = envelopes(3)
        self.from_neighbour += batch
        assert await self.neighbour.send(batch) == [STORED] * 3

    async def is_unharmed(self, *, dropped: int, connections: int = 2) -> None:
        """Nothing but the neighbour's envelopes is stored, and his connection is the same as before."""
        await until(lambda: self.listener.statistics()["dropped"] == dropped)
        await self.greet_neighbour()
        assert list(self.receiver.stored.values()) == self.from_neighbour
        assert self.listener.statistics()["connections"] == connections


async def until(condition: Callable[[], bool]) -> None:
    """For what has no event to wait for; the test's timeout ends it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    transport = TcpTransport(SETTINGS, "billing", 2)
    listener = transport.listener("tcp://127.0.0.1:0", "billing-in")
    receiver = MemoryReceiver()
    await listener.serve(receiver)
    async with transport.sender(listener.address) as neighbour:
        house = House(listener, receiver, neighbour)
        await house.greet_neighbour()
        yield house
    await listener.close()


BEFORE_HELLO = {
    "wrong magic": b"\x89turab\r\n",
    "HTTP GET": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS hello": bytes.fromhex("16030100ca010000c60303") + b"\x00" * 200,
    "ping before the handshake": MAGIC + encode(Frame(Ping(), 1)),
    "batch before the handshake": MAGIC + BATCH,
    "batch with a wrong magic": b"\x00" * 8 + HELLO + BATCH,
}
AFTER_HELLO = {
    "length 0": struct.pack("!I", 0),
    "length 8, less than any frame": struct.pack("!I", 8),
    "length 2^32-1": struct.pack("!I", 2**32 - 1),
    "length limit+1": struct.pack("!I", LIMIT + 1),
    "trailing bytes in a frame": raw_frame(FrameKind.BATCH, msgspec.msgpack.encode([0, []]) + b"\x00"),
    "trailing bytes after a frame": encode(Frame(Ping(), 1)) + b"\x00\x00\x00\x01trailing",
    "a batch that ends too soon": raw_frame(FrameKind.BATCH, BATCH[13:-1]),
    "an envelope that announces 2^32-1 fields": raw_frame(FrameKind.BATCH, b"\x92\x01\x91\xdd\xff\xff\xff\xff"),
    "nesting without end": raw_frame(FrameKind.BATCH, b"\x92\x01" + b"\x91" * 100_000),
    "no msgpack": raw_frame(FrameKind.BATCH, b"\xc1" * 50),
    "an unknown kind": raw_frame(200, b"\x90"),
    "HELLO again": HELLO,
    "what only a server says": encode(Frame(Credit(1_000_000))),
    "more pings than can be answered": b"".join(encode(Frame(Ping(), n)) for n in range(1, MAX_PINGS + 2)),
}


@pytest.mark.parametrize("said", BEFORE_HELLO.values(), ids=BEFORE_HELLO.keys())
async def test_client_without_hello_is_dropped_without_an_answer(house: House, said: bytes) -> None:
    async with house.mallory() as mallory:
        mallory.say(said)
        assert await mallory.dropped() == b""
    await house.is_unharmed(dropped=1)


@pytest.mark.parametrize("said", AFTER_HELLO.values(), ids=AFTER_HELLO.keys())
async def test_client_breaking_the_protocol_is_dropped(house: House, said: bytes) -> None:
    async with house.mallory() as mallory:
        await mallory.greet()
        mallory.say(said)
        await mallory.dropped()
    await house.is_unharmed(dropped=1)


@pytest.mark.parametrize("kept", [1, 4, 13, len(BATCH) // 2, len(BATCH) - 1])
async def test_frame_cut_short_by_the_end_of_the_connection_is_dropped(house: House, kept: int) -> None:
    async with house.mallory() as mallory:
        await mallory.greet()
        mallory.say(BATCH[:kept])
        await mallory.flush()
        mallory.close()
        await house.is_unharmed(dropped=1)


async def test_slow_frame_is_dropped_at_its_deadline(house: House) -> None:
    async with house.mallory() as mallory:
        await mallory.greet()
        began = asyncio.get_running_loop().time()
        gone = asyncio.ensure_future(mallory.dropped())
        for byte in BATCH[:-1]:
            mallory.say(bytes([byte]))
            await asyncio.wait([gone], timeout=0.05)  # a sixth of the deadline: no silence, no progress to speak of
            if gone.done():
                break
        assert asyncio.get_running_loop().time() - began < SETTINGS.idle_timeout.total_seconds()
    await house.is_unharmed(dropped=1)


async def test_slow_hello_is_dropped_at_the_deadline_of_the_handshake(house: House) -> None:
    async with house.mallory() as mallory:
        gone = asyncio.ensure_future(mallory.dropped())
        for byte in MAGIC + HELLO[:-1]:
            mallory.say(bytes([byte]))
            await asyncio.wait([gone], timeout=0.05)
            if gone.done():
                break
        assert gone.done()
    await house.is_unharmed(dropped=1)


async def test_refused_hellos_do_not_move_the_deadline_of_the_handshake(house: House) -> None:
    future = encode(Frame(Hello([99], "mallory", 66, LIMIT)))
    async with house.mallory() as mallory:
        gone = asyncio.ensure_future(mallory.dropped())
        mallory.say(MAGIC)
        for _ in range(100):
            mallory.say(future)
            await asyncio.wait([gone], timeout=0.05)
            if gone.done():
                break
        assert gone.done()
    await house.is_unharmed(dropped=1)


async def test_silent_stranger_is_dropped_at_the_deadline_of_the_handshake(house: House) -> None:
    async with house.mallory() as mallory:
        assert await mallory.dropped() == b""
    await house.is_unharmed(dropped=1)


async def test_silent_client_is_dropped_at_the_idle_deadline(house: House) -> None:
    async with house.mallory() as mallory:
        await mallory.greet()
        assert await mallory.dropped() == b""
    await house.is_unharmed(dropped=1)


async def test_blocked_listener_drops_no_client_with_a_timely_frame() -> None:
    settings = SETTINGS.model_copy(update={"idle_timeout": timedelta(seconds=0.2)})
    listener = TcpTransport(settings, "billing", 2).listener("tcp://127.0.0.1:0", "billing-in")
    await listener.serve(MemoryReceiver())
    async with RawClient(listener.address) as client:
        await client.greet()
        client.say(encode(Frame(Ping(), 1)))
        time.sleep(0.3)  # noqa: ASYNC251  as a handler does that blocks the loop
        assert await client.hear() == Frame(Pong(True), 1)
    await listener.close()


async def test_client_reading_no_answers_is_dropped_at_their_deadline(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reject_large_batches(endpoint: str, batch: list[Envelope]) -> list[Outcome]:
        if len(batch) == MAX_ENVELOPES:
            return [Rejected("x" * 1_000)] * len(batch)
        return await receive(endpoint, batch)

    receive = house.receiver.receive
    monkeypatch.setattr(house.receiver, "receive", reject_large_batches)
    batch = Batch(MAX_ENVELOPES, [envelope()] * MAX_ENVELOPES)
    async with house.mallory() as mallory:
        await mallory.greet()
        for channel in range(1, 21):  # 20 MB of answers: more than socket buffers hold
            mallory.say(encode(Frame(batch, channel)))
        with contextlib.suppress(ConnectionResetError):
            await mallory.flush()
        await house.is_unharmed(dropped=1)


async def test_client_closing_between_frames_is_not_counted_as_dropped(house: House) -> None:
    async with house.mallory() as mallory:
        await mallory.greet()
        mallory.close()
        await mallory.dropped()
    await house.is_unharmed(dropped=0)


NEGATIVE = {
    "bad CRC": (raw_frame(FrameKind.BATCH, BATCH[13:], channel=7, crc=1), "CRC"),
    "count says 10, holds 9": (batch_of(*envelopes(9), count=10), "the count says 10 envelopes, and 9 are there"),
    "count says 9, holds 10": (batch_of(*envelopes(10), count=9), "the count says 9 envelopes, and 10 are there"),
    "an empty batch": (batch_of(), "and 0 are there"),
    "1,001 envelopes": (batch_of(*[0] * (MAX_ENVELOPES + 1)), "length <= 1000"),
    "no batch": (raw_frame(FrameKind.BATCH, msgspec.msgpack.encode("hello")), "no batch"),
}


@pytest.mark.parametrize(("said", "reason"), NEGATIVE.values(), ids=NEGATIVE.keys())
async def test_a_bad_batch_is_refused_and_the_connection_goes_on(house: House, said: bytes, reason: str) -> None:
    async with house.mallory() as mallory:
        await mallory.greet()
        mallory.say(said)
        match await mallory.hear():
            case Frame(Refused(answer), 7):
                assert reason in answer
            case other:
                pytest.fail(f"unexpected: {other}")
        await house.is_unharmed(dropped=0)
        mallory.say(BATCH)
        match await mallory.hear():
            case Frame(Outcomes(outcomes), 1):
                assert outcomes == [STORED]
            case other:
                pytest.fail(f"unexpected: {other}")
    assert house.listener.statistics()["refused"] == 1


async def test_a_future_version_is_refused_and_the_client_may_say_hello_again(house: House) -> None:
    async with house.mallory() as mallory:
        mallory.say(MAGIC + encode(Frame(Hello([2, 3], "mallory", 66, LIMIT))))
        assert await mallory.hear() == Frame(Refused("no version in common", [1]))
        mallory.say(HELLO)
        assert isinstance(await mallory.hear(), Frame)
    await house.is_unharmed(dropped=0)


async def test_batch_beyond_the_credit_is_busy_and_not_received(house: House) -> None:
    house.receiver.room = len(house.from_neighbour) + 4
    async with house.mallory() as mallory:
        welcome = await mallory.greet()
        assert welcome.credit == 2  # his half of the room
        mallory.say(encode(Frame(Batch(3, envelopes(3)), 1)))
        match await mallory.hear():
            case Frame(Outcomes(outcomes), 1):
                assert outcomes == [BUSY] * 3
            case other:
                pytest.fail(f"unexpected: {other}")
    await house.is_unharmed(dropped=0)


async def test_batch_cancelled_before_its_beginning_gives_its_bytes_back(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ping fails in the turn of the event loop in which the batch gets its task."""
    budgets, failing, take = list[Budget](), asyncio.Event(), Budget.take

    async def fail(*_: object) -> None:
        await failing.wait()
        raise LookupError

    async def take_late(self: Budget, size_bytes: int) -> None:
        await take(self, size_bytes)
        budgets.append(self)
        failing.set()
        await asyncio.sleep(0)

    async with house.mallory() as mallory:
        await mallory.greet()
        with monkeypatch.context() as patched:
            patched.setattr("durable.transports.tcp.listener._Connection._pong", fail)
            patched.setattr(Budget, "take", take_late)
            mallory.say(encode(Frame(Ping(), 1)) + BATCH)
            await mallory.dropped()
    await house.is_unharmed(dropped=1)
    (budget,) = budgets
    async with asyncio.timeout(5):
        await budget.take(1 << 40)  # more than all is granted alone
    budget.give_back(1 << 40)


async def test_invalid_envelope_is_rejected_and_its_neighbours_in_the_batch_are_stored(house: House) -> None:
    before, after = envelopes(2)
    naive = msgspec.structs.replace(envelope(), sent_at=envelope().sent_at.replace(tzinfo=None))
    async with house.mallory() as mallory:
        await mallory.greet()
        mallory.say(batch_of("no envelope", before, naive, envelope(REJECTED_TYPE), after, []))
        match await mallory.hear():
            case Frame(Outcomes([Rejected(), first, Rejected(reason), Rejected(theirs), second, Rejected()]), 7):
                assert (first, second) == (STORED, STORED)
                assert "timezone" in reason
                assert theirs == "a type that the test rejects"
            case other:
                pytest.fail(f"unexpected: {other}")
    assert set(house.receiver.stored) >= {before.id, after.id}
    assert naive.id not in house.receiver.stored


async def test_drop_is_logged_with_its_reason_and_without_the_bytes_received(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with house.mallory() as mallory:
            await mallory.greet()
            mallory.say(raw_frame(FrameKind.BATCH, BATCH[13:] + SECRET))
            await mallory.dropped()
        await house.is_unharmed(dropped=1)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "dropped the connection of mallory node 66: a BATCH frame cannot be read" in record.getMessage()
    assert SECRET.decode() not in caplog.text


# The other way round ---------------------------------------------------------------------------------------------

Answer = Callable[[asyncio.StreamWriter, int], Awaitable[None]]


def say(*contents: Content) -> Answer:
    async def answer(writer: asyncio.StreamWriter, channel: int) -> None:
        for content in contents:
            writer.write(encode(Frame(content, channel)))

    return answer


def say_raw(data: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter, channel: int) -> None:
        writer.write(data)

    return answer


async def hang_up(writer: asyncio.StreamWriter, channel: int) -> None:
    writer.write(encode(Frame(Outcomes([STORED]), channel))[:-3])
    writer.close()


async def trickle(writer: asyncio.StreamWriter, channel: int) -> None:
    for byte in encode(Frame(Outcomes([Rejected("x" * 100)]), channel)):
        writer.write(bytes([byte]))
        await asyncio.sleep(0.05)
        if writer.is_closing():
            break


class FakeServer:
    """It welcomes well, and answers the first batch as the test wants, later ones as it should."""

    def __init__(self, answer: Answer, greeting: bytes | None = None) -> None:
        self._answer: Answer | None = answer
        self._greeting = greeting
        self.connections = 0

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.uri = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._tasks.__aexit__(None, None, None)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._tasks.create_task(self._converse(reader, writer))

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        welcome = MAGIC + encode(Frame(Welcome(1, "mallory", 66, LIMIT, 100, 100)))
        writer.write(self._greeting or welcome)
        self._greeting = None
        decoder = Decoder(LIMIT)
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                for item in decoder.feed(data):
                    if isinstance(item, Frame):
                        await self._hear(item, writer)
        writer.transport.abort()

    async def _hear(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        match frame:
            case Frame(Batch(count), channel):
                answer, self._answer = self._answer, None
                await (answer or say(Outcomes([STORED] * count, count)))(writer, channel)
            case Frame(Ping(), channel):
                writer.write(encode(Frame(Pong(True), channel)))
            case _:
                pass


BAD_ANSWERS: dict[str, tuple[Answer, type[TransportError]]] = {
    "too few outcomes": (say(Outcomes([])), ProtocolViolation),
    "too many outcomes": (say(Outcomes([STORED] * 2)), ProtocolViolation),
    "an outcome that does not exist": (
        say_raw(raw_frame(FrameKind.OUTCOMES, b"\x92\x91\x91\x63\x00")),
        ProtocolViolation,
    ),
    "bad CRC": (say_raw(raw_frame(FrameKind.OUTCOMES, b"\x92\x91\x91\x01\x00", crc=1)), ProtocolViolation),
    "trailing bytes": (say_raw(raw_frame(FrameKind.OUTCOMES, b"\x92\x91\x91\x01\x00\x00")), ProtocolViolation),
    "a length above the limit": (say_raw(struct.pack("!I", 2**32 - 1)), ProtocolViolation),
    "what only a client says": (say(Ping()), ProtocolViolation),
    "half an answer, then the end": (hang_up, ConnectionFailed),
    "an answer that trickles in": (trickle, PeerTimeout),
}


@pytest.mark.parametrize(("answer", "error"), BAD_ANSWERS.values(), ids=BAD_ANSWERS.keys())
async def test_a_bad_answer_costs_the_connection_and_the_next_send_opens_another(
    answer: Answer, error: type[TransportError]
) -> None:
    async with FakeServer(answer) as server:
        async with TcpTransport(SETTINGS, "orders", 1).sender(server.uri) as sender:
            with pytest.raises(error):
                await sender.send(envelopes(1))
            assert await sender.send(envelopes(1)) == [STORED]
        assert server.connections == 2


BAD_GREETINGS = {
    "HTML": (b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/html\r\n\r\n<h1>no</h1>", ProtocolViolation),
    "a version that was not offered": (
        MAGIC + encode(Frame(Welcome(9, "mallory", 66, LIMIT, 100, 100))),
        ProtocolViolation,
    ),
    "room for no envelope": (MAGIC + encode(Frame(Welcome(1, "mallory", 66, LIMIT, 0, 100))), ProtocolViolation),
    "credit before the welcome": (MAGIC + encode(Frame(Credit(5))), ProtocolViolation),
    "no": (MAGIC + encode(Frame(Refused("not you", [1]))), ConnectionFailed),
}


@pytest.mark.parametrize(("greeting", "error"), BAD_GREETINGS.values(), ids=BAD_GREETINGS.keys())
async def test_a_bad_welcome_fails_the_send_and_the_next_one_tries_again(
    greeting: bytes, error: type[TransportError]
) -> None:
    async with FakeServer(say(Outcomes([STORED])), greeting) as server:
        async with TcpTransport(SETTINGS, "orders", 1).sender(server.uri) as sender:
            with pytest.raises(error):
                await sender.send(envelopes(1))
            assert await sender.send(envelopes(1)) == [STORED]
        assert server.connections == 2


async def test_stray_answers_are_ignored_and_logged_once_with_their_count(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(writer: asyncio.StreamWriter, channel: int) -> None:
        for unknown in range(1_000, 1_050):
            writer.write(encode(Frame(Outcomes([STORED], 1_000), unknown)))
            writer.write(encode(Frame(Refused("no such batch"), unknown)))
        writer.write(encode(Frame(Outcomes([STORED], 1), channel)))

    async with FakeServer(answer) as server:
        async with TcpTransport(SETTINGS, "orders", 1).sender(server.uri) as sender:
            assert await sender.send(envelopes(1)) == [STORED]
            assert await sender.send(envelopes(1)) == [STORED]
        assert server.connections == 1
    assert caplog.text.count("is not under way") == 1
    assert caplog.text.count("100 batches were not under way") == 1


async def test_error_of_a_closed_connection_names_the_log_of_the_peer_before_welcome_alone() -> None:
    async def close(writer: asyncio.StreamWriter, channel: int) -> None:
        writer.write_eof()

    async with FakeServer(close) as server, TcpTransport(SETTINGS, "orders", 1).sender(server.uri) as sender:
        with pytest.raises(ConnectionFailed, match=r"the peer closed the connection$"):
            await sender.send(envelopes(1))
    silent = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    uri = f"tcp://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with silent, TcpTransport(SETTINGS, "orders", 1).sender(uri) as sender:
        with pytest.raises(ConnectionFailed, match=r"connection before WELCOME; its log says why$"):
            await sender.send(envelopes(1))


async def test_a_duplicate_answer_is_ignored() -> None:
    twice = say(Outcomes([STORED], 1), Outcomes([BUSY], 1_000))
    async with FakeServer(twice) as server:
        async with TcpTransport(SETTINGS, "orders", 1).sender(server.uri) as sender:
            assert await sender.send(envelopes(1)) == [STORED]
            assert await sender.send(envelopes(1)) == [STORED]
        assert server.connections == 1


async def test_a_name_in_hello_writes_no_line_of_its_own(house: House, caplog: pytest.LogCaptureFixture) -> None:
    forged = "x\n2026-01-01 CRITICAL durable: all is lost\r\x1b[2J\u2028\u202e\x00"
    async with RawClient(house.listener.address) as mallory:
        mallory.say(MAGIC + encode(Frame(Hello([1], forged, 66, LIMIT))))
        await mallory.hear()
        mallory.say(encode(Frame(Welcome(1, "x", 1, 1, 1, 1))))
        await mallory.dropped()
    await eventually(lambda: "dropped the connection of x 2026" in caplog.text)
    assert all(record.getMessage().isprintable() for record in caplog.records)
