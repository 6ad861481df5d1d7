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

from dataclasses import dataclass
from typing import Final

from durable.transports.frames import Frame

MAX_PINGS: Final = 16
"""Pings that one client may have unanswered."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Write this frame."""

    frame: Frame
