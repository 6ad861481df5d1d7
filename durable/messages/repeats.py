"""The rule by which a message that comes under a known id is a duplicate: nothing of it is lost.

Times that a sender claims prove nothing: whoever knows an id and guesses the body can send it first, expired on arrival
or put off, with a sent_at to match. So the newcomer is compared with what became of the known message.

    known: handled, or waits and will be handled in time      a duplicate
    known: expired, or is due later than the newcomer         another message
    known: waits, and expires sooner than the newcomer        a duplicate, and the known one lives as long as it
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final, NamedTuple

from durable.envelope import Envelope

DEADLINE_JITTER: Final = timedelta(seconds=1)
"""By so much a repeat may live longer than a message that expired: the time left is counted anew at each arrival."""
DUE_JITTER: Final = timedelta(seconds=10)
"""By so much a message may be due later than its repeat: delays are counted by the clocks of several nodes."""


class Known(NamedTuple):
    """Facts of the message that came first under an id."""

    digest: int
    terms: int
    due_at: datetime | None = None
    """The time that its sender put it off to, if any."""
    expired: datetime | None = None
    """Its deliver_by, if it expired, or is about to."""
    waits_until: datetime | None = None
    """Its deliver_by while it waits to be handled."""

    @classmethod
    def of(
        cls,
        digest: int,
        terms: int,
        now: datetime,
        *,
        due_at: datetime | None,
        expired: datetime | None,
        deliver_by: datetime | None,
    ) -> Known:
        """`deliver_by`: that of the row which waits; None without a row, or without a deadline."""
        if expired is None and deliver_by is not None and deliver_by < now:
            expired = deliver_by
        return cls(digest, terms, due_at, expired, deliver_by if expired is None else None)


def would_be_lost(known: Known, envelope: Envelope, now: datetime) -> bool:
    """Tell whether a message that could be handled would not be, or only later, as a duplicate of the known one."""
    due = max(envelope.execution_time or now, now)
    if envelope.deliver_by is not None and envelope.deliver_by <= due:
        return False
    if known.due_at is not None and known.due_at > due + DUE_JITTER:
        return True
    return known.expired is not None and _lives_longer(envelope, known.expired)


def outlives(known: Known, envelope: Envelope) -> bool:
    """Tell whether the known message waits, and expires sooner than this duplicate of it."""
    return known.waits_until is not None and _lives_longer(envelope, known.waits_until)


def _lives_longer(envelope: Envelope, deadline: datetime) -> bool:
    return envelope.deliver_by is None or envelope.deliver_by > deadline + DEADLINE_JITTER
