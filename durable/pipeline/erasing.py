"""Erasing: the content of chosen messages goes from the database and the lake, and a record of that stays in both.

    1. begin      the database notes who erases and why, and a salted digest of the choice
    2. database   history and letters are emptied, and counted, in one transaction
    3. lake       the files that hold such rows are rewritten, and replaced by one commit of each table
    4. record     the lake notes it too
    5. finish     the database notes how many rows of the lake it were

Rows stay, with ids, types, addresses, times and counts, and with the id of the erasure: so an audit, a comparison or a
report still finds each message, and nothing looks like loss. An erasure concerns the rows of one database: what others
have archived into the same lake, also those of the same service, is erased from there. Who dies on the way has begun an
erasure that `pipeline status` names; the same choice once more goes on with it. A database, or a lake, that was
restored to an earlier state has the content again: that is seen by its missing record, or by missing rows of the
erasure, and the same choice erases it again.

Files that were replaced stay for readers of older versions until scrub(), or vacuum.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from uuid import UUID, uuid4

from sqlalchemy import Connection

from durable.errors import InvalidSetting
from durable.failpoints import failpoint
from durable.pipeline import blanking
from durable.pipeline.blanking import Wanted
from durable.pipeline.checksums import Compared
from durable.pipeline.copying import connection, opened
from durable.pipeline.describing import refuse_unknown_columns
from durable.pipeline.erasures import Recorded, State, recorded, states
from durable.pipeline.lake import Lake
from durable.pipeline.lake_erasure import LakeErasure
from durable.pipeline.lake_tables import SOURCES, LakeTable, Whose
from durable.pipeline.leftovers import Scrubbed
from durable.pipeline.origin import Origin, alone, locked
from durable.pipeline.own_lake import own_lake, require_own
from durable.pipeline.recovering import refuse_unnamed
from durable.storage import archives, erasures
from durable.storage.archives import Archive
from durable.storage.erasures import Chosen, Erasure, Here

_ADVICE: Final = (
    "and would bring the erased content back: wait for it, or stop it, and continue it after the erasure by the same "
    "command"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Rows that an erasure would empty."""

    here: Here
    lake: Mapping[LakeTable, int]
    """Rows of this database."""
    others: Mapping[Whose, int] = field(default_factory=dict)
    """Rows of other databases in the lake, which are erased from there."""

    @property
    def is_empty(self) -> bool:
        return not (self.here.history or self.here.letters or self.here.records or any(self.lake.values()))


