"""The sending end of HTTP: one destination, and what its answers mean.

200 with outcomes   one for each envelope
413                 too large: the batch goes in two halves, an envelope alone is Rejected
429                 all Busy
502, 503, 504       ConnectionFailed: a proxy without a peer behind it, or a peer that is not ready
anything else       TransportError, also a redirect, and 200 with something other than outcomes

Where requests are signed, an answer decides nothing unless it is signed, too: whoever listens in place of the peer, or
sits on the way, could have given it. Then it is a failure like any other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from types import TracebackType
from typing import Final, Self

from durable.envelope import Envelope
from durable.errors import ConnectionFailed, InvalidMessage, ProtocolViolation, TransportError
from durable.failpoints import failpoint
from durable.outcomes import BUSY, Outcome, Rejected, all_settled
from durable.settings import Settings
from durable.transports.frames import MAX_ENVELOPES
from durable.transports.http.client import Answer, Endpoint, HttpClient
from durable.transports.http.wire import BATCH, OUTCOMES, decode_outcomes, encode_batch
from durable.transports.idle import IdleConnections

_GONE: Final = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
_FORBIDDEN: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class HttpSender:
    """A `durable.transports.base.Sender` for the address of its client, which it opens and closes."""

    keeps_order = True

    def __init__(self, client: HttpClient, settings: Settings, *, idle: IdleConnections) -> None:
        self._client = client
        self._idle = idle
        self._peer = client.peer
        self._most_bytes = settings.max_frame_bytes
        self._too_many_bytes = sys.maxsize  # of a batch, as far as the peer has said
        self._batches = Endpoint.at(f"{client.peer}/batches", content_type=BATCH)
        self._pings = Endpoint.at(f"{client.peer}/ping")

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._idle.forget(self)
        await self._client.__aexit__(kind, error, trace)

    def close_if_idle(self) -> bool:
        """Close the connections; False while a request is under way. The next send opens others."""
        return self._client.close_if_idle()

    async def send(self, batch: Sequence[Envelope]) -> list[Outcome]:
        """Deliver the batch, in parts if it is larger than the peer takes at once, and return the outcomes in order.

        An envelope that alone is too large for the peer, or cannot be encoded, is Rejected; what comes behind a part
        that was not stored is Busy. Raises TransportError when the fate of the batch, or of a part of it, is unknown:
        send all of it again, the peer knows duplicates.
        """
        outcomes: list[Outcome] = []
        with self._in_use():
            for start in range(0, len(batch), MAX_ENVELOPES):
                outcomes = await self._send_behind(outcomes, batch[start : start + MAX_ENVELOPES])
        return outcomes

    async def ping(self) -> None:
        """Ask the peer whether it could store a batch now; raise TransportError unless it says so in time."""
        with self._in_use():
            await self._ping()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """A peer that fails keeps no connection: to ping it costs no other peer its own."""
        try:
            yield
        except BaseException:
            if self.close_if_idle():
                self._idle.forget(self)
            raise
        else:
            self._idle.used(self)

    async def _ping(self) -> None:
        answer = await self._client.post(self._pings, b"")
        if answer.status != HTTPStatus.NO_CONTENT:
            raise self._failure(answer)
        self._require_proof(answer)

    async def _send(self, envelopes: Sequence[Envelope]) -> list[Outcome]:
        """Halve a batch until its parts fit: a large batch travels in parts, an impossible envelope is found."""
        try:
            return await self._deliver(envelopes)
        except InvalidMessage as error:
            if len(envelopes) == 1:
                return [Rejected(f"envelope {envelopes[0].id}: {error}")]
        middle = len(envelopes) // 2
        return await self._send_behind(await self._send(envelopes[:middle]), envelopes[middle:])

    async def _send_behind(self, before: list[Outcome], envelopes: Sequence[Envelope]) -> list[Outcome]:
        """Send in order; behind an envelope that was not stored, the rest is Busy."""
        return before + (await self._send(envelopes) if all_settled(before) else [BUSY] * len(envelopes))

    async def _deliver(self, envelopes: Sequence[Envelope]) -> list[Outcome]:
        """Encode envelopes. Raises InvalidMessage when they cannot be encoded, or are too large for one request."""
        body = encode_batch(envelopes, datetime.now(UTC))
        if len(body) > self._most_bytes:
            raise InvalidMessage(f"a request of {len(body):,} bytes; at most {self._most_bytes:,} are sent")
        if len(body) >= self._too_many_bytes and len(envelopes) > 1:
            raise InvalidMessage(f"a request of {len(body):,} bytes; the peer did not take one like it")
        if not self._client.knows_who:
            await self._ping()
        answer = await self._client.post(self._batches, body)
        match answer.status:
            case HTTPStatus.OK if answer.content_type == OUTCOMES:
                self._require_proof(answer)
                failpoint("C11")
                return decode_outcomes(answer.body, len(envelopes))
            case HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                if len(envelopes) == 1:  # otherwise it is sent in parts, which also a proxy may ask for
                    self._require_proof(answer)
                self._too_many_bytes = min(self._too_many_bytes, len(body))
                raise InvalidMessage(f"a request of {len(body):,} bytes; the peer answered {answer}")
            case HTTPStatus.TOO_MANY_REQUESTS:
                self._require_proof(answer)
                return [BUSY] * len(envelopes)
            case _:
                raise self._failure(answer)

    def _require_proof(self, answer: Answer) -> None:
        if not answer.is_proven:
            raise ProtocolViolation(
                f"{self._peer}: the answer {answer} is not signed with the secret that it was asked with: another"
                " process listens there, or the peer has another secret"
            )

    def _failure(self, answer: Answer) -> TransportError:
        said = f"{self._peer}: the peer answered {answer}"
        if answer.status in _FORBIDDEN:
            return TransportError(f"{said}; check shared_secret and peers on both ends")
        if answer.status in _GONE:
            return ConnectionFailed(said)
        if 300 <= answer.status < 400:
            return ProtocolViolation(f"{said}; redirects are not followed: write the final address")
        if 200 <= answer.status < 300:
            return ProtocolViolation(f"{said}; no service that receives messages is at this address")
        return TransportError(said)
