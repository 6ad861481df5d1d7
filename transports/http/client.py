"""Requests to one peer over a pool of persistent connections, each with a deadline and signed, its answer bounded and
judged: is it the peer's?

It is built on transports of httpx, without the client around them: that follows redirects, obeys the proxies of the
environment and keeps cookies, none of which is wanted here, and takes nearly half of the time of a request.

A connection that is open may have been closed by the peer just before the next request came. That request is sent
again at once: whatever is posted here is recognised by the peer when it comes twice.

Errors of httpx and of the network become TransportErrors here, and nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

import httpx

from durable.errors import ConnectionFailed, PeerTimeout, ProtocolViolation
from durable.failpoints import failpoint, is_armed
from durable.settings import Settings
from durable.tasks.waiting import is_set_within
from durable.transports.http import auth as http_auth
from durable.transports.http.address import HttpAddress
from durable.transports.http.pool import Pool
from durable.transports.peers import Credentials
from durable.version import __version__

_MOST_BYTES_UNLESS_OK: Final = 1 << 16
_LONGEST_TEXT: Final = 300
_CLOSING_SECONDS: Final = 1.0
_USER_AGENT: Final = f"durable/{__version__}".encode()
_KEPT_SECONDS: Final = re.compile(r"\btimeout\s*=\s*([0-9]{1,9})\b", re.IGNORECASE)
_CLOSED_BY_PEER: Final = ("Server disconnected", "peer closed connection")


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a peer. As text: its status and its reason."""

    status: int
    headers: httpx.Headers
    body: bytes
    is_proven: bool
    """Is it signed with the secret that it was asked with? True where nothing was signed."""

    @property
    def content_type(self) -> str:
        return str(self.headers.get("content-type", "")).lower()

    def __str__(self) -> str:
        try:
            status = f"{self.status} {HTTPStatus(self.status).phrase}"
        except ValueError:
            status = str(self.status)
        said = _shown(self._said())
        return f"{status}: {said}" if said else status

    def _said(self) -> str:
        """Return the target of a redirect, the detail of a problem, or at least the kind of answer."""
        if "location" in self.headers:
            return f"to {self.headers['location']}"
        if self.content_type != "application/problem+json":
            return self.content_type
        try:
            return str(json.loads(self.body)["detail"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return self.content_type


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Endpoint for requests of one kind, and their common headers."""

    url: httpx.URL
    origin: str
    headers: list[tuple[bytes, bytes]]

    @classmethod
    def at(cls, uri: str, content_type: str | None = None) -> Endpoint:
        url = httpx.URL(uri)
        headers = [(b"host", url.netloc), (b"user-agent", _USER_AGENT), (b"accept-encoding", b"identity")]
        headers += [(b"content-type", content_type.encode())] if content_type else []
        return cls(url, f"{url.scheme}://{url.netloc.decode()}", headers)


Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, before it is signed."""

    method: str
    endpoint: Endpoint
    body: bytes
    headers: Headers = ()

    @property
    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        return [(name.lower().encode(), value.encode()) for name, value in self.headers]


class HttpClient:
    """The connections to one peer. An async context manager: leaving it ends what is under way, and closes them."""

    def __init__(
        self,
        address: HttpAddress,
        settings: Settings,
        credentials: Credentials | None,
        tls: Callable[[], ssl.SSLContext],
        *,
        service: str,
        most_connections: int | None = None,
    ) -> None:
        """`most_connections`: at once (default: what batches and a ping need)."""
        self.peer = str(address)
        self._shows_secret = settings.http_auth == "bearer"
        self._credentials = credentials
        self._service = service
        self._to = credentials.peer if credentials else ""
        self._tls = tls
        self._send_seconds = settings.send_timeout.total_seconds()
        self._connect_seconds = settings.connect_timeout.total_seconds()
        self._most_bytes = settings.max_frame_bytes
        self._most_connections = most_connections or settings.batches_in_flight + 1  # a ping beside the batches
        self._idle_seconds = settings.idle_timeout.total_seconds() / 2
        self._under_way: set[asyncio.Timeout] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._pool: Pool | None = None
        self._former: list[Pool] = []
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._pool = self._make_pool(self._tls())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._pool is not None
        pools, self._pool, self._former = [self._pool, *self._former], None, []
        now = asyncio.get_running_loop().time()
        for limit in self._under_way:
            limit.reschedule(now)
        await is_set_within(self._is_idle, _CLOSING_SECONDS)
        await asyncio.gather(*(pool.aclose() for pool in pools), *self._closing)

    def close_if_idle(self) -> bool:
        """Close the connections; False while a request is under way. The next request opens others."""
        if self._under_way:
            return False
        if self._pool is not None:
            self._former.append(self._pool)
            self._pool = self._make_pool(self._pool.tls)
            self._close_former()
        return True

    async def post(self, endpoint: Endpoint, body: bytes) -> Answer:
        """Return the peer's answer within `send_timeout`; raises TransportError for none, or one that is too large."""
        return await self._in_time(_Asked("POST", endpoint, body))

    async def get(self, endpoint: Endpoint, headers: Headers = ()) -> Answer:
        """Return the peer's answer as post() does."""
        return await self._in_time(_Asked("GET", endpoint, b"", headers))

    async def ask(
        self, method: str, endpoint: Endpoint, body: bytes, headers: Headers, sent: Callable[[], None]
    ) -> Answer:
        """Return the peer's answer, however long it takes, to a request that is sent once. `sent` is called just before
        its first byte leaves.
        """
        with self._translated():
            async with self._pool_in_use() as pool:
                return await self._once(pool, _Asked(method, endpoint, body, headers), _Connection(sent))

    async def _in_time(self, asked: _Asked) -> Answer:
        try:
            async with asyncio.timeout(self._send_seconds), self._pool_in_use() as pool:
                with self._translated():
                    return await self._again_and_again(pool, asked)
        except TimeoutError:
            raise PeerTimeout(f"{self.peer}: no answer within {self._send_seconds:g} seconds") from None

    @asynccontextmanager
    async def _pool_in_use(self) -> AsyncIterator[Pool]:
        """The connections with the certificates as they are now. Those with former ones are closed when idle."""
        pool = self._pool
        if pool is None:
            raise ConnectionFailed(f"{self.peer}: the sender was closed")
        if (tls := self._tls()) is not pool.tls:
            self._former.append(pool)
            pool = self._pool = self._make_pool(tls)
        pool.requests += 1
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._under_way.add(limit)
                self._is_idle.clear()
                yield pool
        except TimeoutError:
            if not limit.expired():
                raise
            raise ConnectionFailed(f"{self.peer}: the sender was closed before the answer") from None
        finally:
            self._under_way.discard(limit)
            if not self._under_way:
                self._is_idle.set()
            pool.requests -= 1
            self._close_former()

    def _close_former(self) -> None:
        """Close connections with former certificates in tasks of their own: this one may be cancelled meanwhile."""
        for pool in [each for each in self._former if not each.requests]:
            self._former.remove(pool)
            closing = asyncio.create_task(pool.aclose(), name=f"close connections to {self.peer}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _make_pool(self, tls: ssl.SSLContext) -> Pool:
        return Pool(tls, self._most_connections, self._idle_seconds)

    async def _again_and_again(self, pool: Pool, asked: _Asked) -> Answer:
        for spare in reversed(range(self._most_connections + 1)):
            connection = _Connection()
            try:
                return await self._once(pool, asked, connection)
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                if connection.is_fresh or not spare:  # each try takes a dead connection out of the pool
                    raise
        raise AssertionError("the last try has returned or raised")

    async def _once(self, pool: Pool, asked: _Asked, connection: _Connection) -> Answer:
        try:
            async with pool.connection() as carrying:
                signature = self._sign(asked)
                answer = await self._exchange(carrying, self._request(asked, signature, connection), signature)
                if (told := _KEPT_SECONDS.search(answer.headers.get("keep-alive", ""))) is not None:
                    pool.heed(float(told[1]))
                return answer
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            raise
        except BaseException:
            await connection.abandon()
            raise

    def _sign(self, asked: _Asked) -> http_auth.Signature | None:
        known = self._credentials
        if known is None or self._shows_secret:
            return None
        said = http_auth.unsigned(
            asked.body,
            to=self._to,
            at=asked.endpoint.origin,
            sender=self._service,
            key=known.key,
            timestamp=int(time.time()),
            nonce=uuid4().hex,
        )
        target, size_bytes = asked.endpoint.url.raw_path, len(asked.body)
        return http_auth.sign(known.secret, said, asked.method, target, size_bytes, asked.raw_headers)

    def _request(self, asked: _Asked, signature: http_auth.Signature | None, connection: _Connection) -> httpx.Request:
        body = asked.body
        headers = [*asked.endpoint.headers, *asked.raw_headers, (b"content-length", b"%d" % len(body))]
        if self._credentials is not None:
            shown = http_auth.bearer(self._credentials.secret) if signature is None else str(signature)
            headers.append((b"authorization", shown.encode()))
        breaks_off = body and (is_armed("C6") or is_armed("C7"))
        stream = _InHalves(body) if breaks_off else httpx.ByteStream(body)
        extensions = {"timeout": {"connect": self._connect_seconds}, "trace": connection.trace}
        return httpx.Request(asked.method, asked.endpoint.url, headers=headers, stream=stream, extensions=extensions)

    async def _exchange(
        self, carrying: httpx.AsyncHTTPTransport, request: httpx.Request, signature: http_auth.Signature | None
    ) -> Answer:
        response = await carrying.handle_async_request(request)
        status = response.status_code
        most_bytes = self._most_bytes if status == HTTPStatus.OK else _MOST_BYTES_UNLESS_OK
        body = bytearray()
        async with aclosing(response):
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > most_bytes:
                    raise ProtocolViolation(f"{self.peer}: answered {status} with more than {most_bytes:,} bytes")
        is_proven = signature is None or self._is_proven(response, signature, bytes(body))
        return Answer(status, response.headers, bytes(body), is_proven)

    def _is_proven(self, response: httpx.Response, signature: http_auth.Signature, body: bytes) -> bool:
        """Judge the answer, and remember which service it is that answers here."""
        assert self._credentials is not None
        shown = response.headers.get(http_auth.ANSWERED, "")
        service = http_auth.answering(shown, self._credentials.secret, signature, response.status_code, body)
        if service and not self._credentials.peer:
            self._to = service
        return bool(service)

    @property
    def knows_who(self) -> bool:
        """Tell whether requests can be signed for the service at this address; a ping finds out which it is."""
        return bool(self._to) or self._credentials is None or self._shows_secret

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            raise PeerTimeout(f"{self.peer}: no connection within {self._connect_seconds:g} seconds") from error
        except httpx.ConnectError as error:
            raise ConnectionFailed(f"connecting to {self.peer}: {_reason(error)}") from error
        except httpx.RemoteProtocolError as error:
            closed = str(error).startswith(_CLOSED_BY_PEER)
            raise (ConnectionFailed if closed else ProtocolViolation)(f"{self.peer}: {_shown(str(error))}") from error
        except (httpx.TransportError, OSError) as error:
            raise ConnectionFailed(f"{self.peer}: {_reason(error)}") from error


class _Connection:
    """Connection of one request, as httpx tells of it."""

    def __init__(self, sent: Callable[[], None] = lambda: None) -> None:
        self.is_fresh = False
        self._opened: Any = None
        self._sent = sent

    async def trace(self, event: str, details: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.started":
            self.is_fresh = True
        elif event == "connection.connect_tcp.complete":
            self._opened = details["return_value"]
        elif event == "http11.send_request_headers.started":
            self._sent()

    async def abandon(self) -> None:
        """Close it, if it was opened for this request: httpx forgets one when a TLS handshake is cancelled."""
        if self._opened is not None:
            await self._opened.aclose()


class _InHalves(httpx.AsyncByteStream):
    """A body that is written in halves, so that failpoints can lie between and behind them."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        half = len(self._body) // 2
        yield self._body[:half]
        failpoint("C6")
        yield self._body[half:]
        failpoint("C7")


def _shown(text: str) -> str:
    """Return the text of a peer, fit for people and logs."""
    return "".join(c if c.isprintable() else " " for c in text[:_LONGEST_TEXT])


def _reason(error: BaseException) -> str:
    """Return the error of the operating system, below the layers that wrap it and say less."""
    layer: BaseException | None = error
    while layer is not None:
        if isinstance(layer, BaseExceptionGroup):  # one for each address of a host
            layer = layer.exceptions[0]
        if isinstance(layer, OSError) and layer.strerror:
            return layer.strerror
        layer = layer.__cause__ or layer.__context__
    return str(error) or type(error).__name__
