"""Receipts: the outcomes of a message, one for each place that it went to.

waiting in any place              no receipt yet
handled, sent, expired,
cancelled, dead-lettered          the last of them in the history counts: the message may have been sent again, or
                                  another one under its id
dead letter, or what became of    counts after an end that is not `handled` or `sent`: a letter without an end in the
it                                history is of an arrival that was refused, and its id may be that of another message
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal, cast
from uuid import UUID

import msgspec

from durable.storage.receipts import WAITING, Standing

Outcome = Literal["handled", "sent", "cancelled", "expired", "discarded", "dead-lettered"]
"""Outcome of a message: `sent` for what has arrived at another service, whose handling is not known here."""

_BY_GRAVITY: Final[Sequence[Outcome]] = ("handled", "sent", "cancelled", "expired", "discarded", "dead-lettered")
DONE: Final = ("handled", "sent")
_REPLAYED: Final = "replayed"
_NEVER: Final = datetime.min.replace(tzinfo=UTC)


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a message in one place: the inbox of this service, or the outbox for one destination."""

    side: Literal["incoming", "outgoing"]
    address: str
    """The endpoint of the inbox, `local` for a message of this service to itself; or the destination."""
    outcome: Outcome
    reason: str | None = None
    """Why the message was not handled, as the dead letter or the history says."""
    ended_at: datetime | None = None
    attempts: int = 0


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a message that waits nowhere in this service any more.

    An event, or a message that this service sends to itself by its address, has several deliveries.
    """

    id: UUID
    message_type: str
    deliveries: tuple[Delivery, ...]

    @property
    def outcome(self) -> Outcome:
        """The gravest outcome of the deliveries: `handled` only when the message was handled in every place."""
        outcomes = {each.outcome for each in self.deliveries}
        return next(each for each in reversed(_BY_GRAVITY) if each in outcomes)

    @property
    def reason(self) -> str | None:
        """The reason of the gravest delivery."""
        return next(each.reason for each in self.deliveries if each.outcome == self.outcome)

    def shown(self) -> dict[str, Any]:
        """Return the receipt as HTTP shows it."""
        whole = {"id": self.id, "type": self.message_type, "outcome": self.outcome, "reason": self.reason}
        return whole | {"deliveries": self.deliveries}


def is_waiting(standings: Iterable[Standing]) -> bool:
    """Tell whether the message waits in any of its places."""
    return any(each.outcome == WAITING for each in standings)


def receipt_of(standings: Sequence[Standing]) -> Receipt | None:
    """Make the receipt of one message from all its places; None while it waits, or when its end is not known."""
    if is_waiting(standings):
        return None
    places: dict[tuple[str, str], list[Standing]] = defaultdict(list)
    for standing in standings:
        places[standing.side, standing.address].append(standing)
    last = [_last(place) for _, place in sorted(places.items())]
    deliveries = tuple(_delivery(each) for each in last if each is not None)
    if not deliveries:
        return None
    return Receipt(id=standings[0].id, message_type=standings[0].message_type, deliveries=deliveries)


def _last(place: Sequence[Standing]) -> Standing | None:
    """Return the end of the message in this place: after a replay, only what came after it counts."""
    past = max((each for each in place if not each.is_letter), key=_time_of, default=None)
    if past is not None and past.outcome in DONE:
        return past
    replayed = max((_time_of(each) for each in place if each.outcome == _REPLAYED), default=_NEVER)
    told = [each for each in place if each.outcome != _REPLAYED and (_time_of(each) > replayed or replayed == _NEVER)]
    return max(reversed(told), key=_time_of, default=None)


def _time_of(standing: Standing) -> datetime:
    return standing.ended_at or _NEVER


def _delivery(standing: Standing) -> Delivery:
    return Delivery(
        side=cast(Literal["incoming", "outgoing"], standing.side),
        address=standing.address,
        outcome=cast(Outcome, standing.outcome),
        reason=standing.reason,
        ended_at=standing.ended_at,
        attempts=standing.attempts,
    )
