"""The talk of a connection to the directory of another service, seen from the end that connects: facts in, what is
learned out.

    GREETING --WELCOME with leases--> OPEN: CONNECT, RESET and ANNOUNCE, then DIRECTORY after each change
        '-----WELCOME without-------> OPEN: LOOKUP now and then, OFFERS of this address alone
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from durable.errors import ConnectionFailed
from durable.outcomes import printable
from durable.transports.directories import Assembly
from durable.transports.frames import (
    Announce,
    Connect,
    Directory,
    Frame,
    Goodbye,
    Listing,
    Lookup,
    Offers,
    Received,
    Refused,
    Reset,
)
from durable.transports.tcp.client_side import Answered, ClientSide, ClientState, Ponged, Stray
from durable.transports.tcp.conversation import Reply
from durable.transports.tcp.proofs import ClientProof
from durable.transports.wire import encode
from durable.version import __version__


@dataclass(frozen=True, slots=True)
class Learned:
    """All that the peer knows. `left_out` listings were too large, or too many, to be told."""

    listings: list[Listing]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Offered:
    """Offers of the peer itself. An older peer has no directory."""

    offers: Offers


@dataclass(frozen=True, slots=True)
class Denied:
    """The announcement, or the lease, was refused."""

    reason: str


class ConnectingSide(ClientSide):
    """State of the connecting end of one connection. It holds `most_bytes` of a directory at most."""

    def __init__(
        self, service: str, node: int, max_frame_bytes: int, proof: ClientProof | None = None, *, most_bytes: int
    ) -> None:
        super().__init__(service, node, max_frame_bytes, proof)
        self._assembly = Assembly(most_bytes)

    def connect(self, name: str) -> Frame:
        """Return what to say first."""
        return Frame(Connect(name, __version__), self._next_channel())

    def reset(self, lease: float) -> Frame:
        return Frame(Reset(lease), self._next_channel())

    def goodbye(self) -> Frame:
        return Frame(Goodbye())

    def lookup(self) -> Frame:
        """Return the question to a peer without a directory."""
        return Frame(Lookup())

    def announce(self, listings: Sequence[Listing]) -> bytes:
        """Return the bytes of an announcement. Raises InvalidMessage when it is larger than the peer takes."""
        return encode(Frame(Announce(list(listings)), self._next_channel()), self._max_frame_bytes)

    def listen(self, item: Received) -> Learned | Offered | Denied | Answered | Ponged | Reply | Stray | None:
        """hear(), and what is learned. Raises ConnectionFailed when the peer ends the connection."""
        if self.state is not ClientState.GREETING:
            match item:
                case Frame(Directory() as part, _, size_bytes):
                    whole = self._assembly.add(part, size_bytes)
                    return None if whole is None else Learned(whole, part.left_out)
                case Frame(Offers() as offers):
                    return Offered(offers)
                case Frame(Refused(reason), 0):
                    raise ConnectionFailed(f"the peer ended the connection: {printable(reason)}")
                case Frame(Refused(reason)):
                    return Denied(printable(reason))
                case _:
                    pass
        return self.hear(item)
