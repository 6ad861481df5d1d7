"""Stand-in for storage of a bus in memory: the waiting messages, and their way to an end.

    stored --> waiting --take()--> a handling agent --> finish()       handled
                  ^                       |--retry_later(), release()  waiting again
                  +-----------------------+--dead_letter()             dead letters
    waiting, deliver_by passed ---------------------------------->     expired

The methods that have the name and the arguments of a function in durable.storage stand in for it: see
durable.testing.database.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

import msgspec

from durable.application.handlers import Handler
from durable.application.retry import Pause
from durable.clock import Clock
from durable.duration import within_calendar
from durable.encryption.repeats import is_another
from durable.encryption.ring import KeyRing
from durable.envelope import Envelope, LeasedEnvelope, LeaseKey, NodeId
from durable.messages.ordering import OrderingRules
from durable.messages.repeats import outlives
from durable.messages.routing import LOCAL
from durable.outcomes import DUPLICATE, OTHER_BODY, STORED, Outcome
from durable.settings import Settings
from durable.storage.circuits import CircuitKind
from durable.storage.inbox import LATE_NOW, Key, Lateness
from durable.storage.leases import Burials
from durable.storage.parks import Place
from durable.storage.receipts import WAITING, Sighting, Standing
from durable.storage.rows import ONCE, UNCOUNTED, Letter, Tried
from durable.storage.sql.recovery import INCOMING, Recovery
from durable.storage.sql.work import INBOX, OUTBOX
from durable.testing.circuits import MemoryCircuits
from durable.testing.history import MemoryHistory
from durable.testing.ids import KnownIds
from durable.testing.rows import Handled, Row, Scheduled, decoded

_NODE: Final = "node memory"


@dataclass
class Mailbox:
    """The rows of one bus in memory, in order of arrival."""

    clock: Clock
    circuits: MemoryCircuits = field(init=False)
    places: OrderingRules = field(default_factory=OrderingRules)
    ring: KeyRing = field(default_factory=KeyRing)
    settings: Settings = field(default_factory=Settings)
    incoming: dict[Key, Row] = field(default_factory=dict)
    outgoing: dict[Key, Row] = field(default_factory=dict)
    history: MemoryHistory = field(init=False)
    ids: KnownIds = field(init=False)

    def __post_init__(self) -> None:
        self.circuits = MemoryCircuits(self.clock, self.places)
        self.history = MemoryHistory(self.clock, self.ring, self.settings.answer_retention)
        self.ids = KnownIds(self.clock, self.ring, self.settings.keep_ids, is_waiting=self.incoming.__contains__)

    # ------------------------------------------------------------------ arriving and waiting

    def send(self, envelope: Envelope) -> bool:
        """A commit stores it: a local message waits here for its handler, another for its way. False when it was sent
        before, here, or there and still waits."""
        travelling = msgspec.structs.replace(envelope, execution_time=None)
        row = Row(travelling, envelope.destination, envelope.execution_time, was_stored=True)
        if envelope.destination != LOCAL and row.key in self.outgoing:
            return False
        if envelope.destination == LOCAL:
            if not self.ids.is_free(row.key, envelope):
                return False
            self.ids.hold(row.key, envelope)
            self.queue(row)
        else:
            self.outgoing[row.key] = row
        return True

    def queue(self, row: Row) -> None:
        row.ordering_key = self.places.incoming(row.envelope).ordering_key
        self.incoming[row.key] = row

    def receive(self, endpoint: str, envelope: Envelope) -> Outcome:
        """Store it unless it was received before."""
        row = Row(envelope, endpoint, envelope.execution_time, was_stored=True)
        if self.ids.is_free(row.key, envelope):
            self.ids.hold(row.key, envelope)
            self.queue(row)
            return STORED
        waiting = self.incoming.get(row.key)
        known = self.ids.facts(row.key, waiting.envelope if waiting else None)
        if is_another(self.ring, known, envelope, self.clock.now()):
            self.history.quarantine(endpoint, envelope, "another message was received under the same id before")
            return OTHER_BODY
        if waiting is not None and outlives(known, envelope):
            waiting.envelope = msgspec.structs.replace(waiting.envelope, deliver_by=envelope.deliver_by)
        return DUPLICATE

    def take(self, handlers: Mapping[str, Handler]) -> list[LeasedEnvelope]:
        """The first message that is due and whose turn it is, and with it others of its type, as many as its handler
        groups; none of a handler or a key that is stopped, and one of a handler that is tried."""
        self.ids.forget_old()
        now, stopped = self.clock.now(), self._stopped(handlers)
        taken: list[LeasedEnvelope] = []
        held: set[str] = set()
        for row in self.incoming.values():
            fits = not taken or row.type == taken[0].envelope.message_type
            is_stopped = row.type in stopped or self.circuits.stops_order(row.ordering_key)
            may_go = row.is_due(now) and not is_stopped and not row.is_parked
            if fits and row.ordering_key not in held and may_go:
                taken.append(row.lease())
                if len(taken) >= self._most_at_once(handlers.get(row.type)):
                    break
            elif row.ordering_key is not None and (row.is_due(now) or row.attempts):
                held.add(row.ordering_key)  # only what its sender has put off lets others pass
        return taken

    def _stopped(self, handlers: Mapping[str, Handler]) -> set[str]:
        """The types of which nothing may be taken: that of the handler, or an older version alone."""
        may_take = self.circuits.may_take
        return {each for each, handler in handlers.items() if not (may_take(each) and may_take(handler.message_type))}

    def _most_at_once(self, handler: Handler | None) -> int:
        is_tried = handler is not None and self.circuits.of(CircuitKind.HANDLER, handler.message_type) is not None
        return 1 if handler is None or is_tried else handler.run_of_key

    def departing(self, destinations: Collection[str]) -> list[Row]:
        """Take out the due messages for these destinations, unless they are paused."""
        now = self.clock.now()
        going = {each for each in destinations if self.circuits.of(CircuitKind.DESTINATION, each) is None}
        rows = [row for row in self.outgoing.values() if row.endpoint in going and row.is_due(now)]
        for row in rows:
            del self.outgoing[row.key]
            self.history.note("sent", row, "outgoing")
        return rows

    def expire_late(self, burials: Burials) -> int:
        """End waiting messages that should have been handled before now. Returns how many expired."""
        now, expired = self.clock.now(), len(self.history.expired)
        late = [(rows, row) for rows in (self.incoming, self.outgoing) for row in rows.values() if row.is_late(now)]
        for rows, row in late:
            del rows[row.key]
            if rows is self.incoming and burials.has(row.type):
                self._bury_late(row, INBOX.late)
            elif rows is self.outgoing and burials.others:
                self.history.bury(row, Letter.because(OUTBOX.late, "expired", row.type), side="outgoing")
            elif rows is self.incoming:
                self._expire(row, INBOX.late)
            else:
                self._expire(row, OUTBOX.late, "outgoing")
        return len(self.history.expired) - expired

    def _expire(self, row: Row, reason: str, side: str = "incoming") -> None:
        """End a message; a later one under its id that lives longer is no duplicate."""
        self.history.expire(row, reason, side)
        self.ids.expire(row.key, row.envelope.deliver_by)

    def _bury_late(self, row: Row, reason: str) -> None:
        self.ids.expire(row.key, row.envelope.deliver_by)
        self.history.bury(row, Letter.because(reason, "expired", row.type))

    def scheduled(self) -> list[Scheduled]:
        """Return the messages that are due later, the next first."""
        now = self.clock.now()
        waiting = [
            Scheduled(decoded(row.envelope, self.ring), row.envelope, row.due, row.attempts)
            for row in (*self.incoming.values(), *self.outgoing.values())
            if row.due is not None and row.due > now
        ]
        return sorted(waiting, key=lambda scheduled: scheduled.due)

    # ------------------------------------------------------------------ what a handling agent asks of storage

    def finish(self, finished: Sequence[Handled], leases: Sequence[LeasedEnvelope]) -> None:
        """Finish messages whose transaction was committed."""
        for handled, lease in zip(finished, leases, strict=True):
            row = self.incoming.pop(_key(lease))
            row.attempts = handled.attempt - 1
            self.history.note("handled", row, "incoming")
            self.history.handled.append(handled)

    def owns(self, lease: LeasedEnvelope) -> bool:
        row = self.incoming.get(_key(lease))
        return row is not None and row.epoch == lease.epoch

    def retry_later(self, node: NodeId, lease: LeasedEnvelope, tried: Tried = ONCE, *, delay: timedelta) -> bool:
        if not self.owns(lease):
            return False
        row = self.incoming[_key(lease)]
        row.epoch += 1
        row.attempts += tried.counted
        now = self.clock.now()
        row.due = now + within_calendar(delay, now)
        return True

    def park(self, node: NodeId, leases: Collection[LeaseKey]) -> int:
        for envelope_id, endpoint, _ in leases:
            row = self.incoming[envelope_id, endpoint]
            row.epoch += 1
            row.is_parked = True
        return len(leases)

    def release_parked(self) -> None:
        """Let messages go on whose encryption keys are here by now."""
        for row in self.incoming.values():
            if row.is_parked and self.ring.missing(row.envelope.body) is None:
                row.is_parked = False

    def release(
        self, table: Recovery, node: NodeId, leases: Collection[LeaseKey], *, is_interrupted: bool = False
    ) -> int:
        """Let these wait again; after an error of durable itself they stay, and MemoryHandling.settle tells of it."""
        if is_interrupted:
            return 0
        rows = [self.incoming[envelope_id, endpoint] for envelope_id, endpoint, _ in leases]
        for row in rows:
            row.epoch += 1
        return len(rows)

    def put_back(
        self,
        node: NodeId,
        lease: LeasedEnvelope,
        tried: Tried = ONCE,
        *,
        headers: Mapping[str, str],
        fair_key: str | None,
        body: bytes,
    ) -> bool:
        if not self.owns(lease):
            return False
        row = self.incoming.pop(_key(lease))
        row.envelope = msgspec.structs.replace(row.envelope, headers=dict(headers), body=body)
        row.epoch += 1
        row.attempts += tried.counted
        self.incoming[row.key] = row
        return True

    def pause_and_release(
        self, node: NodeId, handler: str, lease: LeasedEnvelope, decision: Pause, tried: Tried = UNCOUNTED
    ) -> None:
        self.circuits.pause_at_least(
            CircuitKind.HANDLER, handler, reason=decision.reason, actor=_NODE, duration=decision.time
        )
        if decision.counts:
            self.retry_later(node, lease, tried, delay=timedelta(0))
        else:
            self.release(INCOMING, node, [lease.key])

    def dead_letter(
        self,
        node: NodeId,
        lease: LeasedEnvelope,
        letter: Letter,
        tried: Tried = ONCE,
        *,
        keep_body: bool = False,
        parks: str | None = None,
    ) -> bool:
        if not self.owns(lease):
            return False
        row = self.incoming.pop(_key(lease))
        if parks is not None and lease.ordering_key is not None:
            kind, key = Place.of(lease).circuit(parks)
            self.circuits.park(kind, key, reason=letter.reason, actor=_NODE, ordering_key=lease.ordering_key)
        row.attempts += tried.counted
        self.history.bury(row, letter)
        return True

    def expire(
        self,
        node: NodeId,
        lease: LeasedEnvelope,
        lateness: Lateness = LATE_NOW,
        *,
        keep_body: bool = False,
    ) -> bool:
        if not lease.envelope.is_late(self.clock.now() + lateness.within):
            return False
        row = self.incoming.pop(_key(lease), None)
        if row is not None:
            row.attempts += lateness.tried.counted
            self._expire(row, lateness.reason)
        return row is not None

    def bury_incoming(
        self,
        node: NodeId,
        lease: LeasedEnvelope,
        lateness: Lateness = LATE_NOW,
        *,
        keep_body: bool = False,
    ) -> bool:
        if not lease.envelope.is_late(self.clock.now() + lateness.within) or not self.owns(lease):
            return False
        row = self.incoming.pop(_key(lease))
        row.attempts += lateness.tried.counted
        self._bury_late(row, lateness.reason)
        return True

    def forget_former_answer(self, request_id: UUID, *, endpoint: str, came_to: str) -> None:
        if not self.ids.is_held((request_id, came_to)):
            self.history.drop_answer(request_id, endpoint=endpoint)

    # ------------------------------------------------------------------ what a receipt tells

    def look(self, ids: Collection[UUID], *, ended_after: datetime | None) -> Sighting:
        return Sighting(self.look_again(ids, since=0), horizon=1)

    def look_again(self, ids: Collection[UUID], *, since: int) -> list[Standing]:
        """Return every place of these messages: what ended before is told again."""
        waiting = [
            self.history.standing(WAITING, row, side)
            for side, rows in (("incoming", self.incoming), ("outgoing", self.outgoing))
            for row in rows.values()
        ]
        return [each for each in (*self.history.ended, *waiting) if each.id in ids]


def _key(lease: LeasedEnvelope) -> Key:
    return lease.envelope.id, lease.endpoint
