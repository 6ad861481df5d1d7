"""Common part of the HTTP endpoints: admission, reading of requests, refusals.

    request --> credentials --> content type --> counted body --> signature --> endpoint
                    401              415        400 408 413 429      401

Nothing that a client announces is believed: bytes are counted as they arrive, for this request and for all that are
under way. A request that is refused raises Starlette's HTTPException, which the client sees as a problem (RFC 9457).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from durable.settings import Settings
from durable.transports.base import Receiver
from durable.transports.http import auth as http_auth
from durable.transports.http.address import is_loopback
from durable.transports.http.problems import CLOSE
from durable.transports.http.room import Room, Share
from durable.transports.visits import CLIENT, Client

RETRY_SOON: Final = {"Retry-After": "1"}

_PART_OF_STRANGERS: Final = 4
_CHARSET: Final = frozenset({"", "charset=utf-8", 'charset="utf-8"'})


@dataclass(frozen=True)
class Door:
    """Admission of requests to the endpoints of one app.

    `receiver` returns None while this process is not ready to store anything. `endpoint` is the stable key under which
    envelopes are stored and recognised. `messages` are the classes handled here, by message type.
    """

    receiver: Callable[[], Receiver | None]
    endpoint: str
    service: str
    settings: Settings
    messages: Callable[[], Mapping[str, type]]
    counts: Counter[str] = field(default_factory=lambda: Counter(batches=0, envelopes=0, refused=0))

    @cached_property
    def room(self) -> Room:
        """Room for the bodies of known clients."""
        return Room(self.settings.buffer_bytes)

    @cached_property
    def strangers(self) -> Room:
        """Room for bodies whose senders are not known yet."""
        return Room(self.settings.buffer_bytes // _PART_OF_STRANGERS, displaces=True)

    def open(self) -> Receiver:
        """The receiver; raises HTTPException (503) while there is none."""
        receiver = self.receiver()
        if receiver is None:
            raise HTTPException(503, "this process is not ready to store anything", RETRY_SOON)
        return receiver


# Coming in --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def admitted(
    request: Request, door: Door, *content_types: str, most_bytes: int | None = None
) -> AsyncIterator[bytes]:
    """The body of a request that may come in; inside the block its bytes count as under way.

    `content_types` are those that are understood: none means that the endpoint looks for itself. `most_bytes` is
    `max_frame_bytes` unless given. Raises HTTPException.
    """
    _refuse_two_lengths(request)
    signature = _authenticated(request, door.settings)
    if content_types:
        require_content_type(request, *content_types)
    most_bytes = door.settings.max_frame_bytes if most_bytes is None else most_bytes
    client: Client | None = request.scope.get("state", {}).get(CLIENT)
    if signature is None and client is not None:
        client.prove()
    is_known = client is None or client.is_known
    with (door.room if is_known else door.strangers).share() as share:
        body = await _read(request, door.settings, most_bytes, share)
        secrets, headers = _secrets(door.settings), request.headers.raw
        if signature is not None and not signature.matches(secrets, *_signed(request), body, headers):
            raise _unauthenticated(
                "the signature does not fit: another http_secret, or path, headers or body were changed on the way"
            )
        if client is not None and not is_known:
            client.prove()
            if not share.move(door.room):
                raise _no_room()
        yield body


def _refuse_two_lengths(request: Request) -> None:
    """Our own server refuses them, too; an application may run on another one, behind a proxy that reads the other."""
    if "transfer-encoding" in request.headers and "content-length" in request.headers:
        raise HTTPException(400, "Transfer-Encoding and Content-Length exclude each other", CLOSE)


def require_content_type(request: Request, *understood: str) -> str:
    """The content type, one of these; raises HTTPException (415) for any other."""
    named, _, parameter = request.headers.get("content-type", "").partition(";")
    named, parameter = named.strip().lower(), parameter.replace(" ", "").lower()
    if named not in understood or parameter not in _CHARSET:
        raise HTTPException(415, f"Content-Type must be {' or '.join(understood)}")
    return named


async def _read(request: Request, settings: Settings, most_bytes: int, share: Share) -> bytes:
    announced = _announced(request)
    if announced is not None and announced > most_bytes:
        raise _too_large(most_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.frame_timeout.total_seconds()) as share.limit:
            async for chunk in request.stream():
                size += len(chunk)
                if size > most_bytes:
                    raise _too_large(most_bytes)
                if not share.take(len(chunk)):
                    raise _no_room()
                chunks.append(chunk)
    except TimeoutError:
        raise HTTPException(408, "the body did not arrive in time (frame_timeout)", CLOSE) from None
    except ClientDisconnect:
        raise HTTPException(400, "the client went away before the body was whole") from None
    finally:
        share.limit = None
    if announced is not None and announced != size:
        raise HTTPException(400, f"Content-Length says {announced}, and {size} bytes came")
    return b"".join(chunks)


def _announced(request: Request) -> int | None:
    """Return the Content-Length; None for a chunked body. Raises HTTPException for an encoded body."""
    headers = request.headers
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise HTTPException(415, "a body must come without Content-Encoding", {"Accept-Encoding": "identity"})
    length = headers.get("content-length")
    if length is None:
        return None
    if not (length.isascii() and length.isdigit() and len(length) <= 18):
        raise HTTPException(400, "Content-Length must be one number", CLOSE)
    return int(length)


def _no_room() -> HTTPException:
    return HTTPException(429, "as many bytes as may be (buffer_bytes) are under way", RETRY_SOON)


def _too_large(most_bytes: int) -> HTTPException:
    return HTTPException(413, f"a body has at most {most_bytes} bytes here", CLOSE)


# Authentication ---------------------------------------------------------------------------------------------------


def _authenticated(request: Request, settings: Settings) -> http_auth.Signature | None:
    """Raise HTTPException (401) unless the credentials are good; a signature is still to be matched with the body."""
    secrets = _secrets(settings)
    if not secrets and is_local(request.scope):
        return None
    if not secrets:
        raise _unauthenticated(
            "this service has no secret and answers only its own machine: set http_secret on both ends"
        )
    skew_seconds = settings.http_clock_skew.total_seconds()
    match http_auth.parse(request.headers.get("authorization", "")):
        case http_auth.Bearer() as bearer if bearer.matches(secrets):
            return None
        case http_auth.Signature() as signature if signature.is_timely(time.time(), skew_seconds):
            return signature
        case http_auth.Signature():
            raise _unauthenticated(
                f"the timestamp is more than http_clock_skew ({skew_seconds:g} s) off: the two clocks differ, or it is "
                "a replay"
            )
        case http_auth.Bearer():
            raise _unauthenticated("this is not the secret: http_secret must be the same on both ends")
        case None:
            raise _unauthenticated("show http_secret, as a signature or as a bearer token")


def is_local(scope: Mapping[str, Any]) -> bool:
    """True when both ends of the connection are this machine. A proxy must not make strangers look local."""
    return all(scope.get(end) and is_loopback(str(scope[end][0])) for end in ("server", "client"))


def _secrets(settings: Settings) -> list[str]:
    known = (settings.http_secret, settings.http_previous_secret)
    return [secret.get_secret_value() for secret in known if secret is not None]


def _signed(request: Request) -> tuple[str, bytes]:
    """The method and the target as the client wrote them; a mount or a router changes only the decoded path."""
    scope = request.scope
    path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    query: bytes = scope.get("query_string", b"")
    return request.method, path + b"?" + query if query else path


def _unauthenticated(detail: str) -> HTTPException:
    return HTTPException(401, detail, {"WWW-Authenticate": http_auth.CHALLENGE, **CLOSE})
