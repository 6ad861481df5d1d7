"""HTTP/1.1 as it is written, for requests: h11 takes more than that, as a proxy before it may not (RFC 9112).

    Transfer-Encoding beside Content-Length, or in HTTP/1.0      two lengths of one body
    a line that ends without CR, a CR alone, a folded header     two heads in one, or one in two
    trailers, or such a line at the end of chunks                the same, behind the body
    a head that is too long                                      h11 counts only heads that arrive in part
    a body in very many very small chunks                        each costs more than its bytes, before anybody is known

Where a proxy and a server read a request differently, the end of one is the beginning of another that nobody has
authenticated. So each of these is refused, and the connection ends with it.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any, Final

import h11

_HEAD: Final = re.compile(rb"\A(?:.*?\n\r?\n|.*)", re.DOTALL)
_LOOSE: Final = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)|\n[ \t]")


_CHUNKS_ALLOWED: Final = 256
_BYTES_A_CHUNK: Final = 64  # on average, beyond those


class StrictConnection(h11.Connection):
    """Server's end of an h11 connection that refuses ambiguous requests; `refusal` and `status` say why."""

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._max_head_bytes = max_head_bytes
        self.refusal = ""
        self.status = HTTPStatus.BAD_REQUEST
        self._is_chunked = False
        self._chunks = self._chunk_bytes = 0

    def next_event(self) -> Any:
        """Return the next event. Raises h11.RemoteProtocolError."""
        arrived = b""
        if self.their_state is h11.IDLE or (self._is_chunked and self.their_state is h11.SEND_BODY):
            arrived = self.trailing_data[0]
        if self.their_state is h11.IDLE:
            self._check_head(_head(arrived))
        event = super().next_event()
        match event:
            case h11.Request():
                self._check_framing(event)
            case h11.Data() if self._is_chunked:
                self._check_chunk(event)
            case h11.EndOfMessage() if self._is_chunked:
                self._check_end(event, arrived)
            case _:
                pass
        return event

    def _check_head(self, head: bytes) -> None:
        if len(head) > self._max_head_bytes:
            self.status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            raise self._refused(f"a head has at most {self._max_head_bytes} bytes here")
        if _LOOSE.search(head):
            raise self._refused("a line of the head is folded, or does not end with CR LF")

    def _check_framing(self, request: h11.Request) -> None:
        names = {name for name, _ in request.headers}
        self._is_chunked = b"transfer-encoding" in names
        self._chunks = self._chunk_bytes = 0
        if self._is_chunked and b"content-length" in names:
            raise self._refused("Transfer-Encoding and Content-Length exclude each other")
        if self._is_chunked and request.http_version != b"1.1":
            raise self._refused("Transfer-Encoding is not of HTTP/1.0")

    def _check_chunk(self, data: h11.Data) -> None:
        self._chunks += data.chunk_start
        self._chunk_bytes += len(data.data)
        if self._chunks > _CHUNKS_ALLOWED and self._chunk_bytes < (self._chunks - _CHUNKS_ALLOWED) * _BYTES_A_CHUNK:
            raise self._refused(f"chunks have {_BYTES_A_CHUNK} bytes or more on average here")

    def _check_end(self, end: h11.EndOfMessage, arrived: bytes) -> None:
        """The last line of the chunks must be empty and end with CR LF, with nothing between it and the last chunk."""
        consumed = arrived[: len(arrived) - len(self.trailing_data[0])]
        if list(end.headers):
            raise self._refused("trailers behind the chunks are not taken")
        if consumed != b"\r\n" and not consumed.endswith(b"\r\n\r\n"):
            raise self._refused("a line behind the chunks does not end with CR LF")

    def _refused(self, reason: str) -> h11.RemoteProtocolError:
        self.refusal = reason
        return h11.RemoteProtocolError(reason)


def _head(arrived: bytes) -> bytes:
    """Return the head of a request, or as much as is there."""
    found = _HEAD.match(arrived)
    return found[0] if found else b""
