"""Messages that wait for their time: sent with `delay=` or `at=`, or put off after a failed attempt.

waiting --promoted--> due                          by the nodes, when the time has come
        --cancel()--> cancelled, in the history    by people, as the others
        --run_now()-> due
        --reschedule()-> waiting
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple, get_args
from uuid import UUID

from sqlalchemy import Connection

from durable.storage.database import channel
from durable.storage.dead_letters import Change, LetterRange, Resolved, Survey, change_range
from durable.storage.sql import schedules as statements
from durable.storage.sql.schedules import Waiting
from durable.storage.sql.statement import Statement

Side = Literal["incoming", "outgoing"]
SIDES: Final[tuple[Side, ...]] = get_args(Side)

_EVERYTHING: Final = LetterRange(0, 2**63 - 1, 2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Filters for messages; None matches every message. `address` is the endpoint or the destination."""

    ids: Sequence[UUID] | None = None
    message_type: str | None = None
    address: str | None = None
    due_before: datetime | None = None

    @property
    def is_narrowed(self) -> bool:
        """True when the selection is less than everything."""
        return any(getattr(self, field.name) is not None for field in fields(self))

    def parameters(self) -> dict[str, Any]:
        return asdict(self) | {"ids": None if self.ids is None else list(self.ids)}


class Delayed(NamedTuple):
    """A message that waits for its time."""

    side: Side
    id: UUID
    message_type: str
    address: str
    source: str
    due_at: datetime
    due_in: timedelta
    attempts: int
    sent_at: datetime
    deliver_by: datetime | None

    @property
    def is_retry(self) -> bool:
        """True when an attempt to handle the message has failed."""
        return self.side == "incoming" and self.attempts > 0


class Whereabouts(NamedTuple):
    id: UUID
    state: str


def page(conn: Connection, schema: str, selection: Selection, *, limit: int) -> list[Delayed]:
    """The next ones to be due."""
    params = selection.parameters() | {"limit": limit}
    rows = (
        Delayed(*row) for side in SIDES for row in conn.execute(statements.WAITING[side].list.within(schema), params)
    )
    return sorted(rows, key=lambda row: row.due_at)[:limit]


def survey(conn: Connection, schema: str, selection: Selection, *, side: Side) -> Survey:
    """Count the selected messages on this side, and find the newest."""
    row = conn.execute(statements.WAITING[side].survey.within(schema), selection.parameters()).one()
    return Survey(row.total, row.total, row.newest)


def whereabouts(conn: Connection, schema: str, ids: Sequence[UUID]) -> list[Whereabouts]:
    """Find where these messages are, unless they are finished."""
    rows = conn.execute(statements.READ_WHEREABOUTS.within(schema), {"ids": list(ids)})
    return [Whereabouts(*row) for row in rows]


# ---------------------------------------------------------------- changed, a stretch of one side at a time


def cancel(
    conn: Connection,
    schema: str,
    selection: Selection,
    stretch: LetterRange,
    *,
    side: Side,
    actor: str,
    reason: str | None,
    keep_body: bool = False,
) -> Resolved:
    """Cancel the selected messages; the history records it."""
    waiting = statements.WAITING[side]
    told = f"cancelled by {actor}" + (f": {reason}" if reason else "")
    return _change(conn, schema, waiting, waiting.cancel, selection, stretch, {"reason": told, "keep_body": keep_body})


def run_now(conn: Connection, schema: str, selection: Selection, stretch: LetterRange, *, side: Side) -> Resolved:
    """Make the selected messages due."""
    waiting, params = statements.WAITING[side], {"channel": channel(schema)}
    return _change(conn, schema, waiting, waiting.run_now, selection, stretch, params)


def reschedule(
    conn: Connection,
    schema: str,
    selection: Selection,
    stretch: LetterRange,
    *,
    side: Side,
    at: datetime,
    dedupe_window: timedelta,
) -> Resolved:
    """Make the selected messages due at this time; leave those that would expire, or be too old by then."""
    waiting = statements.WAITING[side]
    params = {"at": at, "dedupe_window": dedupe_window, "channel": channel(schema)}
    return _change(conn, schema, waiting, waiting.reschedule, selection, stretch, params)


def _change(
    conn: Connection,
    schema: str,
    waiting: Waiting,
    statement: Statement,
    selection: Selection,
    stretch: LetterRange,
    params: Mapping[str, Any],
) -> Resolved:
    change = Change(statement, waiting.numbers, "change the delayed message")
    return change_range(conn, schema, change, selection.parameters(), stretch, params)


# ---------------------------------------------------------------- one message, wherever it waits


def cancel_message(
    conn: Connection, schema: str, message: UUID, *, actor: str, reason: str | None, keep_body: bool = False
) -> bool:
    """False when it does not wait for its time."""
    only = Selection(ids=[message])
    cancelled = [
        cancel(conn, schema, only, _EVERYTHING, side=side, actor=actor, reason=reason, keep_body=keep_body)
        for side in SIDES
    ]
    return any(each.done for each in cancelled)


def run_message_now(conn: Connection, schema: str, message: UUID) -> bool:
    """False when it does not wait for its time."""
    changed = [run_now(conn, schema, Selection(ids=[message]), _EVERYTHING, side=side) for side in SIDES]
    return any(each.done for each in changed)


def reschedule_message(
    conn: Connection, schema: str, message: UUID, *, at: datetime, dedupe_window: timedelta
) -> Resolved:
    """Reschedule one message, on either side. Returns the rows done and those left."""
    only = Selection(ids=[message])
    changed = [
        reschedule(conn, schema, only, _EVERYTHING, side=side, at=at, dedupe_window=dedupe_window) for side in SIDES
    ]
    return Resolved([seq for each in changed for seq in each.done], [seq for each in changed for seq in each.left])
