"""Erasing: the content of chosen messages goes from the database and the lake, and a record of that stays in both.

    1. begin      the database notes who erases and why, and a salted digest of the choice
    2. database   history and letters are emptied, and counted, in one transaction
    3. lake       the files that hold such rows are rewritten, and replaced by one commit of each table
    4. record     the lake notes it too
    5. finish     the database notes how many rows of the lake it were

Rows stay, with ids, types, addresses, times and counts, and with the id of the erasure: so an audit, a comparison or a
report still finds each message, and nothing looks like loss. Who dies on the way has begun an erasure that
`pipeline status` names; the same choice once more goes on with it. A database, or a lake, that was restored to an
earlier state has the content again: that is seen by its missing record, and the same choice erases it again.

Files that were replaced stay for readers of older versions until scrub(), or vacuum.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final
from uuid import UUID, uuid4

from sqlalchemy import Connection

from durable.errors import ArchiveConflict, InvalidSetting
from durable.failpoints import failpoint
from durable.pipeline import blanking
from durable.pipeline.blanking import Wanted
from durable.pipeline.copying import opened
from durable.pipeline.describing import properties, refuse_unknown_columns
from durable.pipeline.erasures import Recorded, State, record, recorded, states
from durable.pipeline.lake import SOURCES, Lake, LakeTable, Whose
from durable.pipeline.origin import Origin, locked
from durable.storage import archives, erasures
from durable.storage.erasures import Chosen, Erasure, Here

_TRIES: Final = 5  # against who compacts the same days meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Rows that an erasure would empty."""

    here: Here
    lake: Mapping[LakeTable, int]
    """Rows of this service."""
    others: Mapping[Whose, int] = field(default_factory=dict)
    """Rows of other services in the lake, which are erased from their databases."""

    @property
    def is_empty(self) -> bool:
        return not (self.here.history or self.here.letters or any(self.lake.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Erasure as recorded by the database or the lake."""

    erasure: Erasure
    state: State


def survey(origin: Origin, lake: Lake | None, chosen: Chosen) -> Survey:
    """Count what is there of these messages, and change nothing."""
    with opened(origin.url) as engine, engine.connect() as conn:
        _refuse_half(conn, origin, lake)
        here = erasures.count(conn, origin.schema, chosen)
    found: dict[LakeTable, int] = {}
    others: dict[Whose, int] = {}
    for table in SOURCES:
        rows = blanking.count(lake, table, Wanted(chosen.ids, chosen.keys)) if lake is not None else {}
        found[table] = sum(count for whose, count in rows.items() if whose.service == origin.service)
        for whose, count in rows.items():
            if whose.service != origin.service:
                others[whose] = others.get(whose, 0) + count
    return Survey(here=here, lake=found, others=others)


def earlier(origin: Origin, lake: Lake | None, chosen: Chosen) -> list[Listed]:
    """The erasures of the same choice, the oldest first."""
    with opened(origin.url) as engine, engine.connect() as conn:
        return _of_choice(conn, origin, lake, chosen)


def erase(origin: Origin, lake: Lake | None, chosen: Chosen, *, actor: str, reason: str) -> Erasure:
    """Empty them, in the database and in the lake, and return the record.

    Raises ArchiveConflict while an archiver is at work, or others keep replacing the same files; InvalidSetting where
    the lake is missing, or was written by a newer version.
    """
    with opened(origin.url) as engine, locked(engine, origin.schema) as conn:
        _refuse_half(conn, origin, lake)
        if lake is not None:
            for table in _tables(lake):
                refuse_unknown_columns(lake.opened(table), table, lake.url)
        erasure = _begun(conn, origin, lake, chosen, actor, reason)
        erasures.begin(conn, origin.schema, erasure)
        with engine.begin() as work:
            erasures.erase(work, origin.schema, erasure, chosen)
        failpoint("E1")
        if lake is not None:
            erasure = _erased_in_lake(conn, origin, lake, chosen, erasure)
        erasures.finish(conn, origin.schema, erasure)
        return next(each for each in erasures.read(conn, origin.schema) if each.erasure_id == erasure.erasure_id)


def scrub(origin: Origin, lake: Lake) -> int:
    """Remove every file that is no part of the lake's tables now, and the logs that tell of them; returns how many.

    Older versions of the tables cannot be read any more, and readers that have begun with one fail.
    """
    with opened(origin.url) as engine, locked(engine, origin.schema) as conn:
        return sum(_scrubbed(conn, origin, lake, table) for table in _tables(lake))


def listed(conn: Connection, origin_schema: str, lake: Lake | None) -> list[Listed]:
    """The erasures of this database, and what is the matter with each."""
    here = erasures.read(conn, origin_schema)
    database = archives.known_database(conn, origin_schema)
    there = [] if lake is None else [each for each in recorded(lake) if each.database == database]
    found = states(here, there, None if lake is None else lake.table_id("history"))
    known = {each.erasure_id: each for each in [*map(_as_erasure, there), *here]}
    return [Listed(erasure=known[each], state=state) for each, state in found.items()]


# ---------------------------------------------------------------- steps


def _refuse_half(conn: Connection, origin: Origin, lake: Lake | None) -> None:
    """Content must not stay behind in a lake that nobody has named."""
    archive = archives.find(conn, origin.schema, SOURCES["history"])
    if lake is None:
        if archive is not None:
            raise InvalidSetting(f"lake: not set, and this database is archived into {archive.lake}; give --lake")
    elif not _tables(lake):
        raise InvalidSetting(f"lake {lake.url}: there is no lake; name the one that this database is archived into")


def _tables(lake: Lake) -> list[LakeTable]:
    return [table for table in SOURCES if lake.exists(table)]


def _begun(conn: Connection, origin: Origin, lake: Lake | None, chosen: Chosen, actor: str, reason: str) -> Erasure:
    """The record of this erasure: that of an earlier one of the same choice which is not done, or a new one."""
    for each in _of_choice(conn, origin, lake, chosen):
        if each.state is not State.DONE:
            return each.erasure
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


def _of_choice(conn: Connection, origin: Origin, lake: Lake | None, chosen: Chosen) -> list[Listed]:
    """The erasures of the same choice."""
    return [
        each
        for each in listed(conn, origin.schema, lake)
        if each.erasure.chosen_count == len(chosen.ids) + len(chosen.keys)
        and each.erasure.choice_digest == _digest(chosen, each.erasure.erasure_id)
    ]


def _digest(chosen: Chosen, erasure_id: UUID) -> bytes:
    """Costly to compute, so that a list of likely keys is of no use against it."""
    words = sorted([*(f"id {each}" for each in chosen.ids), *(f"key {each}" for each in chosen.keys)])
    return hashlib.scrypt("\0".join(words).encode(), salt=erasure_id.bytes, n=1 << 14, r=8, p=1, dklen=32)


def _erased_in_lake(conn: Connection, origin: Origin, lake: Lake, chosen: Chosen, erasure: Erasure) -> Erasure:
    wanted = Wanted(chosen.ids, chosen.keys, origin.service)
    counts: dict[LakeTable, int] = dict.fromkeys(SOURCES, 0)
    for table in _tables(lake):
        lake.create(table)  # adds the column that marks such rows, to a lake of an earlier version
        _rewrite(conn, origin, lake, table, wanted, erasure.erasure_id)
        failpoint("E2")
        counts[table] = blanking.count_erased(lake, table, erasure.erasure_id)
    done = erasure._replace(
        lake=lake.url,
        lake_id=lake.table_id("history"),
        lake_history_rows=counts["history"],
        lake_letter_rows=counts["dead_letters"],
    )
    record(lake, _as_recorded(done, archives.database(conn, origin.schema)))
    failpoint("E3")
    return done


def _rewrite(conn: Connection, origin: Origin, lake: Lake, table: LakeTable, wanted: Wanted, erasure_id: UUID) -> None:
    """Rewrite the files; repeat when another writer replaces the same files meanwhile, up to a limit."""
    for tries_left in reversed(range(_TRIES)):
        offsets = _offsets(conn, origin, lake, table)
        replaced, written = blanking.rewritten(lake, table, wanted, erasure_id, _name(offsets))
        if not replaced:
            return
        try:
            lake.replace(table, replaced, written, offsets)
        except ArchiveConflict:
            for file in written:
                lake.remove(table, file.path)
            if not tries_left:
                raise ArchiveConflict(
                    f"lake {lake.url}: {table} was changed by others {_TRIES} times meanwhile; erase once more"
                ) from None
        else:
            return


def _offsets(conn: Connection, origin: Origin, lake: Lake, table: LakeTable) -> dict[str, int]:
    """Return this database's offset in the lake, which must not move meanwhile."""
    archive = archives.find(conn, origin.schema, SOURCES[table])
    if archive is None or archive.lake_id != lake.table_id(table):
        return {}
    return {archive.app_id: lake.offset(archive.app_id, table)}


def _name(offsets: Mapping[str, int]) -> str:
    """Name files as an archive does, so that it cleans up after an erasure that has died."""
    app_id, low = next(iter(offsets.items()), ("", 0))
    return f"{_app(app_id)}-{low}-{uuid4().hex[:8]}"


def _app(app_id: str) -> str:
    return f"{zlib.crc32(app_id.encode()):08x}"


def _scrubbed(conn: Connection, origin: Origin, lake: Lake, table: LakeTable) -> int:
    removed = len(lake.opened(table).vacuum(0, dry_run=False, enforce_retention_duration=False))
    names = {_app(app_id) for app_id in (*_offsets(conn, origin, lake, table), "")}
    for day in lake.files_by_day(table):
        for path in lake.unlisted(table, day):
            parts = path.rpartition("/")[2].split("-")
            if len(parts) == 6 and parts[0] == "part" and parts[1] in names:
                lake.remove(table, path)
                removed += 1
    _forget_log(lake, table)
    return removed


def _forget_log(lake: Lake, table: LakeTable) -> None:
    """Earlier versions have written statistics into the log, with the lowest and highest of keys and headers."""
    of = properties(table)
    none = {name: "interval 0 seconds" for name in of if name.endswith("RetentionDuration")}
    lake.opened(table).alter.set_table_properties(none)
    lake.opened(table).create_checkpoint()
    lake.opened(table).cleanup_metadata()
    lake.opened(table).alter.set_table_properties({name: of[name] for name in none})


# ---------------------------------------------------------------- records


def _as_recorded(erasure: Erasure, database: str) -> Recorded:
    return Recorded(
        erasure_id=erasure.erasure_id,
        service=erasure.service,
        database=database,
        actor=erasure.actor,
        reason=erasure.reason,
        chosen_by=erasure.chosen_by,
        chosen_count=erasure.chosen_count,
        choice_digest=erasure.choice_digest,
        erased_at=datetime.now(UTC),
        history_rows=erasure.lake_history_rows,
        letter_rows=erasure.lake_letter_rows,
    )


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
