"""The record of erasures that lies in the lake, beside the one in the database: who, when, why, and how many rows.

    LAKE/erasures/<erasure>.json     one for each; no commit names them, nothing ever removes them

Of the two records one may be missing: an erasure was interrupted, or one of the places was restored to an earlier
state, in which the content is there again. Such an erasure is named until it was done once more.
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
from durable.pipeline.lake import Lake
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
    LAKE_RESTORED = "missing in the lake, which was restored to an earlier state"
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


def states(here: Iterable[Erasure], there: Iterable[Recorded], lake_id: str | None) -> Mapping[UUID, State]:
    """Compare the database's records of erasures with those that the lake has of this database, and return the state of
    each.
    """
    in_lake = {each.erasure_id for each in there}
    found = {each.erasure_id: _state(each, in_lake, lake_id) for each in here}
    return found | {each: State.DATABASE_RESTORED for each in in_lake if each not in found}


def _state(erasure: Erasure, in_lake: set[UUID], lake_id: str | None) -> State:
    if erasure.finished_at is None:
        return State.INTERRUPTED
    if lake_id is not None and erasure.lake_id == lake_id and erasure.erasure_id not in in_lake:
        return State.LAKE_RESTORED
    return State.DONE
