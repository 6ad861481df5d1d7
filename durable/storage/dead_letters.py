"""Dead letters: found, read, and resolved.

    unresolved --replay()--> replayed     back in the inbox, or the outbox, for any node
               --discard()-> discarded    nothing becomes of it, and somebody said why
               --handle()--> handled      by hand, in the transaction of its handler

Each is the end of a letter, not of its row: that stays, with what was done, when, by whom and why, until purge() finds
it older than its retention. A message that fails again is another letter, with a higher replay_count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection, Row

from durable.envelope import JSON, Envelope, LeasedEnvelope, NodeId
from durable.storage import maintenance
from durable.storage.database import channel
from durable.storage.isolation import isolated, left_alone, tried
from durable.storage.locks import Job, lock
from durable.storage.rows import shown_headers
from durable.storage.sql import dead_letters as statements
from durable.storage.sql.statement import Statement

Side = Literal["incoming", "outgoing"]

_RESOLVE: Final = "resolve dead letter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Filters for letters; None matches all. `since` is included, `until` is not; both are times of the failure."""

    letters: Sequence[int] | None = None
    ids: Sequence[UUID] | None = None
    """The ids of messages; give `letters` or these, not both."""
    side: Side | None = None
    message_type: str | None = None
    exception_type: str | None = None
    fingerprint: str | None = None
    source: str | None = None
    address: str | None = None
    key: str | None = None
    text: str | None = None
    """A part of the reason, in letters of any case, or of the body as it is stored."""
    since: datetime | None = None
    until: datetime | None = None
    up_to: int | None = None
    """The number of the newest letter: those that fail later are not selected."""
    resolved: bool | None = False

    @property
    def is_narrowed(self) -> bool:
        """True when the selection is less than everything: every letter has an empty text."""
        return any(getattr(self, field.name) not in (None, "") for field in fields(self) if field.name != "resolved")

    def parameters(self) -> dict[str, Any]:
        named = self.letters is not None or self.ids is not None
        return asdict(self) | {
            "letters": list(self.letters or ()) if named else None,
            "ids": list(self.ids or ()) if named else None,
        }


@dataclass(frozen=True, slots=True)
class Group:
    """Letters of one cause; `example` is the reason of the newest."""

    fingerprint: str
    side: Side
    message_type: str | None
    exception_type: str
    count: int
    first: datetime
    last: datetime
    example: str


class Summary(NamedTuple):
    """A letter in a list: `address` is the endpoint where it came in, or the destination that it was meant for.

    What is no envelope has no id, no type and no source, and cannot be replayed.
    """

    letter_id: int
    side: Side
    address: str
    id: UUID | None
    message_type: str | None
    source: str | None
    attempts: int
    interruptions: int
    exception_type: str
    reason: str
    fingerprint: str
    failed_at: datetime
    node_id: NodeId
    replay_count: int
    replayable: bool
    resolution: str | None
    resolved_at: datetime | None
    resolved_by: str | None
    resolution_reason: str | None


class DeadLetter(msgspec.Struct, frozen=True):
    """All of a letter. `body` is what failed; `edited_body` what was replayed in its place, if that was another."""

    summary: Summary
    correlation_id: UUID | None
    causation_id: UUID | None
    partition_key: str | None
    content_type: str | None
    headers: dict[str, str]
    body: bytes
    edited_body: bytes | None
    sent_at: datetime | None
    deliver_by: datetime | None
    traceback: str | None
    epoch: int

    def lease(self) -> LeasedEnvelope | None:
        """Return the letter as its handler would get it; None when it is no whole envelope."""
        about = self.summary
        if not about.replayable or about.id is None or self.correlation_id is None or self.sent_at is None:
            return None
        envelope = Envelope(
            id=about.id,
            message_type=about.message_type or "",
            destination=about.address,
            source=about.source or "",
            correlation_id=self.correlation_id,
            body=self.body,
            sent_at=self.sent_at,
            content_type=self.content_type or JSON,
            causation_id=self.causation_id,
            partition_key=self.partition_key,
            headers=self.headers,
            deliver_by=self.deliver_by,
        )
        return LeasedEnvelope(envelope, self.epoch, about.address)


class Attempt(NamedTuple):
    """A failed attempt to handle the message."""

    number: int
    failed_at: datetime
    exception_type: str
    reason: str
    traceback: str
    node_id: NodeId


class Relative(NamedTuple):
    """A letter of the same conversation, or where the message or its cause waits; `letter_id` is None then."""

    letter_id: int | None
    place: str
    id: UUID
    causation_id: UUID | None
    message_type: str
    address: str
    sent_at: datetime
    state: str


class Survey(NamedTuple):
    """Number of letters, and the newest of them, where a run over them ends."""

    total: int
    replayable: int
    newest: int


class LetterRange(NamedTuple):
    """The next letters of a run: after this one, up to that one, so many at most."""

    after: int
    newest: int
    batch_size: int


class Resolved(NamedTuple):
    """Result of a range: letters that were resolved, and those that could not be. Empty at the end."""

    done: list[int]
    left: list[int]
    taken: Sequence[int] = ()
    """The left letters whose ids were used again meanwhile."""
    refused: Sequence[int] = ()
    """The left letters that the database refuses to change."""


# ---------------------------------------------------------------- reading


def groups(conn: Connection, schema: str, selection: Selection) -> list[Group]:
    """The causes, the most frequent first."""
    return [Group(*row) for row in conn.execute(statements.GROUP_LETTERS.within(schema), selection.parameters())]


def page(
    conn: Connection, schema: str, selection: Selection, *, limit: int, before: int | None = None
) -> list[Summary]:
    """The newest letters, or those before the letter at which another page ended."""
    params = selection.parameters() | {"limit": limit, "before": before}
    return [Summary(*row) for row in conn.execute(statements.LIST_LETTERS.within(schema), params)]


