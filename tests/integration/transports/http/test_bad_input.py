"""What each bad input gets at the endpoint for batches: a problem with its status, or the end of the connection.

After each of them: nothing of it is stored, the listener serves on, and a good neighbour never noticed. The other way
round, a sender takes nothing from a bad server and finds a good one later.
"""

from __future__ import annotations

import asyncio
import errno
import gzip
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
import pytest
from starlette.types import Message

from durable.envelope import Envelope
from durable.errors import ConnectionFailed, PeerTimeout, ProtocolViolation, TransportError
from durable.outcomes import BUSY, STORED, Failed, Outcome, Rejected
from durable.settings import Settings, load_settings
from durable.testing import eventually
from durable.transports.base import Listener, Sender
from durable.transports.frames import MAX_ENVELOPES
from durable.transports.http.auth import sign, unsigned
from durable.transports.http.transport import HttpTransport
from durable.transports.http.wire import BATCH, OUTCOMES, decode_outcomes, encode_batch, encode_outcomes
from tests.support.raw_http import FakeHttpServer, Handle, RawHttpClient, RawResponse, request, response, saying
from tests.support.receivers import REJECTED_TYPE, MemoryReceiver, envelope, envelopes

LIMIT = 1 << 17
SECRET = "correct horse battery"
LETTER = b"the body of a message, which belongs in no log"
SETTINGS = load_settings(
    connect_timeout=timedelta(seconds=2),
    send_timeout=timedelta(seconds=5),
    frame_timeout=timedelta(seconds=5),
    drain_timeout=timedelta(seconds=2),
    max_frame_bytes=LIMIT,
    max_message_bytes=LIMIT // 2,
)
HASTY = SETTINGS.model_copy(update={"frame_timeout": timedelta(seconds=0.3)})


def batch(*items: object, version: int = 1, count: int | None = None) -> bytes:
    """A batch that holds these, envelopes or not."""
    held = [version, len(items) if count is None else count, list(items)]
    return msgspec.msgpack.Encoder(uuid_format="bytes").encode(held)


def transport(settings: Settings, secret: str | None = SECRET) -> HttpTransport:
    known = load_settings(shared_secret=secret).shared_secret
    return HttpTransport(settings.model_copy(update={"shared_secret": known}), service="billing", messages=dict)


@dataclass
class House:
    """A listener that knows a secret, a good neighbour who sends to it, and what was received."""

    listener: Listener
    receiver: MemoryReceiver
    neighbour: Sender
    from_neighbour: list[Envelope] = field(default_factory=list)

    def mallory(self) -> RawHttpClient:
        return RawHttpClient(self.listener.address)

    async def greet_neighbour(self) -> None:
        sent = envelopes(3)
        assert await self.neighbour.send(sent) == [STORED] * 3
        self.from_neighbour += sent

    async def is_unharmed(self, *, refused: int = 0, dropped: int = 0) -> None:
        """Nothing but the neighbour's envelopes is stored, and his connection is the same as before."""
        await eventually(lambda: self._counts("refused", "dropped") == (refused, dropped), what="the counts")
        await self.greet_neighbour()
        assert list(self.receiver.stored.values()) == self.from_neighbour

    async def has_dropped(self, count: int) -> None:
        await eventually(lambda: self._counts("dropped") == (count,), what="the drops")

    def _counts(self, *names: str) -> tuple[int, ...]:
        return tuple(self.listener.statistics()[name] for name in names)


async def open_house(settings: Settings) -> AsyncIterator[House]:
    there = transport(settings)
    listener = there.listener("http://127.0.0.1:0/in", "billing-in")
    receiver = MemoryReceiver()
    await listener.serve(receiver)
    async with there.sender(listener.address) as neighbour:
        house = House(listener, receiver, neighbour)
        await house.greet_neighbour()
        yield house
    await listener.close()


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async for house in open_house(SETTINGS):
        yield house


@pytest.fixture
async def hasty_house() -> AsyncIterator[House]:
    async for house in open_house(HASTY):
        yield house


def signed(body: bytes, target: str = "/in/batches", secret: str = SECRET, age: int = 0) -> str:
    timestamp = int(time.time()) - age
    said = unsigned(body, to="billing", at="https://billing", timestamp=timestamp, nonce=secrets.token_hex(8))
    return str(sign(secret, said, "POST", target.encode(), len(body)))


def post(body: bytes, target: str = "/in/batches", **headers: str) -> bytes:
    """A request that is good, but for what is given."""
    good = {"content_type": BATCH, "authorization": signed(body, target)}
    return request(target, body, **{**good, **headers})


TOKEN = f"Bearer {SECRET}"


async def ask(house: House, data: bytes) -> RawResponse:
    async with house.mallory() as mallory:
        return await mallory.ask(data)


# Who comes in -----------------------------------------------------------------------------------------------------

