"""The client of a TCP connection, as durable.transports.tcp.conversation describes it: facts in, what to say out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Final

from durable.envelope import Envelope
from durable.errors import ConnectionFailed, InvalidMessage, ProtocolViolation
from durable.grammar import several
from durable.outcomes import LONGEST_REASON, Failed, Outcome, printable, tidy
from durable.transports.deadlines import departure
from durable.transports.frames import (
    MAX_ENVELOPES,
    VERSIONS,
    Batch,
    Challenge,
    Credit,
    Damaged,
    Frame,
    Goodbye,
    Hello,
    Outcomes,
    Ping,
    Pong,
    Received,
    Refused,
    Welcome,
)
from durable.transports.tcp.conversation import Reply
from durable.transports.tcp.proofs import ClientProof
from durable.transports.watchdog import Bounds
from durable.transports.wire import encode

_LAST_CHANNEL: Final = 2**32 - 1


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
            raise ProtocolViolation(
                f"malformed answer: {several(len(outcomes), 'outcomes')} for {several(count, 'envelopes')}"
            )
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
