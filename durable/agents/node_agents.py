"""The agents of one node: how they are made, and what units of work, listeners and recovery ask of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from durable.agents.attempts import Attempts
from durable.agents.context import AgentContext
from durable.agents.handling import HandlingAgent
from durable.agents.intake import HandlerDispatcher
from durable.agents.pace import Standing
from durable.agents.receiving import ReceivingAgent
from durable.agents.sending import SendingAgent
from durable.agents.stuck_threads import StuckThreads
from durable.agents.woken import Woken
from durable.application.application import Application, Transports
from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, NodeId
from durable.errors import InvalidSetting, said
from durable.failpoints import failpoint
from durable.messages.routing import LOCAL
from durable.outbox.sessions import Sessions
from durable.storage.outbox import Sent
from durable.tasks.cancelling import raise_if_cancelled
from durable.tasks.crew import Crew
from durable.telemetry import OTHER, Subject, log

Hint = Callable[[str | None, str], None]
"""Hears of a destination, or None for the inbox, and of a key there that may have rows that no node owns."""


class NodeAgents:
    """The senders by destination, the handlers by message type, and the receiver of all listeners."""

    def __init__(
        self,
        application: Application,
        context: AgentContext,
        *,
        sessions: Sessions,
        transports: Transports,
        stuck: StuckThreads,
    ) -> None:
        self.node_id = ANY_NODE
        """The node, while rows are stored as its own."""
        self.woken = Woken()
        """Set when there is work to claim."""
        self.senders: dict[str, SendingAgent] = {}
        self.handlers: dict[str, HandlingAgent] = {}
        self.by_type: dict[str, HandlingAgent] = {}
        """The handlers with the older types that they serve, too."""
        self.receiver: ReceivingAgent | None = None
        self.sending: set[asyncio.Task[None]] = set()
        self.tasks: Crew
        """The crew in which the tasks of the senders run."""
        self._application = application
        self._context = context
        self._sessions = sessions
        self.transports = transports
        self._stuck = stuck
        self._hint: Hint = lambda destination, key: None
        self._dispatcher = HandlerDispatcher(self.by_type)
        self._unknown: dict[str, str] = {}

    def make(self, node: NodeId, hint: Hint) -> ReceivingAgent:
        """Make the handlers and the receiver of this node."""
        self._hint = hint
        context, application, suspects = self._context.at(node), self._application, asyncio.Lock()
        for message_type, handler in application.handlers.items():
            self.handlers[message_type] = HandlingAgent(
                handler,
                Attempts(handler, context, self._sessions, onion=application.stack, stuck=self._stuck),
                context.of(Subject.MESSAGE_TYPE, message_type),
                policy=application.policy(handler),
                on_capacity=self.woken.set,
                suspects=suspects,
                on_key_released=partial(hint, None),
            )
        served = application.by_type().items()
        self.by_type.update({name: self.handlers[handler.message_type] for name, handler in served})
        self.receiver = ReceivingAgent(
            context,
            self._dispatcher,
            spans=application.batch_spans,
            places=application.routes.places,
            on_key_stored=partial(hint, None),
        )
        return self.receiver

    def agent_for(self, destination: str) -> SendingAgent | None:
        """The sending agent of this destination, started if need be; None when no transport understands it."""
        agent = self.senders.get(destination)
        if agent is not None:
            return agent
        try:
            sender = self.transports.of(destination).sender(destination)
        except BaseException as error:  # the address is unknown here, or the transport is the application's
            raise_if_cancelled(error)
            self._tell_unknown(destination, error)
            return None
        agent = self.senders[destination] = SendingAgent(
            destination,
            sender,
            self._context.at(self.node_id).of(Subject.DESTINATION, self._counted_as(destination)),
            on_capacity=self.woken.set,
            spans=self._application.batch_spans,
            on_key_released=partial(self._hint, destination),
            fairness=self._application.routes.places.fair_destinations.get(destination),
        )
        sending = self.tasks.create_task(agent.run(), name=f"sending to {destination}")
        self.sending.add(sending)
        sending.add_done_callback(self.sending.discard)
        return agent

    def retire(self, destination: str) -> bool:
        """End the agent of an unused address; False when it has rows after all."""
        agent = self.senders.get(destination)
        if agent is None or not agent.retire():
            return False
        del self.senders[destination]
        return True

    def _counted_as(self, destination: str) -> str:
        return destination if destination in self._application.destinations() else OTHER

    def _tell_unknown(self, destination: str, error: BaseException) -> None:
        """Once, however often its envelopes are met."""
        if self._unknown.get(destination) != said(error):
            self._unknown[destination] = said(error)
            trace = None if isinstance(error, InvalidSetting) else error
            log.error("envelopes for %s stay in the outbox: %s", destination, said(error), exc_info=trace)

    def problems(self) -> list[str]:
        """Return the problems for the health check."""
        return [problem for agent in self.handlers.values() for problem in agent.problems()]

    def slowest_step(self, *others: Standing | None) -> Standing | None:
        """The step of an agent, or of these, that is nearest to its bound."""
        found = [agent.pace.slowest() for agent in self.senders.values()]
        found += [agent.slowest() for agent in self.handlers.values()]
        if self.receiver is not None:
            found.append(self.receiver.pace.slowest())
        steps = [step for step in (*found, *others) if step is not None]
        return max(steps, key=lambda step: step.share, default=None)

    # ------------------------------------------------------------------ for units of work

    def reserve(self, envelope: Envelope) -> NodeId:
        if envelope.execution_time is not None:
            return ANY_NODE
        if envelope.deliver_by is not None and envelope.is_late(self._context.clock.now()):
            return ANY_NODE  # it expires where it lies
        if envelope.destination == LOCAL:
            return self._dispatcher.reserve(envelope)
        sender = self.senders.get(envelope.destination)
        return self.node_id if sender is not None and sender.reserve(envelope) else ANY_NODE

    def deliver(self, sent: Sequence[Sent]) -> None:
        """Hand committed envelopes to their agents; in the loop."""
        failpoint("C4")
        by_destination: dict[str, list[LeasedEnvelope]] = {}
        for envelope, endpoint, owner, place in sent:
            if place.ordering_key is not None:
                if envelope.execution_time is None:
                    self._hint(None if endpoint else envelope.destination, place.ordering_key)
            elif owner == self.node_id != ANY_NODE:
                lease = LeasedEnvelope(envelope, endpoint=endpoint or envelope.destination)
                by_destination.setdefault(envelope.destination, []).append(lease)
        for destination, group in by_destination.items():
            if destination == LOCAL:
                self._dispatcher.accept(group)
            else:
                self.senders[destination].accept(group)
        if any(each.owner == ANY_NODE and each.place.ordering_key is None for each in sent):
            self.woken.set()

    def give_back(self, sent: Sequence[Sent]) -> None:
        """Give back the room of rows whose transaction was rolled back; from any thread."""
        for envelope, endpoint, owner, _ in sent:
            if owner != self.node_id or owner == ANY_NODE:
                continue
            if endpoint == LOCAL:
                self._dispatcher.abandon([envelope])
            else:
                self.senders[envelope.destination].abandon([envelope])
