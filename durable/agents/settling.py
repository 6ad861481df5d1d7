"""Ends and next attempts of messages that were not handled; each is one statement.

RunLater     unowned, due later, its failures kept      Pause        its handler is stopped, and it is handed back
HandBack     unowned, uncounted                         DeadLetter   moved, with every failure that is known
ToTheEnd     unowned, last, with other headers          expired      moved to the history
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec
from sqlalchemy import Connection

from durable.agents.attempts import is_suspect
from durable.agents.context import AgentContext
from durable.application.handlers import Handler
from durable.application.retry import DeadLetter, HandBack, Pause, RunLater, ToTheEnd
from durable.envelope import TENANT, LeasedEnvelope, NodeId
from durable.errors import MissingKey, said
from durable.failpoints import failpoint
from durable.messages import validation as screening
from durable.messages.routing import LOCAL
from durable.messages.scope import listener_of
from durable.messages.sealed import is_sealed
from durable.outcomes import LONGEST_REASON
from durable.plain import plain_text
from durable.storage import circuits, inbox, leases, parked, status
from durable.storage.circuits import CircuitKind
from durable.storage.expiry import bury_incoming
from durable.storage.inbox import LATE_NOW, Lateness
from durable.storage.rows import UNCOUNTED, Letter, Tried, storable
from durable.storage.sql.recovery import INCOMING
from durable.telemetry import Event, log


class Settling:
    """Settles messages of one handler that this node owns; a lease that was lost settles nothing."""

    def __init__(self, handler: Handler, context: AgentContext) -> None:
        settings = context.settings
        self.parks = handler.parks(settings.on_dead_letter)
        """True if a dead letter stops its key, or its ordered handler."""
        self._handler = handler.message_type
        self._share_of = handler.share_of
        self._database = context.database
        self._node = context.node
        self._counters = context.counters
        self._keep_body = settings.history_bodies
        self._limits = settings.limits
        self._ring = context.ring
        buries = (handler.on_expiry or settings.on_expiry) == "dead-letter"
        self._expire = bury_incoming if buries else inbox.expire
        self._expired = Event.DEAD_LETTERED if buries else Event.EXPIRED
        self.on_delayed: Callable[[timedelta], None] = lambda delay: None
        """Hears after how long a message is due again."""

    async def settle(
        self,
        lease: LeasedEnvelope,
        decision: RunLater | HandBack | ToTheEnd | Pause | DeadLetter,
        error: BaseException,
        tried: Tried,
    ) -> None:
        """Carry out the verdict on `error`."""
        write = self._database.transaction_with_retry
        match decision:
            case RunLater(delay=delay):
                if await self._expires_within(lease, delay, error, tried):
                    return
                failpoint("C19")
                is_own = await write(inbox.retry_later, self._node, lease, tried, delay=delay)
                failpoint("C19")
                self._counters.add(Event.RETRIED if is_own else Event.LEASE_LOST)
                self.on_delayed(delay)  # also without the lease: a lost reply of COMMIT looks like that
            case HandBack():
                await self.give_back([lease])
            case ToTheEnd(headers=changes):
                await self._put_back(lease, changes, tried)
            case Pause():
                await write(pause_and_release, self._node, self._handler, lease, decision, tried)
            case DeadLetter():
                failpoint("C19")
                await self.dead_letter(lease, Letter.from_error(error), tried)
                failpoint("C19")

    async def _put_back(self, lease: LeasedEnvelope, changes: Mapping[str, str | None], tried: Tried) -> None:
        merged = {**lease.envelope.headers, **changes}
        headers = {plain_text(name): plain_text(value) for name, value in merged.items() if value is not None}
        envelope = msgspec.structs.replace(lease.envelope, headers=headers)
        if reason := screening.find_error(envelope, **self._limits):
            why = f"it cannot be put back with other headers: {reason}"
            letter = Letter.because(why, "headers that are refused", envelope.message_type)
            await self.dead_letter(lease, letter, tried)
            return
        fair_key = self._share_of(envelope) if self._share_of else None
        body = envelope.body
        if is_sealed(body) and envelope.headers.get(TENANT) != lease.envelope.headers.get(TENANT):
            try:
                body = self._ring.resealed(lease.envelope, envelope)  # it is sealed for its tenant
            except MissingKey as error:
                await self.park([lease], error.key_id)
                return
        is_own = await self._database.transaction_with_retry(
            inbox.put_back, self._node, lease, tried, headers=headers, fair_key=fair_key, body=body
        )
        self._counters.add(Event.RETRIED if is_own else Event.LEASE_LOST)

    async def hand_back(self, owned: Sequence[LeasedEnvelope], *, is_interrupted: bool = False) -> None:
        """Release messages to any node, unchanged, or marked like those of a node that died."""
        await self._database.transaction_with_retry(
            leases.release, INCOMING, self._node, [lease.key for lease in owned], is_interrupted=is_interrupted
        )

    async def park(self, leases: Sequence[LeasedEnvelope], key_id: str) -> None:
        """Let messages wait, uncounted, until a node has this encryption key."""
        parked_count = await self._database.transaction_with_retry(
            parked.park, self._node, [lease.key for lease in leases]
        )
        self._counters.add(Event.PARKED, parked_count)
        self._ring.tell_missing(key_id, parked_count)

    async def begin_suspect_attempt(self, lease: LeasedEnvelope) -> int | None:
        """Count the attempt before it runs; the new count, or None when the lease was lost."""
        return await self._database.transaction_with_retry(inbox.begin_suspect_attempt, self._node, lease)

    async def give_back(self, owned: Sequence[LeasedEnvelope]) -> None:
        """Release messages to any node after an attempt that does not count: that of a suspect was counted before."""
        for suspect in filter(is_suspect, owned):
            await self._database.transaction_with_retry(inbox.take_back_attempt, self._node, suspect)
        if sound := [lease for lease in owned if not is_suspect(lease)]:
            await self.hand_back(sound)

    async def now(self) -> datetime:
        """Return the time by the database's clock."""
        return await self._database.transaction_with_retry(status.clock)

    async def expire(self, lease: LeasedEnvelope, lateness: Lateness = LATE_NOW) -> bool:
        """Expire a message by the database's clock; False when that is behind this node's."""
        expired = await self._database.transaction_with_retry(
            self._expire, self._node, lease, lateness, keep_body=self._keep_body
        )
        self._counters.add(self._expired, int(expired))
        return expired

    async def _expires_within(
        self, lease: LeasedEnvelope, delay: timedelta, error: BaseException, tried: Tried
    ) -> bool:
        """End it now if another attempt after this delay would come too late: nothing could save it until then."""
        if lease.envelope.deliver_by is None:
            return False
        reason = f"the next attempt, {delay} later, would come after its deliver_by; this one failed: {said(error)}"
        return await self.expire(lease, Lateness(delay, storable(reason, LONGEST_REASON), tried))

    async def dead_letter(self, lease: LeasedEnvelope, letter: Letter, tried: Tried) -> None:
        """Move it; where this handler parks, its key or the ordered handler stops in the same transaction."""
        parks = self._handler if self.parks else None
        if await self._database.transaction_with_retry(
            inbox.dead_letter, self._node, lease, letter, tried, keep_body=self._keep_body, parks=parks
        ):
            self._counters.add(Event.DEAD_LETTERED)
            envelope = lease.envelope
            log.error(
                "dead letter %s (%s): %s; see: durable-agent dead-letters show APP:BUS %s",
                envelope.id,
                envelope.message_type,
                letter.reason,
                envelope.id,
            )


def pause_and_release(
    conn: Connection,
    schema: str,
    node: NodeId,
    handler: str,
    lease: LeasedEnvelope,
    decision: Pause,
    tried: Tried = UNCOUNTED,
) -> None:
    """Pause the handler, and perhaps the endpoint of the message, for every node; then hand the message back."""
    paused = [(CircuitKind.HANDLER, handler)]
    if decision.listener and lease.endpoint != LOCAL:
        paused.append((CircuitKind.LISTENER, listener_of(lease.endpoint)))
    for kind, key in paused:
        circuits.pause_at_least(
            conn, schema, kind, key, reason=decision.reason, actor=f"node {node}", duration=decision.time
        )
    if decision.counts:
        inbox.retry_later(conn, schema, node, lease, tried, delay=timedelta(0))
    elif is_suspect(lease):
        inbox.take_back_attempt(conn, schema, node, lease)
    else:
        leases.release(conn, schema, INCOMING, node, [lease.key])
