"""The vocabulary of the TCP protocol: what the two ends of a connection can say to each other.

    kind         by       says
    HELLO        client   the versions it speaks, who it is, the largest frame it takes; its nonce, and the key
                          of the secret that it knows
    CHALLENGE    server   who it is, its nonce, and its proof that it knows the secret too
    PROOF        client   the client's proof
    WELCOME      server   the version chosen, who it is, its limits, the first credit
    REFUSED      server   no to what came on this channel; the connection goes on, and no credit was used
    BATCH        client   a count, and as many envelopes
    OUTCOMES     server   one for each envelope of the batch on this channel, and more credit
    CREDIT       server   more credit
    PING, PONG   client, server: can a batch be stored now?
    GOODBYE      either   nothing new from me; what is under way will be finished
    LOOKUP       client   which services can be called here? It is told at once, and of each change
    OFFERS       server   the services that can be called here now
    CALL         client   a service, a method, the arguments, and how long the call may wait for its turn
    CANCEL       client   nobody waits for the call on this channel any more
    RESULT       server   the result of the call on this channel
    FAULT        server   why there is none
    CONNECT      client   who it is; from now on the server tells which services it knows, and watches over the client
    ANNOUNCE     client   the services that the client offers itself, instead of those that it has announced before
    RESET        client   the lease that begins now; one out of the server's bounds is refused, and changes nothing
    DIRECTORY    server   the services that it knows, now and after each change, in one frame or in several

Each frame is an array on the wire: later versions add fields at the end, which earlier ones skip.
durable.transports.tcp.conversation defines the order of frames, durable.transports.wire their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, IntEnum
from typing import Annotated, Any, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from durable.envelope import Envelope, Moment
from durable.outcomes import Outcome, Rejected

VERSIONS: Final = (1,)
MAX_ENVELOPES: Final = 1_000
"""Envelopes in a batch, at most."""

MAX_OFFERS: Final = 1_000
"""Services that can be called at one address, at most."""
MAX_METHODS: Final = 1_000
"""Methods of a service, at most."""
MAX_LISTINGS: Final = 10_000
"""Providers in a directory, at most."""
MAX_ADDRESSES: Final = 20
"""Addresses of a provider, at most."""

LONGEST_TRACEPARENT: Final = 100
"""Characters; version 00 has 55."""
LONGEST_TRACESTATE: Final = 512

Name = Annotated[str, Meta(max_length=200)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Versions = Annotated[list[int], Meta(max_length=100)]
Digest = Annotated[bytes, Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=2_000)]
Seconds = Annotated[float, Meta(gt=0, le=10**9)]


class Hello(Struct, array_like=True, frozen=True):
    versions: Versions
    service: Name
    node: Count
    max_frame_bytes: Count
    nonce: Digest = b""
    key: Name = ""


class Challenge(Struct, array_like=True, frozen=True):
    service: Name
    node: Count
    nonce: Digest
    proof: Digest = b""


class Proof(Struct, array_like=True, frozen=True):
    proof: Digest


class Welcome(Struct, array_like=True, frozen=True):
    """The leases are the bounds of RESET, in seconds; 0 where the server has no directory. `name` is the name of the
    process for people, and `program` the version of durable.
    """

    version: int
    service: Name
    node: Count
    max_frame_bytes: Count
    max_envelopes: Count
    credit: Count
    shortest_lease: float = 0.0
    longest_lease: float = 0.0
    name: Name = ""
    program: Name = ""


class Refused(Struct, array_like=True, frozen=True):
    """`versions` are those that the server speaks, when that is why."""

    reason: str
    versions: Versions = []


class Batch(Struct, array_like=True, frozen=True):
    """`clock` is what the sender's says, when one of the envelopes has a deadline."""

    count: Count
    envelopes: Annotated[list[Envelope], Meta(max_length=MAX_ENVELOPES)]
    clock: Moment | None = None


class Outcomes(Struct, array_like=True, frozen=True):
    outcomes: Annotated[list[Outcome], Meta(max_length=MAX_ENVELOPES)]
    credit: Count = 0


class Credit(Struct, array_like=True, frozen=True):
    credit: Count


class Ping(Struct, array_like=True, frozen=True):
    pass


class Pong(Struct, array_like=True, frozen=True):
    ready: bool


class Goodbye(Struct, array_like=True, frozen=True):
    pass


class Lookup(Struct, array_like=True, frozen=True):
    pass


class Signature(Struct, array_like=True, frozen=True):
    """A method that can be called. `digest` is that of the schema of its arguments and of its result."""

    method: Name
    digest: Digest
    text: Text


class Offer(Struct, array_like=True, frozen=True):
    """A service that can be called here. `is_partial`: it has methods that the peer may not call, and is not told."""

    service: Name
    version: Name
    signatures: Annotated[list[Signature], Meta(max_length=MAX_METHODS)]
    is_partial: bool = False


class Offers(Struct, array_like=True, frozen=True):
    offers: Annotated[list[Offer], Meta(max_length=MAX_OFFERS)]


class Listing(Struct, array_like=True, frozen=True):
    """A provider of a service: who offers it where. `load` are the calls that run and wait there.

    A singleton has one holder at a time; `epoch` rises with each of them, and is 0 for all that do not hold it.
    Unix addresses work on the `machine` alone.
    """

    offer: Offer
    application: Name
    node: Count
    addresses: Annotated[list[Name], Meta(max_length=MAX_ADDRESSES)]
    since: Moment
    load: Count = 0
    is_singleton: bool = False
    epoch: Count = 0
    machine: Name = ""


