"""The handling agents of a node by message type: where what arrives, and what is sent locally, goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from durable.agents.handling import HandlingAgent
from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, NodeId


class HandlerDispatcher:
    """The `Intake` of a node."""

    def __init__(self, agents: Mapping[str, HandlingAgent]) -> None:
        self._agents = agents

    def reserve(self, envelope: Envelope) -> NodeId:
        agent = self._agents.get(envelope.message_type)
        return agent.reserve(envelope) if agent is not None else ANY_NODE

    def accept(self, leases: Sequence[LeasedEnvelope]) -> None:
        by_type: dict[str, list[LeasedEnvelope]] = {}
        for lease in leases:
            by_type.setdefault(lease.envelope.message_type, []).append(lease)
        for message_type, group in by_type.items():
            self._agents[message_type].accept(group)

    def abandon(self, envelopes: Sequence[Envelope]) -> None:
        for envelope in envelopes:
            self._agents[envelope.message_type].buffer.done([envelope])
