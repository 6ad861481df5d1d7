"""The server of a TCP connection, as durable.transports.tcp.conversation describes it: facts in, what to do out."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

import msgspec

from durable.envelope import Envelope
from durable.errors import InvalidMessage, ProtocolViolation
from durable.grammar import several
from durable.outcomes import BUSY, LONGEST_REASON, Outcome, Rejected, merged, tidy
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
from durable.transports.tcp.conversation import MAX_PINGS, Reply
from durable.transports.tcp.proofs import WRONG_PROOF, ServerProof
from durable.transports.watchdog import Bounds
from durable.transports.wire import encode
from durable.version import __version__


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
            raise ValueError(
                f"{several(len(outcomes), 'outcomes')} for {several(self._under_way[channel], 'envelopes')}"
            )
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
