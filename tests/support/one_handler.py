"""One handler of one node on Postgres, driven by a test: it stores messages, lets them be handled and looks around."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Retry, message
from durable.agents.attempts import Attempts
from durable.agents.context import AgentContext
from durable.agents.handling import HandlingAgent
from durable.agents.stuck_threads import StuckThreads
from durable.application.handlers import Handler
from durable.application.middleware import MiddlewareStack
from durable.application.retry import Policy
from durable.clock import Clock, SystemClock
from durable.embedded import Embedded
from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, NodeId, new_id
from durable.messages.routing import Routes
from durable.outbox.envelope_factory import EnvelopeFactory
from durable.outbox.scope import Scope
from durable.outbox.sessions import Sessions
from durable.outbox.transactions import Ending
from durable.settings import load_settings
from durable.storage import inbox
from durable.storage.database import Database
from durable.storage.inbox import Arrival
from durable.storage.outbox import Sent
from durable.telemetry import Counters
from durable.testing import eventually
from tests.support.tables import Tables, shared_tables

NODE = NodeId(7)
BILLING = "tcp://billing:1"
ONCE = Retry(immediate=0, delays=[])


@message("handling.placed")
class Placed(msgspec.Struct):
    number: int


@message("handling.billed")
class Billed(msgspec.Struct):
    number: int


class Nobody:
    """A dispatcher without agents."""

    def reserve(self, envelopes: Sequence[Envelope]) -> list[NodeId]:
        return [ANY_NODE] * len(envelopes)

    def committed(self, sent: Sequence[Sent]) -> None:
        pass

    def committing(self, ending: Ending, sent: Sequence[Sent]) -> None:
        pass

    def abandoned(self, sent: Sequence[Sent]) -> None:
        pass


class Shop:
    """A node with one handler."""

    def __init__(self, tables: Tables, clock: Clock, **settings: Any) -> None:
        self.tables = tables
        self.settings = load_settings(**({"database_url": tables.url, "pool_size": 4} | settings))
        self.counters = Counters()
        self.database = Database(self.settings)
        routes = Routes()
        routes.route("handling.billed", BILLING)
        envelope_factory = EnvelopeFactory("shop", routes, self.settings, SystemClock())
        self.sessions = Sessions(self.settings, envelope_factory, Nobody(), Scope())
        self.asked_for_work = 0
        self.agent: HandlingAgent
        self.attempts: Attempts
        self._clock = clock

    def handles(
        self,
        function: Callable[..., Any],
        onion: MiddlewareStack | None = None,
        stuck: StuckThreads | None = None,
        **changes: Any,
    ) -> None:
        options: dict[str, Any] = {"retry": ONCE, "concurrency": 1, "max_batch": 1, "timeout": timedelta(seconds=10)}
        options |= {"message_type": "handling.placed", "cls": Placed, "function": function}
        handler = Handler(**options | changes)
        context = AgentContext(self.database, NODE, self.settings, self._clock, self.counters)
        self.attempts = Attempts(handler, context, self.sessions, onion=onion, stuck=stuck)
        self.agent = HandlingAgent(
            handler,
            self.attempts,
            context,
            policy=Policy(handler.retry or Retry(), handler.by_error),
            on_capacity=self._ask,
        )

    async def close(self) -> None:
        await self.sessions.close()
        await self.database.close()

    def _ask(self) -> None:
        self.asked_for_work += 1

    async def receive(
        self, *numbers: int, attempts: int = 0, interruptions: int = 0, **changes: Any
    ) -> list[LeasedEnvelope]:
        """Store orders as the receiving agent does, and hand them to the handler."""
        return await self.receive_all(
            [envelope(number, **changes) for number in numbers], attempts=attempts, interruptions=interruptions
        )

    async def receive_all(
        self, envelopes: Sequence[Envelope], *, attempts: int = 0, interruptions: int = 0
    ) -> list[LeasedEnvelope]:
        arrivals = [Arrival("shop", e, self.agent.reserve(e)) for e in envelopes]
        await self.database.transaction(inbox.store, arrivals)
        await self.tables.change(
            "UPDATE durable.incoming_envelopes SET attempts = %s, interruptions = %s", attempts, interruptions
        )
        leases = [
            LeasedEnvelope(e, 0, "shop", attempts, interruptions, ordering_key=e.partition_key) for e in envelopes
        ]
        self.agent.accept(leases)
        return leases

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Handle in the block; then stop as a node does."""
        running = asyncio.create_task(self.agent.run())
        try:
            yield
            self.agent.stop()
            async with asyncio.timeout(30):
                await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def settled(self) -> None:
        """Until the handler works on nothing."""
        await eventually(lambda: self.agent.buffer.used_count == 0, within=30, what="an idle handler")

    async def all_settled(self) -> None:
        """Until the inbox is empty: what was handed back is claimed again, as recovery does it."""

        async def is_empty() -> bool:
            await self.settled()
            claimed = await self.database.transaction(
                inbox.claim, message_type="handling.placed", batch_size=100, node=NODE
            )
            self.agent.take(claimed)
            return not (claimed or self.inbox())

        await eventually(is_empty, within=30, what="an empty inbox")

    def effects(self) -> list[int]:
        return self.tables.rows("SELECT number FROM effects ORDER BY effect")

    def sent(self) -> list[int]:
        bodies = "SELECT (convert_from(body, 'UTF8')::json->>'number')::integer FROM durable.outgoing_envelopes"
        return sorted(self.tables.rows(bodies))

    def inbox(self) -> list[Any]:
        """owner_id, epoch, attempts, is it put off?"""
        return self.tables.rows(
            "SELECT owner_id, epoch, attempts, execution_time > now() FROM durable.incoming_envelopes ORDER BY seq"
        )

    async def write(self, session: AsyncSession, number: int) -> None:
        await session.execute(text("INSERT INTO effects (number) VALUES (:number)"), {"number": number})

    def take_away(self, lease: LeasedEnvelope) -> None:
        """What a sweep does when it holds this node for dead."""
        self.tables.execute(
            "UPDATE durable.incoming_envelopes SET owner_id = 0, epoch = epoch + 1 WHERE id = %s", lease.envelope.id
        )


def envelope(number: int, **changes: Any) -> Envelope:
    made = Envelope(
        id=new_id(),
        message_type="handling.placed",
        destination="shop",
        source="elsewhere",
        correlation_id=new_id(),
        body=msgspec.json.encode(Placed(number)),
        sent_at=datetime.now(UTC),
    )
    return msgspec.structs.replace(made, **changes)


@contextmanager
def shop_tables(server: Embedded) -> Iterator[Tables]:
    """A database with tables for effects: `once` refuses the second of a number at COMMIT."""
    with shared_tables(server) as tables:
        tables.execute("CREATE TABLE effects (effect serial, number integer)")
        tables.execute("CREATE TABLE once (number integer UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        yield tables