def survey(conn: Connection, schema: str, selection: Selection) -> Survey:
    return Survey(*conn.execute(statements.SURVEY_LETTERS.within(schema), selection.parameters()).one())


def read(conn: Connection, schema: str, selection: Selection, stretch: LetterRange) -> list[DeadLetter]:
    """The letters of a stretch, whole."""
    rows = conn.execute(statements.READ_LETTERS.within(schema), selection.parameters() | stretch._asdict())
    return [_dead_letter(*row) for row in rows]


def attempts(conn: Connection, schema: str, letter_id: int) -> list[Attempt]:
    """The failed attempts that led to this letter, in their order; the last ones, if there were many."""
    return [Attempt(*row) for row in conn.execute(statements.READ_ATTEMPTS.within(schema), {"letter": letter_id})]


def relatives(conn: Connection, schema: str, letter: DeadLetter) -> list[Relative]:
    """Read the other envelopes and letters of its conversation."""
    params = {
        "letter": letter.summary.letter_id,
        "id": letter.summary.id,
        "correlation_id": letter.correlation_id,
        "causation_id": letter.causation_id,
    }
    return [Relative(*row) for row in conn.execute(statements.READ_RELATIVES.within(schema), params)]


# ---------------------------------------------------------------- resolving


def replay(
    conn: Connection,
    schema: str,
    selection: Selection,
    stretch: LetterRange,
    *,
    actor: str,
    reason: str | None = None,
    body: bytes | None = None,
) -> Resolved:
    """Put the messages of a stretch back to where they failed, as new, with another body if one is given.

    Letters are left when their message waits there already, and when their id was used meanwhile: by another message,
    or by the same one that came in once more. Letters without a whole envelope are passed over. One transaction at a
    time replays: what it puts back is in the order of the letters, and so is what the next one does.
    """
    lock(conn, schema, Job.LETTERS)
    params = {"actor": actor, "reason": reason, "body": body, "channel": channel(schema)}
    change = Change(statements.REPLAY_LETTERS, statements.NEXT_LETTERS, _RESOLVE)
    return change_range(conn, schema, change, selection.parameters() | {"replayable": True}, stretch, params)


def discard(
    conn: Connection, schema: str, selection: Selection, stretch: LetterRange, *, actor: str, reason: str
) -> Resolved:
    """Give the letters of a stretch up for good."""
    change = Change(statements.DISCARD_LETTERS, statements.NEXT_LETTERS, _RESOLVE)
    params = {"actor": actor, "reason": reason}
    return change_range(conn, schema, change, selection.parameters() | {"replayable": False}, stretch, params)


def handle(
    conn: Connection,
    schema: str,
    letter_id: int,
    *,
    actor: str,
    reason: str | None = None,
    keep_body: bool = False,
) -> bool:
    """Resolve a letter as handled, in the transaction of its handler. False when it was resolved meanwhile."""
    params = {"letter": letter_id, "actor": actor, "reason": reason, "keep_body": keep_body}
    return int(conn.execute(statements.HANDLE_LETTER.within(schema), params).scalar_one()) == 1


def purge(conn: Connection, schema: str, *, keep: timedelta, batch_size: int = 1_000) -> int:
    """Delete a bounded number of letters that were resolved longer ago than this. Returns how many."""
    return maintenance.purge(conn, schema, statements.PURGE_LETTERS, keep=keep, batch_size=batch_size)


def purge_attempts(conn: Connection, schema: str, *, keep: timedelta, batch_size: int = 1_000) -> int:
    """Delete a bounded number of older failed attempts that no letter needs. Returns how many."""
    return maintenance.purge(conn, schema, statements.PURGE_ATTEMPTS, keep=keep, batch_size=batch_size)


class Change(NamedTuple):
    """A change of the selected rows of a range.

    `statement` returns a number and whether it was done for each row, NULL where its id was used meanwhile; `numbers`
    returns the numbers of the range, in their order.
    """

    statement: Statement
    numbers: Statement
    what: str


def change_range(
    conn: Connection,
    schema: str,
    change: Change,
    selected: Mapping[str, Any],
    stretch: LetterRange,
    params: Mapping[str, Any],
) -> Resolved:
    """Change the rows of a range; those that the database refuses are left."""
    refused: list[int] = []
    tell = left_alone(change.what)

    def leave(number: int, reason: str) -> None:
        refused.append(number)
        tell(number, reason)

    def work(part: LetterRange) -> Sequence[Row[Any]]:
        return conn.execute(change.statement.within(schema), {**selected, **part._asdict(), **params}).all()

    def work_on(numbers: Sequence[int]) -> Sequence[Row[Any]]:
        return work(LetterRange(numbers[0] - 1, numbers[-1], len(numbers)) if numbers else LetterRange(0, 0, 0))

    parts, reason = tried(conn, lambda: work(stretch))
    if reason is not None:
        numbers = conn.execute(change.numbers.within(schema), {**selected, **stretch._asdict()}).scalars()
        parts = isolated(conn, list(numbers), work_on, leave)
    found = sorted((row[0], row.done) for rows in parts for row in rows if row[0] is not None)
    left = sorted([*refused, *(number for number, done in found if not done)])
    taken = tuple(number for number, done in found if done is None)
    return Resolved([number for number, done in found if done], left, taken, tuple(refused))


def _dead_letter(*row: Any) -> DeadLetter:
    count = len(Summary._fields)
    correlation_id, causation_id, partition_key, content_type, headers, *rest = row[count:]
    known = shown_headers(headers)
    return DeadLetter(Summary(*row[:count]), correlation_id, causation_id, partition_key, content_type, known, *rest)
