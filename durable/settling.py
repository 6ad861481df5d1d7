"""How a message that was not handled comes to its end, or to its next attempt: each is one statement.

RunLater     unowned, due later, its failures kept      Pause        its handler and its listener closed, handed back
HandBack     unowned, uncounted                         DeadLetter   moved, with every failure that is known
expired      moved to the history
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import Connection

from durable.envelope import Leased, NodeId
from durable.failpoints import failpoint
from durable.retry import DeadLetter, HandBack, Pause, RunLater
from durable.routing import LOCAL
from durable.storage import circuits, inbox, leases
from durable.storage.circuits import Kind
from durable.storage.database import Database
from durable.storage.rows import Failure, Letter
from durable.storage.statements import INCOMING
from durable.telemetry import Counters, Event, log


class Settling:
    """Settles messages that this node owns; a lease that was lost settles nothing."""

    def __init__(self, database: Database, node: NodeId, counters: Counters) -> None:
        self._database = database
        self._node = node
        self._counters = counters

    async def settle(
        self,
        lease: Leased,
        decision: RunLater | HandBack | Pause | DeadLetter,
        error: Exception,
        *,
        counted: int,
        failures: Sequence[Failure],
        parks: bool = False,
    ) -> None:
        """Do as was decided after `error`; `counted` attempts are not in the row yet."""
        match decision:
            case RunLater(delay=delay):
                failpoint("C19")
                await self._database.insist(
                    inbox.retry_later, self._node, lease, delay=delay, counted=counted, failures=failures
                )
                failpoint("C19")
                self._counters.add(Event.RETRIED)
            case HandBack():
                await self.hand_back([lease])
            case Pause(duration=duration, reason=reason):
                await self._database.insist(self._pause, lease, duration, reason)
            case DeadLetter():
                failpoint("C19")
                letter = Letter.from_error(error)
                await self.dead_letter(lease, letter, counted=counted, failures=failures, parks=parks)
                failpoint("C19")

    async def hand_back(self, owned: Sequence[Leased]) -> None:
        """To any node, as they are."""
        await self._database.insist(leases.release, INCOMING, self._node, [lease.key for lease in owned])

    async def begin_suspect_attempt(self, lease: Leased) -> int | None:
        """Count the attempt before it runs; the new count, or None when the lease was lost."""
        return await self._database.insist(inbox.begin_suspect_attempt, self._node, lease)

    async def expire(self, lease: Leased) -> bool:
        """By the database's clock; False when that is behind this node's."""
        expired = await self._database.insist(inbox.expire, self._node, lease)
        self._counters.add(Event.EXPIRED, int(expired))
        return expired

    async def dead_letter(
        self,
        lease: Leased,
        letter: Letter,
        *,
        counted: int = 1,
        failures: Sequence[Failure] = (),
        parks: bool = False,
    ) -> None:
        """With `parks` its key, or its ordered handler, stops in the same transaction."""
        moved = await self._database.insist(
            inbox.dead_letter, self._node, lease, letter, counted=counted, failures=failures, parks=parks
        )
        if moved:
            self._counters.add(Event.DEAD_LETTERED)
            log.error("dead letter %s (%s): %s", lease.envelope.id, lease.envelope.message_type, letter.reason)

    def _pause(self, conn: Connection, schema: str, lease: Leased, duration: timedelta, reason: str) -> None:
        """Its handler and the endpoint that it came by, for every node; then hand it back."""
        paused = [(Kind.HANDLER, lease.envelope.message_type)]
        if lease.endpoint != LOCAL:
            paused.append((Kind.LISTENER, lease.endpoint))
        for kind, key in paused:
            circuits.pause(conn, schema, kind, key, reason=reason, actor=f"node {self._node}", duration=duration)
        leases.release(conn, schema, INCOMING, self._node, [lease.key])
