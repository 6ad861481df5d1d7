"""The lake as Iceberg tables: metadata beside the Delta logs, about the same files. No row is copied.

    LAKE/history/day=.../part-*.parquet              the rows, once
    LAKE/history/_delta_log/                         which of them are part of the Delta table
    LAKE/iceberg/history/metadata/v7.metadata.json   which of them were part of it at the last export
    LAKE/iceberg/history/metadata/version-hint.text  7

Delta's log stays the truth: an export compares it with the Iceberg table, and commits what was added and replaced
since as one version. The partition is the UTC day of finished_at or failed_at, as a transform that needs no column.
Bounds are kept of the columns that Delta keeps them of, so that no content is in the metadata.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from durable.errors import InvalidSetting, needs
from durable.pipeline import places
from durable.pipeline.describing import properties
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import DAY_OF, LakeTable
from durable.pipeline.unwritable import in_one_line, writing

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

_NAMESPACE: Final = "durable"
_HINT: Final = "version-hint.text"
_KEPT_SNAPSHOTS: Final = timedelta(days=1)
_KEPT_VERSIONS: Final = 10  # of the metadata: who has begun with an earlier one goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Exported table: `metadata` is the location for readers and catalogs."""

    table: str
    metadata: str
    version: int
    files: int
    added: int
    removed: int


def export(lake: Lake, table: LakeTable) -> Exported:
    """Bring the Iceberg table to what the Delta table is now; the first export makes it.

    One exporter at a time. Raises InvalidSetting without the extra, or where the table holds nothing yet.
    """
    with needs("export", extra="iceberg"):
        import pyiceberg.table  # noqa: F401
    import pyarrow as pa

    if not lake.exists(table):
        raise InvalidSetting(f"lake {lake.url}: no {table}; fill it with durable-agent pipeline archive")
    place = f"{_url(lake.url)}/iceberg/{table}"
    version = _version(place) or 0
    schema = _schema(lake, table)
    exported = _opened(place, version) if version else None
    with writing(_plain(place)):
        found = _made(lake, table, schema, place) if exported is None else exported
    wanted = _wanted(lake, table)
    known = {task.file.file_path: task.file for task in found.scan().plan_files()}
    added, removed = sorted(wanted - known.keys()), [file for path, file in known.items() if path not in wanted]
    if added or removed or exported is None or _lacks_columns(found, schema):
        before = _manifests(found)
        try:
            with writing(_plain(place)):
                _commit(found, schema, added, removed)
        except pa.ArrowInvalid as error:
            raise places.unreadable(_unreadable(added) or lake.table_url(table), in_one_line(str(error))) from error
        version += 1
        _publish(place, found, version)
        _forget(place, before - _manifests(found), version)
    metadata = f"{place}/metadata/v{version}.metadata.json"
    files = len(wanted)
    return Exported(
        table=table, metadata=metadata, version=version, files=files, added=len(added), removed=len(removed)
    )


# ---------------------------------------------------------------- the table


def _catalog(place: str) -> Catalog:
    """Return a catalog in memory: the state of a table lies in its metadata."""
    from pyiceberg.catalog.memory import InMemoryCatalog

    catalog = InMemoryCatalog(_NAMESPACE, warehouse=place, **_store(place))
    catalog.create_namespace(_NAMESPACE)
    return catalog


def _schema(lake: Lake, table: LakeTable) -> pa.Schema:
    """Return the schema of the Delta table, with the columns of newer versions; the day is no column of its files."""
    import pyarrow as pa

    whole = pa.schema(lake.opened(table).schema().to_arrow())
    return pa.schema([field.remove_metadata() for field in whole if field.name != "day"])


def _made(lake: Lake, table: LakeTable, schema: pa.Schema, place: str) -> Table:
    from pyiceberg.transforms import DayTransform

    bounded = properties(table)["delta.dataSkippingStatsColumns"].split(",")
    made = _catalog(place).create_table(
        (_NAMESPACE, table),
        schema=schema,
        location=place,
        properties={
            "write.metadata.metrics.default": "none",
            **{f"write.metadata.metrics.column.{name}": "full" for name in bounded},
            "commit.manifest-merge.enabled": "true",
            "durable.delta-table": lake.table_url(table),
        },
    )
    with made.update_spec() as spec:
        spec.add_field(DAY_OF[table], DayTransform(), f"{DAY_OF[table]}_day")
    return made


