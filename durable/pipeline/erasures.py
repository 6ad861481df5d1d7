"""The record of erasures that lies in the lake, beside the one in the database: who, when, why, and how many rows.

    LAKE/erasures/<erasure>.json     one for each; no commit names them, nothing ever removes them

Of the two records one may be missing: an erasure was interrupted, or one of the places was restored to an earlier
state, in which the content is there again. Where both are there, the tables of the lake may have been put back: then
they lack the mark of the erasure, or rows that it has emptied. Such an erasure is named until it was done once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from typing import Final
from uuid import UUID

import msgspec

from durable.pipeline import places
from durable.pipeline.blanking import count_erased
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES, LakeTable, Whose
from durable.pipeline.spans import NO_SPAN
from durable.storage.erasures import Erasure

_FOLDER: Final = "erasures"


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one erasure in the lake."""

    erasure_id: UUID
    service: str
    database: str
    actor: str
    reason: str
    chosen_by: str
    chosen_count: int
    choice_digest: bytes
    erased_at: datetime
    history_rows: int
    """Rows of the lake."""
    letter_rows: int


class State(StrEnum):
    DONE = "done"
    INTERRUPTED = "interrupted"
    LAKE_RESTORED = "missing in the lake, which was restored to an earlier state, or copied before it"
    DATABASE_RESTORED = "missing in the database, which was restored to an earlier state"


def record(lake: Lake, erasure: Recorded) -> None:
    """Write it down in the lake, in the place of what an interrupted attempt may have written."""
    with places.created(lake.url, f"{_FOLDER}/{erasure.erasure_id}.json") as file:
        file.write(msgspec.json.encode(erasure))


def recorded(lake: Lake) -> list[Recorded]:
    """All of the lake's, of every service, the oldest first."""
    found = []
    for name in places.names(lake.url, _FOLDER):
        with suppress(msgspec.DecodeError):  # of one that died while it wrote: its erasure is named as interrupted
            found.append(msgspec.json.decode(places.read(lake.url, f"{_FOLDER}/{name}"), type=Recorded))
    return sorted(found, key=lambda each: (each.erased_at, each.erasure_id))


def written(lake: Lake) -> dict[str, datetime]:
    """The records, by their names, and when each was written last: another answer later tells of an erasure."""
    return {file.path: file.modified for file in places.files(f"{lake.url}/{_FOLDER}")}


def mark(erasure_id: UUID) -> str:
    """The name under which a table's log keeps that this erasure has come to it, and up to which transaction."""
    return f"durable:erased:{erasure_id}"


def states(
    here: Iterable[Erasure],
    there: Iterable[Recorded],
    lake: Lake | None,
    database: str | None,
    *,
    counts_rows: bool = True,
) -> Mapping[UUID, State]:
    """Compare the database's records of erasures with those that the lake has of this database, and both with the marks
    of the lake's tables and the rows that are erased there; return the state of each.
    """
    in_database = {each.erasure_id: each for each in here}
    if lake is None:
        return {each: _state_here(erasure) for each, erasure in in_database.items()}
    in_lake = {each.erasure_id: each for each in there}
    lake_id = lake.table_id("history")
    of_lake = {each.erasure_id: each for each in in_database.values() if each.lake_id == lake_id}
    known = {**_expected_there(in_lake.values()), **_expected_here(of_lake.values())}
    lost = {each for each in of_lake if each not in in_lake} | _lost_rows(lake, known, counts_rows=counts_rows)
    lost |= {
        each for each, erasure in in_database.items() if each not in in_lake and _is_older(lake, erasure, database)
    }
    found = {each: _state_here(erasure) for each, erasure in in_database.items()}
    found |= {each: State.LAKE_RESTORED for each in lost if found.get(each) is State.DONE}
    return found | {each: State.DATABASE_RESTORED for each in in_lake if each not in found}


def _state_here(erasure: Erasure) -> State:
    return State.INTERRUPTED if erasure.finished_at is None else State.DONE


def _is_older(lake: Lake, erasure: Erasure, database: str | None) -> bool:
    """Tell whether this lake had rows of the database before the erasure, which was made while another lake was used.

    A lake that is younger was filled with rows that had been erased.
    """
    if database is None or erasure.began_at is None:
        return False
    whose, began_at = Whose(erasure.service, database), erasure.began_at
    return any(
        created is not None and created < began_at and lake.span(table, whose) != NO_SPAN
        for table in SOURCES
        for created in [lake.created_at(table)]
    )


_Rows = Mapping[LakeTable, int]


def _expected_here(found: Iterable[Erasure]) -> dict[UUID, _Rows]:
    return {e.erasure_id: {"history": e.lake_history_rows, "dead_letters": e.lake_letter_rows} for e in found}


def _expected_there(found: Iterable[Recorded]) -> dict[UUID, _Rows]:
    return {e.erasure_id: {"history": e.history_rows, "dead_letters": e.letter_rows} for e in found}


def _lost_rows(lake: Lake, expected: Mapping[UUID, _Rows], *, counts_rows: bool) -> set[UUID]:
    """The erasures of which a table lacks the mark, or erased rows: it was put back to a state before them.

    The mark shows it where the whole table was put back, the rows where a later version of it restores an older one.
    """
    lost: set[UUID] = set()
    for table in SOURCES:
        wanted = {each: rows[table] for each, rows in expected.items() if rows[table]}
        marks = lake.marks(table, [mark(each) for each in wanted])
        below = {each: marks[mark(each)] for each in wanted if mark(each) in marks}
        lost |= wanted.keys() - below.keys()
        counts = count_erased(lake, table, below) if counts_rows else None
        if counts is not None:
            lost |= {each for each in below if counts[each] < wanted[each]}
    return lost