GOOD = encode_batch(envelopes(2))
# Functions, because a signature is good for five minutes only.
STRANGERS: Mapping[str, Callable[[], str]] = {
    "no credentials": lambda: "",
    "credentials of another kind": lambda: "Basic dXNlcjpwYXNz",
    "another token": lambda: "Bearer wrong horse battery",
    "no token": lambda: "Bearer ",
    "the beginning of the secret": lambda: f"Bearer {SECRET[:-1]}",
    "a signature with another secret": lambda: signed(GOOD, secret="wrong horse battery"),
    "a signature of another body": lambda: signed(GOOD + b"x"),
    "a signature of another length": lambda: signed(GOOD[:-1]),
    "a signature for another path": lambda: signed(GOOD, "/batches"),
    "a signature that is too old": lambda: signed(GOOD, age=310),
    "a signature from the future": lambda: signed(GOOD, age=-310),
    "a signature that is cut short": lambda: signed(GOOD)[:-1],
}


@pytest.mark.parametrize("credentials", STRANGERS.values(), ids=STRANGERS.keys())
async def test_a_stranger_gets_401(house: House, credentials: Callable[[], str]) -> None:
    refusal = await ask(house, post(GOOD, authorization=credentials()))
    assert refusal.status == 401
    assert refusal.problem["title"] == "Unauthorized"
    assert refusal.headers["www-authenticate"].startswith("Durable-HMAC-SHA256")
    assert SECRET not in refusal.body.decode()
    await house.is_unharmed(refused=1)


async def test_a_stranger_cannot_ping(house: House) -> None:
    refusal = await ask(house, request("/in/ping"))
    assert refusal.problem["status"] == 401
    await house.is_unharmed(refused=1)


@pytest.mark.parametrize(
    "credentials",
    ["", "Bearer wrong horse battery", signed(b"", age=310)],
    ids=["none", "another token", "a signature that is too old"],
)
async def test_a_stranger_is_refused_before_the_body_is_read(house: House, credentials: str) -> None:
    refusal = await ask(house, request("/in/batches", length=1_000, content_type=BATCH, authorization=credentials))
    assert refusal.status == 401
    await house.is_unharmed(refused=1)


async def test_bearer_token_equal_to_the_secret_is_accepted(house: House) -> None:
    answer = await ask(house, post(GOOD, authorization=f"Bearer {SECRET}"))
    assert decode_outcomes(answer.body, 2) == [STORED] * 2


# What comes in ----------------------------------------------------------------------------------------------------

REQUESTS: Mapping[str, tuple[Callable[[], bytes], int, str]] = {
    "no content type": (lambda: post(GOOD, content_type=""), 415, f"Content-Type must be {BATCH}"),
    "JSON": (lambda: post(GOOD, content_type="application/json"), 415, f"Content-Type must be {BATCH}"),
    "another charset": (lambda: post(GOOD, content_type=f"{BATCH}; charset=latin-1"), 415, "Content-Type must be"),
    "gzip": (lambda: post(gzip.compress(GOOD), content_encoding="gzip"), 415, "without Content-Encoding"),
    "two encodings": (lambda: post(GOOD, content_encoding="identity, br"), 415, "without Content-Encoding"),
    "a body that is announced too large": (
        lambda: post(b"", length=str(LIMIT + 1), authorization=TOKEN),
        413,
        f"at most {LIMIT} bytes",
    ),
    "an empty body": (lambda: post(b""), 400, "no batch"),
    "an empty batch": (lambda: post(batch()), 400, "no batch"),
    "count says 10, holds 9": (
        lambda: post(batch(*envelopes(9), count=10)),
        400,
        "the count says 10 envelopes, and 9 are there",
    ),
    "count says 9, holds 10": (
        lambda: post(batch(*envelopes(10), count=9)),
        400,
        "the count says 9 envelopes, and 10 are there",
    ),
    "1,001 envelopes": (lambda: post(batch(*[0] * (MAX_ENVELOPES + 1))), 400, "length <= 1000"),
    "a version of the future": (
        lambda: post(batch("anything", version=2)),
        400,
        "version 2; this service speaks version 1",
    ),
    "no msgpack": (lambda: post(b"\xc1" * 50), 400, "no batch"),
    "JSON in msgpack's clothes": (lambda: post(b'{"envelopes": []}'), 400, "no batch"),
    "a batch that ends too soon": (lambda: post(GOOD[:-1]), 400, "no batch"),
    "trailing bytes": (lambda: post(GOOD + b"\x00"), 400, "no batch"),
    "nesting without end": (lambda: post(b"\x93\x01\x01" + b"\x91" * 50_000), 400, "no batch"),
    "2^32-1 envelopes": (lambda: post(b"\x93\x01\x01\xdd\xff\xff\xff\xff"), 400, "no batch"),
}