class Noted(NamedTuple):
    """Erasures as the database has noted them, and the name by which lakes know it. None: it was never archived."""

    erasures: Sequence[Erasure]
    database: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Erasure as recorded by the database or the lake."""

    erasure: Erasure
    state: State


def survey(
    origin: Origin, lake: Lake | None, chosen: Chosen, lost: Sequence[str] = (), compared: Compared | None = None
) -> Survey:
    """Count what is there of these messages, and change nothing.

    `lost`: databases of this service that exist no more, by the names that the lake has for them. `compared`: what was
    compared before, and need not be read for that again. Raises DurableError, which names it, for a damaged file of the
    lake: its rows may be others than were written.
    """
    with connection(origin.url) as conn:
        known = _archives(conn, origin)
        here = erasures.count(conn, origin.schema, chosen)
        ours = {Whose(origin.service, each) for each in (archives.known_database(conn, origin.schema), *lost) if each}
    lakes = _lakes(known, lake)
    found: Counter[LakeTable] = Counter()
    others: Counter[Whose] = Counter()
    wanted, compared = Wanted(chosen.ids, chosen.keys), compared or Compared()
    for table in SOURCES:
        for place in lakes:
            for whose, rows in blanking.count(place, table, wanted, compared).items():
                is_ours = whose in ours or (whose.service == origin.service and not whose.database)
                if is_ours:
                    found[table] += rows
                else:
                    others[whose] += rows
    return Survey(here=here, lake={table: found[table] for table in SOURCES}, others=others)


def earlier(origin: Origin, lake: Lake | None, chosen: Chosen) -> list[Listed]:
    """The erasures of the same choice, the oldest first."""
    with connection(origin.url) as conn:
        known, here = _archives(conn, origin), noted(conn, origin.schema)
    return _of_choice(here, _lakes(known, lake), chosen)


def erase(
    origin: Origin,
    lake: Lake | None,
    chosen: Chosen,
    *,
    actor: str,
    reason: str,
    lost: Sequence[str] = (),
    compared: Compared | None = None,
) -> Erasure:
    """Empty them, in the database and in the lake, and return the record.

    They go from the lake that is named, and from the one that the database is archived into. `lost` and `compared`: as
    in survey(). Raises ArchiveConflict while an archiver or a replay is at work, or others keep replacing the same
    files; InvalidSetting where the lake is missing, or was written by a newer version; DurableError, before anything is
    erased, for a damaged file of the lake.
    """
    compared = compared or Compared()
    with opened(origin.url) as engine, locked(engine, origin.schema) as conn, alone(conn, origin.schema, _ADVICE):
        lakes = _lakes(_archives(conn, origin), lake)
        for place in lakes:
            for table in place.tables():
                refuse_unknown_columns(place.opened(table), table, place.url)
                compared.check(place.table_url(table), place.sizes(table))
        refuse_unnamed(conn, lakes, origin)
        work = LakeErasure(conn, origin, lakes, chosen, lost, compared)
        earlier_ones = _of_choice(noted(conn, origin.schema), lakes, chosen)
        unfinished = [each.erasure for each in earlier_ones if each.state is not State.DONE]
        begun = unfinished or [_new(origin, chosen, actor, reason)]
        for erasure in begun:
            erasures.begin(conn, origin.schema, erasure)
            with engine.begin() as emptying:
                erasures.erase(emptying, origin.schema, erasure, chosen)
            failpoint("E1")
            erasures.finish(conn, origin.schema, work.erase(erasure))
        return next(each for each in erasures.read(conn, origin.schema) if each.erasure_id == begun[0].erasure_id)


def scrub(
    origin: Origin, lake: Lake, chosen: Chosen, lost: Sequence[str] = (), compared: Compared | None = None
) -> Scrubbed:
    """Remove the files that hold erased content and are no part of the lake's tables now. To be called after erase(),
    with the same choice.

    Older versions of the tables cannot be read any more, and readers that have begun with one fail.
    """
    with opened(origin.url) as engine, locked(engine, origin.schema) as conn:
        lakes = _lakes(_archives(conn, origin), lake)
        refuse_unnamed(conn, lakes, origin)
        work = LakeErasure(conn, origin, lakes, chosen, lost, compared or Compared())
        return sum((work.scrub(place, table) for place in lakes for table in place.tables()), Scrubbed())


def noted(conn: Connection, schema: str) -> Noted:
    """Read what the database knows of its erasures."""
    return Noted(erasures.read(conn, schema), archives.known_database(conn, schema))


def listed(here: Noted, lake: Lake | None, *, counts_rows: bool = True) -> list[Listed]:
    """The erasures of this database, and what is the matter with each; without counting the rows of the lake it is not
    seen that one of its tables was put back by a later version.
    """
    there = [] if lake is None else [each for each in recorded(lake) if each.database == here.database]
    found = states(here.erasures, there, lake, here.database, counts_rows=counts_rows)
    known = {each.erasure_id: each for each in [*map(_as_erasure, there), *here.erasures]}
    return [Listed(erasure=known[each], state=state) for each, state in found.items()]


# ---------------------------------------------------------------- steps


def _archives(conn: Connection, origin: Origin) -> Mapping[LakeTable, Archive]:
    known: dict[LakeTable, Archive] = {}
    for table, source in SOURCES.items():
        if (archive := archives.find(conn, origin.schema, source)) is not None:
            known[table] = archive
    return known


def _lakes(known: Mapping[LakeTable, Archive], named: Lake | None) -> list[Lake]:
    """The lake of this database and the one that is named: content must not stay behind in one of them."""
    found: list[Lake] = []
    for table, archive in known.items():
        if named is None:
            raise InvalidSetting(f"lake: not set, and this database is archived into {archive.lake}; give --lake")
        if not named.tables():
            require_own(archive, table, named, 0)
        found.append(own_lake(archive, table, named))
    if named is not None and not named.tables():
        raise InvalidSetting(f"lake {named.url}: there is no lake; name the one that this database is archived into")
    return _distinct([*found, *([] if named is None else [named])])


def _distinct(lakes: Iterable[Lake]) -> list[Lake]:
    found: list[Lake] = []
    for lake in lakes:
        if not any(lake.is_at(each) for each in found):
            found.append(lake)
    return found


def _new(origin: Origin, chosen: Chosen, actor: str, reason: str) -> Erasure:
    erasure_id = uuid4()
    chosen_by, count = ("id", len(chosen.ids)) if chosen.ids else ("key", len(chosen.keys))
    return Erasure(
        erasure_id=erasure_id,
        service=origin.service,
        actor=actor,
        reason=reason,
        chosen_by="id" if chosen_by == "id" else "key",
        chosen_count=count,
        choice_digest=_digest(chosen, erasure_id),
    )


def _of_choice(here: Noted, lakes: Sequence[Lake], chosen: Chosen) -> list[Listed]:
    """The erasures of the same choice, each with its state in the lake where it is not done."""
    found: dict[UUID, Listed] = {}
    for lake in lakes or (None,):
        for each in listed(here, lake):
            if each.erasure.erasure_id not in found or each.state is not State.DONE:
                found[each.erasure.erasure_id] = each
    count = len(chosen.ids) + len(chosen.keys)
    same = [each for each in found.values() if each.erasure.chosen_count == count]
    return [each for each in same if each.erasure.choice_digest == _digest(chosen, each.erasure.erasure_id)]


def _digest(chosen: Chosen, erasure_id: UUID) -> bytes:
    """Costly to compute, so that a list of likely keys is of no use against it."""
    words = sorted([*(f"id {each}" for each in chosen.ids), *(f"key {each}" for each in chosen.keys)])
    return hashlib.scrypt("\0".join(words).encode(), salt=erasure_id.bytes, n=1 << 14, r=8, p=1, dklen=32)


def _as_erasure(found: Recorded) -> Erasure:
    return Erasure(
        erasure_id=found.erasure_id,
        service=found.service,
        actor=found.actor,
        reason=found.reason,
        chosen_by="id" if found.chosen_by == "id" else "key",
        chosen_count=found.chosen_count,
        choice_digest=found.choice_digest,
        began_at=found.erased_at,
        lake_history_rows=found.history_rows,
        lake_letter_rows=found.letter_rows,
    )
