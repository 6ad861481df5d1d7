"""The agents of any number of nodes on one database, without the nodes: nothing happens that the test does not ask for.

So the steps of a race are put in order by hand: node 1 claims, node 1 is declared dead, node 2 claims, node 1 finishes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from sqlalchemy.ext.asyncio import AsyncSession

from durable import Context, Retry
from durable.agents.attempts import Attempts
from durable.agents.context import AgentContext
from durable.agents.handling import HandlingAgent
from durable.agents.receiving import ReceivingAgent
from durable.agents.sending import SendingAgent
from durable.application.handlers import Handler
from durable.application.retry import Policy
from durable.clock import SystemClock
from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, NodeId
from durable.messages.routing import Routes
from durable.outbox.envelope_factory import EnvelopeFactory
from durable.outbox.scope import Scope
from durable.outbox.sessions import Sessions
from durable.outbox.transactions import Ending
from durable.outcomes import Outcome
from durable.settings import load_settings
from durable.storage import inbox, leases, outbox
from durable.storage.database import Database
from durable.storage.outbox import Sent
from durable.storage.sql.recovery import INCOMING, OUTGOING
from durable.telemetry import Counters
from durable.transports.base import Sender
from tests.failure.app import ADD_EFFECT, OrderPlaced
from tests.failure.leftovers import MESSAGE_TYPE

QUICK: dict[str, Any] = {
    "heartbeat_interval": timedelta(seconds=0.3),
    "heartbeat_stale": timedelta(seconds=1.5),
    "dormant_grace": timedelta(seconds=0.1),
    "sweep_interval": timedelta(seconds=0.2),
    "poll_interval": timedelta(seconds=0.1),
    "forgotten_after": timedelta(seconds=0.5),
    "ping_interval": timedelta(seconds=0.1),
    "delete_linger": timedelta(seconds=0.01),
    "drain_timeout": timedelta(seconds=3),
}


class Nobody:
    """Stands for handlers and agents that have no room: every row is left to any node."""

    def reserve(self, envelope: Envelope) -> NodeId:
        return ANY_NODE

    def accept(self, leases: Sequence[LeasedEnvelope]) -> None:
        raise AssertionError("nobody has reserved room")

    def abandon(self, envelopes: Sequence[Envelope]) -> None:
        raise AssertionError("nobody has reserved room")


class _NoAgents:
    """What a unit of work tells its outcome when no node runs."""

    def reserve(self, envelopes: Sequence[Envelope]) -> list[NodeId]:
        return [ANY_NODE] * len(envelopes)

    def committed(self, sent: Sequence[Sent]) -> None:
        pass

    def committing(self, ending: Ending, sent: Sequence[Sent]) -> None:
        pass

    abandoned = committed


class Workbench:
    """An async context manager: agents that were started are cancelled when it is left, and connections closed."""

    def __init__(self, database: str, **settings: Any) -> None:
        self.settings = load_settings(database_url=database, **{**QUICK, **settings})
        self.database = Database(self.settings)
        self.counters = Counters()
        routes = Routes()
        routes.handled_here(MESSAGE_TYPE)
        envelope_factory = EnvelopeFactory("orders", routes, self.settings, SystemClock())
        self.sessions = Sessions(self.settings, envelope_factory, _NoAgents(), Scope())
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.sessions.close()
        await self.database.close()

    def context(self, node: NodeId = ANY_NODE) -> AgentContext:
        return AgentContext(self.database, node, self.settings, counters=self.counters)

    def start(self, agent: HandlingAgent | SendingAgent | ReceivingAgent) -> asyncio.Task[None]:
        task = asyncio.create_task(agent.run(), name=type(agent).__name__)
        self._tasks.append(task)
        return task

    def handling(
        self,
        node: NodeId,
        function: Callable[..., Awaitable[None]],
        *,
        retry: Retry | None = None,
        max_batch: int = 1,
        concurrency: int = 4,
    ) -> HandlingAgent:
        handler = Handler(
            message_type=MESSAGE_TYPE,
            cls=OrderPlaced,
            function=function,
            retry=retry or Retry(immediate=0, delays=()),
            concurrency=concurrency,
            max_batch=max_batch,
            timeout=self.settings.handler_timeout,
        )
        agent = HandlingAgent(
            handler,
            Attempts(handler, self.context(node), self.sessions),
            self.context(node),
            policy=Policy(handler.retry or Retry()),
            on_capacity=lambda: None,
        )
        self.start(agent)
        return agent

    def receiving(self, node: NodeId) -> ReceivingAgent:
        agent = ReceivingAgent(self.context(node), Nobody())
        self.start(agent)
        return agent

    def sending(self, node: NodeId, destination: str, sender: Sender) -> SendingAgent:
        agent = SendingAgent(
            destination,
            sender,
            self.context(node),
            on_capacity=lambda: None,
        )
        self.start(agent)
        return agent

    # ------------------------------------------------------------------ what recovery does, by hand

    async def claim_incoming(self, agent: HandlingAgent, node: NodeId) -> int:
        """Give this agent of this node what is unowned; returns how much it was."""
        claimed = await self.database.transaction(inbox.claim, message_type=MESSAGE_TYPE, batch_size=100, node=node)
        agent.take(claimed)
        return len(claimed)

    async def claim_outgoing(self, agent: SendingAgent, node: NodeId) -> int:
        claimed = await self.database.transaction(outbox.claim, {agent.destination: 100}, node=node)
        agent.take(claimed)
        return len(claimed)

    async def declare_dead(self, node: NodeId) -> None:
        """What the sweep does with a dormant node, all at once."""
        for table in (OUTGOING, INCOMING):
            await self.database.transaction(leases.release_dormant, table, node, 1_000)

    async def promote(self) -> None:
        for table in (OUTGOING, INCOMING):
            await self.database.transaction(leases.promote_due, table, 1_000)


class DirectSender:
    """A `Sender` that hands batches to a receiving agent without any transport."""

    def __init__(self, receiver: ReceivingAgent) -> None:
        self._receiver = receiver

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def send(self, batch: Sequence[Envelope]) -> list[Outcome]:
        return await self._receiver.receive("billing", batch)

    async def ping(self) -> None:
        pass


class Clerk:
    """A handler that a test can hold in the middle of its work, after it has written its effect."""

    def __init__(self, node: NodeId, *, held: bool = False) -> None:
        self.node = node
        self.begun = asyncio.Event()
        self._go = asyncio.Event()
        self._error: Exception | None = None
        if not held:
            self._go.set()

    def go_on(self, error: Exception | None = None) -> None:
        """Let it finish, or fail."""
        self._error = error
        self._go.set()

    async def handle(self, order: OrderPlaced, session: AsyncSession, ctx: Context) -> None:
        await session.execute(ADD_EFFECT, {"envelope_id": ctx.id, "order_id": order.order_id, "process": self.node})
        self.begun.set()
        await self._go.wait()
        if self._error is not None:
            raise self._error
