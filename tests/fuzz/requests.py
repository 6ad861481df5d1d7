"""Requests of HTTP as bytes: good ones, and what becomes of them; and the target of their reading, without a socket."""

from __future__ import annotations

from typing import Any, NamedTuple

import h11
from hypothesis import strategies as st

from durable.transports.http.strict import StrictConnection
from tests.fuzz.damage import damaged, pieces
from tests.fuzz.targets import of_rules

_MOST_HEAD_BYTES = 16 << 10

_METHODS = st.sampled_from(["POST", "GET", "PUT", "OPTIONS", "POST ", "P\x00ST"])
_TARGETS = st.sampled_from(
    [
        "/batches",
        "/ping",
        "/messages/web.sold",
        "/messages",
        "/openapi.json",
        "/health/live",
        "/health/ready",
        "/",
        "*",
        "//batches",
        "/messages/%2e%2e",
        "http://other/batches",
        "/batches?x=%ff",
    ]
)
_LINES = [
    "Content-Length: 5",
    "Content-Length: 0",
    "content-length: 5, 5",
    "Content-Length: +5",
    "Content-Length: 99999999999999999999",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding : chunked",
    "transfer-encoding: identity",
    "Expect: 100-continue",
    "Connection: close",
    "Connection: upgrade",
    "Upgrade: h2c",
    "Host: other.example",
    "Content-Encoding: gzip",
    "X-Forwarded-For: 127.0.0.1",
    "Authorization: Bearer wrong",
    "Content-Type: application/json",
    " folded: yes",
    "no colon",
    "é: é",
    "Durable-Source: a\x0bb",
    "Idempotency-Key: order-17",
    "ce-specversion: 1.0",
    "Range: bytes=0-1",
    "If-None-Match: *",
]
_CHUNKS = [
    b"5\r\nhello\r\n0\r\n\r\n",
    b"0\r\n\r\n",
    b"5;x=y\r\nhello\r\n0\r\n\r\n",
    b"5\r\nhello\r\n0\r\nx: y\r\n\r\n",
    b"5\nhello\n0\n\n",
    b"ffffffffffffffff\r\n",
    b"-5\r\nhello",
    b"0x5\r\nhello\r\n0\r\n\r\n",
    b"5\r\nhello!\r\n0\r\n\r\n",
]


@st.composite
def requests(draw: st.DrawFn, bodies: st.SearchStrategy[bytes], *more: str) -> bytes:
    """A request line, headers and a body whose length is told rightly or not."""
    version = draw(st.sampled_from(["HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/1.1 "]))
    lines = [f"{draw(_METHODS)} {draw(_TARGETS)} {version}", "Host: 127.0.0.1", *more]
    lines += draw(st.lists(st.sampled_from(_LINES), max_size=3))
    chunked = any("chunked" in line for line in lines)
    body = draw(st.sampled_from(_CHUNKS)) if chunked else draw(bodies)
    if not chunked and draw(st.integers(0, 9)):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1", errors="replace") + body


class _Exchange(NamedTuple):
    method: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


def _read(arriving: list[bytes]) -> tuple[list[_Exchange], str]:
    """Requests that are read as whole, and the end: all answered, one in part, or a refusal."""
    connection = StrictConnection(_MOST_HEAD_BYTES)
    found: list[_Exchange] = []
    request: h11.Request | None = None
    body = b""
    for piece in arriving:
        if piece:  # nothing is the end of the connection
            connection.receive_data(piece)
        while True:
            try:
                event: Any = connection.next_event()
            except h11.RemoteProtocolError:
                return found, "refused"
            match event:
                case h11.Request():
                    request, body = event, b""
                case h11.Data():
                    body += bytes(event.data)
                case h11.EndOfMessage():
                    assert request is not None
                    found.append(_Exchange(request.method, request.target, tuple(request.headers), body))
                    request = None
                    connection.send(h11.Response(status_code=204, headers=[]))
                    connection.send(h11.EndOfMessage())
                    if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                        return found, "closed"
                    connection.start_next_cycle()
                case _:
                    break
    return found, "in part" if request or connection.trailing_data[0] else "answered"


def check_requests(arriving: list[bytes]) -> str:
    """The cuts make no difference, and a request that is taken reads the same when it is written without any doubt:
    then no proxy, which may write it anew, can have seen another end of it."""
    found, end = _read(arriving)
    whole, whole_end = _read([b"".join(arriving)])
    assert (found, end) == (whole, whole_end), "the cuts made a difference"
    for request in found:
        names = [name for name, _ in request.headers]
        assert not (b"transfer-encoding" in names and b"content-length" in names)
        assert names.count(b"content-length") <= 1
        assert all(b"\r" not in value and b"\n" not in value and b"\0" not in value for _, value in request.headers)
        again, _ = _read([_written(request)])
        assert [each._replace(headers=()) for each in again] == [request._replace(headers=())]
    return f"{min(len(found), 3)} and {end}"


def _written(request: _Exchange) -> bytes:
    kept = [(name, value) for name, value in request.headers if name not in (b"content-length", b"transfer-encoding")]
    if b"host" not in {name for name, _ in kept}:  # HTTP/1.0 needs none
        kept.append((b"host", b"127.0.0.1"))
    lines = [request.method + b" " + request.target + b" HTTP/1.1", *(name + b": " + value for name, value in kept)]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(request.body), b"", b""]) + request.body


_streams = damaged(st.lists(requests(st.just(b"hello")), min_size=1, max_size=3).map(b"".join))

TARGETS = [of_rules("http-requests", pieces(_streams), check_requests)]
