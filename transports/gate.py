"""The gate behind every door: of the envelopes that a peer brings, those that it may send go to the receiver.

a type that the peer may not send        Rejected: a dead letter at the sender
a destination that is not this service   a dead letter here: the sender believes that it has arrived
any other                                received under the peer's own endpoint (durable.messages.scope)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from durable.envelope import Envelope
from durable.errors import StorageUnavailable
from durable.messages.scope import scoped
from durable.outcomes import STORED, Failed, Outcome, Rejected, merged
from durable.settings import Settings
from durable.transports import peers
from durable.transports.base import Receiver
from durable.transports.wire import UNWRITABLE

_LONGEST_SHOWN: Final = 200


@dataclass(frozen=True, slots=True)
class Gate:
    """Gate of one endpoint. `schemes` are those of the destinations that can lead to it; none where a broker routes, so
    that any may.
    """

    receiver: Receiver
    endpoint: str
    service: str
    settings: Settings
    schemes: tuple[str, ...] = ()

    async def receive(self, batch: Sequence[Envelope], peer: str | None) -> list[Outcome]:
        """Return an outcome for each envelope of a peer; None is one that has proven no name."""
        refused = await self._refused(batch, peer)
        fitting = [each for place, each in enumerate(batch) if place not in refused] if refused else batch
        stored = await self.receiver.receive(scoped(self.endpoint, peer), fitting) if fitting else []
        return merged(stored, refused)

    async def _refused(self, batch: Sequence[Envelope], peer: str | None) -> dict[int, Outcome]:
        settings, service = self.settings, self.service
        if not peers.may_use(settings, peer, self.endpoint):
            refusal = Rejected(f"{peer} may not send to {self.endpoint}: see endpoints in peers")
            return dict.fromkeys(range(len(batch)), refusal)
        uris = {each.destination for each in batch} if self.schemes else ()
        elsewhere = {uri for uri in uris if not peers.is_ours(settings, uri, self.schemes, service)}
        refused: dict[int, Outcome] = {}
        for place, each in enumerate(batch):
            if not peers.may_send(settings, peer, each.message_type):
                refused[place] = Rejected(f"{peer} may not send messages of type {each.message_type} to {service}")
            elif each.destination in elsewhere:
                refused[place] = await self._quarantine(each, peer)
        return refused

    async def _quarantine(self, envelope: Envelope, peer: str | None) -> Outcome:
        reason = f"the envelope is for {envelope.destination[:_LONGEST_SHOWN]}, which is not this service"
        facts = {"id": str(envelope.id), "type": envelope.message_type, "source": envelope.source}
        try:
            raw = msgspec.msgpack.encode(envelope)
            await self.receiver.reject(scoped(self.endpoint, peer), raw, reason, facts)
        except (StorageUnavailable, *UNWRITABLE) as error:
            return Failed(f"the receiver could not keep it: {type(error).__name__}")
        return STORED
