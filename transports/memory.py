"""Transport within one process, for tests and for queues that need no network: `memory://name`.

A sender calls the receiver directly, so everything happens in the order in which it is awaited. Listeners and faults
belong to the MemoryTransport: two transports do not see each other. A test can make any URI fail as networks do:

    break_(uri)     batches under way fail, and new ones find nobody: ConnectionFailed
    silence(uri)    batches and pings get no answer: PeerTimeout after `send_timeout`
    restore(uri)    all is well again
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import Final, Self

from durable.envelope import Envelope
from durable.errors import ConnectionFailed, InvalidSetting, PeerTimeout, TransportError
from durable.outcomes import BUSY, Outcome
from durable.schemes import normal_scheme
from durable.settings import Settings
from durable.transports.base import Receiver
from durable.transports.uris import split

SCHEMES: Final = ("memory",)


class _Fault(Enum):
    BROKEN = "broken"
    SILENT = "silent"


def parse_destination(uri: str) -> str:
    """Return the address. Raises InvalidSetting unless it is memory:// and a name."""
    parts = split(uri, "write a name, as in memory://orders")
    if parts.scheme not in SCHEMES or not parts.netloc or parts.path or parts.query or parts.fragment:
        raise InvalidSetting(f"{uri}: write a name and nothing else, as in memory://orders")
    return normal_scheme(uri)


class MemoryTransport:
    """A `durable.transports.base.Transport` that ends where it begins."""

    schemes: tuple[str, ...] = SCHEMES

    def __init__(self, settings: Settings) -> None:
        self.send_timeout = settings.send_timeout
        self._drain_seconds = settings.drain_timeout.total_seconds()
        self._listeners: dict[str, MemoryListener] = {}
        self._faults: dict[str, _Fault] = {}
        self._under_way: dict[asyncio.Timeout, str] = {}

    def with_settings(self, settings: Settings) -> Self:
        """The same listeners and faults, seen with other settings."""
        other = copy.copy(self)
        other.send_timeout = settings.send_timeout
        other._drain_seconds = settings.drain_timeout.total_seconds()
        return other

    def check(self, uri: str) -> None:
        """Raise InvalidSetting unless this is memory:// and a name."""
        parse_destination(uri)

    def resolve(self, uri: str, message_type: str) -> str:
        return parse_destination(uri)

    def sender(self, destination: str) -> MemorySender:
        return MemorySender(self, parse_destination(destination))

    def listener(self, uri: str, endpoint: str) -> MemoryListener:
        return MemoryListener(self, parse_destination(uri), endpoint, self._drain_seconds)

    def break_(self, uri: str) -> None:
        """Fail batches under way to this URI, and all later ones until restore()."""
        self._faults[uri] = _Fault.BROKEN
        for deadline, destination in self._under_way.items():
            if destination == uri and not deadline.expired():
                deadline.reschedule(0)

    def silence(self, uri: str) -> None:
        """Answer nothing that is sent to this URI from now on, until restore()."""
        self._faults[uri] = _Fault.SILENT

    def restore(self, uri: str) -> None:
        """End the fault of this URI."""
        self._faults.pop(uri, None)

    def _bind(self, listener: MemoryListener) -> None:
        if listener.address in self._listeners:
            raise InvalidSetting(f"{listener.address}: another listener has this name; choose another")
        self._listeners[listener.address] = listener

    def _unbind(self, listener: MemoryListener) -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    @contextlib.asynccontextmanager
    async def _reaching(self, uri: str) -> AsyncIterator[MemoryListener]:
        """The listener behind this URI, for `send_timeout` at most, unless a fault is in the way."""
        deadline = asyncio.timeout(self.send_timeout.total_seconds())
        self._under_way[deadline] = uri
        try:
            async with deadline:
                if self._faults.get(uri) is _Fault.SILENT:
                    await asyncio.get_running_loop().create_future()
                yield self._listener(uri)
        except TimeoutError:
            raise self._failure(uri) from None
        finally:
            self._under_way.pop(deadline)

    def _listener(self, uri: str) -> MemoryListener:
        if self._faults.get(uri) is _Fault.BROKEN or uri not in self._listeners:
            raise ConnectionFailed(f"{uri}: no listener at this address")
        return self._listeners[uri]

    def _failure(self, uri: str) -> TransportError:
        if self._faults.get(uri) is _Fault.BROKEN:
            return ConnectionFailed(f"{uri}: the connection broke")
        return PeerTimeout(f"{uri}: no answer within {self.send_timeout.total_seconds():g} seconds")


class MemorySender:
    """A `durable.transports.base.Sender`."""

    keeps_order = True

    def __init__(self, transport: MemoryTransport, destination: str) -> None:
        self._transport = transport
        self._destination = destination

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def send(self, batch: Sequence[Envelope]) -> list[Outcome]:
        """Send envelopes. Returns their outcomes in order; Busy for those beyond the receiver's credit.

        Raises ConnectionFailed when nobody listens, PeerTimeout when the receiver takes longer than `send_timeout`.
        """
        if not batch:
            return []
        async with self._transport._reaching(self._destination) as listener:
            return await listener._receive(list(batch))

    async def ping(self) -> None:
        """Raise TransportError unless a listener is there and could store a batch now."""
        async with self._transport._reaching(self._destination) as listener:
            if not await listener._ready():
                raise TransportError(f"{self._destination}: the peer cannot store anything now")


class MemoryListener:
    """A `durable.transports.base.Listener`."""

    def __init__(self, transport: MemoryTransport, uri: str, endpoint: str, drain_seconds: float) -> None:
        self._transport = transport
        self._uri = uri
        self._endpoint = endpoint
        self._drain_seconds = drain_seconds
        self._receiver: Receiver | None = None
        self._under_way = 0
        self._idle = asyncio.Event()
        self._counts: Counter[str] = Counter(connections=0, dropped=0, batches=0, envelopes=0, refused=0)

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def address(self) -> str:
        return self._uri

    def statistics(self) -> Mapping[str, int]:
        """Return the counters since serve(); those of connections stay 0."""
        return dict(self._counts)

    async def serve(self, receiver: Receiver) -> None:
        """Register the listener. Raises InvalidSetting when another listener of this transport has the name."""
        self._transport._bind(self)
        self._receiver = receiver

    async def close(self) -> None:
        """Be found no more, and wait at most `drain_timeout` for the batches under way."""
        self._transport._unbind(self)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                while self._under_way:
                    self._idle.clear()
                    await self._idle.wait()

    async def _receive(self, batch: list[Envelope]) -> list[Outcome]:
        assert self._receiver is not None
        self._under_way += 1
        try:
            taken = batch[: max(0, self._receiver.credit())]
            outcomes = await self._receiver.receive(self._endpoint, taken) if taken else []
        finally:
            self._under_way -= 1
            self._idle.set()
        self._counts["batches"] += 1
        self._counts["envelopes"] += len(taken)
        return outcomes + [BUSY] * (len(batch) - len(taken))

    async def _ready(self) -> bool:
        assert self._receiver is not None
        return await self._receiver.ready()
