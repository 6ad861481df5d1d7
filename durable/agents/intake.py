"""Intake of arrivals and of messages sent locally: into the handling agents of a node, or for any node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from durable.agents.handling import HandlingAgent
from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, NodeId


class Intake(Protocol):
    """The handlers of this node, as an arriving envelope sees them."""

    def reserve(self, envelope: Envelope) -> NodeId:
        """Reserve room for a message. Returns this node, or ANY_NODE when there is no room."""
        ...

    def accept(self, leases: Sequence[LeasedEnvelope]) -> None:
        """Take rows that were committed, and are owned by this node."""
        ...

    def abandon(self, envelopes: Sequence[Envelope]) -> None:
        """Give back the room of rows that were not stored after all."""
        ...


class LeftToOthers:
    """The Intake of a process that handles nothing: every row is left to any node."""

    def reserve(self, envelope: Envelope) -> NodeId:
        return ANY_NODE

    def accept(self, leases: Sequence[LeasedEnvelope]) -> None:
        raise AssertionError("nothing is reserved, so nothing is owned")

    def abandon(self, envelopes: Sequence[Envelope]) -> None:
        pass


class HandlerDispatcher:
    """The `Intake` of a node: its handling agents by message type."""

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
