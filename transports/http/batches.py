"""The endpoints that senders of durable use: POST /batches and POST /ping.

A batch is answered with one outcome for each envelope, in order, when those that are Stored are committed. What is no
envelope is Rejected alone, and what exceeds the receiver's room is Busy. A ping is answered by what a batch would meet
on its way, authentication and database included.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from durable.envelope import Envelope
from durable.errors import InvalidMessage, ProtocolViolation, StorageUnavailable
from durable.failpoints import failpoint
from durable.messages.scope import scoped
from durable.outcomes import BUSY, STORED, Failed, Outcome, Rejected, merged
from durable.transports.deadlines import counted_anew
from durable.transports.frames import PartlyReadable
from durable.transports.http import peers as http_peers
from durable.transports.http.exchange import PING, RETRY_SOON, Door, admitted
from durable.transports.http.wire import BATCH, OUTCOMES, decode_batch, encode_batch, encode_outcomes

_LONGEST_SHOWN: Final = 200


def routes(door: Door) -> list[BaseRoute]:
    return [
        Route("/batches", partial(_store, door), methods=["POST"]),
        Route(PING, partial(_ping, door), methods=["POST"]),
    ]


async def _store(door: Door, request: Request) -> Response:
    async with admitted(request, door, BATCH) as entry:
        try:
            batch = decode_batch(entry.body)
        except ProtocolViolation as error:
            raise HTTPException(400, str(error)) from error
        outcomes = await _receive(door, batch, entry.peer)
    failpoint("C10")
    door.counts["batches"] += 1
    door.counts["envelopes"] += len(outcomes)
    return Response(encode_outcomes(outcomes), media_type=OUTCOMES)


async def _receive(door: Door, batch: PartlyReadable, peer: str | None) -> list[Outcome]:
    receiver = door.open()
    arrived = counted_anew(batch.envelopes[: receiver.credit()], batch.clock, datetime.now(UTC))
    elsewhere = {uri for uri in {each.destination for each in arrived} if not http_peers.is_ours(door.settings, uri)}
    refused: dict[int, Outcome] = {}
    for place, each in enumerate(arrived):
        if not http_peers.may_send(door.settings, peer, each.message_type):
            refused[place] = Rejected(f"{peer} may not send messages of type {each.message_type} to {door.service}")
        elif each.destination in elsewhere:
            refused[place] = await _quarantine(door, each, peer)
    fitting = [each for place, each in enumerate(arrived) if place not in refused]
    stored = await receiver.receive(scoped(door.endpoint, peer), fitting) if fitting else []
    received = merged(stored, refused)
    busy = [BUSY] * (len(batch.envelopes) - len(arrived))
    return merged([*received, *busy], batch.rejected)


async def _quarantine(door: Door, envelope: Envelope, peer: str | None) -> Outcome:
    """Keep an envelope for another service as a dead letter: its sender believes that it has arrived."""
    reason = f"the envelope is for {envelope.destination[:_LONGEST_SHOWN]}, which is not this service"
    try:
        await door.open().reject(scoped(door.endpoint, peer), encode_batch([envelope]), reason, _facts(envelope))
    except (StorageUnavailable, InvalidMessage) as error:
        return Failed(f"the receiver could not keep it: {type(error).__name__}")
    return STORED


def _facts(envelope: Envelope) -> dict[str, str]:
    return {"id": str(envelope.id), "type": envelope.message_type, "source": envelope.source}


async def _ping(door: Door, request: Request) -> Response:
    async with admitted(request, door, most_bytes=0):
        if not await door.open().ready():
            raise HTTPException(503, "the peer cannot store anything now", RETRY_SOON)
    return Response(status_code=204)
