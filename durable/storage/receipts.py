"""The places of messages by their ids: where they wait, and how they ended."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from durable.envelope import unix_ms
from durable.storage.sql import receipts as statements

WAITING: Final = "waiting"


class Standing(NamedTuple):
    """One place of a message: the inbox of an endpoint, or the outbox for a destination."""

    id: UUID
    side: str
    address: str
    message_type: str
    outcome: str
    """`waiting`, an outcome of the history, or a resolution of the dead letter."""
    reason: str | None
    ended_at: datetime | None
    attempts: int
    correlation_id: UUID | None = None
    is_letter: bool = False
    """True for a dead letter. The history has an end of its own for each message that was stored to be handled."""


class Step(NamedTuple):
    """One place of a message on the way of its conversation."""

    id: UUID
    causation_id: UUID | None
    correlation_id: UUID | None
    message_type: str
    source: str
    sent_at: datetime
    side: str
    address: str
    outcome: str
    """`waiting`, an outcome of the history, or `dead-lettered`."""
    attempts: int
    ended_at: datetime | None


class Window(NamedTuple):
    """Time in which the ends of messages are looked for, and how many of them are taken."""

    after: datetime
    until: datetime
    limit: int


class Sent(NamedTuple):
    """A message in the order of sending."""

    sent_at: datetime
    id: UUID


class Sighting(NamedTuple):
    """Places of some messages, and the horizon of the look: what ends after it has an xid at or above it."""

    standings: list[Standing]
    horizon: int


def made_after(ids: Collection[UUID], clock_lead: timedelta) -> datetime | None:
    """Return a time before these ids were made, as far as they tell it. An id may name a time to come: its message may
    end today all the same, when its letter is replayed.
    """
    made = [unix_ms(each) for each in ids]
    if any(each is None for each in made):
        return None
    oldest = min(each for each in made if each is not None)
    return min(datetime.fromtimestamp(min(oldest / 1_000, 2**35), UTC), datetime.now(UTC)) - clock_lead


def look(conn: Connection, schema: str, ids: Collection[UUID], *, ended_after: datetime | None) -> Sighting:
    """Find the places of messages that were not looked for before.

    `ended_after` bounds the days of the history that are read; None reads all of them.
    """
    horizon: int = conn.execute(statements.READ_HORIZON.within(schema)).scalar_one()
    return Sighting(_find(conn, schema, ids, since=0, ended_after=ended_after), horizon)


def look_again(conn: Connection, schema: str, ids: Collection[UUID], *, since: int) -> list[Standing]:
    """Find where these messages wait, and how they ended since the look with this horizon."""
    return _find(conn, schema, ids, since=since, ended_after=None)


def conversation(conn: Connection, schema: str, correlation_id: UUID, window: Window) -> list[Step]:
    """Read the steps of all messages of a conversation, the oldest first. It reads whole days: bound its time."""
    params = {"wanted": correlation_id, **window._asdict()}
    return [Step(*row) for row in conn.execute(statements.READ_CONVERSATION.within(schema), params)]


def of_key(conn: Connection, schema: str, key: str, window: Window, before: Sent | None = None) -> list[Step]:
    """Read the steps of the messages with this key that were sent before this one, the newest first. It reads whole
    days: bound its time.
    """
    sent_before, id_before = before or (None, None)
    params = {"wanted": key, "sent_before": sent_before, "id_before": id_before, **window._asdict()}
    return [Step(*row) for row in conn.execute(statements.READ_OF_KEY.within(schema), params)]


def _find(
    conn: Connection, schema: str, ids: Collection[UUID], *, since: int, ended_after: datetime | None
) -> list[Standing]:
    """Read the history last: a message that leaves its place between the statements is found there."""
    params = {"ids": list(ids)}
    ended = params | {"since": since, "ended_after": ended_after}
    standings = [Standing(*row) for row in conn.execute(statements.READ_STANDINGS.within(schema), params)]
    return standings + [Standing(*row) for row in conn.execute(statements.READ_ENDED.within(schema), ended)]
