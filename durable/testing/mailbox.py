"""Stand-in for storage of a bus in memory: the waiting messages, and the outcomes of the others.

    stored --> waiting --take()--> a handling agent --> finish()       handled
                  ^                       |--retry_later(), release()  waiting again
                  +-----------------------+--dead_letter()             dead letters
    waiting, deliver_by passed ---------------------------------->     expired

    waiting, not due --cancel_message()----------------------->     cancelled
                     --reschedule_message(), run_message_now()  waiting again

The methods that have the name and the arguments of a function in durable.storage stand in for it: see
durable.testing.database.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal, ParamSpec, TypeVar
from uuid import UUID

import msgspec

from durable.application.handlers import Handler
from durable.application.retry import Pause
from durable.clock import Clock
from durable.duration import within_calendar
from durable.encryption.repeats import is_another
from durable.encryption.ring import KeyRing
from durable.envelope import DUE, Envelope, LeasedEnvelope, LeaseKey, NodeId, new_id
from durable.messages.ordering import OrderingRules
from durable.messages.repeats import outlives
from durable.messages.routing import LOCAL
from durable.outcomes import DUPLICATE, OTHER_BODY, STORED, Outcome
from durable.storage.answers import Arrived, Kept
from durable.storage.circuits import CircuitKind
from durable.storage.dead_letters import Resolved
from durable.storage.inbox import Key, parked
from durable.storage.leases import Burials
from durable.storage.receipts import WAITING, Sighting, Standing
from durable.storage.rows import ONCE, QUARANTINED, UNCOUNTED, Letter, Tried
from durable.storage.sql.recovery import INCOMING, Recovery
from durable.storage.sql.work import INBOX, OUTBOX
from durable.testing.circuits import MemoryCircuits
from durable.testing.ids import KnownIds
from durable.testing.rows import DeadLetter, Expired, Handled, Row, Scheduled, decoded

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Mailbox:
    """The rows of one bus in memory, in order of arrival."""

    clock: Clock
    circuits: MemoryCircuits = field(init=False)
    places: OrderingRules = field(default_factory=OrderingRules)
    ring: KeyRing = field(default_factory=KeyRing)
    incoming: dict[Key, Row] = field(default_factory=dict)
    outgoing: dict[Key, Row] = field(default_factory=dict)
    handled: list[Handled] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    expired: list[Expired] = field(default_factory=list)
    ended: list[Standing] = field(default_factory=list)
    """History and dead letters, as receipts tell of them."""
    answers: dict[Key, Envelope | None] = field(default_factory=dict)
    """Answers that are kept, by their requests and endpoints; None for those that were forgotten."""
    _ids: KnownIds = field(init=False)
    _quarantined: dict[UUID, set[tuple[str, bytes, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.circuits = MemoryCircuits(self.clock)
        self._ids = KnownIds(self.clock, self.ring)

    # ------------------------------------------------------------------ arriving and waiting

    def send(self, envelope: Envelope) -> bool:
        """A commit stores it: a local message waits here for its handler, another for its way. False when it was sent
        before, here, or there and still waits."""
        travelling = msgspec.structs.replace(envelope, execution_time=None)
        row = Row(travelling, envelope.destination, envelope.execution_time)
        if envelope.destination != LOCAL and row.key in self.outgoing:
            return False
        if envelope.destination == LOCAL:
            if not self._ids.is_free(row.key, envelope):
                return False
            self._ids.hold(row.key, envelope)
            self._queue(row)
        else:
            self.outgoing[row.key] = row
        return True

    def _queue(self, row: Row) -> None:
        row.ordering_key = self.places.incoming(row.envelope).ordering_key
        self.incoming[row.key] = row

    def receive(self, endpoint: str, envelope: Envelope) -> Outcome:
        """Store it unless it was received before."""
        row = Row(envelope, endpoint, envelope.execution_time)
        if self._ids.is_free(row.key, envelope):
            self._ids.hold(row.key, envelope)
            self._queue(row)
            return STORED
        waiting = self.incoming.get(row.key)
        known = self._ids.facts(row.key, waiting.envelope if waiting else None)
        if is_another(self.ring, known, envelope, self.clock.now()):
            self.quarantine(endpoint, envelope, "another message was received under the same id before")
            return OTHER_BODY
        if waiting is not None and outlives(known, envelope):
            waiting.envelope = msgspec.structs.replace(waiting.envelope, deliver_by=envelope.deliver_by)
        return DUPLICATE

    def _expire(self, row: Row, reason: str, side: str = "incoming") -> None:
        """End a message; a later one under its id that lives longer is no duplicate."""
        self._note("expired", row, side, reason)
        self.expired.append(Expired(decoded(row.envelope, self.ring), row.envelope))
        self._ids.expire(row.key, row.envelope.deliver_by)

    def quarantine(self, endpoint: str, envelope: Envelope, reason: str, *, replayable: bool = False) -> None:
        """Make a dead letter of an arrival that is not stored; a repeat of it makes no other."""
        kept = endpoint, envelope.body if replayable else msgspec.msgpack.encode(envelope), reason
        if envelope.id.int and kept in self._quarantined.setdefault(envelope.id, set()):
            return
        self._quarantined[envelope.id] = self._quarantined.get(envelope.id, set()) | {kept}
        row = Row(envelope, endpoint)
        self._note("dead-lettered", row, "incoming", reason)
        self._bury(row, Letter.because(reason, QUARANTINED), replayable=replayable)

    def reject(self, endpoint: str, raw: bytes, reason: str, headers: Mapping[str, str]) -> None:
        """Keep bytes that are no envelope: their dead letter has an envelope here, without type or source."""
        envelope = Envelope(
            id=new_id(),
            message_type="",
            destination=endpoint,
            source="",
            correlation_id=new_id(),
            body=raw,
            sent_at=self.clock.now(),
            headers=dict(headers),
        )
        self.quarantine(endpoint, envelope, reason)

    def take(self, handlers: Mapping[str, Handler]) -> list[LeasedEnvelope]:
        """The first message that is due and whose turn it is, and with it others of its type, as many as its handler
        groups; none of a handler or a key that is stopped, and one of a handler that is tried."""
        now, stopped = self.clock.now(), self._stopped(handlers)
        taken: list[LeasedEnvelope] = []
        held: set[str] = set()
        for row in self.incoming.values():
            fits = not taken or row.type == taken[0].envelope.message_type
            is_stopped = (
                row.type in stopped or self.circuits.of(CircuitKind.KEY, row.envelope.partition_key or "") is not None
            )
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
            self._note("sent", row, "outgoing")
        return rows

    def expire_late(self, burials: Burials) -> int:
        """End waiting messages that should have been handled before now. Returns how many expired."""
        now, expired = self.clock.now(), len(self.expired)
        late = [(rows, row) for rows in (self.incoming, self.outgoing) for row in rows.values() if row.is_late(now)]
        for rows, row in late:
            del rows[row.key]
            if rows is self.incoming and burials.has(row.type):
                self._bury_late(row, INBOX.late)
            elif rows is self.outgoing and burials.others:
                letter = Letter.because(OUTBOX.late, "expired")
                self._bury(row, letter, side="outgoing")
                self._note("dead-lettered", row, "outgoing", letter.reason)
            elif rows is self.incoming:
                self._expire(row, INBOX.late)
            else:
                self._expire(row, OUTBOX.late, "outgoing")
        return len(self.expired) - expired

    def _bury_late(self, row: Row, reason: str) -> None:
        letter = Letter.because(reason, "expired")
        self._ids.expire(row.key, row.envelope.deliver_by)
        self._note("dead-lettered", row, "incoming", reason)
        self._bury(row, letter)

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
            self._note("handled", self.incoming.pop(_key(lease)), "incoming")
            self.handled.append(handled)

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

    def release(self, table: Recovery, node: NodeId, leases: Collection[LeaseKey]) -> int:
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
            CircuitKind.HANDLER, handler, reason=decision.reason, actor="memory", duration=decision.time
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
            self.circuits.pause_at_least(*parked(lease, parks), reason=letter.reason, actor="memory", duration=None)
        row.attempts += tried.counted
        self._note("dead-lettered", row, "incoming", letter.reason)
        self._bury(row, letter)
        return True

    def expire(
        self,
        node: NodeId,
        lease: LeasedEnvelope,
        *,
        within: timedelta = timedelta(0),
        reason: str = INBOX.late,
        keep_body: bool = False,
    ) -> bool:
        if not lease.envelope.is_late(self.clock.now() + within):
            return False
        row = self.incoming.pop(_key(lease), None)
        if row is not None:
            self._expire(row, reason)
        return row is not None

    def bury_incoming(
        self,
        node: NodeId,
        lease: LeasedEnvelope,
        *,
        within: timedelta = timedelta(0),
        reason: str = INBOX.late,
        keep_body: bool = False,
    ) -> bool:
        if not lease.envelope.is_late(self.clock.now() + within) or not self.owns(lease):
            return False
        self._bury_late(self.incoming.pop(_key(lease)), reason)
        return True

    def replay(self, letter: DeadLetter) -> None:
        """Let it wait again for its handler, as new."""
        key = letter.envelope.id, letter.address
        if not letter.replayable:
            raise ValueError(f"it was quarantined, and cannot be handled: {letter.reason}")
        if letter.side == "incoming" and not self._may_hold(key, letter):
            raise ValueError(f"the id of the dead letter of {letter.envelope.id} was used meanwhile")
        if key in (self.incoming if letter.side == "incoming" else self.outgoing):
            raise ValueError(f"the message of the dead letter of {letter.envelope.id} waits already")
        self._resolve(letter)
        envelope = letter.envelope
        if envelope.is_late(self.clock.now()):  # it would expire at once
            envelope = msgspec.structs.replace(envelope, deliver_by=None)
        row = Row(envelope, letter.address)
        self.ended = [each for each in self.ended if (each.id, each.address) != row.key]
        if letter.side == "outgoing":
            self.outgoing[row.key] = row
            return
        if not self._ids.is_held(row.key):
            self._ids.hold(row.key, envelope)
        self._queue(row)

    def _may_hold(self, key: Key, letter: DeadLetter) -> bool:
        """Tell whether the message of a letter holds its id, or would hold it: no other has come under it."""
        if not self._ids.is_held(key):
            return True
        return letter.exception_type != QUARANTINED and self._ids.was_held_by(key, letter.envelope.sent_at)

    def discard(self, letter: DeadLetter, reason: str) -> None:
        """Give it up for good: another message may be sent under its business key."""
        self._resolve(letter)
        row = Row(letter.envelope, letter.address, attempts=letter.attempts)
        self._note("discarded", row, letter.side, reason)
        was_stored = letter.side == "incoming" and letter.exception_type != QUARANTINED
        if was_stored and row.key not in self.incoming and self._ids.was_held_by(row.key, letter.envelope.sent_at):
            self._ids.give_up(row.key)

    def _resolve(self, letter: DeadLetter) -> None:
        """Each once: its message waits or is handled then, or another one has its id."""
        left = [each for each in self.dead_letters if each is not letter]
        if len(left) == len(self.dead_letters):
            raise ValueError(f"the dead letter of {letter.envelope.id} was replayed or discarded before")
        self.dead_letters = left

    # ------------------------------------------------------------------ what became of messages

    def look(self, ids: Collection[UUID], *, ended_after: datetime | None) -> Sighting:
        return Sighting(self.look_again(ids, since=0), horizon=1)

    def look_again(self, ids: Collection[UUID], *, since: int) -> list[Standing]:
        """Return every place of these messages: what ended before is told again."""
        waiting = [
            self._standing(WAITING, row, side)
            for side, rows in (("incoming", self.incoming), ("outgoing", self.outgoing))
            for row in rows.values()
        ]
        return [each for each in (*self.ended, *waiting) if each.id in ids]

    def keep(self, arrived: Sequence[Arrived]) -> set[UUID]:
        """Keep the first answer to each request. Returns the ids of those that are kept."""
        kept = set()
        for request_id, lease in arrived:
            if (request_id, lease.endpoint) not in self.answers:
                self.answers[request_id, lease.endpoint] = msgspec.structs.replace(
                    lease.envelope, destination=lease.endpoint
                )
                kept.add(lease.envelope.id)
        return kept

    def read_answers(self, request_ids: Collection[UUID]) -> list[Kept]:
        return [Kept(*key, envelope) for key, envelope in self.answers.items() if key[0] in request_ids]

    def forget_answer(self, request_id: UUID, *, endpoint: str) -> None:
        self.answers[request_id, endpoint] = None

    def _note(self, outcome: str, row: Row, side: str, reason: str | None = None) -> None:
        self.ended.append(self._standing(outcome, row, side, reason))

    def _standing(self, outcome: str, row: Row, side: str, reason: str | None = None) -> Standing:
        ended_at = None if outcome == WAITING else self.clock.now()
        return Standing(
            row.envelope.id,
            side,
            row.endpoint,
            row.type,
            outcome,
            reason,
            ended_at,
            row.attempts,
            row.envelope.correlation_id,
        )

    # ------------------------------------------------------------------ what people ask of storage

    def cancel_message(self, message: UUID, *, actor: str, reason: str | None, keep_body: bool = False) -> bool:
        told = f"cancelled by {actor}" + (f": {reason}" if reason else "")
        cancelled = [(rows, rows.pop(row.key)) for rows, row in self._waiting_for_time(message)]
        for rows, row in cancelled:
            self._note("cancelled", row, "incoming" if rows is self.incoming else "outgoing", told)
            if rows is self.incoming:
                self._ids.give_up(row.key)
        return bool(cancelled)

    def run_message_now(self, message: UUID) -> bool:
        found = self._waiting_for_time(message)
        for _, row in found:
            row.due = None
        return bool(found)

    def reschedule_message(self, message: UUID, *, at: datetime, dedupe_window: timedelta) -> Resolved:
        done, left = [], []
        for rows, row in self._waiting_for_time(message):
            too_old = rows is self.outgoing and at >= row.envelope.sent_at + dedupe_window
            if too_old or row.envelope.is_late(at) or row.envelope.deliver_by == at:
                left.append(0)
            else:
                row.due = at
                if DUE in row.envelope.headers:
                    headers = {**row.envelope.headers, DUE: at.isoformat()}
                    row.envelope = msgspec.structs.replace(row.envelope, headers=headers)
                done.append(0)
        return Resolved(done, left)

    def _waiting_for_time(self, message: UUID) -> list[tuple[dict[Key, Row], Row]]:
        now = self.clock.now()
        every = [(rows, row) for rows in (self.incoming, self.outgoing) for row in rows.values()]
        return [(rows, row) for rows, row in every if row.envelope.id == message and not row.is_due(now)]

    def _bury(
        self,
        row: Row,
        letter: Letter,
        *,
        side: Literal["incoming", "outgoing"] = "incoming",
        replayable: bool = True,
    ) -> None:
        why = letter.exception_type, letter.reason, letter.traceback
        message = decoded(row.envelope, self.ring)
        self.dead_letters.append(
            DeadLetter(message, row.envelope, row.attempts, *why, row.endpoint, side=side, replayable=replayable)
        )


def _key(lease: LeasedEnvelope) -> Key:
    return lease.envelope.id, lease.endpoint
