"""Deletion of the rows that a peer has stored: they gather for a moment, so that one commit deletes many batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from sqlalchemy import Connection

from durable.agents.context import AgentContext
from durable.envelope import LeasedEnvelope
from durable.failpoints import failpoint
from durable.storage import outbox
from durable.telemetry import Event

_AT_ONCE: Final = 1_000


class Deletions:
    """Deletes the acknowledged rows of one destination. `done` is told of the rows that are gone."""

    def __init__(self, context: AgentContext, done: Callable[[Sequence[LeasedEnvelope]], None]) -> None:
        self._context = context
        self._done = done
        self._sent: list[LeasedEnvelope] = []
        self._deleting: list[LeasedEnvelope] = []
        self._changed = asyncio.Event()
        self._is_awaited = False
        self._is_closed = False

    def add(self, stored: Sequence[LeasedEnvelope]) -> None:
        """Delete the rows of these envelopes soon."""
        self._sent += stored
        self._changed.set()

    def hurry(self) -> None:
        """Delete the next ones without waiting for more."""
        self._is_awaited = True

    def close(self) -> None:
        """End run() when all that was added is deleted."""
        self._is_closed = True
        self._changed.set()

    def under_way(self) -> Sequence[LeasedEnvelope]:
        """Return the rows that are still to be deleted."""
        return [*self._sent, *self._deleting]

    async def run(self) -> None:
        linger = self._context.settings.delete_linger.total_seconds()
        while not (self._is_closed and not self._sent):
            await self._changed.wait()
            if len(self._sent) < _AT_ONCE and not self._is_closed and not self._is_awaited:
                await asyncio.sleep(linger)
            self._changed.clear()
            self._is_awaited = False
            if self._sent:
                failpoint("C12")
                await self._delete()
                failpoint("C13")
                self._done(self._deleting)
                self._deleting = []

    async def _delete(self) -> None:
        counters = self._context.counters
        deleted = await self._context.database.transaction_with_retry(self._delete_all)
        counters.add(Event.SENT, deleted)
        if deleted < len(self._deleting):
            counters.add(Event.LEASE_LOST, len(self._deleting) - deleted)

    def _delete_all(self, conn: Connection, schema: str) -> int:
        """Delete what is there now: rows that the database refuses are told from the wiring only where others pass."""
        self._deleting += self._sent
        self._sent = []
        keep_body = self._context.settings.history_bodies
        return outbox.delete_sent(conn, schema, self._context.node, self._deleting, keep_body=keep_body)
