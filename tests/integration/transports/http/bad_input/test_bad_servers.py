"""A sender takes nothing from a bad server, and finds a good one later."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Mapping
from datetime import timedelta

import pytest

from durable.errors import ConnectionFailed, PeerTimeout, ProtocolViolation, TransportError
from durable.outcomes import BUSY, STORED
from durable.transports.http.wire import OUTCOMES, encode_outcomes
from tests.integration.transports.http.bad_input.houses import LIMIT, SETTINGS, transport
from tests.support.raw_http import FakeHttpServer, Handle, response, saying
from tests.support.receivers import envelopes


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
        "1 outcome for 2 envelopes",
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