def without_loads(listings: Iterable[Listing]) -> list[Listing]:
    """Return what these say beside how busy the providers are."""
    return [replace(listing, load=0) for listing in listings]


class Call(Struct, array_like=True, frozen=True):
    """`expires_in` are the seconds after which the call is not to begin any more; None: none. One that is not
    `awaited` goes on when its caller is gone. `epoch` is that of the singleton which is meant; 0: any provider.
    `traceparent` and `tracestate` are the W3C trace context of the caller, if it has any. `version` and `schema` are
    the version of the service that the caller has, and the digest of its schema of the method; empty: not compared.
    """

    service: Name
    method: Name
    body: bytes
    expires_in: Seconds | None = None
    awaited: bool = True
    epoch: Count = 0
    traceparent: Annotated[str, Meta(max_length=LONGEST_TRACEPARENT)] = ""
    tracestate: Annotated[str, Meta(max_length=LONGEST_TRACESTATE)] = ""
    version: Name = ""
    schema: Digest = b""


class Cancel(Struct, array_like=True, frozen=True):
    pass


class Result(Struct, array_like=True, frozen=True):
    body: bytes


class FaultKind(Enum):
    UNKNOWN = "unknown"
    """no such service or method here"""
    INVALID = "invalid"
    """the arguments, or the result, do not fit the contract"""
    RAISED = "raised"
    """the method raised an error"""
    EXPIRED = "expired"
    """the call waited for its turn for too long, and did not begin"""
    OVERLOADED = "overloaded"
    """too many calls wait already, and this one did not begin"""
    FORBIDDEN = "forbidden"
    """this peer may not call this method"""
    GONE = "gone"
    """the provider ended before the answer; the call may have been run"""
    ENDING = "ending"
    """the provider is ending, and this one did not begin"""
    SUPERSEDED = "superseded"
    """the provider does not hold the singleton in this epoch, and the call did not begin"""
    INCOMPATIBLE = "incompatible"
    """the call was made against another version or schema of the service, and did not begin"""


class Fault(Struct, array_like=True, frozen=True):
    """`error` is the type of the error that the method raised."""

    kind: FaultKind
    text: str
    error: Name = ""


class PartlyReadable(Struct, frozen=True):
    """A BATCH as it arrived when some of it is no envelope: what could be read, and what to say of the rest.

    `rejected` is keyed by the position in the batch, in ascending order.
    """

    count: int
    envelopes: list[Envelope]
    rejected: dict[int, Rejected]
    clock: datetime | None = None


class Connect(Struct, array_like=True, frozen=True):
    """`name` is the name of the process for people, and `program` the version of durable."""

    name: Name = ""
    program: Name = ""


class Announce(Struct, array_like=True, frozen=True):
    listings: Annotated[list[Listing], Meta(max_length=MAX_OFFERS)]


class Reset(Struct, array_like=True, frozen=True):
    """`lease` are the seconds after which the connection ends, unless it is reset again before."""

    lease: Seconds


class Directory(Struct, array_like=True, frozen=True):
    """Part of a directory; there are `more` of it. `left_out` listings of it are told in no part."""

    listings: Annotated[list[Listing], Meta(max_length=MAX_LISTINGS)]
    more: bool = False
    left_out: Count = 0


class FrameKind(IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    BATCH = 4
    OUTCOMES = 5
    CREDIT = 6
    PING = 7
    PONG = 8
    GOODBYE = 9
    CHALLENGE = 10
    PROOF = 11
    LOOKUP = 12
    OFFERS = 13
    CALL = 14
    CANCEL = 15
    RESULT = 16
    FAULT = 17
    CONNECT = 18
    ANNOUNCE = 19
    RESET = 20
    DIRECTORY = 21


Greeting = Hello | Challenge | Proof | Welcome
OfBatches = Refused | Batch | Outcomes | Credit | Ping | Pong | Goodbye
OfCalls = Lookup | Offers | Call | Cancel | Result | Fault
OfDirectories = Connect | Announce | Reset | Directory
Content = Greeting | OfBatches | OfCalls | OfDirectories


@dataclass(frozen=True, slots=True)
class Frame:
    """Statement of one end to the other. `size_bytes` is its size on the wire, when it came from there."""

    content: Content | PartlyReadable
    channel: int = 0
    size_bytes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Damaged:
    """A frame of which no more is known than where it ended and, most likely, its channel."""

    channel: int
    reason: str


Received = Frame | Damaged

TYPES: Final[dict[FrameKind, type[Content]]] = {
    FrameKind.HELLO: Hello,
    FrameKind.WELCOME: Welcome,
    FrameKind.REFUSED: Refused,
    FrameKind.BATCH: Batch,
    FrameKind.OUTCOMES: Outcomes,
    FrameKind.CREDIT: Credit,
    FrameKind.PING: Ping,
    FrameKind.PONG: Pong,
    FrameKind.GOODBYE: Goodbye,
    FrameKind.CHALLENGE: Challenge,
    FrameKind.PROOF: Proof,
    FrameKind.LOOKUP: Lookup,
    FrameKind.OFFERS: Offers,
    FrameKind.CALL: Call,
    FrameKind.CANCEL: Cancel,
    FrameKind.RESULT: Result,
    FrameKind.FAULT: Fault,
    FrameKind.CONNECT: Connect,
    FrameKind.ANNOUNCE: Announce,
    FrameKind.RESET: Reset,
    FrameKind.DIRECTORY: Directory,
}
KINDS: Final[dict[type[Any], FrameKind]] = {content: kind for kind, content in TYPES.items()}
