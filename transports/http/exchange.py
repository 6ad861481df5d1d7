"""Common part of the HTTP endpoints: admission, reading of requests, refusals.

    request --> length --> credentials --> content type --> counted body --> its digest --> endpoint
                 400            401             415       400 408 413 429       401

What follows the credentials, refusals included, is signed where the request was (durable.transports.http.answers).

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
from datetime import timedelta
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import quote
from uuid import UUID

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from durable.envelope import Envelope
from durable.settings import Settings
from durable.transports import peers
from durable.transports.base import Directory, Provider, Receiver
from durable.transports.http import auth as http_auth
from durable.transports.http import local as http_local
from durable.transports.http.answers import proved_with
from durable.transports.http.problems import CLOSE
from durable.transports.http.replays import Signatures
from durable.transports.http.room import Room, Share
from durable.transports.visits import CLIENT, Client

PING: Final = "/ping"
RETRY_SOON: Final = {"Retry-After": "1"}

_PART_OF_STRANGERS: Final = 4
_CHARSET: Final = frozenset({"", "charset=utf-8", 'charset="utf-8"'})


class Outcomes(Protocol):
    """Port to what became of messages. Its methods raise UnknownMessage and StorageUnavailable."""

    async def outcome(self, message_id: UUID, at: str | None, patience: timedelta) -> Mapping[str, Any] | None:
        """Return the outcome; None while the message waits still, after so much patience.

        `at`: the only endpoint whose messages may be seen.
        """
        ...

    async def answer(self, request_id: UUID, patience: timedelta) -> Envelope | None:
        """Return the answer to a request, decrypted; None while there is none, after so much patience.

        Raises NoAnswer when it was forgotten, or the request ended without being handled; MissingKey and Forged when
        it cannot be decrypted.
        """
        ...

    async def begin(self, request_id: UUID, at: str) -> None:
        """Forget the answer to a former request, whose id is known at this endpoint no more."""
        ...

    async def forget(self, request_id: UUID) -> None:
        """Forget the answer to a request, also one that is to come, and one that cannot be decrypted."""
        ...


@dataclass(frozen=True)
class Door:
    """Admission of requests to the endpoints of one app.

    `receiver` returns None while this process is not ready to store anything. `endpoint` is the stable key under which
    envelopes are stored and recognised. `messages` are the classes handled here, by message type. `allow_local`: where
    no secret is set, programs on this machine may come in. `outcomes` tells what became of messages; without it, no
    client can ask. `provider` has the services that can be called, and `directory` those that this service knows.
    """

    receiver: Callable[[], Receiver | None]
    endpoint: str
    service: str
    settings: Settings
    messages: Callable[[], Mapping[str, type]]
    allow_local: bool
    counts: Counter[str] = field(default_factory=lambda: Counter(batches=0, envelopes=0, refused=0))
    outcomes: Outcomes | None = None
    provider: Provider | None = None
    directory: Directory | None = None
    waiting: Counter[str] = field(default_factory=Counter)
    """The number of requests that wait for an outcome or an answer now."""

    @cached_property
    def room(self) -> Room:
        """Room for the bodies of known clients."""
        return Room(self.settings.buffer_bytes)

    @cached_property
    def strangers(self) -> Room:
        """Room for bodies whose senders are not known yet."""
        return Room(self.settings.buffer_bytes // _PART_OF_STRANGERS, displaces=True)

    @cached_property
    def signatures(self) -> Signatures:
        """Signatures of the last requests."""
        return Signatures()

    def open(self) -> Receiver:
        """The receiver; raises HTTPException (503) while there is none."""
        receiver = self.receiver()
        if receiver is None:
            raise HTTPException(503, "this process is not ready to store anything", RETRY_SOON)
        return receiver


# Coming in --------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """The body of a request that came in, and the name that its sender has proven, if it has."""

    body: bytes
    peer: str | None


class _Caller(NamedTuple):
    """Sender of a request, as far as it is known before the body is read."""

    peer: str | None = None
    signature: http_auth.Signature | None = None


@asynccontextmanager
async def admitted(
    request: Request, door: Door, *content_types: str, most_bytes: int | None = None
) -> AsyncIterator[Entry]:
    """A request that may come in; inside the block the bytes of its body count as under way.

    `content_types` are those that are understood: none means that the endpoint looks for itself. `most_bytes` is
    `max_frame_bytes` unless given. Raises HTTPException.
    """
    announced = _announced(request)
    caller = _authenticated(request, door, announced)
    if not peers.may_use(door.settings, caller.peer, door.endpoint):
        raise HTTPException(403, f"{caller.peer} may not send to {door.endpoint}: see endpoints in peers")
    if content_types:
        require_content_type(request, *content_types)
    most_bytes = door.settings.max_frame_bytes if most_bytes is None else most_bytes
    client: Client | None = request.scope.get("state", {}).get(CLIENT)
    if caller.signature is None and client is not None:
        client.prove()
    is_known = client is None or client.is_known
    with (door.room if is_known else door.strangers).share() as share:
        body = await _read(request, door.settings, announced, most_bytes, share)
        if caller.signature is not None and not caller.signature.is_for(body):
            raise _unauthenticated("the signature is for another body: it was changed on the way")
        is_proof = caller.signature is None or door.signatures.is_first(caller.signature.digest)
        if client is not None and not is_known and is_proof:
            if not share.move(door.room):
                raise _no_room()
            client.prove()
        yield Entry(body, caller.peer)


def require_content_type(request: Request, *understood: str) -> str:
    """The content type, one of these; raises HTTPException (415) for any other."""
    named, _, parameter = request.headers.get("content-type", "").partition(";")
    named, parameter = named.strip().lower(), parameter.replace(" ", "").lower()
    if named not in understood or parameter not in _CHARSET:
        raise HTTPException(415, f"Content-Type must be {' or '.join(understood)}")
    return named


async def _read(request: Request, settings: Settings, announced: int | None, most_bytes: int, share: Share) -> bytes:
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise HTTPException(415, "a body must come without Content-Encoding", {"Accept-Encoding": "identity"})
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
    """Return the Content-Length; None for a body in chunks. Raises HTTPException."""
    headers = request.headers
    length = headers.get("content-length")
    if length is None:
        return None if "transfer-encoding" in headers else 0
    if "transfer-encoding" in headers:  # our own server refuses both, too; an app may run on another, behind a proxy
        raise HTTPException(400, "Transfer-Encoding and Content-Length exclude each other", CLOSE)
    if not (length.isascii() and length.isdigit() and len(length) <= 18):
        raise HTTPException(400, "Content-Length must be one number", CLOSE)
    return int(length)


def _no_room() -> HTTPException:
    return HTTPException(429, "as many bytes as may be (buffer_bytes) are under way", RETRY_SOON)


def _too_large(most_bytes: int) -> HTTPException:
    return HTTPException(413, f"a body has at most {most_bytes} bytes here", CLOSE)


# Authentication ---------------------------------------------------------------------------------------------------


def _authenticated(request: Request, door: Door, announced: int | None) -> _Caller:
    """Raise HTTPException (401) unless the credentials are good; of a signature, all but the body is judged here."""
    settings = door.settings
    if not peers.has_secrets(settings):
        _require_local(request, door)
        return _Caller()
    skew_seconds = settings.http_clock_skew.total_seconds()
    match http_auth.parse(request.headers.get("authorization", "")):
        case http_auth.Bearer(token):
            if (known := peers.token(settings, token)) is None:
                raise _unauthenticated("this is no secret that is known here: see shared_secret and peers on both ends")
            return _Caller(known.peer)
        case http_auth.Signature() as signature if signature.is_timely(time.time(), skew_seconds):
            return _Caller(_signer(request, door, signature, announced), signature)
        case http_auth.Signature():
            raise _unauthenticated(
                f"the timestamp is more than http_clock_skew ({skew_seconds:g} s) off: the two clocks differ, or it is "
                "a replay"
            )
        case None:
            raise _unauthenticated("show a secret, as a signature or as a bearer token")


def _signer(request: Request, door: Door, signature: http_auth.Signature, announced: int | None) -> str | None:
    """Return the name of the peer that has signed the request; raises HTTPException."""
    known = peers.signing(door.settings, signature.sender, signature.key)
    secrets = [each.secret for each in known]
    secret = signature.secret_of(secrets, *_signed(request), announced, request.headers.raw)
    if secret is None:
        raise _unauthenticated(
            "the signature does not fit: another secret, or path, headers or length were changed on the way"
        )
    proved_with(request.scope, secret, signature, door.service)
    asks_who = not signature.to and request.scope["path"].endswith(PING)
    if signature.to != door.service and not asks_who:
        raise HTTPException(
            421, f"this is the service {door.service}, and the request was signed for {signature.to or 'nobody'}"
        )
    if http_local.is_elsewhere(request.scope, signature.at):
        raise HTTPException(
            421,
            f"this is another address of this machine, and the request was signed for {signature.at}: whoever listens"
            " there has passed it on; write the address of the service itself, or use https",
        )
    return known[0].peer


def _require_local(request: Request, door: Door) -> None:
    """Raise HTTPException (401) unless a program on this machine has sent the request, and nobody through it."""
    if not door.allow_local:
        raise _unauthenticated(
            "this service has no secret, and bus.asgi() refuses every request: set shared_secret on both ends, or say"
            " bus.asgi(allow_local=True) for programs on this machine"
        )
    if not http_local.is_local(request.scope):
        raise _unauthenticated(
            "this service has no secret and answers only its own machine: set shared_secret on both ends"
        )
    if reason := http_local.passed_on(request.headers.raw):
        raise _unauthenticated(
            f"this service has no secret and answers only programs on its own machine, and {reason}: set shared_secret"
        )


def _signed(request: Request) -> tuple[str, bytes]:
    """The method and the target as the client wrote them; a mount or a router changes only the decoded path."""
    scope = request.scope
    path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    query: bytes = scope.get("query_string", b"")
    return request.method, path + b"?" + query if query else path


def _unauthenticated(detail: str) -> HTTPException:
    return HTTPException(401, detail, {"WWW-Authenticate": http_auth.CHALLENGE, **CLOSE})