@pytest.mark.parametrize(("data", "status", "detail"), REQUESTS.values(), ids=REQUESTS.keys())
async def test_bad_request_is_refused_with_its_fault(
    house: House, data: Callable[[], bytes], status: int, detail: str
) -> None:
    refusal = await ask(house, data())
    assert refusal.problem["status"] == status
    assert detail in refusal.problem["detail"]
    await house.is_unharmed(refused=1)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "HEAD"])
@pytest.mark.parametrize("path", ["/in/batches", "/in/ping"])
async def test_other_method_than_post_gets_405(house: House, path: str, method: str) -> None:
    async with house.mallory() as mallory:
        mallory.say(request(path, method=method))
        if method == "HEAD":
            mallory.end()
            assert (await mallory.cut()).startswith(b"HTTP/1.1 405 ")
        else:
            refusal = await mallory.hear()
            assert refusal.problem["status"] == 405
            assert refusal.headers["allow"] == "POST"
    await house.is_unharmed(refused=1)


@pytest.mark.parametrize(
    "path", ["/", "/in", "/in/", "/in/batches/", "/batches", "/in/nowhere", "/in/%00", "/../in/batches"]
)
async def test_unknown_path_gets_404(house: House, path: str) -> None:
    refusal = await ask(house, post(GOOD, path))
    assert refusal.problem["status"] == 404
    await house.is_unharmed(refused=1)


