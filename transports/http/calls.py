"""The endpoints that callers of durable use.

    POST /calls/{service}/{method}   the arguments  --> 200 the result, or a problem that says what became of the call
    GET  /offers                     the services that can be called here
    GET  /directory                  all providers that this service knows

    Durable-Expires-In: 0.5          seconds after which the call is not to begin any more
    Durable-Awaited: no              it goes on when the client is gone
    Durable-Epoch: 3                 of the singleton that is meant
    Durable-Version: 1.2             of the service, as the client has it
    Durable-Schema: 0f5c             digest of the method's schema, as the client has it; in hexadecimal

A client that closes its request cancels the call. The two lists have an ETag: a client that shows the last one is told
304 when nothing has changed, and with `Prefer: wait=10` it waits so long for a change.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from durable.transports import peers
from durable.transports.base import Answer, Provider
from durable.transports.frames import (
    LONGEST_TRACEPARENT,
    LONGEST_TRACESTATE,
    MAX_LISTINGS,
    Call,
    Fault,
    FaultKind,
    Result,
)
from durable.transports.http.exchange import RETRY_SOON, Door, Entry, admitted
from durable.transports.http.headers import refuse_unknown
from durable.transports.http.messages import refused
from durable.transports.http.problems import problem
from durable.transports.http.receipts import waiting
from durable.transports.http.wire import ARGUMENTS, DIRECTORY, OFFERS, RESULT, encode_directory, encode_offers

EXPIRES_IN: Final = "Durable-Expires-In"
AWAITED: Final = "Durable-Awaited"
EPOCH: Final = "Durable-Epoch"
VERSION: Final = "Durable-Version"
SCHEMA: Final = "Durable-Schema"
LONGEST_NAME: Final = 200
_HEADERS: Final = tuple(name.lower() for name in (EXPIRES_IN, AWAITED, EPOCH, VERSION, SCHEMA))

STATUS: Final = {
    FaultKind.UNKNOWN: 404,
    FaultKind.INVALID: 422,
    FaultKind.RAISED: 500,
    FaultKind.EXPIRED: 503,
    FaultKind.OVERLOADED: 429,
    FaultKind.FORBIDDEN: 403,
    FaultKind.GONE: 503,
    FaultKind.ENDING: 503,
    FaultKind.SUPERSEDED: 409,
    FaultKind.INCOMPATIBLE: 409,
}
"""Status of each fault; the kind itself stands in the problem."""

_LARGEST_EPOCH: Final = 2**63 - 1
_VERSION: Final = re.compile(r"([0-9]{1,6}\.[0-9]{1,6})?")
_SCHEMA: Final = re.compile(r"([0-9a-f]{2}){0,64}")


def routes(door: Door) -> list[BaseRoute]:
    if door.provider is None:
        return []
    return [
        Route("/calls/{service}/{method}", partial(_call, door, door.provider), methods=["POST"]),
        Route(
            "/offers", partial(_tell, door, door.provider.watch, partial(_offers, door, door.provider)), methods=["GET"]
        ),
        *_directory_routes(door),
    ]


def _directory_routes(door: Door) -> list[BaseRoute]:
    if door.directory is None:
        return []
    listed = partial(_directory, door)
    return [Route("/directory", partial(_tell, door, door.directory.watch, listed), methods=["GET"])]


async def _call(door: Door, provider: Provider, request: Request) -> Response:
    async with admitted(request, door, ARGUMENTS) as entry:
        call = _read(request, entry)
    if door.receiver() is None:
        return _answered(Fault(FaultKind.ENDING, "this process has not begun to answer, or is ending"))
    door.counts["calls"] += 1
    name = f"{call.service}.{call.method}"
    if not peers.may_send(door.settings, entry.peer, name):
        return _answered(Fault(FaultKind.FORBIDDEN, f"{entry.peer} may not call {name}: see types in peers"))
    answer = await _run(provider, call, entry.peer, request)
    if isinstance(answer, Result) and len(answer.body) > door.settings.max_frame_bytes:
        too_large = f"the result of {len(answer.body):,} bytes is larger than max_frame_bytes"
        answer = Fault(FaultKind.INVALID, too_large)
    return _answered(answer)


async def _run(provider: Provider, call: Call, peer: str | None, request: Request) -> Answer:
    """Run the call until it is answered, or its client is gone."""
    answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    cancel = provider.begin(call, peer, lambda answer: None if answered.done() else answered.set_result(answer))
    gone = asyncio.create_task(_gone(request), name=f"client of {call.service}.{call.method}")
    try:
        waited: list[asyncio.Future[Any]] = [answered, gone]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            return Fault(FaultKind.GONE, "the client has gone")
        return answered.result()
    finally:
        gone.cancel()
        if not answered.done() and call.awaited:
            cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _read(request: Request, entry: Entry) -> Call:
    """Return the call in a request. Raises HTTPException."""
    service, method = request.path_params["service"], request.path_params["method"]
    if max(len(service), len(method)) > LONGEST_NAME:
        raise HTTPException(404, f"the name of a service, or of a method, has at most {LONGEST_NAME} characters")
    headers = request.headers
    with refused(400):
        refuse_unknown(headers.raw, _HEADERS)
    awaited = headers.get(AWAITED, "yes")
    if awaited not in ("yes", "no"):
        raise HTTPException(400, f"{AWAITED} must be yes or no")
    epoch = headers.get(EPOCH, "0")
    if not (epoch.isascii() and epoch.isdigit() and len(epoch) < 20 and int(epoch) <= _LARGEST_EPOCH):
        raise HTTPException(400, f"{EPOCH} must be a number")
    expires_in = _seconds(headers.get(EXPIRES_IN))
    call = Call(service, method, entry.body, expires_in, awaited == "yes", int(epoch), *_trace(headers))
    version, schema = _made_against(headers)
    return replace(call, version=version, schema=schema) if version or schema else call


def _made_against(headers: Mapping[str, str]) -> tuple[str, bytes]:
    """Return the version and the schema that the client has. Raises HTTPException."""
    version, schema = headers.get(VERSION, ""), headers.get(SCHEMA, "")
    if not _VERSION.fullmatch(version):
        raise HTTPException(400, f"{VERSION} must be two numbers, such as 1.2")
    if not _SCHEMA.fullmatch(schema):
        raise HTTPException(400, f"{SCHEMA} must be a digest in hexadecimal")
    return version, bytes.fromhex(schema)


def _trace(headers: Mapping[str, str]) -> tuple[str, str]:
    """The trace context of the client, as far as it is within its bounds."""
    parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
    if len(parent) > LONGEST_TRACEPARENT:
        return "", ""
    return parent, state if len(state) <= LONGEST_TRACESTATE else ""


def _seconds(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value) if value.isascii() and "_" not in value else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 10**9:
        raise HTTPException(400, f"{EXPIRES_IN} must be a number of seconds above 0")
    return seconds


def _answered(answer: Answer) -> Response:
    if isinstance(answer, Result):
        return Response(answer.body, media_type=RESULT, headers={"Cache-Control": "no-store"})
    status = STATUS[answer.kind]
    more = {"fault": answer.kind.value, "error": answer.error} if answer.error else {"fault": answer.kind.value}
    return problem(status, answer.text, RETRY_SOON if status in (429, 503) else None, **more)


# Lists ------------------------------------------------------------------------------------------------------------

_Watch = Callable[[Callable[[], None]], Callable[[], None]]
_List = Callable[[str | None], tuple[bytes, str]]


async def _tell(door: Door, watch: _Watch, read: _List, request: Request) -> Response:
    async with admitted(request, door, most_bytes=0) as entry:
        pass
    known = request.headers.get("if-none-match", "")
    with waiting(door, request) as wait:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        deadline = loop.time() + wait.patience.total_seconds()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(changed.set)

        unwatch = watch(tell)
        try:
            while True:
                changed.clear()
                body, content_type = read(entry.peer)
                tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
                headers = {"ETag": tag, "Cache-Control": "no-cache", **wait.headers}
                if tag != known:
                    return Response(body, media_type=content_type, headers=headers)
                try:
                    async with asyncio.timeout_at(deadline):
                        await changed.wait()
                except TimeoutError:
                    return Response(status_code=304, headers=headers)
        finally:
            unwatch()


def _offers(door: Door, provider: Provider, peer: str | None) -> tuple[bytes, str]:
    return encode_offers(peers.seen_of(door.settings, peer, provider.offers())), OFFERS


def _directory(door: Door, peer: str | None) -> tuple[bytes, str]:
    assert door.directory is not None
    listings = list(door.directory.listings(peer))[:MAX_LISTINGS]
    body = encode_directory(listings)
    if len(body) > door.settings.max_frame_bytes:
        raise HTTPException(503, f"the directory has {len(body):,} bytes, more than max_frame_bytes", RETRY_SOON)
    return body, DIRECTORY