def _opened(place: str, version: int) -> Table | None:
    """None for that of a lake whose files were copied, or moved, to this place: it names files of the other one."""
    named = f"{place}/metadata/v{version}.metadata.json"
    found = _catalog(place).register_table((_NAMESPACE, "exported"), named)
    return found if found.location() == place else None


def _lacks_columns(found: Table, schema: pa.Schema) -> bool:
    return not set(schema.names) <= set(found.schema().column_names)


def _commit(found: Table, schema: pa.Schema, added: list[str], removed: list[Any]) -> None:
    """Commit in one version of the metadata, so that every reader sees each row exactly once."""
    with found.transaction() as work:
        if _lacks_columns(found, schema):
            with work.update_schema() as change:
                change.union_by_name(schema)
        if removed:
            with work.update_snapshot().overwrite() as snapshot:
                for file in removed:
                    snapshot.delete_data_file(file)
        if added:
            work.add_files(added, check_duplicate_files=False)
    found.maintenance.expire_snapshots().older_than(datetime.now(UTC) - _KEPT_SNAPSHOTS).commit()


def _unreadable(files: Sequence[str]) -> str | None:
    """The first of these files that is no Parquet file, or was cut off."""
    import pyarrow as pa
    from pyarrow.parquet import read_metadata

    for url in files:
        folder, _, name = url.rpartition("/")
        try:
            with places.opened(_plain(folder), name) as file:
                read_metadata(file)
        except pa.ArrowInvalid:
            return url
    return None


def _publish(place: str, found: Table, version: int) -> None:
    """Publish the metadata under the name that readers without a catalog look for; the hint comes last."""
    name = found.metadata_location.rpartition("/")[2]
    for path, content in (
        (f"metadata/v{version}.metadata.json", places.read(_plain(place), f"metadata/{name}")),
        (f"metadata/{_HINT}", str(version).encode()),
    ):
        with places.created(_plain(place), path) as file:
            file.write(content)


def _forget(place: str, manifests: set[str], version: int) -> None:
    """Remove what no version that is kept names any more."""
    kept = {f"v{number}.metadata.json" for number in range(version - _KEPT_VERSIONS, version + 1)}
    for name in places.names(_plain(place), "metadata"):
        if name in manifests or (name.endswith(".metadata.json") and name not in kept):
            places.remove(_plain(place), f"metadata/{name}")


def _manifests(found: Table) -> set[str]:
    """The names of the files that the snapshots of this version consist of."""
    named: set[str] = set()
    for snapshot in found.snapshots():
        named.add(snapshot.manifest_list)
        named |= {manifest.manifest_path for manifest in snapshot.manifests(found.io)}
    return {path.rpartition("/")[2] for path in named}


# ---------------------------------------------------------------- places


def _wanted(lake: Lake, table: LakeTable) -> set[str]:
    folder, paths = _url(lake.table_url(table)), [path for each in lake.files_by_day(table).values() for path in each]
    places.check_present(lake.table_url(table), paths)
    return {f"{folder}/{path}" for path in paths}


def _version(place: str) -> int | None:
    """The last one that was published."""
    if _HINT not in places.names(_plain(place), "metadata"):
        return None
    return int(places.read(_plain(place), f"metadata/{_HINT}"))


def _url(place: str) -> str:
    """Write a place for readers, which take a URL by its letters: a path with # or ? they would cut, and has none."""
    url = f"file://{place}"
    return place if "://" in place or urlsplit(url).path != place else url


def _plain(place: str) -> str:
    """Write a place as the lake does."""
    return place.removeprefix("file://")


def _store(place: str) -> Mapping[str, str]:
    """Return the address of an object store, for a library that does not read it from the environment."""
    if not place.startswith("s3"):
        return {}
    named = {
        "s3.endpoint": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "s3.region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
        "s3.access-key-id": ("AWS_ACCESS_KEY_ID",),
        "s3.secret-access-key": ("AWS_SECRET_ACCESS_KEY",),
        "s3.session-token": ("AWS_SESSION_TOKEN",),
    }
    found = {name: next((os.environ[key] for key in keys if key in os.environ), None) for name, keys in named.items()}
    return {name: value for name, value in found.items() if value is not None}
