"""The endpoints that senders of durable use: POST /batches and POST /ping.

A batch is answered with one outcome for each envelope, in order, when those that are Stored are committed. What is no
envelope is Rejected alone, and what exceeds the receiver's room is Busy. A ping is answered by what a batch would meet
on its way, authentication and database included.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from durable.errors import ProtocolViolation
from durable.failpoints import failpoint
from durable.outcomes import BUSY, Outcome, merged
from durable.transports.deadlines import counted_anew
from durable.transports.frames import PartlyReadable
from durable.transports.gate import Gate
from durable.transports.http.address import SCHEMES
from durable.transports.http.exchange import PING, RETRY_SOON, Door, admitted
from durable.transports.http.wire import BATCH, OUTCOMES, decode_batch, encode_outcomes


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
    gate = Gate(receiver, door.endpoint, door.service, door.settings, SCHEMES)
    received = await gate.receive(arrived, peer)
    busy = [BUSY] * (len(batch.envelopes) - len(arrived))
    return merged([*received, *busy], batch.rejected)


async def _ping(door: Door, request: Request) -> Response:
    async with admitted(request, door, most_bytes=0):
        if not await door.open().ready():
            raise HTTPException(503, "the peer cannot store anything now", RETRY_SOON)
    return Response(status_code=204)
