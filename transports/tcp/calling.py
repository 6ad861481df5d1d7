"""The talk of a connection that is for calls alone, seen from the end that calls: facts in, what to do and to say out.

It greets and pings as a connection for batches does. Each call has a channel, and is answered on it once. A call that
is cancelled is forgotten here at once, and its answer, should it come, is a stray.
"""

from __future__ import annotations

from dataclasses import dataclass

from durable.errors import InvalidMessage
from durable.outcomes import printable
from durable.transports.frames import Call, Cancel, Fault, FaultKind, Frame, Offers, Received, Refused, Result
from durable.transports.tcp.client_side import Answered, ClientSide, ClientState, Ponged, Sendable, Stray, Unsendable
from durable.transports.tcp.conversation import Reply
from durable.transports.tcp.proofs import ClientProof
from durable.transports.wire import encode


@dataclass(frozen=True, slots=True)
class Told:
    """The services that can be called at the peer now."""

    offers: Offers


@dataclass(frozen=True, slots=True)
class Ended:
    """The call on this channel has this answer."""

    channel: int
    answer: Result | Fault


class CallingSide(ClientSide):
    """State of the calling end of one connection."""

    def __init__(self, service: str, node: int, max_frame_bytes: int, proof: ClientProof | None = None) -> None:
        super().__init__(service, node, max_frame_bytes, proof)
        self._calls: set[int] = set()  # channels

    @property
    def outstanding(self) -> int:
        """Calls sent and not yet answered."""
        return len(self._calls)

    def call(self, call: Call) -> Sendable | Unsendable:
        """Return the bytes of the call."""
        channel = self._next_channel()
        try:
            data = encode(Frame(call, channel), self._max_frame_bytes)
        except InvalidMessage as error:
            return Unsendable(str(error))
        self._calls.add(channel)
        return Sendable(channel, data)

    def cancel(self, channel: int) -> Frame | None:
        """Return what to say when nobody waits for this call any more; None when it is answered."""
        if channel not in self._calls:
            return None
        self._calls.discard(channel)
        return Frame(Cancel(), channel)

    def listen(self, item: Received) -> Told | Ended | Answered | Ponged | Reply | Stray | None:
        """hear(), and the answers to calls."""
        match item:
            case Frame(Result() | Fault() as answer, channel) if self.state is not ClientState.GREETING:
                return self._ended(channel, answer)
            case Frame(Offers() as offers) if self.state is not ClientState.GREETING:
                return Told(offers)
            case Frame(Refused(reason), channel) if channel in self._calls:
                return self._ended(channel, Fault(FaultKind.INVALID, printable(reason)))
            case _:
                pass
        return self.hear(item)

    def _ended(self, channel: int, answer: Result | Fault) -> Ended | Stray:
        if channel not in self._calls:
            return Stray(channel)
        self._calls.discard(channel)
        return Ended(channel, answer)
