"""Beginning of an archive run: the lake, the numbering of transactions, and the first transaction of the run.

    the database      is the one that was archived     goes on where the lake ends
                      has taken its place              a new generation of numbers; its rows are known by their keys
                      is a copy of it                  begins in a lake that holds none of its original
                      has another life in the lake     the last commit is one that it does not know: as one that has
                      (files put back, or copied)      taken its place, and what it had archived since they parted is
                                                       archived again, or gone
    the lake          is another one, and new          begins with the rows that are here
                      is another one, used before      a new generation; what was dropped since is a gap of that lake

All tables that are archived are looked at before one of them is changed, and are changed in one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from typing import Final, NamedTuple

from sqlalchemy import Connection, Engine

from durable.errors import DurableError, InvalidSetting
from durable.pipeline import lost_lives, recovering
from durable.pipeline.erasures import record, recorded
from durable.pipeline.foreign import Parted
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES, LakeTable, Whose
from durable.pipeline.origin import Origin, app_id
from durable.pipeline.own_lake import is_known_place, refuse_copy, require_own
from durable.storage import archives, erasures, horizons
from durable.storage.archives import Archive, LakeEnd, Place


@dataclass(frozen=True, slots=True)
class Wish:
    """Decision of an operator about the database and the lake."""

    is_new_lake: bool = False
    """Leave the earlier lake behind."""
    is_successor: bool = False
    """This database has taken the place of the one that was archived."""


class Begun(NamedTuple):
    """An archive that has begun, and the rows that are gone with the lake that it has left, by day."""

    archive: Archive
    gone: Mapping[date, int]
    left: str | None = None
    """The lake that it has just left."""


NO_WISH: Final = Wish()


def begin(engine: Engine, conn: Connection, lake: Lake, table: LakeTable, origin: Origin, wish: Wish) -> Begun:
    """Begin to archive a table: from here on maintenance drops only rows that are archived.

    `conn` commits each statement. Raises InvalidSetting where an operator has to decide first.
    """
    schema = origin.schema
    name = archives.database(conn, schema, _earlier_name(conn, lake, origin, wish))
    moving: list[LakeTable] = [
        each for each in SOURCES if wish.is_new_lake and archives.find(conn, schema, SOURCES[each])
    ]
    sides = [_Side.find(conn, lake, each, origin, name) for each in SOURCES if each == table or each in moving]
    for side in sides:
        side.refuse(lake, wish)
        if side.archive is not None and not (wish.is_new_lake or is_known_place(side.archive, table, lake)):
            _require_both(conn, lake, schema)
    if any(side.moves and not side.returns for side in sides):
        _refuse_other_name(conn, lake, origin)
    for side in sides:
        if side.is_first or wish.is_new_lake or side.lake_id:  # a misspelt place stays empty
            side.lake_id = lake.create(side.table)
    for side in sides:
        if side.moves:
            _bring_records(conn, lake, side)
    with engine.begin() as changing:
        gone = _change(changing, lake, sides, origin, wish)
    side = next(each for each in sides if each.table == table)
    if side.commit_id is not None:
        archives.forget_found(conn, schema, side.source, side.commit_id)
    archives.confirm(conn, schema, side.source, side.offset)
    archives.rewind(conn, schema, side.source, side.offset)
    left = side.known.lake.removesuffix(f"/{table}") if side.moves else None
    return Begun(archives.read(conn, schema, side.source), gone.get(table, {}), left)


def _earlier_name(conn: Connection, lake: Lake, origin: Origin, wish: Wish) -> str | None:
    """Return the name under which the lake knows a database that does not know it itself."""
    if archives.known_database(conn, origin.schema) is not None:
        return None
    name = recovering.earlier_name(conn, lake, origin)
    if name is not None and not wish.is_successor:
        raise InvalidSetting(
            f"lake {lake.url}: has rows of this database, as {name}, and this database was never archived: it was "
            "restored to a state before that, or copied; if it has taken the place of that database, run once with "
            "--successor, which archives what the lake does not have; if that one still lives, archive this one into "
            "another lake"
        )
    return name


def _require_both(conn: Connection, lake: Lake, schema: str) -> None:
    """Raise InvalidSetting unless both tables have come to this place: one alone would leave the other behind."""
    for table, source in SOURCES.items():
        archive = archives.find(conn, schema, source)
        if archive is not None:
            require_own(archive, table, lake, lake.offset(archive.app_id, table))


def _refuse_other_name(conn: Connection, lake: Lake, origin: Origin) -> None:
    """Raise InvalidSetting where the lake knows this database by a name that it had before it was restored.

    Its own name is no reason: an archiver that was killed between the tables of a new lake leaves rows under it.
    """
    name = recovering.earlier_name(conn, lake, origin)
    if name is not None and name != archives.known_database(conn, origin.schema):
        raise InvalidSetting(
            f"lake {lake.url}: has rows of this database as {name}, its name before it was restored to a state without "
            "one, or that of its original; archive it into another lake"
        )


@dataclass(slots=True)
class _Side:
    """A table, its archive as the database knows it, and the lake that is named for it."""

    table: LakeTable
    origin: Origin
    archive: Archive | None
    app_id: str
    lake_url: str
    lake_id: str
    """Empty where there is no such table."""
    offset: int
    commit_id: int | None
    """The last commit of the lake; None where there is none, or it has no number."""
    common: int | None
    """The transaction below which the lake was archived when this database knew its last commit; None where its log
    does not tell."""
    is_put_back: bool
    is_other_database: bool
    is_numbered_anew: bool

    @classmethod
    def find(cls, conn: Connection, lake: Lake, table: LakeTable, origin: Origin, name: str) -> _Side:
        schema, source = origin.schema, SOURCES[table]
        archive, app = archives.find(conn, schema, source), app_id(origin.service, name, schema, source)
        known_app = app if archive is None else archive.app_id
        offset, commit_id = lake.offset(known_app, table), lake.commit_id(known_app, table)
        common: int | None = offset
        if commit_id is not None and archives.claimed(conn, schema, source, [commit_id]) is None:
            common = archives.claimed(conn, schema, source, lake.commits(known_app, table))
        return cls(
            table=table,
            origin=origin,
            archive=archive,
            app_id=app,
            lake_url=lake.table_url(table),
            lake_id=lake.table_id(table) or "",
            offset=offset,
            commit_id=commit_id,
            common=common,
            is_put_back=offset > 0
            and archive is not None
            and lake.table_id(table) == archive.lake_id
            and recovering.is_put_back_by_restore(lake, table, archive, recovering.newest_commit(conn, schema, table)),
            is_other_database=archive is not None and archive.identity != archives.identity(conn, schema),
            is_numbered_anew=archives.is_numbered_anew(conn, schema, source),
        )

    @property
    def source(self) -> str:
        return SOURCES[self.table]

    @property
    def is_first(self) -> bool:
        return self.archive is None

    @property
    def moves(self) -> bool:
        return self.archive is not None and self.archive.lake_id != self.lake_id

    @property
    def returns(self) -> bool:
        """Tell whether rows of this database, or of one before it, are in the lake to which the archive moves."""
        return self.moves and self.offset > 0

    @property
    def is_of_another_life(self) -> bool:
        """Tell whether somebody else has made the last commit of the lake."""
        return self.common != self.offset

    @property
    def remembered(self) -> int:
        """Return the transaction up to which this database remembers that it was archived into this lake."""
        if self.is_of_another_life and self.common is not None:
            return self.common
        is_here = self.archive is not None and not self.moves
        if not is_here:
            return 0 if self.archive is None else self.archive.left_lakes.get(self.lake_id, 0)
        return max(self.known.claimed_below, self.known.archived_below)

    @property
    def is_ahead(self) -> bool:
        """Tell whether the lake has commits that this database does not remember."""
        return (self.offset > self.remembered or self.is_of_another_life) and not self.moves

    @property
    def place(self) -> Place:
        return Place(self.origin.service, self.app_id, self.lake_url, self.lake_id)

    def needs_generation(self) -> bool:
        return self.is_other_database or self.is_numbered_anew or self.is_ahead or self.returns

    def refuse(self, lake: Lake, wish: Wish) -> None:
        """Raise InvalidSetting unless the wish settles what the database and the lake tell."""
        if self.is_other_database and not (wish.is_new_lake or wish.is_successor):
            raise InvalidSetting(_OTHER_DATABASE.format(source=self.source, lake=self.known.lake))
        if self.is_other_database and not wish.is_successor and self.known.lake_id == self.lake_id:
            raise InvalidSetting(_OF_ORIGINAL.format(lake=self.known.lake))
        if self.archive is not None:
            refuse_copy(self.archive, self.table, lake)
            if not wish.is_new_lake:
                require_own(self.archive, self.table, lake, self.offset)
        if self.is_put_back:
            raise InvalidSetting(f"lake {self.lake_url}: {PUT_BACK}")
        is_own = not self.moves or (
            self.lake_id in self.known.left_lakes and not (self.is_other_database or self.is_of_another_life)
        )
        if self.returns and not is_own and not wish.is_successor:
            raise InvalidSetting(_OF_ORIGINAL.format(lake=self.lake_url))
        is_numbered_anew = self.is_numbered_anew and not (self.is_first or self.is_other_database)
        if (self.is_ahead or is_numbered_anew) and not (wish.is_successor or self.is_other_database):
            raise InvalidSetting(
                f"lake {self.lake_url}: is at transaction {self.offset}, by a commit that this database does not know: "
                "it was restored to an earlier state, or copied, and its transactions are numbered as those of the "
                "other; run once with --successor, which archives what the lake does not have; if the other one still "
                "lives, archive this one into another lake, with --new-lake"
            )

    @property
    def known(self) -> Archive:
        """Return the archive of a table that is archived."""
        if self.archive is None:
            raise AssertionError(f"{self.source} is not archived")
        return self.archive


PUT_BACK: Final = (
    "an earlier version was put back by RESTORE, and does not say where it ends; put its files back from a backup, or "
    "archive into another lake, with --new-lake"
)
_OTHER_DATABASE = (
    "{source}: this is not the database that was archived into {lake}: it was restored, copied, upgraded or failed "
    "over, and its transactions are numbered anew; if it has taken the place of that database, run once with "
    "--successor, which archives what the lake does not have; if that one still lives, archive this one into another "
    "lake, with --new-lake"
)
_OF_ORIGINAL = (
    "lake {lake}: belongs to the database of which this one is a copy; name another place for the copy, or give "
    "--successor if it has taken the place of that database"
)


def _change(
    conn: Connection, lake: Lake, sides: Sequence[_Side], origin: Origin, wish: Wish
) -> dict[LakeTable, Mapping[date, int]]:
    """Change what the database says of these archives; return the rows that are gone with lakes that are left."""
    schema = origin.schema
    gone: dict[LakeTable, Mapping[date, int]] = {}
    whose = Whose(origin.service, archives.database(conn, schema))
    for side in sides:
        if side.is_first:
            archives.begin(conn, schema, side.source, side.place)
        elif side.moves:
            gone |= {side.table: _leave(conn, side)}
            archives.move(conn, schema, side.source, side.place)
        elif side.is_of_another_life:
            gone |= {side.table: _part(conn, side)}
        archives.place(conn, schema, side.source, side.place)
        if side.commit_id is not None and side.is_of_another_life:
            earlier = lake.commits(side.app_id if side.is_first else side.known.app_id, side.table)
            archives.adopt(conn, schema, side.source, {**earlier, side.commit_id: side.offset})
        if side.moves:
            end = LakeEnd(side.lake_id, side.offset, lake.span(side.table, whose).until)
            # A new lake has a beginning of history, but a day that was dropped may be made once more.
            since = None if side.returns or side.table == "dead_letters" else horizons.begins_at(conn, schema)
            archives.note_as_gaps(conn, schema, side.source, "dropped", end, since=since)
            archives.note_as_gaps(conn, schema, side.source, "foreign", end, others=True)
        if wish.is_successor and (side.is_ahead or side.returns):
            parted = Parted(lake, side.table, whose, side.remembered, below=side.offset)
            found = parted.foreign(conn, origin)
            archives.note_foreign(conn, schema, side.source, side.lake_id, found.noted)
            if found.keys is not None:
                lost_lives.write(lake, side.table, whose, found.keys)
        archives.resume(conn, schema, side.source)
    if any(side.is_other_database for side in sides) and not wish.is_successor:
        archives.forget_left_lakes(conn, schema)
    if any(side.needs_generation() for side in sides):
        archives.begin_generation(conn, schema)
        while archives.generation_base(conn, schema) <= max(side.offset for side in sides):
            archives.begin_generation(conn, schema)  # a state that is put back twice repeats it
    return gone


def _part(conn: Connection, side: _Side) -> Mapping[date, int]:
    """Forget what this database has archived since it and another life of it parted: the lake has that of the other
    one. Note, and return, the rows that are not here any more.
    """
    schema, source, common = side.origin.schema, side.source, side.remembered
    archives.rewind(conn, schema, source, common)
    gone = archives.gone(conn, schema, source, common)
    recovering.note_gone(conn, side.origin, side.table, gone, None)
    archives.settle(conn, schema, source)
    return gone


def _leave(conn: Connection, side: _Side) -> Mapping[date, int]:
    """Note, and return, the rows that were lost with the earlier lake, and that are not here."""
    gone = archives.gone(conn, side.origin.schema, side.source, side.known.archived_below)
    recovering.note_gone(conn, side.origin, side.table, gone, None)
    return gone


def _bring_records(conn: Connection, lake: Lake, side: _Side) -> None:
    """Copy the earlier lake's records of erasures that this database does not know."""
    left, schema = side.known, side.origin.schema
    here = {each.erasure_id for each in erasures.read(conn, schema)}
    with suppress(InvalidSetting, DurableError, OSError):  # a lake is often left because it cannot be read
        for each in recorded(Lake(left.lake.removesuffix(f"/{side.table}"))):
            if each.database == archives.known_database(conn, schema) and each.erasure_id not in here:
                record(lake, each)
