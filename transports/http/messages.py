"""The endpoints for any HTTP client: one message a request, answered when it is committed.

    POST /messages/{type}    the body is the message, in JSON or for another codec; headers say the rest
    POST /messages           the body, or the headers too, are a CloudEvent (durable.messages.cloudevents)

    202  stored now                          4xx  it can never be stored like this: the problem says why
    200  was stored before: a repeat         503  not now: send it again, under the same key

A client is told at once what a peer would find among the dead letters of this service: a message is stored only if a
handler of this service can decode it. A repeat is recognised by the id of the envelope, which is made of

    Idempotency-Key, a UUID     this UUID
    Idempotency-Key, any text   a UUIDv5 of the endpoint, the type and the key
    none, but a signature       a UUIDv5 of the signature: a recording of the request, sent again, is a repeat
    nothing                     a new UUIDv7: each request is a message
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Final
from uuid import UUID

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from durable.envelope import Envelope, new_id
from durable.errors import InvalidMessage
from durable.grammar import suggestion
from durable.messages import cloudevents, codec, upcasting
from durable.messages import validation as screening
from durable.messages.scope import scoped
from durable.outcomes import Busy, Duplicate, Failed, Rejected, Stored
from durable.transports import peers
from durable.transports.http import auth as http_auth
from durable.transports.http import headers as http_headers
from durable.transports.http.exchange import RETRY_SOON, Door, admitted, require_content_type

_VERSION_HEADER: Final = "ce-specversion"
_LONGEST_TYPE: Final = 200
_LONGEST_DETAIL: Final = 2_000


def routes(door: Door) -> list[BaseRoute]:
    return [
        Route("/messages", partial(_take_event, door), methods=["POST"]),
        Route("/messages/{message_type}", partial(_take_message, door), methods=["POST"]),
    ]


async def _take_message(door: Door, request: Request) -> Response:
    message_type: str = request.path_params["message_type"]
    async with admitted(request, door, *content_types(), most_bytes=door.settings.max_message_bytes) as entry:
        cls = class_of(door, message_type, status=404)
        with refused(400):
            envelope_id = _id_of(door, message_type, request)
            envelope = envelope_of_message(door, message_type, request, entry.body, envelope_id)
        return await _store(door, envelope, cls, entry.peer, key="Idempotency-Key")


async def _take_event(door: Door, request: Request) -> Response:
    if request.headers.get("content-type", "").lower().startswith(cloudevents.BATCHED):
        raise HTTPException(415, "batches of CloudEvents are not taken: send each event in a request of its own")
    async with admitted(request, door, *content_types(), cloudevents.STRUCTURED) as entry:
        with refused(400):
            event = _read_event(request, entry.body)
        cls = class_of(door, event.message_type, status=422)
        if event.content_type not in content_types():
            understood = " or ".join(content_types())
            raise HTTPException(415, f"the data of an event must be {understood}, not {event.content_type[:100]!r}")
        return await _store(door, _envelope_of_event(door, event, request), cls, entry.peer, key="source and id")


async def _store(door: Door, envelope: Envelope, cls: type, peer: str | None, *, key: str) -> Response:
    """Store the message if it is valid, and answer with the outcome."""
    refuse_unfit(door, envelope, cls, peer)
    is_new = await store(door, envelope, peer, key=key)
    return JSONResponse({"id": str(envelope.id), "type": envelope.message_type}, 202 if is_new else 200)


async def store(door: Door, envelope: Envelope, peer: str | None, *, key: str, status_of_conflict: int = 422) -> bool:
    """Store a valid message; False when it was stored before. Raises HTTPException."""
    [outcome] = await door.open().receive(scoped(door.endpoint, peer), [envelope])
    door.counts["envelopes"] += 1
    match outcome:
        case Stored():
            return True
        case Duplicate(other_body=False):
            return False
        case Duplicate():
            raise HTTPException(
                status_of_conflict,
                f"this {key} was used with another body or version, other headers or other times: that message was "
                "stored; this one was not",
            )
        case Rejected(reason):
            raise HTTPException(422, reason)
        case Busy():
            raise HTTPException(503, "there is no room for it now", RETRY_SOON)
        case Failed(reason):
            raise HTTPException(503, reason, RETRY_SOON)


def refuse_unfit(door: Door, envelope: Envelope, cls: type, peer: str | None) -> None:
    """Raise HTTPException for a message that the peer may not send, that the receiver would quarantine, or that no
    handler could decode.
    """
    if not peers.may_send(door.settings, peer, envelope.message_type):
        raise HTTPException(403, f"{peer} may not send messages of type {envelope.message_type}: see types in peers")
    settings, now = door.settings, datetime.now(UTC)
    if len(envelope.body) > settings.max_message_bytes:
        raise HTTPException(413, f"a message has at most {settings.max_message_bytes} bytes here")
    if reason := screening.find_error(envelope, **settings.limits):
        raise HTTPException(422, reason)
    if screening.never_due(envelope):
        raise HTTPException(422, "it would expire before it is due: give it longer, or an earlier Durable-Execute-At")
    if reason := screening.find_misdating(envelope, now, **settings.window):
        raise HTTPException(422, reason)
    with refused(422):
        upcasting.decode(envelope, cls)


def content_types() -> list[str]:
    """Content types of messages. A CloudEvent is more than a message."""
    return [each for each in codec.content_types() if each != cloudevents.STRUCTURED]


def class_of(door: Door, message_type: str, *, status: int) -> type:
    """Return the class of messages of this type; raises HTTPException unless it is handled here."""
    known = door.messages()
    if message_type not in known:
        shown = message_type[:_LONGEST_TYPE]
        raise HTTPException(status, f"no message type {shown!r} is handled here{suggestion(shown, known)}")
    return known[message_type]


def envelope_of_message(door: Door, message_type: str, request: Request, body: bytes, envelope_id: UUID) -> Envelope:
    """Make the envelope of a request whose body is the message; raises InvalidMessage, and HTTPException (415)."""
    headers = request.headers.raw
    if _VERSION_HEADER in request.headers:
        raise InvalidMessage("a CloudEvent says of what type it is: post it to /messages")
    options = http_headers.read_options(headers)
    now = datetime.now(UTC)
    return Envelope(
        id=envelope_id,
        message_type=message_type,
        destination=door.service,
        source=options.source,
        correlation_id=options.correlation_id or envelope_id,
        body=body,
        content_type=require_content_type(request, *content_types()),
        sent_at=now,
        partition_key=options.partition_key,
        headers=http_headers.trace_context(headers) | http_headers.own_headers(headers),
        deliver_by=options.deadline(now),
        execution_time=options.execute_at,
    )


def _id_of(door: Door, message_type: str, request: Request) -> UUID:
    key = http_headers.read_key(request.headers.raw)
    if key is None:
        credentials = http_auth.parse(request.headers.get("authorization", ""))
        if not isinstance(credentials, http_auth.Signature):
            return new_id()
        key = f"signature {credentials.digest}"
    return http_headers.id_of(key, door.endpoint, message_type)


def _read_event(request: Request, body: bytes) -> cloudevents.Event:
    for name in request.headers:
        if name == http_headers.KEY or name.startswith(http_headers.PREFIX):
            raise InvalidMessage(f"the header {name!r} is not for CloudEvents; use an attribute of the event")
    understood = content_types()
    content_type = require_content_type(request, *understood, cloudevents.STRUCTURED)
    if content_type == cloudevents.STRUCTURED:
        return cloudevents.from_structured(body, understood=understood)
    if _VERSION_HEADER not in request.headers:
        raise InvalidMessage("there is no header ce-specversion, so this is no CloudEvent: post it to /messages/{type}")
    return cloudevents.from_binary(request.headers.raw, content_type, body, understood=understood)


def _envelope_of_event(door: Door, event: cloudevents.Event, request: Request) -> Envelope:
    return Envelope(
        id=event.id,
        message_type=event.message_type,
        destination=door.service,
        source=event.source,
        correlation_id=event.id,
        body=event.body,
        content_type=event.content_type,
        sent_at=event.sent_at or datetime.now(UTC),
        partition_key=event.partition_key,
        headers=http_headers.trace_context(request.headers.raw) | event.headers,
        deliver_by=event.deliver_by,
    )


@contextmanager
def refused(status: int) -> Iterator[None]:
    """Answer an InvalidMessage with this status."""
    try:
        yield
    except InvalidMessage as error:
        raise HTTPException(status, str(error)[:_LONGEST_DETAIL]) from error
