"""Where what arrives, and what is sent locally, goes: to the handling agents of a node, or to any node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from durable.agents.handling import HandlingAgent
from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, NodeId


class Intake(Protocol):
    """The handlers of this node, as an arriving envelope sees them."""

    def reserve(self, envelope: Envelope) -> NodeId:
        """This node, which now keeps room for it, or ANY_NODE."""
        ...

    def accept(self, leases: Sequence[LeasedEnvelope]) -> None:
        """They are committed, owned by this node."""
        ...

    def abandon(self, envelopes: Sequence[Envelope]) -> None:
        """They were not stored after all: give the room back."""
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
