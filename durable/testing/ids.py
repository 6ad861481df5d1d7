"""Ids under which messages have come, in memory: what `received_ids` and `undated_ids` hold on Postgres.

    free --hold()--> held by one message --give_up()--> free for another message, not for a repeat of that one

An id that names its day is never given up. Any id is forgotten after a time, as by the maintenance on Postgres, but not
while its message waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from durable.clock import Clock
from durable.encryption.repeats import known_arrival
from durable.encryption.ring import KeyRing
from durable.envelope import Envelope, unix_ms
from durable.messages.repeats import Known
from durable.storage.inbox import Key


@dataclass
class _Holder:
    """The message that holds an id; another message under it has another `sent_at`."""

    facts: Known
    sent_at: datetime
    since: datetime
    given_up: datetime | None = None
    """When it was cancelled, or discarded."""

    def is_repeated_by(self, envelope: Envelope) -> bool:
        """Tell whether this is the same message once more: given up or not, that is none to be handled."""
        if self.given_up is None:
            return True
        return self.sent_at == envelope.sent_at and envelope.sent_at < self.given_up


class KnownIds:
    """The ids of one inbox, by endpoint."""

    def __init__(self, clock: Clock, ring: KeyRing, keep: timedelta, *, is_waiting: Callable[[Key], bool]) -> None:
        self._clock = clock
        self._ring = ring
        self._keep = keep
        self._is_waiting = is_waiting
        self._holders: dict[Key, _Holder] = {}  # the oldest first

    def forget_old(self) -> None:
        """Forget ids that are too old; one whose message waits is kept for as long again."""
        now = self._clock.now()
        while self._holders:
            key, oldest = next(iter(self._holders.items()))
            if now - oldest.since <= self._keep:
                return
            del self._holders[key]
            if self._is_waiting(key):
                self._remember(key, oldest)

    def _remember(self, key: Key, holder: _Holder) -> None:
        self._holders.pop(key, None)
        holder.since = self._clock.now()
        self._holders[key] = holder

    def is_free(self, key: Key, envelope: Envelope) -> bool:
        """Tell whether this message may come in under its id."""
        self.forget_old()
        holder = self._holders.get(key)
        return holder is None or not holder.is_repeated_by(envelope)

    def is_held(self, key: Key) -> bool:
        self.forget_old()
        holder = self._holders.get(key)
        return holder is not None and holder.given_up is None

    def was_held_by(self, key: Key, sent_at: datetime) -> bool:
        """Tell whether this message was the last to hold the id, though it may have been given up."""
        holder = self._holders.get(key)
        return holder is not None and holder.sent_at == sent_at

    def hold(self, key: Key, envelope: Envelope) -> None:
        facts = known_arrival(self._ring, envelope, self._clock.now())._replace(expired=None)
        self._remember(key, _Holder(facts, envelope.sent_at, self._clock.now()))

    def facts(self, key: Key, waiting: Envelope | None) -> Known:
        """Return the facts of the message that holds this id, and what it is now, if it still waits."""
        facts = self._holders[key].facts
        return Known.of(
            facts.digest,
            facts.terms,
            self._clock.now(),
            due_at=facts.due_at,
            expired=facts.expired,
            deliver_by=None if waiting is None else waiting.deliver_by,
        )

    def expire(self, key: Key, deliver_by: datetime | None) -> None:
        """Note that its message has expired: a later one under its id that lives longer is no duplicate."""
        if (holder := self._holders.get(key)) is not None:
            holder.facts = holder.facts._replace(expired=deliver_by)

    def give_up(self, key: Key) -> None:
        """Let another message come under this id."""
        if (holder := self._holders.get(key)) is not None and unix_ms(key[0]) is None:
            holder.given_up = self._clock.now()
            self._remember(key, holder)
