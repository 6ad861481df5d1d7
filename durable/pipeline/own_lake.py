"""The lake of a database, told from copies of it: `cp -r` keeps the ids of the tables, so that the place tells.

the known place has the table             it is the own lake, and another place with the same id has a copy
the known place has it no more, or        the place that is named is the own lake if it has all that was archived: it
cannot be looked into                     was moved there. An earlier state is none: the known place may be a mount that
                                          is away, and back tomorrow
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
    if known.table_id(table) == archive.lake_id:
        return known
    if named.table_id(table) != archive.lake_id:
        raise InvalidSetting(
            f"lake {named.url}: the database is archived into {archive.lake}, which is not there; name the place where "
            "it is now"
        )
    require_own(archive, table, named, named.offset(archive.app_id, table))
    return named


def require_own(archive: Archive, table: LakeTable, named: Lake, offset: int) -> None:
    """Raise InvalidSetting for another place than that of the lake that this table is archived into."""
    if fault := fault_of(archive, table, named, offset):
        raise InvalidSetting(f"lake {named.table_url(table)}: {fault}")


def refuse_copy(archive: Archive, table: LakeTable, named: Lake) -> None:
    """Raise InvalidSetting for a copy of the lake that this table is archived into."""
    if named.table_id(table) == archive.lake_id and _is_copy(archive, table, named):
        raise InvalidSetting(f"lake {named.table_url(table)}: {_copy(archive, table)}")


def fault_of(archive: Archive, table: LakeTable, named: Lake, offset: int) -> str | None:
    """Return why the archive does not go on in this lake, which ends at `offset`: it is another one, a copy, or may be
    an old one; None where it does.
    """
    if named.table_id(table) != archive.lake_id:
        return _another(archive, table, named)
    if _is_copy(archive, table, named):
        return _copy(archive, table)
    if offset < archive.archived_below and not is_known_place(archive, table, named):
        return (
            f"lacks what was archived last into {archive.lake}, which is not there now; mount that, or put this one "
            "into its place if it is lost; to leave it behind, run durable-agent pipeline archive --new-lake here"
        )
    return None


def _another(archive: Archive, table: LakeTable, named: Lake) -> str:
    of, is_there = f"{SOURCES[table]} of this database", named.table_id(table) is not None
    if not is_known_place(archive, table, named):
        lacks = "" if named.tables() else "there is no lake, and "
        return f"{lacks}{of} is archived into {archive.lake}; name that lake, or begin anew in this one with --new-lake"
    found = "is another lake than the one" if is_there else "there is no lake any more in the place"
    return (
        f"{found} that {of} is archived into; mount that lake, put its files back, or name the place where they are "
        "now; if they are lost, begin anew in another place with --new-lake"
    )


def is_known_place(archive: Archive, table: LakeTable, named: Lake) -> bool:
    """Tell whether the named place is the one that this table was archived into last, whatever is there now."""
    try:
        return Lake(_url(archive, table)).is_at(named)
    except InvalidSetting:
        return False


def _is_copy(archive: Archive, table: LakeTable, named: Lake) -> bool:
    """Tell whether the known place has the lake that is also at the named one. One that cannot be opened has it no
    more, or the archive could not go on in another place.
    """
    try:
        known = _known(archive, table, named)
        return known.table_id(table) == archive.lake_id and not known.is_at(named)
    except DurableError:
        return False


def _copy(archive: Archive, table: LakeTable) -> str:
    return (
        f"is a copy of {archive.lake}, into which {SOURCES[table]} is archived; name that, or move it away if the copy "
        "is to take its place"
    )


def _known(archive: Archive, table: LakeTable, named: Lake) -> Lake:
    try:
        known = Lake(_url(archive, table))
        if known.url == named.url:
            return named
        known.exists(table)
    except InvalidSetting as error:
        raise InvalidSetting(
            f"lake {named.url}: the database is archived into {archive.lake}, which cannot be opened: {error}; if that "
            "lake was moved, let durable-agent pipeline archive go on in its new place first"
        ) from error
    return known


def _url(archive: Archive, table: LakeTable) -> str:
    return archive.lake.removesuffix(f"/{table}")
