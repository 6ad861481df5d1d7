"""A body has one length: what has two readings is refused, and what ends early is not stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
from starlette.types import Message

from durable.transports.http.transport import HttpTransport
from durable.transports.http.wire import BATCH, encode_batch
from tests.integration.transports.http.bad_input.houses import GOOD, SETTINGS, TOKEN, House, post, signed, transport
from tests.support.raw_http import request
from tests.support.receivers import MemoryReceiver, envelopes


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