async def test_endless_chunks_get_413_and_a_cut_connection(house: House) -> None:
    async with house.mallory() as mallory:
        mallory.say(post(b"", length="", transfer_encoding="chunked", authorization=TOKEN))
        chunk = b"2000\r\n" + b"x" * 0x2000 + b"\r\n"
        for _ in range(LIMIT // 0x2000 + 1):
            mallory.say(chunk)
        assert (await mallory.hear()).problem["status"] == 413
        gone = asyncio.ensure_future(mallory.cut())
        while not gone.done():
            mallory.say(chunk)
            await asyncio.wait([gone], timeout=0.02)
    await house.is_unharmed(refused=1)


BODIES_OF_STRANGERS = {
    "a length": request("/in/batches", length=1 << 40, content_type=BATCH),
    "chunks": request("/in/batches", length="", transfer_encoding="chunked", content_type=BATCH),
    "another endpoint": request("/in/nowhere", length=1 << 40),
    "the health": request("/in/health/live", method="GET", length=1 << 40),
    "another method": request("/in/batches", method="PUT", length=1 << 40),
    "a wrong secret": request("/in/batches", length=1 << 40, content_type=BATCH, authorization="Bearer wrong"),
}


@pytest.mark.parametrize("begun", BODIES_OF_STRANGERS.values(), ids=BODIES_OF_STRANGERS.keys())
async def test_body_of_a_refused_request_is_not_swallowed(house: House, begun: bytes) -> None:
    chunk = b"2000\r\n" + b"x" * 0x2000 + b"\r\n"
    async with house.mallory() as mallory:
        mallory.say(begun)
        answered = asyncio.ensure_future(mallory.hear())
        taken = 0
        while await mallory.still_listens():
            mallory.say(chunk)
            taken += len(chunk)
            assert taken < 16 << 20  # socket buffers take some of it
        assert (await answered).headers["connection"] == "close"
    await house.greet_neighbour()


MALFORMED = {
    "a length that is no number": request("/in/batches", GOOD, length="many"),
    "a negative length": request("/in/batches", GOOD, length="-1"),
    "two lengths": request("/in/batches", GOOD, length=f"{len(GOOD)}\r\nContent-Length: {len(GOOD) + 1}"),
    "an encoding of transfer that is unknown": request("/in/batches", GOOD, transfer_encoding="gzip"),
    "a header that is folded": b"POST /in/batches HTTP/1.1\r\nhost: test\r\n\r smuggled: 1\r\n\r\n",
    "no host": b"POST /in/batches HTTP/1.1\r\n\r\n",
    "no HTTP": b"\x89durab\r\n\r\n\r\n",
    "a TLS hello": bytes.fromhex("16030100ca010000c60303") + b"\x00" * 200 + b"\r\n\r\n",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_request_gets_400_and_a_closed_connection(house: House, data: bytes) -> None:
    async with house.mallory() as mallory:
        mallory.say(data)
        assert (await mallory.cut()).startswith(b"HTTP/1.1 400 ")
    await house.is_unharmed(dropped=1)


LONG_HEADS = {
    "in one piece": lambda: post(GOOD, x_long="x" * 17_000),
    "in more than h11 reads at once": lambda: post(GOOD, x_long="x" * 70_000),
    "without end": lambda: b"POST /in/batches HTTP/1.1\r\nhost: test\r\n" + b"x: y\r\n" * 5_000,
}


@pytest.mark.parametrize("data", LONG_HEADS.values(), ids=LONG_HEADS.keys())
async def test_long_head_is_refused(house: House, data: Callable[[], bytes]) -> None:
    async with house.mallory() as mallory:
        mallory.say(data())
        refusal = await mallory.hear()
        assert "a head has at most 16384 bytes" in refusal.problem["detail"]
        assert refusal.status == 431
    await house.is_unharmed(dropped=1)


def chunked(body: bytes, ending: bytes = b"0\r\n\r\n") -> bytes:
    return b"%x\r\n%b\r\n%b" % (len(body), body, ending)


def smuggled(first: bytes) -> bytes:
    """A request with another one in it, or behind it, that is as good as any: a proxy has seen one of them only."""
    return first + post(encode_batch(envelopes(1)))


def head(text: bytes, **headers: str) -> bytes:
    """A good request, its head rewritten: `text` is added behind the first line."""
    line, rest = post(GOOD, **headers).split(b"\r\n", 1)
    return line + b"\r\n" + text + rest


AMBIGUOUS: Mapping[str, Callable[[], bytes]] = {
    "chunks beside a length": lambda: post(GOOD, transfer_encoding="chunked"),
    "chunks, with a length, of another request": lambda: request(
        "/in/health/live", b"0\r\n\r\n" + post(GOOD), transfer_encoding="chunked"
    ),
    "chunks in HTTP/1.0": lambda: request("/in/batches", chunked(GOOD), length="", transfer_encoding="chunked").replace(
        b"HTTP/1.1", b"HTTP/1.0", 1
    ),
    "a bare line feed behind a header": lambda: head(b"x: y\n"),
    "a bare line feed behind the first line": lambda: post(GOOD).replace(b"\r\n", b"\n", 1),
    "bare line feeds behind the head": lambda: request("/in/health/live", method="GET")[:-4] + b"\n\n",
    "a bare line feed in the empty line": lambda: request("/in/health/live", method="GET")[:-2] + b"\n",
    "a bare CR": lambda: head(b"x: y\rz: 1\r\n"),
    "a folded header": lambda: head(b"x: y\r\n z: 1\r\n"),
    "a header folded by a tab": lambda: head(b"x: y\r\n\tContent-Length: 0\r\n"),
    "a blank before the colon": lambda: head(b"Content-Length : 0\r\n"),
    "a bare line feed behind the chunks": lambda: request(
        "/in/batches", chunked(GOOD, b"0\r\n\n"), length="", transfer_encoding="chunked"
    ),
    "a bare line feed in a chunk": lambda: request(
        "/in/batches", chunked(GOOD).replace(b"\r\n", b"\n", 1), length="", transfer_encoding="chunked"
    ),
    "trailers": lambda: request(
        "/in/batches", chunked(GOOD, b"0\r\nContent-Length: 5\r\n\r\n"), length="", transfer_encoding="chunked"
    ),
    "a folded trailer": lambda: request(
        "/in/batches", chunked(GOOD, b"0\r\nx: 1\r\n y\r\n\r\n"), length="", transfer_encoding="chunked"
    ),
}


@pytest.mark.parametrize("byte_by_byte", [False, True], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("data", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
async def test_ambiguous_request_smuggles_no_other(house: House, data: Callable[[], bytes], byte_by_byte: bool) -> None:
    async with house.mallory() as mallory:
        said = smuggled(data())
        for part in [said[at : at + 1] for at in range(len(said))] if byte_by_byte else [said]:
            mallory.say(part)
            if byte_by_byte and not await mallory.still_listens():
                break
        answers = await mallory.cut()
    assert answers.count(b"HTTP/1.1 ") == 1
    assert answers.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 401 "))
    assert b"connection: close" in answers.lower()
    await house.greet_neighbour()
    assert list(house.receiver.stored.values()) == house.from_neighbour


async def test_body_in_chunks_is_taken(house: House) -> None:
    async with house.mallory() as mallory:
        for _ in range(2):  # on one connection
            said = post(GOOD, length="", transfer_encoding="chunked", authorization=TOKEN).removesuffix(GOOD) + chunked(
                GOOD
            )
            mallory.say(said[:-3])
            await asyncio.sleep(0.01)
            mallory.say(said[-3:])
            assert (await mallory.hear()).status == 200


async def test_malformed_chunk_behind_a_refusal_logs_no_traceback(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    async with house.mallory() as mallory:
        mallory.say(request("/in/batches", b"5\r\nhello\r\nZZZZ\r\n", length="", transfer_encoding="chunked"))
        assert (await mallory.cut()).startswith(b"HTTP/1.1 40")
    await house.greet_neighbour()
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("taken", [300, 10_000])
async def test_body_in_very_many_small_chunks_is_refused(house: House, taken: int) -> None:
    """Each byte would cost the listener a hundred times its price, before anybody is known."""
    async with house.mallory() as mallory:
        mallory.say(post(b"", length="", transfer_encoding="chunked", authorization=signed(b"x" * 50_000)))
        mallory.say(b"1\r\nx\r\n" * taken)
        answer = await mallory.hear()
        assert (answer.status, answer.problem["detail"]) == (400, "chunks have 64 bytes or more on average here")
    await house.has_dropped(1)
    await house.greet_neighbour()
    assert list(house.receiver.stored.values()) == house.from_neighbour


async def test_stranger_leaving_at_the_answer_logs_no_traceback(
    house: House, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system knows that he has reset the connection before the event loop does."""
    ended: list[int] = []

    def has_gone(_: object) -> None:
        ended.append(1)
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr("asyncio.selector_events._SelectorSocketTransport.write_eof", has_gone)
    async with house.mallory() as mallory:
        mallory.say(request("/in/batches", b"x" * 50_000, length=100_000, content_type=BATCH))
        assert (await mallory.hear()).status == 401
        mallory.reset_when_closed()
    await house.greet_neighbour()
    assert ended
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("other", ["authorization", "content-type"])
async def test_two_lengths_get_400_on_any_server(other: str) -> None:
    """uvicorn, as it serves here, lets none through; an application may run on another server."""
    answers: list[Message] = []

    async def bring() -> Message:
        pytest.fail("the body was read")

    async def hear(answer: Message) -> None:
        answers.append(answer)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/batches",
        "query_string": b"",
        "headers": [(b"content-length", b"5"), (b"transfer-encoding", b"chunked"), (other.encode(), b"nonsense")],
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 5),
    }
    await transport(SETTINGS).app("in", MemoryReceiver)(scope, bring, hear)
    assert answers[0]["status"] == 400
    assert (b"connection", b"close") in answers[0]["headers"]


async def test_body_shorter_than_its_length_gets_400(house: House) -> None:
    async with house.mallory() as mallory:
        mallory.say(post(GOOD, length=str(len(GOOD) + 1), authorization=TOKEN))
        mallory.end()
        assert (await mallory.cut()).startswith(b"HTTP/1.1 400 ")
    await house.is_unharmed(refused=1, dropped=1)


async def test_body_longer_than_its_length_gets_400(house: House) -> None:
    async with house.mallory() as mallory:
        mallory.say(post(GOOD, length=str(len(GOOD) - 1), authorization=signed(GOOD[:-1])))
        refusal = await mallory.hear()
        assert refusal.problem["status"] == 400
    await house.is_unharmed(refused=1)


@pytest.mark.parametrize("kept", [1, len(GOOD) // 2, len(GOOD) - 1], ids=["begun", "half", "all but a byte"])
async def test_client_leaving_within_a_body_has_sent_nothing(house: House, kept: int) -> None:
    async with house.mallory() as mallory:
        mallory.say(post(GOOD)[: kept - len(GOOD)])
    await house.is_unharmed(refused=1, dropped=1)


async def test_connection_reset_within_a_body_has_sent_nothing(house: House) -> None:
    async with house.mallory() as mallory:
        mallory.say(post(GOOD)[:-1])
        mallory.reset_when_closed()
    await house.is_unharmed(refused=1)


@pytest.mark.parametrize("before", [0, 1], ids=["at once", "after a good request"])
async def test_slow_head_is_cut_at_its_deadline(hasty_house: House, before: int) -> None:
    async with hasty_house.mallory() as mallory:
        for _ in range(before):
            assert (await mallory.ask(request("/in/health/live", method="GET"))).status == 204
        gone = asyncio.ensure_future(mallory.cut())
        for byte in post(GOOD):
            mallory.say(bytes([byte]))
            await asyncio.wait([gone], timeout=0.05)  # a sixth of the deadline
            if gone.done():
                break
        assert gone.result() == b""
    await hasty_house.is_unharmed(dropped=1)


async def test_slow_body_gets_408_at_its_deadline(hasty_house: House) -> None:
    async with hasty_house.mallory() as mallory:
        mallory.say(request("/in/batches", length=len(GOOD), content_type=BATCH, authorization=signed(GOOD)))
        answered = asyncio.ensure_future(mallory.hear())
        for byte in GOOD:
            mallory.say(bytes([byte]))
            await asyncio.wait([answered], timeout=0.05)
            if answered.done():
                break
        assert (await answered).problem["status"] == 408
        assert await mallory.cut() == b""
    await hasty_house.is_unharmed(refused=1)


async def test_silent_client_is_cut(hasty_house: House) -> None:
    async with hasty_house.mallory() as mallory:
        assert await mallory.cut() == b""
    await hasty_house.is_unharmed(dropped=1)


async def test_client_pausing_between_two_requests_is_not_cut(hasty_house: House) -> None:
    async with hasty_house.mallory() as mallory:
        assert (await mallory.ask(post(GOOD))).status == 200
        for _ in range(6):
            await asyncio.sleep(0.25)  # longer than a request may take, all together
        assert (await mallory.ask(post(GOOD))).status == 200


async def test_client_reading_no_answers_is_cut_at_their_deadline(
    hasty_house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reject_strangers(endpoint: str, received: list[Envelope]) -> list[Outcome]:
        return [Rejected("x" * 1_000)] * len(received)

    with monkeypatch.context() as patched:
        patched.setattr(hasty_house.receiver, "receive", reject_strangers)
        async with hasty_house.mallory() as mallory:
            for _ in range(200):  # 20 MB of answers: more than socket buffers hold
                mallory.say(post(encode_batch(envelopes(100))))
            await eventually(lambda: hasty_house.listener.statistics()["dropped"] == 1, what="the cut")
    await hasty_house.is_unharmed(dropped=1)


@pytest.mark.parametrize("brought", [1, 999])
async def test_false_length_gets_400_on_any_server(brought: int) -> None:
    """uvicorn counts by itself; an application may run on another server."""
    answers: list[Message] = []

    async def bring() -> Message:
        return {"type": "http.request", "body": b"x" * brought, "more_body": False}

    async def hear(answer: Message) -> None:
        answers.append(answer)

    receiver = MemoryReceiver()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/batches",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", BATCH.encode()), (b"content-length", b"500")],
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 5),
    }
    app = HttpTransport(SETTINGS, service="billing", messages=dict).app("in", lambda: receiver, allow_local=True)
    await app(scope, bring, hear)
    assert answers[0]["status"] == 400
    assert f"Content-Length says 500, and {brought} bytes came".encode() in answers[1]["body"]


async def test_oldest_stranger_gives_way_when_there_are_too_many() -> None:
    async for house in open_house(SETTINGS.model_copy(update={"stranger_connections": 1})):
        async with house.mallory() as first, house.mallory() as second:
            assert await first.cut() == b""
            assert (await second.ask(request("/in/health/live", method="GET"))).status == 204
        await house.is_unharmed(dropped=1)


async def test_idle_connection_of_a_known_client_gives_way_to_another_client() -> None:
    async for house in open_house(SETTINGS.model_copy(update={"http_connections": 2})):  # the neighbour has one
        async with house.mallory() as first, house.mallory() as second:
            assert (await first.ask(post(GOOD))).status == 200
            assert (await second.ask(post(encode_batch(envelopes(1))))).status == 200
            await house.has_dropped(1)
            assert (await second.ask(post(encode_batch(envelopes(1))))).status == 200


async def test_known_clients_beyond_the_room_are_served_as_strangers() -> None:
    async for house in open_house(SETTINGS.model_copy(update={"http_connections": 1})):
        house.receiver.hold()
        async with house.mallory() as first, house.mallory() as second:
            first.say(post(GOOD))
            second.say(post(encode_batch(envelopes(1))))
            await house.receiver.arrived(3)  # the neighbour's was the first
            house.receiver.release()
            assert (await first.hear()).status == 200
            assert (await second.hear()).status == 200


async def test_bytes_under_way_are_bounded_by_429() -> None:
    settings = SETTINGS.model_copy(update={"buffer_bytes": 100_000})
    async for house in open_house(settings):
        house.receiver.hold()
        large = encode_batch(envelopes(1, body=b"x" * 60_000))
        async with house.mallory() as first, house.mallory() as second:
            first.say(post(large))
            await house.receiver.arrived(2)  # the neighbour's was the first
            refusal = await second.ask(post(large))
            assert (refusal.problem["status"], refusal.headers["retry-after"]) == (429, "1")
            house.receiver.release()
            assert (await first.hear()).status == 200
            assert (await second.ask(post(large))).status == 200


async def test_request_larger_than_the_bound_of_bytes_under_way_goes_alone() -> None:
    settings = SETTINGS.model_copy(update={"buffer_bytes": 10_000})
    async for house in open_house(settings):
        assert (await ask(house, post(encode_batch(envelopes(1, body=b"x" * 60_000))))).status == 200
        await house.greet_neighbour()


async def test_invalid_envelope_is_rejected_and_its_neighbours_in_the_batch_are_stored(house: House) -> None:
    before, after = envelopes(2)
    naive = msgspec.structs.replace(envelope(), sent_at=envelope().sent_at.replace(tzinfo=None))
    answer = await ask(house, post(batch("no envelope", before, naive, envelope(REJECTED_TYPE), after, [])))
    match decode_outcomes(answer.body, 6):
        case [Rejected(), first, Rejected(reason), Rejected(theirs), second, Rejected()]:
            assert (first, second) == (STORED, STORED)
            assert "timezone" in reason
            assert theirs == "a type that the test rejects"
        case other:
            pytest.fail(f"unexpected: {other}")
    house.from_neighbour += [before, after]
    await house.is_unharmed()


async def test_batch_sent_twice_is_stored_once(house: House) -> None:
    data = post(GOOD)
    async with house.mallory() as mallory:
        first, second = await mallory.ask(data), await mallory.ask(data)
    assert (first.status, second.status) == (200, 200)
    assert second.headers["content-type"] == OUTCOMES
    assert decode_outcomes(first.body, 2) == [STORED] * 2
    assert [type(outcome).__name__ for outcome in decode_outcomes(second.body, 2)] == ["Duplicate"] * 2


async def test_two_requests_at_once_on_one_connection_are_answered_in_turn(house: House) -> None:
    other = encode_batch(envelopes(5))
    async with house.mallory() as mallory:
        mallory.say(post(GOOD) + post(other))
        assert decode_outcomes((await mallory.hear()).body, 2) == [STORED] * 2
        assert decode_outcomes((await mallory.hear()).body, 5) == [STORED] * 5


async def test_envelopes_beyond_the_room_of_the_receiver_are_busy(house: House) -> None:
    house.receiver.room = len(house.from_neighbour) + 2
    answer = await ask(house, post(batch(envelope(), "no envelope", *envelopes(3))))
    match decode_outcomes(answer.body, 5):
        case [first, Rejected(), second, *rest]:
            assert (first, second, rest) == (STORED, STORED, [BUSY] * 2)
        case other:
            pytest.fail(f"unexpected: {other}")
    assert len(house.receiver.batches[-1]) == 2  # it is not asked for more than it has room for


async def test_reasons_of_outcomes_are_fit_to_travel(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(endpoint: str, received: list[Envelope]) -> list[Outcome]:
        return [Failed("\x00\ud800" + "x" * 10_000)] * len(received)

    monkeypatch.setattr(house.receiver, "receive", fail)
    answer = await ask(house, post(GOOD))
    assert decode_outcomes(answer.body, 2) == [Failed(2 * "\N{REPLACEMENT CHARACTER}" + "x" * 998)] * 2


async def test_fault_of_the_receiver_gets_500_without_details(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(endpoint: str, received: list[Envelope]) -> list[Outcome]:
        raise RuntimeError("an inner detail")

    with monkeypatch.context() as patched:
        patched.setattr(house.receiver, "receive", fail)
        refusal = await ask(house, post(GOOD))
    assert refusal.problem == {
        "type": "about:blank",
        "title": "Internal Server Error",
        "status": 500,
        "detail": "a fault of this service",
    }
    assert "an inner detail" in caplog.text
    await house.is_unharmed()


async def test_bodies_and_secrets_are_not_logged(house: House, caplog: pytest.LogCaptureFixture) -> None:
    body = encode_batch(envelopes(1, body=LETTER))
    with caplog.at_level(logging.DEBUG):
        await ask(house, post(body))
        await ask(house, post(body, authorization=f"Bearer {SECRET}x"))
        await ask(house, post(body + LETTER))
        await house.greet_neighbour()
    assert caplog.text
    assert LETTER.decode() not in caplog.text
    assert SECRET not in caplog.text


# The other way round ----------------------------------------------------------------------------------------------


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def hang_up_in_mid_answer(writer: asyncio.StreamWriter) -> None:
    writer.write(ANSWER[:-1])
    writer.close()


async def hang_up_in_mid_head(writer: asyncio.StreamWriter) -> None:
    writer.write(ANSWER[:20])
    writer.close()


async def flood(writer: asyncio.StreamWriter) -> None:
    writer.write(response("200 OK", content_type=OUTCOMES, transfer_encoding="chunked", content_length=""))
    while not writer.is_closing():
        writer.write(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
        await writer.drain()


HTML = {"content_type": "text/html"}
PROBLEM = {"content_type": "application/problem+json"}
ANSWER = response("200 OK", encode_outcomes([STORED] * 2), content_type=OUTCOMES)
ANSWERS: Mapping[str, tuple[Handle, type[TransportError], str]] = {
    "HTML": (saying(response("200 OK", b"<h1>It works</h1>", **HTML)), ProtocolViolation, "200 OK: text/html"),
    "outcomes of no type": (
        saying(response("200 OK", encode_outcomes([STORED] * 2))),
        ProtocolViolation,
        "no service that receives messages is at this address",
    ),
    "201 with outcomes": (
        saying(response("201 Created", encode_outcomes([STORED] * 2), content_type=OUTCOMES)),
        ProtocolViolation,
        "201 Created",
    ),
    "204": (saying(response("204 No Content", content_length="")), ProtocolViolation, "204 No Content"),
    "a redirect": (
        saying(response("307 Temporary Redirect", location="http://127.0.0.1:1/elsewhere")),
        ProtocolViolation,
        "to http://127.0.0.1:1/elsewhere; redirects are not followed",
    ),
    "a permanent redirect": (
        saying(response("308 Permanent Redirect", location="https://elsewhere.example/in")),
        ProtocolViolation,
        "write the final address",
    ),
    "too few outcomes": (
        saying(response("200 OK", encode_outcomes([STORED]), content_type=OUTCOMES)),
        ProtocolViolation,
        "1 outcomes for 2 envelopes",
    ),
    "too many outcomes": (
        saying(response("200 OK", encode_outcomes([STORED] * 3), content_type=OUTCOMES)),
        ProtocolViolation,
        "3 outcomes for 2 envelopes",
    ),
    "no outcomes": (
        saying(response("200 OK", b"\xc1\xc1", content_type=OUTCOMES)),
        ProtocolViolation,
        "cannot be read",
    ),
    "outcomes in gzip": (
        saying(
            response(
                "200 OK", gzip.compress(encode_outcomes([STORED] * 2)), content_type=OUTCOMES, content_encoding="gzip"
            )
        ),
        ProtocolViolation,
        "cannot be read",
    ),
    "an answer above the limit": (
        saying(response("200 OK", b"x" * (LIMIT + 1), content_type=OUTCOMES)),
        ProtocolViolation,
        "more than 131,072 bytes",
    ),
    "an answer without end": (flood, ProtocolViolation, "more than 131,072 bytes"),
    "headers without end": (saying(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 50_000), ProtocolViolation, "too long"),
    "no HTTP": (saying(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), ProtocolViolation, "illegal status line"),
    "a line without end": (saying(b"\x89" * 20_000 + b"\r\n\r\n"), ProtocolViolation, "illegal status line"),
    "a problem": (
        saying(response("500 Internal Server Error", b'{"detail": "out of order"}', **PROBLEM)),
        TransportError,
        "500 Internal Server Error: out of order",
    ),
    "a problem that is none": (saying(response("500 Oh", b"[1]", **PROBLEM)), TransportError, "500 Internal Server"),
    "an unknown status": (saying(response("599 Whatever")), TransportError, "the peer answered 599"),
    "text for terminals": (
        saying(response("500 Oh", b'{"detail": "\\u001b[2J\\u0000\\r\\n' + b"x" * 5_000 + b'"}', **PROBLEM)),
        TransportError,
        r"500 Internal Server Error:  \[2J   x{293}$",
    ),
    "401": (saying(response("401 Unauthorized")), TransportError, "check shared_secret"),
    "403": (saying(response("403 Forbidden")), TransportError, "check shared_secret"),
    "404": (saying(response("404 Not Found", b"<h1>?</h1>", **HTML)), TransportError, "404 Not Found: text/html"),
    "502": (saying(response("502 Bad Gateway", b"<h1>nginx</h1>", **HTML)), ConnectionFailed, "502 Bad Gateway"),
    "503": (saying(response("503 Service Unavailable")), ConnectionFailed, "503 Service Unavailable"),
    "no answer": (hang_up, ConnectionFailed, "disconnected"),
    "half a head": (hang_up_in_mid_head, ConnectionFailed, "disconnected"),
    "half an answer": (hang_up_in_mid_answer, ConnectionFailed, "peer closed connection"),
}


@pytest.mark.parametrize(("handle", "error", "reason"), ANSWERS.values(), ids=ANSWERS.keys())
async def test_sender_rejects_a_bad_server_and_finds_a_good_one(
    handle: Handle, error: type[TransportError], reason: str
) -> None:
    async with FakeHttpServer(handle) as server, transport(SETTINGS, None).sender(server.uri) as sender:
        with pytest.raises(error, match=reason) as raised:
            await sender.send(envelopes(2))
        assert type(raised.value) is error
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 600
        server.handle = saying(ANSWER)
        assert await sender.send(envelopes(2)) == [STORED] * 2


@pytest.mark.parametrize(
    "first", [b"", b"HTTP/1.1 100 Continue\r\n\r\n", ANSWER[:20], ANSWER[:-1]], ids=["silence", "100", "head", "body"]
)
async def test_silent_server_costs_one_timeout(first: bytes) -> None:
    settings = SETTINGS.model_copy(update={"send_timeout": timedelta(seconds=1.5)})
    async with FakeHttpServer(saying(first)) as server, transport(settings, None).sender(server.uri) as sender:
        with pytest.raises(PeerTimeout, match=r"no answer within 1\.5 seconds"):
            await sender.send(envelopes(2))
        server.handle = saying(ANSWER)
        assert await sender.send(envelopes(2)) == [STORED] * 2


async def test_server_answering_429_is_busy() -> None:
    busy = saying(response("429 Too Many Requests", retry_after="3600"))
    async with FakeHttpServer(busy) as server, transport(SETTINGS, None).sender(server.uri) as sender:
        assert await sender.send(envelopes(2)) == [BUSY] * 2


async def test_a_redirect_is_not_followed_with_the_secret() -> None:
    async with FakeHttpServer(saying(ANSWER)) as elsewhere:
        redirect = saying(response("307 Temporary Redirect", location=f"{elsewhere.uri}/batches"))
        async with FakeHttpServer(redirect) as server, transport(SETTINGS, None).sender(server.uri) as sender:
            with pytest.raises(TransportError, match="redirects are not followed"):
                await sender.send(envelopes(2))
        assert elsewhere.connections == 0
