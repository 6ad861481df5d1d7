"""Deadlines between two clocks: what travels is the time that is left.

A `deliver_by` is a moment on the sender's clock. Beside it goes what that clock says when the envelope leaves, and the
receiver counts the rest from its own:

    deliver_by, clock --> left = deliver_by - clock --> deliver_by = now + left

The way itself is not counted, for which a connection is short enough. A message may wait at a broker for long: there
the earlier of both moments counts, so that the wait is, and a slow clock alone makes no deadline longer.

A peer that sends no clock, being older, is believed; one that knows of none skips it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from msgspec.structs import replace

from durable.envelope import Envelope


def departure(envelopes: Sequence[Envelope], now: datetime | None) -> datetime | None:
    """Return the time to send beside these envelopes, or None when none of them has a deadline."""
    return now if any(envelope.deliver_by is not None for envelope in envelopes) else None


def counted_anew(envelopes: list[Envelope], clock: datetime | None, now: datetime) -> list[Envelope]:
    """Return these envelopes with deadlines by the receiver's clock; unchanged if the sender sent no clock."""
    if clock is None:
        return envelopes
    return [
        replace(envelope, deliver_by=moved(envelope.deliver_by, clock, now)) if envelope.deliver_by else envelope
        for envelope in envelopes
    ]


def moved(deliver_by: datetime, clock: datetime, now: datetime) -> datetime:
    """Return the deadline by the receiver's clock; one outside of the calendar stays unchanged."""
    try:
        return now + (deliver_by - clock)
    except (OverflowError, TypeError):  # beyond the calendar, or without a zone, which is found out later
        return deliver_by
