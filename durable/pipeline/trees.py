"""A conversation as a tree: each message under the one whose handler sent it.

    order placed ──> invoice issued ──> receipt sent          depth 3
                └──> parcel packed                            critical path: the chain that ended last

Plain Python over the rows of one conversation. A message is one node however many rows it has: one of its sender, and
one of each place where it came to an end. What was caused by a message that is not there is a root, like that which
nothing caused; rows that cause each other, which only a forger writes, are cut where they close.

A business key that begins a conversation begins another one in each of its uses (durable.pipeline.uses): their rows are
told apart by the time of sending.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple
from uuid import UUID

from durable.envelope import unix_ms
from durable.pipeline.uses import DEDUPE_WINDOW, MICROSECOND, beginnings, use_of

COLUMNS: Final = (
    "correlation_id",
    "id",
    "causation_id",
    "message_type",
    "source",
    "service",
    "side",
    "outcome",
    "address",
    "sent_at",
    "finished_at",
)
"""Of the history, in the order of Row. Times are microseconds."""


class Row(NamedTuple):
    correlation_id: bytes
    id: bytes
    causation_id: bytes | None
    message_type: str
    source: str
    service: str
    side: str
    outcome: str
    address: str
    sent_at: int
    finished_at: int


@dataclass(slots=True)
class Message:
    """Message with all that its rows contain."""

    id: bytes
    caused_by: bytes | None
    message_type: str
    source: str
    sent_at: int
    ended_at: int
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation built from rows. `path` leads from the root to the message that ended last."""

    correlation_id: bytes
    messages: Mapping[bytes, Message]
    depth: int
    began_at: int
    ended_at: int
    path: Sequence[Message]


def conversations(rows: Iterable[Row], dedupe_window: timedelta = DEDUPE_WINDOW) -> Iterator[Conversation]:
    """Build conversations from rows sorted by correlation id. Those of one id at a time are held in memory, and come in
    the order in which they began.
    """
    for _, of_id in groupby(rows, key=attrgetter("correlation_id")):
        yield from map(conversation, _by_use([*of_id], dedupe_window // MICROSECOND))


def _by_use(rows: Sequence[Row], dedupe_window: int) -> Iterable[Sequence[Row]]:
    """Part the rows of one correlation id by the uses of the key that is its root."""
    root = rows[0].correlation_id
    begins = [] if unix_ms(UUID(bytes=root)) is not None else [row.sent_at for row in rows if row.id == root]
    begins = beginnings(begins, dedupe_window)
    uses: list[list[Row]] = [[] for _ in begins or [0]]
    for row in rows:
        uses[use_of(begins, row.sent_at)].append(row)
    return uses


def conversation(rows: Sequence[Row]) -> Conversation:
    """All rows of one; at least one row."""
    messages = _messages(rows)
    last = max(messages.values(), key=lambda message: (message.ended_at, message.id))
    return Conversation(
        rows[0].correlation_id,
        messages,
        max(depths(messages).values()),
        min(message.sent_at for message in messages.values()),
        last.ended_at,
        list(_chain(messages, last))[::-1],
    )


def depths(messages: Mapping[bytes, Message]) -> dict[bytes, int]:
    """Count the messages that lead to each, itself included."""
    found: dict[bytes, int] = {}
    for message in messages.values():
        unknown = []
        for each in _chain(messages, message):
            if each.id in found:
                break
            unknown.append(each)
        above = found.get(unknown[-1].caused_by or b"", 0) if unknown else 0
        for level, each in enumerate(reversed(unknown), above + 1):
            found[each.id] = level
    return found


def children(messages: Mapping[bytes, Message]) -> dict[bytes | None, list[Message]]:
    """The messages that each one caused, in the order in which they were sent; under None the roots."""
    found: dict[bytes | None, list[Message]] = {}
    for message in sorted(messages.values(), key=lambda message: (message.sent_at, message.id)):
        found.setdefault(message.caused_by if message.caused_by in messages else None, []).append(message)
    return found


def _messages(rows: Iterable[Row]) -> dict[bytes, Message]:
    found: dict[bytes, Message] = {}
    for row in rows:
        message = found.get(row.id)
        if message is None:
            message = Message(row.id, row.causation_id, row.message_type, row.source, row.sent_at, row.finished_at)
            found[row.id] = message
        message.rows.append(row)
        message.sent_at = min(message.sent_at, row.sent_at)
        message.ended_at = max(message.ended_at, row.finished_at)
    _cut_circles(found)
    return found


def _cut_circles(messages: Mapping[bytes, Message]) -> None:
    sound: set[bytes] = set()
    for message in messages.values():
        walked: set[bytes] = set()
        for each in _chain(messages, message):
            if each.id in sound:
                break
            walked.add(each.id)
            if each.caused_by in walked:
                each.caused_by = None
        sound |= walked


def _chain(messages: Mapping[bytes, Message], message: Message) -> Iterator[Message]:
    """Return the chain from this message up to its root."""
    current: Message | None = message
    while current is not None:
        yield current
        current = messages.get(current.caused_by) if current.caused_by is not None else None
