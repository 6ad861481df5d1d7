"""Transport protocols: the interfaces between agents and the network.

Sender      one destination, as the sending agent sees it
Receiver    what a listener hands batches to: the receiving agent
Listener    one bound address
Provider    what a listener hands calls to: the services that this process offers
Caller      one address whose services are called
Directory   what a listener tells connected peers of: the providers that this service knows, and those they announce
Spoke       what a connection to the directory of another service is made for
Transport   makes senders and listeners for the URIs of one or more schemes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from durable.envelope import Envelope
from durable.outcomes import Outcome
from durable.transports.announcements import Announcer
from durable.transports.frames import Call, Fault, Listing, Offers, Result
from durable.transports.watchdog import Bounds

__all__ = ["Listener", "Receiver", "Sender", "Transport"]


class Sender(Protocol):
    """A destination. An async context manager: leaving it closes the connection.

    It connects when first used and again after a failure; it never retries by itself.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def send(self, batch: Sequence[Envelope]) -> list[Outcome]:
        """Deliver the batch and return one outcome for each envelope, in order.

        Several calls may be under way at once. Raises TransportError when the fate of the batch is unknown.
        """
        ...

    async def ping(self) -> None:
        """Travel the path that a batch takes, up to the peer's database; raise TransportError if it is broken."""
        ...


def keeps_order(sender: Sender) -> bool:
    """True when a batch is stored in its order, and nothing behind an envelope that was not stored.

    A sender that does says so by an attribute `keeps_order = True`. To any other a message of a key is given only when
    the one before it has been answered.
    """
    return getattr(sender, "keeps_order", False) is True


class Receiver(Protocol):
    """Receiver of the envelopes that a listener brings."""

    async def receive(self, endpoint: str, batch: Sequence[Envelope]) -> list[Outcome]:
        """Store the batch; an outcome of Stored or Duplicate means that it is committed. Never raises."""
        ...

    async def reject(self, endpoint: str, raw: bytes, reason: str, headers: Mapping[str, str] | None = None) -> None:
        """Keep bytes that are no envelope as a dead letter, with what is known of them as `headers`.

        Returns when they are committed; raises StorageUnavailable when they cannot be.
        """
        ...

    async def ready(self) -> bool:
        """Tell whether a batch can be stored now; the answer to a ping."""
        ...

    def credit(self) -> int:
        """Number of envelopes that there is room for now."""
        ...


class Listener(Protocol):
    """A bound address that hands batches to a receiver."""

    @property
    def endpoint(self) -> str:
        """The stable key under which envelopes are stored and recognised; never an address that may change."""
        ...

    @property
    def address(self) -> str:
        """The URI that peers send to, with the port that was bound."""
        ...

    async def serve(self, receiver: Receiver) -> None:
        """Bind and return; raises InvalidSetting when the address cannot be bound."""
        ...

    async def close(self) -> None:
        """Accept nothing new, answer the batches under way, and close."""
        ...

    def statistics(self) -> Mapping[str, int]:
        """Return the counters since serve(): connections, dropped, batches, envelopes."""
        ...


Answer = Result | Fault


class Provider(Protocol):
    """Offered services of this process, as a listener sees them. Nothing here waits, and nothing raises."""

    def offers(self) -> Offers:
        """Return what can be called now."""
        ...

    def watch(self, told: Callable[[], None]) -> Callable[[], None]:
        """Call `told` after each change of the offers, until the returned function is called."""
        ...

    def begin(
        self,
        call: Call,
        peer: str | None,
        answer: Callable[[Answer], None],
        has_room: Callable[[], bool] = lambda: True,
    ) -> Callable[[], None]:
        """Run a call of this peer, whose name was proved unless it is None; `answer` is called once, now or later.

        `has_room`: tells when the turn of the call has come whether a result can be taken; a call is not run where none
        can. The returned function cancels the call; then it has no answer.
        """
        ...


class Caller(Protocol):
    """An address whose services are called. An async context manager: leaving it closes the connection."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def offers(self) -> Offers:
        """Return what can be called there now. Raises TransportError when it cannot be reached."""
        ...

    async def call(self, call: Call, sent: Callable[[], None]) -> Answer:
        """Send the call once, and return its answer; a cancelled one is cancelled at the other end too.

        `sent` is called just before the first byte of the call leaves. Until then the call was surely not run, and
        afterwards it may have been, whatever is raised. Raises TransportError for no answer, InvalidMessage for a call
        that is larger than the peer takes.
        """
        ...


class Directory(Protocol):
    """Directory of this service, as a listener sees it. Nothing here waits. `name` is that of the process, for people.

    `watch` may tell of a change in any thread; everything else belongs to the event loop.
    """

    name: str

    @property
    def bounds(self) -> Bounds:
        """Bounds of the leases of connected peers."""
        ...

    def listings(self, peer: str | None) -> Sequence[Listing]:
        """Return the providers that this peer may call, whose name was proved unless it is None."""
        ...

    def watch(self, told: Callable[[], None]) -> Callable[[], None]:
        """Call `told` after each change of the listings, until the returned function is called."""
        ...

    def announce(self, connection: object, announcer: Announcer, listings: Sequence[Listing], size_bytes: int) -> None:
        """Know these as all that this connection offers. Raises InvalidMessage, and changes nothing then."""
        ...

    def end(self, connection: object) -> None:
        """Forget what this connection has announced."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """Services of a listener: those that can be called there, and the directory of all that this service knows."""

    provider: Provider | None = None
    directory: Directory | None = None


class Spoke(Protocol):
    """Process that connects to the directory of another service. `name` is its own, for people."""

    name: str
    lease: float
    """Seconds of the lease that it chooses; the nearest one within the bounds of the server counts."""

    def listings(self) -> Sequence[Listing]:
        """Return the services that it offers itself."""
        ...

    def watch(self, told: Callable[[], None]) -> Callable[[], None]:
        """Call `told` after each change of them, in any thread, until the returned function is called."""
        ...

    def learn(self, listings: Sequence[Listing]) -> None:
        """Take these as all that the peer knows."""
        ...


class Transport(Protocol):
    """Makes senders and listeners. `schemes` are those of the URIs it understands."""

    schemes: tuple[str, ...]

    def check(self, uri: str) -> None:
        """Raise InvalidSetting when this URI could never be sent to or listened on."""
        ...

    def resolve(self, uri: str, message_type: str) -> str:
        """Return the destination of messages of this type that are sent to `uri`; it is stored with each.

        For most transports this is `uri` itself; one that fans out by type names a destination for each, so that
        each has its own agent and latch. Resolving what is resolved changes nothing.
        """
        ...

    def sender(self, destination: str) -> Sender:
        """Make the sender to this destination, which resolve() returned."""
        ...

    def listener(self, uri: str, endpoint: str) -> Listener:
        """Make a listener at this URI, whose envelopes are stored under the key `endpoint`."""
        ...
