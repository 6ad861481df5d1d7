"""The lake of a database, told from copies of it: `cp -r` keeps the ids of the tables, so that the place tells.

the known place has the table      it is the own lake, and another place with the same id has a copy
the known place has it no more     it was moved: the place that is named is the own lake
"""

from __future__ import annotations

from durable.errors import InvalidSetting
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
        raise InvalidSetting(
            f"lake {named.table_url(table)}: is a copy of {archive.lake}, into which {SOURCES[table]} is archived; "
            "name that"
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
