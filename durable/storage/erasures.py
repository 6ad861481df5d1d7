"""Erasing the content of messages in the database, and the record of it, which holds none of that content.

    envelope_history    key, headers, body and error go; ids, type, addresses, times and counts stay
    dead_letters        the same, with reason and traceback; an open letter is discarded first
    failed_attempts     reason and traceback go
    actions             target, reason, before and after go where they name a key; the reason also with its letters
    replays             parts of the plan go that name a key, and with them the way to continue the replay
    circuits            the reason of a paused key goes

So counts and comparisons still find each message. Messages that still wait are not in the history yet, and are counted
only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple
from unicodedata import normalize
from uuid import UUID

from sqlalchemy import Connection

from durable.storage import dead_letters
from durable.storage.dead_letters import LetterRange, Selection
from durable.storage.sql import erasures as statements

ERASED_PART: Final = {"erased": True}
"""Stands in the plan of a replay for a part that named a key; no option gives it."""
_LETTERS_AT_ONCE: Final = 1_000
_LONG_KEY: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Choice of messages: by their ids, or by their partition keys."""

    ids: Sequence[UUID] = ()
    keys: Sequence[str] = ()

    def parameters(self) -> dict[str, Any]:
        named = [pattern for key in self.keys for pattern in _patterns(key)]
        return {"ids": list(self.ids), "keys": list(self.keys), "named": named, "erased_part": json.dumps(ERASED_PART)}


def holds(text: str, key: str) -> bool:
    """Tell whether a text names this key, in whatever case. One of few characters, such as 7, counts as a word only."""
    return any(re.search(pattern, normalize("NFKC", text), re.IGNORECASE) for pattern in _patterns(key))


def _patterns(key: str) -> Iterator[str]:
    """Regular expressions, for Python and for Postgres, of the ways in which texts, SQL and JSON write a key."""
    written = normalize("NFKC", key).strip()
    for spelling in {written, written.replace("'", "''"), json.dumps(written, ensure_ascii=False)[1:-1]} - {""}:
        pattern = re.escape(spelling)
        yield pattern if len(written) >= _LONG_KEY else rf"(?<!\w){pattern}(?!\w)"


class Here(NamedTuple):
    """Chosen messages that the database has, and has not erased."""

    history: int
    letters: int
    open_letters: int
    waiting: int
    records: int
    """Actions, plans of replays and paused keys that name them."""


class Erasure(NamedTuple):
    """Record of an erasure: actor, messages, time and reason. `choice_digest` is salted: it recognises the choice, and
    does not reveal it.
    """

    erasure_id: UUID
    service: str
    actor: str
    reason: str
    chosen_by: Literal["id", "key"]
    chosen_count: int
    choice_digest: bytes
    began_at: datetime | None = None
    finished_at: datetime | None = None
    history_rows: int = 0
    letter_rows: int = 0
    lake: str | None = None
    lake_id: str | None = None
    lake_history_rows: int = 0
    lake_letter_rows: int = 0


def count(conn: Connection, schema: str, chosen: Chosen) -> Here:
    return Here(*conn.execute(statements.COUNT_CHOSEN.within(schema), chosen.parameters()).one())


def begin(conn: Connection, schema: str, erasure: Erasure) -> None:
    """Say what is about to be erased; one that is known already begins again."""
    named = (
        "erasure_id",
        "service",
        "actor",
        "reason",
        "chosen_by",
        "chosen_count",
        "choice_digest",
    )
    conn.execute(statements.BEGIN_ERASURE.within(schema), {name: getattr(erasure, name) for name in named})


def erase(conn: Connection, schema: str, erasure: Erasure, chosen: Chosen) -> None:
    """Erase the content, and count the rows in the record; in the caller's transaction."""
    params = chosen.parameters() | {"erasure": erasure.erasure_id}
    conn.execute(statements.ERASE_RECORDS.within(schema), params)  # while letters have the reasons that actions share
    _discard_open(conn, schema, erasure, chosen)
    history = conn.execute(statements.ERASE_HISTORY.within(schema), params).scalar_one()
    letters = conn.execute(statements.ERASE_LETTERS.within(schema), params).scalar_one()
    counts = {"erasure": erasure.erasure_id, "history": history, "letters": letters}
    conn.execute(statements.COUNT_ERASED.within(schema), counts)


def finish(conn: Connection, schema: str, erasure: Erasure) -> None:
    """Note that the lake has followed: its place, and how many of its rows were erased."""
    params = {
        "erasure": erasure.erasure_id,
        "lake": erasure.lake,
        "lake_id": erasure.lake_id,
        "lake_history": erasure.lake_history_rows,
        "lake_letters": erasure.lake_letter_rows,
    }
    conn.execute(statements.FINISH_ERASURE.within(schema), params)


def read(conn: Connection, schema: str) -> list[Erasure]:
    """All of them, the oldest first."""
    return [Erasure(*_plain(row)) for row in conn.execute(statements.READ_ERASURES.within(schema))]


def some(conn: Connection, schema: str, limit: int) -> list[Erasure]:
    """Read the unfinished erasures, then the newest."""
    rows = conn.execute(statements.READ_SOME_ERASURES.within(schema), {"limit": limit})
    return [Erasure(*_plain(row)) for row in rows]


def _discard_open(conn: Connection, schema: str, erasure: Erasure, chosen: Chosen) -> None:
    """A letter without its content can be neither replayed nor handled."""
    rows = conn.execute(statements.LOCK_OPEN_LETTERS.within(schema), chosen.parameters())
    letters = list(rows.scalars())
    for first in range(0, len(letters), _LETTERS_AT_ONCE):
        some = letters[first : first + _LETTERS_AT_ONCE]
        stretch = LetterRange(0, some[-1], len(some))
        dead_letters.discard(conn, schema, Selection(letters=some), stretch, actor=erasure.actor, reason=erasure.reason)


def _plain(row: Sequence[Any]) -> list[Any]:
    return [bytes(value) if isinstance(value, memoryview) else value for value in row]
