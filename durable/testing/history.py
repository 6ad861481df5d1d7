"""The messages of a bus in memory whose way has ended, and the answers that are kept: its history and dead letters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

import msgspec

from durable.clock import Clock
from durable.encryption.ring import KeyRing
from durable.envelope import Envelope, new_id
from durable.storage.answers import Arrived, Kept
from durable.storage.dead_letters import Side
from durable.storage.inbox import Key
from durable.storage.receipts import WAITING, Standing
from durable.storage.rows import QUARANTINED, Letter
from durable.testing.rows import DeadLetter, Expired, Handled, Row, decoded


class _Answer(NamedTuple):
    kept_at: datetime
    envelope: Envelope | None
    """None for an answer that was forgotten."""


@dataclass
class MemoryHistory:
    """Ended messages, in the order of their ends."""

    clock: Clock
    ring: KeyRing
    answer_retention: timedelta
    handled: list[Handled] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    expired: list[Expired] = field(default_factory=list)
    ended: list[Standing] = field(default_factory=list)
    """History and dead letters, as receipts tell of them."""
    _answers: dict[Key, _Answer] = field(default_factory=dict)
    """Answers that are kept, by their requests and endpoints, the oldest first."""
    _quarantined: dict[UUID, list[tuple[object, DeadLetter]]] = field(default_factory=dict)
    """Letters of messages that were never stored, with what makes a message a repeat of them, by id."""

    def note(self, outcome: str, row: Row, side: str, reason: str | None = None) -> None:
        self.ended.append(self.standing(outcome, row, side, reason))

    def standing(self, outcome: str, row: Row, side: str, reason: str | None = None) -> Standing:
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
            is_letter=not row.was_stored,
        )

    def expire(self, row: Row, reason: str, side: str = "incoming") -> None:
        self.note("expired", row, side, reason)
        self.expired.append(Expired(decoded(row.envelope, self.ring), row.envelope))

    def bury(self, row: Row, letter: Letter, *, side: Side = "incoming", replayable: bool = True) -> DeadLetter:
        self.note("dead-lettered", row, side, letter.reason)
        why = letter.exception_type, letter.reason, letter.traceback
        message = decoded(row.envelope, self.ring)
        dead = DeadLetter(message, row.envelope, row.attempts, *why, row.endpoint, side=side, replayable=replayable)
        self.dead_letters.append(dead)
        return dead

    def quarantine(self, endpoint: str, envelope: Envelope, reason: str, *, replayable: bool = False) -> None:
        """Make a dead letter of an arrival that is not stored; a repeat of it makes no other."""
        facts = endpoint, envelope.body, reason, envelope.message_type, envelope.partition_key
        known = self._quarantined.setdefault(envelope.id, [])
        if envelope.id.int and any(
            facts == same and (self._is_unresolved(letter) or letter.envelope.sent_at == envelope.sent_at)
            for same, letter in known
        ):
            return
        letter = self.bury(
            Row(envelope, endpoint), Letter.because(reason, QUARANTINED, envelope.message_type), replayable=replayable
        )
        known.append((facts, letter))

    def _is_unresolved(self, letter: DeadLetter) -> bool:
        return any(each is letter for each in self.dead_letters)

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

    def resolve(self, letter: DeadLetter) -> None:
        """Take out a letter, once: its message waits or is handled then, or another one has its id."""
        left = [each for each in self.dead_letters if each is not letter]
        if len(left) == len(self.dead_letters):
            raise ValueError(f"the dead letter of {letter.envelope.id} was replayed or discarded before")
        self.dead_letters = left

    def keep(self, arrived: Sequence[Arrived]) -> set[UUID]:
        """Keep the first answer to each request. Returns the ids of those that are kept."""
        self._purge_answers()
        kept = set()
        for request_id, lease in arrived:
            if (request_id, lease.endpoint) not in self._answers:
                answer = msgspec.structs.replace(lease.envelope, destination=lease.endpoint)
                self._answers[request_id, lease.endpoint] = _Answer(self.clock.now(), answer)
                kept.add(lease.envelope.id)
        return kept

    def read_answers(self, request_ids: Collection[UUID]) -> list[Kept]:
        self._purge_answers()
        return [Kept(*key, answer.envelope) for key, answer in self._answers.items() if key[0] in request_ids]

    def forget_answer(self, request_id: UUID, *, endpoint: str) -> None:
        self._purge_answers()
        kept = self._answers.get((request_id, endpoint))
        self._answers[request_id, endpoint] = _Answer(kept.kept_at if kept else self.clock.now(), None)

    def drop_answer(self, request_id: UUID, *, endpoint: str) -> None:
        """Let another answer be kept in place of this one."""
        self._answers.pop((request_id, endpoint), None)

    def _purge_answers(self) -> None:
        """Delete what is older than `answer_retention`, as the maintenance does on Postgres."""
        oldest = self.clock.now() - self.answer_retention
        while self._answers and (first := next(iter(self._answers.items())))[1].kept_at < oldest:
            del self._answers[first[0]]
