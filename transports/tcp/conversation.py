"""The talk between the two ends of a TCP connection: facts in, what to do and to say out.

*Channels.* The client numbers each batch and each ping, and the server answers on the same channel, in whatever order
the answers are ready. An answer to a channel that is answered already, or was never used, is a stray: it is counted,
and does nothing.

*Credit.* The server grants credit, counted in envelopes, and the client pays for each envelope that it sends. So the
server decides how much can be under way, and a client without credit waits instead of filling buffers. A batch beyond
the credit is answered Busy and costs nothing, as a refused one does. When no answers are to come, and less credit is
left than a batch needs, it is spent on a part of the batch: waiting for more might last for ever.

*Calls.* A client that looks for services is told what can be called. Calls use no credit: the server answers that it
is overloaded. Each is answered once on its channel, unless the client cancels it first.

*Proofs.* Where a secret is shared, each end proves that it knows it before anything else is said
(durable.transports.tcp.proofs). An end whose TLS certificate was checked needs no other proof.

    ClientSide   GREETING --WELCOME--> OPEN --GOODBYE--> LEAVING
                    |  '--REFUSED, or no proof: ConnectionFailed
                    '--^ CHALLENGE: PROOF

    ServerSide   AWAITING_HELLO --HELLO--> AWAITING_PROOF --PROOF--> OPEN --leave()--> LEAVING
                    |      '----HELLO, no proof needed---------------^
                    '--^ no version in common: REFUSED, and the client may try another
                 no proof, or a wrong one: REFUSED, and the connection is dropped

An end that is LEAVING starts no new exchange: batches under way are answered, then the connection is closed. A frame
that is not allowed in the state of an end raises ProtocolViolation, and the connection is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Final

import msgspec

from durable.envelope import Envelope
from durable.errors import ConnectionFailed, InvalidMessage, ProtocolViolation
from durable.outcomes import BUSY, LONGEST_REASON, Failed, Outcome, Rejected, merged, printable, tidy
from durable.transports.deadlines import departure
from durable.transports.frames import (
    MAX_ENVELOPES,
    VERSIONS,
    Announce,
    Batch,
    Call,
    Cancel,
    Challenge,
    Connect,
    Credit,
    Damaged,
    Fault,
    FaultKind,
    Frame,
    Goodbye,
    Hello,
    Lookup,
    Outcomes,
    PartlyReadable,
    Ping,
    Pong,
    Proof,
    Received,
    Refused,
    Reset,
    Result,
    Welcome,
)
from durable.transports.tcp.proofs import WRONG_PROOF, ClientProof, ServerProof
from durable.transports.watchdog import Bounds
from durable.transports.wire import encode
from durable.version import __version__

MAX_PINGS: Final = 16
"""Pings that one client may have unanswered."""

_LAST_CHANNEL: Final = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Reply:
    """Write this frame."""

    frame: Frame


# The client ------------------------------------------------------------------------------------------------------


class ClientState(Enum):
    GREETING = "greeting"
    OPEN = "open"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class Answered:
    """The batch on this channel has these outcomes."""

    channel: int
    outcomes: list[Outcome]


@dataclass(frozen=True, slots=True)
class Ponged:
    channel: int
    ready: bool


@dataclass(frozen=True, slots=True)
class Stray:
    """An answer to a batch that is not under way: never sent, or answered already. Nothing is done with it."""

    channel: int


@dataclass(frozen=True, slots=True)
class Sendable:
    """The first of the envelopes, paid for, as the bytes to write now."""

    channel: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Unsendable:
    """The first envelope, alone, can never be sent to this peer."""

    reason: str


class ClientSide:
    """State of the sending end of one connection."""

    def __init__(self, service: str, node: int, max_frame_bytes: int, proof: ClientProof | None = None) -> None:
        self.state = ClientState.GREETING
        self.credit = 0
        self.bounds: Bounds | None = None
        """Bounds of the leases of connected peers; None where the server has no directory."""
        self.server = ("", 0)
        """Service and node of the server, in its own words."""
        shown = (proof.nonce, proof.key) if proof is not None else (b"", "")
        self.node = node
        self._hello = Hello(list(VERSIONS), service, node, max_frame_bytes, *shown)
        self._proof = proof
        self._is_proven = proof is None or not proof.is_needed
        self._outstanding: dict[int, int] = {}  # channel -> envelopes
        self._last_channel = 0
        self._max_frame_bytes = 0
        self._max_envelopes = 0

    @property
    def outstanding(self) -> int:
        """Envelopes sent and not yet answered."""
        return sum(self._outstanding.values())

    def greet(self) -> Frame:
        return Frame(self._hello)

    def offer(self, envelopes: Sequence[Envelope], now: datetime | None = None) -> Sendable | Unsendable | None:
        """Spend credit on as many of these as may be sent in one frame; None: wait until something is heard.

        `now` is told to the server with what has a deadline.
        """
        count = min(len(envelopes), self._max_envelopes)
        if self.state is not ClientState.OPEN or self.credit == 0:
            return None
        if self.credit < count:
            if self._outstanding:
                return None
            count = self.credit
        return self._pack(envelopes, count, now)

    def ping(self) -> Frame:
        return Frame(Ping(), self._next_channel())

    def hear(self, item: Received) -> Answered | Ponged | Reply | Stray | None:
        """Take in what arrived; what is returned concerns one channel, None the connection or nothing.

        Raises ConnectionFailed when the server will not talk, or proves nothing, ProtocolViolation when it talks
        nonsense.
        """
        match item:
            case Frame(Welcome() as welcome) if self.state is ClientState.GREETING:
                self._welcomed(welcome)
            case Frame(Challenge() as challenge) if self.state is ClientState.GREETING and self._proof is not None:
                answer = self._proof.answer(self._hello, challenge)
                self._is_proven = True
                return Reply(Frame(answer))
            case Frame(Refused(reason, versions)) if self.state is ClientState.GREETING:
                speaks = f"; the peer speaks versions {versions}" if versions else ""
                raise ConnectionFailed(f"refused: {printable(reason)}{speaks}")
            case Damaged(_, reason):
                raise ProtocolViolation(reason)
            case Frame(Outcomes(outcomes, credit), channel) if self.state is not ClientState.GREETING:
                return self._answered(channel, outcomes, credit)
            case Frame(Refused(reason), channel) if self.state is not ClientState.GREETING:
                return self._refused(channel, reason)
            case Frame(Credit(credit)) if self.state is not ClientState.GREETING:
                self.credit += credit
            case Frame(Pong(ready), channel) if self.state is not ClientState.GREETING:
                return Ponged(channel, ready)
            case Frame(Goodbye()):
                self.state = ClientState.LEAVING
            case Frame(content):
                raise ProtocolViolation(
                    f"unexpected frame: a server must not say {type(content).__name__} to a client {self.state.value}"
                )
        return None

    def _welcomed(self, welcome: Welcome) -> None:
        if not self._is_proven:
            raise ConnectionFailed("the peer did not prove that it knows the secret; set it on both ends")
        if welcome.version not in self._hello.versions or not welcome.max_envelopes:
            raise ProtocolViolation(
                f"malformed welcome: version {welcome.version} was not offered, or no envelopes are allowed"
            )
        self.state = ClientState.OPEN
        self.server = welcome.service, welcome.node
        if 0 < welcome.shortest_lease <= welcome.longest_lease:
            self.bounds = Bounds(welcome.shortest_lease, welcome.longest_lease)
        self.credit = welcome.credit
        self._max_frame_bytes = welcome.max_frame_bytes
        self._max_envelopes = min(welcome.max_envelopes, MAX_ENVELOPES)

    def _answered(self, channel: int, outcomes: list[Outcome], credit: int) -> Answered | Stray:
        count = self._outstanding.pop(channel, None)
        if count is None:  # its credit was counted the first time, if ever
            return Stray(channel)
        if count != len(outcomes):
            raise ProtocolViolation(f"malformed answer: {len(outcomes)} outcomes for {count} envelopes")
        self.credit += credit
        return Answered(channel, tidy(outcomes, LONGEST_REASON))

    def _refused(self, channel: int, reason: str) -> Answered | Stray:
        count = self._outstanding.pop(channel, None)
        if count is None:
            return Stray(channel)
        self.credit += count
        return Answered(channel, [Failed(printable(reason))] * count)

    def _pack(self, envelopes: Sequence[Envelope], count: int, now: datetime | None) -> Sendable | Unsendable:
        """Halve a batch until its parts fit: a large batch travels in parts, an impossible envelope is found."""
        channel = self._next_channel()
        while True:
            try:
                part = list(envelopes[:count])
                data = encode(Frame(Batch(count, part, departure(part, now)), channel), self._max_frame_bytes)
            except InvalidMessage as error:
                if count == 1:
                    return Unsendable(f"envelope {envelopes[0].id}: {error}")
                count //= 2
            else:
                self.credit -= count
                self._outstanding[channel] = count
                return Sendable(channel, data)

    def _next_channel(self) -> int:
        self._last_channel = self._last_channel % _LAST_CHANNEL + 1
        return self._last_channel


# The server ------------------------------------------------------------------------------------------------------


class ServerState(Enum):
    AWAITING_HELLO = "awaiting hello"
    AWAITING_PROOF = "awaiting proof"
    OPEN = "open"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class TurnAway:
    """Write this frame, and drop the connection for this reason."""

    frame: Frame
    reason: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """Command to give the envelopes to the receiver, and then to answer this channel with its outcomes."""

    channel: int
    envelopes: list[Envelope]
    size_bytes: int
    rejected: dict[int, Rejected] = field(default_factory=dict)
    clock: datetime | None = None
    """The clock of the client, sent when one of the envelopes has a deadline."""

    def outcomes(self, received: list[Outcome]) -> list[Outcome]:
        """Return an outcome for each envelope of the batch: the receiver's, and Rejected for those it was not given."""
        return merged(received, self.rejected)


