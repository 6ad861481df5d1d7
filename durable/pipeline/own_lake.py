"""The lake of a database, told from copies of it: `cp -r` keeps the ids of the tables, so that the place tells.

the known place has the table      it is the own lake, and another place with the same id has a copy
the known place has it no more     it was moved: the place that is named is the own lake
"""

from __future__ import annotations

from durable.errors import DurableError, InvalidSetting
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES, LakeTable
from durable.storage.archives import Archive


def own_lake(archive: Archive, table: LakeTable, named: Lake) -> Lake:
    """Return the lake that this table is archived into. Raises InvalidSetting where it is in neither place, or nobody
    can look into the known one.
    """
    known = _known(archive, table, named)
    for lake in (known, named):
        if lake.table_id(table) == archive.lake_id:
            return lake
    raise InvalidSetting(
        f"lake {named.url}: the database is archived into {archive.lake}, which is not there; name the place where it "
        "is now"
    )


def require_own(archive: Archive, table: LakeTable, named: Lake) -> None:
    """Raise InvalidSetting for another lake than the one that this table is archived into, and for a copy of it."""
    if named.table_id(table) != archive.lake_id:
        raise InvalidSetting(
            f"lake {named.table_url(table)}: {SOURCES[table]} is archived into {archive.lake}; name that"
        )
    if not own_lake(archive, table, named).is_at(named):
        raise InvalidSetting(f"lake {named.table_url(table)}: {copy_of(archive, table)}")


def refuse_copy(archive: Archive, table: LakeTable, named: Lake) -> None:
    """Raise InvalidSetting for a copy of the lake that this table is archived into."""
    if is_copy(archive, table, named):
        raise InvalidSetting(f"lake {named.table_url(table)}: {copy_of(archive, table)}")


def refuse_earlier(archive: Archive, table: LakeTable, named: Lake, offset: int) -> None:
    """Raise InvalidSetting for what may be an old copy."""
    fault, cause = _earlier(archive, table, named, offset)
    if fault is not None:
        raise InvalidSetting(f"lake {named.table_url(table)}: {fault}") from cause


def fault_of(archive: Archive, table: LakeTable, named: Lake, offset: int) -> str | None:
    """Return why the archive does not go on in this lake: it is a copy, or may be an old one; None where it does."""
    return copy_of(archive, table) if is_copy(archive, table, named) else _earlier(archive, table, named, offset)[0]


def _earlier(archive: Archive, table: LakeTable, named: Lake, offset: int) -> tuple[str | None, DurableError | None]:
    """The fault of a lake that ends at `offset`, before what was archived, where nobody can look into the known place:
    it may be an old copy, and the own lake may be back tomorrow. With all that was archived in it, it may go on in any
    case.
    """
    if named.table_id(table) != archive.lake_id or offset >= archive.archived_below:
        return None, None
    try:
        own_lake(archive, table, named)
    except DurableError as error:
        return (
            f"lacks what was archived last into {archive.lake}, which cannot be looked into; name that when it is "
            "there again, or put this one into its place if it is lost"
        ), error
    return None, None


def is_copy(archive: Archive, table: LakeTable, named: Lake) -> bool:
    """Tell whether the known place has the lake that is also at the named one. One that cannot be opened has it no
    more, or the archive could not go on in another place.
    """
    if named.table_id(table) != archive.lake_id:
        return False
    try:
        return not own_lake(archive, table, named).is_at(named)
    except DurableError:
        return False


def copy_of(archive: Archive, table: LakeTable) -> str:
    """Return the fault of a copy, and what to do."""
    return (
        f"is a copy of {archive.lake}, into which {SOURCES[table]} is archived; name that, or move it away if the copy "
        "is to take its place"
    )


def _known(archive: Archive, table: LakeTable, named: Lake) -> Lake:
    try:
        known = Lake(archive.lake.removesuffix(f"/{table}"))
        known.exists(table)
    except InvalidSetting as error:
        raise InvalidSetting(
            f"lake {named.url}: the database is archived into {archive.lake}, which cannot be opened: {error}; if that "
            "lake was moved, let durable-agent pipeline archive go on in its new place first"
        ) from error
    return known
