"""Each bad request is refused with its status and its fault."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable, Mapping

import pytest

from durable.transports.frames import MAX_ENVELOPES
from durable.transports.http.wire import BATCH
from tests.integration.transports.http.bad_input.houses import GOOD, LIMIT, TOKEN, House, ask, batch, post
from tests.support.raw_http import request
from tests.support.receivers import envelopes

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