@dataclass(frozen=True, slots=True)
class Probe:
    """Find out whether a batch could be stored, then answer this channel with `pong`."""

    channel: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Command to say what can be called here, now and after each change."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Command to run the call, and then to answer this channel with what became of it."""

    channel: int
    call: Call


@dataclass(frozen=True, slots=True)
class Abandon:
    """Command to cancel the call on this channel, if it is still under way."""

    channel: int


@dataclass(frozen=True, slots=True)
class Register:
    """Command of the client for its place in the directory. A refusal is the answer on this channel."""

    channel: int
    content: Connect | Announce | Reset
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Leave:
    """End of the client: finish the batches under way and close."""


Action = Reply | TurnAway | Deliver | Probe | Tell | Begin | Abandon | Register | Leave


class ServerSide:
    """State of the receiving end of one connection. `room` is the number of envelopes that could be taken now."""

    def __init__(
        self,
        service: str,
        node: int,
        max_frame_bytes: int,
        proof: ServerProof | None = None,
        leases: Bounds | None = None,
        name: str = "",
    ) -> None:
        self.state = ServerState.AWAITING_HELLO
        self.hello: Hello | None = None
        """The words of a client that is known by now."""
        self.unspent = 0
        self.peer = "a stranger"
        self.proven: str | None = None
        """The name that the client has proved, by its certificate or by a secret of its own."""
        self._proof = proof
        self._challenged: tuple[Hello, Challenge] | None = None
        self._service = service
        self._node = node
        self._max_frame_bytes = max_frame_bytes
        self._leases = leases
        self._name = name
        self.peer_max_frame_bytes = 0
        self._under_way: dict[int, int] = {}  # channel -> envelopes
        self._pings: set[int] = set()
        self._calls: set[int] = set()  # channels

    @property
    def calls_under_way(self) -> int:
        """Calls received and not yet answered."""
        return len(self._calls)

    @property
    def is_greeting(self) -> bool:
        """True until the client is known."""
        return self.state in (ServerState.AWAITING_HELLO, ServerState.AWAITING_PROOF)

    @property
    def under_way(self) -> int:
        """Envelopes received and not yet answered."""
        return sum(self._under_way.values())

    def hear(self, item: Received, room: int) -> Action:
        """Return the actions for a frame. Raises ProtocolViolation for one that is not allowed, or not now."""
        match item:
            case Frame(Call() as call, channel) if not self.is_greeting:
                return self._called(call, channel)
            case Frame(Cancel(), channel) if not self.is_greeting:
                self.abandon(channel)
                return Abandon(channel)
            case Frame(Lookup()) if not self.is_greeting:
                return Tell()
            case Frame(Connect() | Announce() | Reset() as content, channel, size_bytes) if not self.is_greeting:
                return Register(channel, content, size_bytes)
            case Damaged(channel, reason):
                return _refuse(channel, reason)
            case Frame(Hello() as hello) if self.state is ServerState.AWAITING_HELLO:
                return self._greeted(hello, room)
            case Frame(Proof() as proof) if self.state is ServerState.AWAITING_PROOF:
                return self._shown(proof, room)
            case Frame(Batch() | PartlyReadable()) if not self.is_greeting:
                return self._batch(item, room)
            case Frame(Ping(), channel) if not self.is_greeting:
                return self._pinged(channel)
            case Frame(Goodbye()):
                return Leave()
            case Frame(content):
                raise ProtocolViolation(
                    f"unexpected frame: a client must not say {type(content).__name__} to a server {self.state.value}"
                )

    def answer(self, channel: int, outcomes: list[Outcome], room: int) -> Frame:
        """The batch on this channel is dealt with."""
        if len(outcomes) != self._under_way[channel]:
            raise ValueError(f"{len(outcomes)} outcomes for {self._under_way[channel]} envelopes")
        del self._under_way[channel]
        return self._outcomes(channel, outcomes, room)

    def pong(self, channel: int, ready: bool) -> Frame:
        self._pings.discard(channel)
        return Frame(Pong(ready), channel)

    def abandon(self, channel: int) -> None:
        """Wait for no answer to the call on this channel."""
        self._calls.discard(channel)

    def end(self, channel: int, answer: Result | Fault) -> bytes | None:
        """Return the answer to the call on this channel as the bytes to write; None for one that was cancelled.

        A result that is larger than the client takes is answered with a fault.
        """
        if channel not in self._calls:
            return None
        self._calls.discard(channel)
        try:
            return encode(Frame(answer, channel), self.peer_max_frame_bytes)
        except InvalidMessage as error:
            return encode(Frame(Fault(FaultKind.INVALID, f"the result does not fit into a frame: {error}"), channel))

    def grant(self, room: int) -> Frame | None:
        """More credit, when room has appeared that makes a difference."""
        credit = self._credit_for(room)
        if credit == 0 or credit < self.unspent:
            return None
        self.unspent += credit
        return Frame(Credit(credit))

    def leave(self) -> Frame:
        """Say goodbye; batches that cross it on the way are answered Busy, and are sent elsewhere or later."""
        self.state = ServerState.LEAVING
        return Frame(Goodbye())

    def _greeted(self, hello: Hello, room: int) -> Reply | TurnAway:
        if not set(hello.versions) & set(VERSIONS):
            return Reply(Frame(Refused("no version in common", list(VERSIONS))))
        if self._proof is None:
            return self._welcome(hello, room)
        challenge = self._proof.challenge(hello, self._service, self._node)
        if challenge is None:
            return _turn_away("a secret that is known here must be proven; see shared_secret and peers on both ends")
        self.state = ServerState.AWAITING_PROOF
        self._challenged = hello, challenge
        return Reply(Frame(challenge))

    def _shown(self, proof: Proof, room: int) -> Reply | TurnAway:
        assert self._proof is not None
        assert self._challenged is not None
        hello, challenge = self._challenged
        known = self._proof.proven(hello, challenge, proof)
        if known is None:
            return _turn_away(WRONG_PROOF)
        self.proven = known.peer
        return self._welcome(hello, room)

    def _welcome(self, hello: Hello, room: int) -> Reply:
        self.state = ServerState.OPEN
        self.hello = hello
        self.peer = f"{hello.service} node {hello.node}"
        if self.proven not in (None, hello.service):
            self.peer += f", certified as {self.proven}"
        self.unspent = room
        self.peer_max_frame_bytes = hello.max_frame_bytes
        version = max(set(hello.versions) & set(VERSIONS))
        welcome = Welcome(version, self._service, self._node, self._max_frame_bytes, MAX_ENVELOPES, room)
        if (leases := self._leases) is not None:
            welcome = msgspec.structs.replace(
                welcome,
                shortest_lease=leases.shortest,
                longest_lease=leases.longest,
                name=self._name,
                program=__version__,
            )
        return Reply(Frame(welcome))

    def _batch(self, frame: Frame, room: int) -> Reply | Deliver:
        batch, channel = frame.content, frame.channel
        assert isinstance(batch, Batch | PartlyReadable)
        rejected = batch.rejected if isinstance(batch, PartlyReadable) else {}
        held = len(batch.envelopes) + len(rejected)
        if batch.count != held or held == 0:
            return _refuse(channel, f"malformed batch: the count says {batch.count} envelopes, and {held} are there")
        if channel in self._under_way:
            raise ProtocolViolation(f"malformed batch: channel {channel} is used twice")
        if held > self.unspent or self.state is ServerState.LEAVING:
            return Reply(self._outcomes(channel, [BUSY] * held, room))
        self.unspent -= held
        self._under_way[channel] = held
        return Deliver(channel, batch.envelopes, frame.size_bytes, rejected, batch.clock)

    def _called(self, call: Call, channel: int) -> Reply | Begin:
        if channel in self._calls:
            raise ProtocolViolation(f"malformed call: channel {channel} is used twice")
        if self.state is ServerState.LEAVING:
            return Reply(Frame(Fault(FaultKind.ENDING, "the provider is ending"), channel))
        self._calls.add(channel)
        return Begin(channel, call)

    def _pinged(self, channel: int) -> Probe:
        if len(self._pings) >= MAX_PINGS:
            raise ProtocolViolation(f"too many pings: more than {MAX_PINGS} at once")
        self._pings.add(channel)
        return Probe(channel)

    def _outcomes(self, channel: int, outcomes: list[Outcome], room: int) -> Frame:
        credit = self._credit_for(room)
        self.unspent += credit
        # A character takes at most 4 bytes: with this many for each reason the frame is within the client's limit.
        fitting = self.peer_max_frame_bytes // (8 * len(outcomes))
        return Frame(Outcomes(tidy(outcomes, min(fitting, LONGEST_REASON)), credit), channel)

    def _credit_for(self, room: int) -> int:
        if self.state is ServerState.LEAVING:
            return 0
        return max(0, room - self.unspent - self.under_way)


def _refuse(channel: int, reason: str) -> Reply:
    return Reply(Frame(Refused(reason), channel))


def _turn_away(reason: str) -> TurnAway:
    return TurnAway(Frame(Refused(reason)), reason)
