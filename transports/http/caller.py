"""The calling end of HTTP: one address, a request for each call, on pooled connections.

200 with a result          the result
a problem with a fault     what became of the call
413                        InvalidMessage: the arguments are larger than the peer takes
anything else              TransportError: nobody can tell whether the call was run

A call is sent once: when its connection breaks, it may have been run. One that waits for a connection was not sent. A
caller that is cancelled closes its connection, and with it cancels the call. Where requests are signed, an answer
without a signature is a failure, whatever it says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote

from durable.errors import ConnectionFailed, InvalidMessage, ProtocolViolation, TransportError
from durable.outcomes import printable
from durable.settings import Settings
from durable.transports.base import Answer
from durable.transports.frames import Call, Fault, FaultKind, Offers, Result
from durable.transports.http.calls import AWAITED, EPOCH, EXPIRES_IN, SCHEMA, VERSION
from durable.transports.http.client import Answer as Answered
from durable.transports.http.client import Endpoint, HttpClient
from durable.transports.http.wire import ARGUMENTS, OFFERS, RESULT, decode_offers

MOST_CONNECTIONS: Final = 64
"""Calls to one address that are under way at once; more wait."""

_FRESH_SECONDS: Final = 5.0  # in which the offers are not asked for again
_LONGEST_ERROR: Final = 200
_REFUSED: Final = {
    HTTPStatus.UNAUTHORIZED: FaultKind.FORBIDDEN,
    HTTPStatus.FORBIDDEN: FaultKind.FORBIDDEN,
    HTTPStatus.NOT_FOUND: FaultKind.UNKNOWN,
    HTTPStatus.TOO_MANY_REQUESTS: FaultKind.OVERLOADED,
}
"""What a problem without a fault says: the call did not begin."""


class HttpCaller:
    """A `durable.transports.base.Caller` for the address of its client, which it opens and closes."""

    def __init__(self, client: HttpClient, settings: Settings) -> None:
        self._client = client
        self._peer = client.peer
        self._most_bytes = settings.max_frame_bytes
        self._pings = Endpoint.at(f"{client.peer}/ping")
        self._list = Endpoint.at(f"{client.peer}/offers")
        self._endpoints: dict[tuple[str, str], Endpoint] = {}
        self._offers: Offers | None = None
        self._tag = ""
        self._asked_at = 0.0
        self._asking = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def offers(self) -> Offers:
        """Return what could be called there a moment ago. Raises TransportError when the address cannot be reached."""
        async with self._asking:
            now = asyncio.get_running_loop().time()
            if self._offers is None or now - self._asked_at > _FRESH_SECONDS:
                self._offers = await self._ask(self._offers)
                self._asked_at = now
            return self._offers

    async def call(self, call: Call, sent: Callable[[], None]) -> Answer:
        """Send the call once, and return its answer. Raises as `durable.transports.base.Caller` says."""
        if len(call.body) > self._most_bytes:
            raise InvalidMessage(f"a call of {len(call.body):,} bytes; at most {self._most_bytes:,} are sent")
        headers = [(AWAITED, "yes" if call.awaited else "no")]
        headers += [(EXPIRES_IN, repr(call.expires_in))] if call.expires_in is not None else []
        headers += [(EPOCH, str(call.epoch))] if call.epoch else []
        headers += [(VERSION, call.version)] if call.version else []
        headers += [(SCHEMA, call.schema.hex())] if call.schema else []
        headers += [("traceparent", call.traceparent)] if call.traceparent else []
        headers += [("tracestate", call.tracestate)] if call.tracestate else []
        endpoint = self._endpoint(call)
        answered = await self._client.ask("POST", endpoint, call.body, headers, sent)
        self._require_proof(answered)
        if answered.status == HTTPStatus.OK and answered.content_type == RESULT:
            return Result(answered.body)
        if answered.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            raise InvalidMessage(f"a call of {len(call.body):,} bytes; the peer answered {answered}")
        fault = _fault(answered)
        if fault is None:
            raise self._failure(answered)
        if fault.kind in (FaultKind.UNKNOWN, FaultKind.INCOMPATIBLE):  # another process may answer there by now
            self._offers = None
        return fault

    async def _ask(self, known: Offers | None) -> Offers:
        if not self._client.knows_who:
            self._require_proof(pong := await self._client.post(self._pings, b""))
            if pong.status != HTTPStatus.NO_CONTENT:
                raise self._failure(pong)
        headers = [("if-none-match", self._tag)] if known is not None else []
        answered = await self._client.get(self._list, headers)
        self._require_proof(answered)
        if answered.status == HTTPStatus.NOT_MODIFIED and known is not None:
            return known
        if answered.status != HTTPStatus.OK or answered.content_type != OFFERS:
            raise self._failure(answered)
        self._tag = answered.headers.get("etag", "")
        return decode_offers(answered.body)

    def _endpoint(self, call: Call) -> Endpoint:
        key = call.service, call.method
        if key not in self._endpoints:
            path = f"/calls/{quote(call.service, safe='')}/{quote(call.method, safe='')}"
            self._endpoints[key] = Endpoint.at(f"{self._peer}{path}", content_type=ARGUMENTS)
        return self._endpoints[key]

    def _require_proof(self, answered: Answered) -> None:
        if not answered.is_proven:
            raise ProtocolViolation(
                f"{self._peer}: the answer {answered} is not signed with the secret that it was asked with: another"
                " process listens there, or the peer has another secret"
            )

    def _failure(self, answered: Answered) -> TransportError:
        said = f"{self._peer}: the peer answered {answered}"
        if 300 <= answered.status < 400:
            return ProtocolViolation(f"{said}; redirects are not followed: write the final address")
        if answered.status == HTTPStatus.NOT_FOUND or 200 <= answered.status < 300:
            return ConnectionFailed(f"{said}; no service that can be called is at this address")
        return ConnectionFailed(said)


def _fault(answered: Answered) -> Fault | None:
    """Return what a problem says of the call; None where it says nothing."""
    if answered.content_type != "application/problem+json":
        return None
    try:
        said = json.loads(answered.body)
        text, kind, error = str(said["detail"]), said.get("fault"), str(said.get("error", ""))[:_LONGEST_ERROR]
        return Fault(_REFUSED[HTTPStatus(answered.status)] if kind is None else FaultKind(kind), printable(text), error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
