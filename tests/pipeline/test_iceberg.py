"""The lake as Iceberg tables: the same rows by the same files, after every change of the Delta tables."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import Field
from deltalake.schema import PrimitiveType
from pyiceberg.table import StaticTable

from durable.errors import DurableError, InvalidSetting
from durable.pipeline import iceberg, places
from durable.pipeline.compaction import compact, vacuum
from durable.pipeline.iceberg import Exported, export
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import DataFile, LakeTable
from tests.support.command import Agent
from tests.support.lakes import BEGAN, fill, handled, letter, sent, table

KEY = "customer anna"


@pytest.fixture(params=["lake", "a lake [of] {é}"])
def lake(tmp_path: Path, request: pytest.FixtureRequest) -> Lake:
    lake = Lake(str(tmp_path / request.param))
    return fill(lake, table([sent(1, partition_key=KEY), handled(1), handled(90_000)]))


def read(done: Exported, store: Mapping[str, str] | None = None, **scan: Any) -> list[tuple[int, str]]:
    rows = StaticTable.from_metadata(done.metadata, dict(store or {})).scan(**scan).to_arrow()
    return sorted((int.from_bytes(row["id"]), row["side"]) for row in rows.to_pylist())


def columns(done: Exported) -> list[str]:
    return StaticTable.from_metadata(done.metadata).schema().column_names


def lake_of_earlier_version(folder: Path) -> Lake:
    lake = Lake(str(folder / "lake"))
    with tarfile.open(Path(__file__).parent / "fixtures" / "lake-of-version-0.1.0.tar.xz") as packed:
        packed.extractall(lake.url, filter="data")
    return lake


def commit(lake: Lake, rows: pa.Table) -> None:
    """Rows of one day, in a folder or an object store."""
    path, low = f"day={BEGAN.date()}/part-more.parquet", lake.offset("more", "history")
    with places.created(lake.table_url("history"), path) as file:
        pq.write_table(rows.drop_columns("day"), file)
    written = DataFile(path, BEGAN.date(), len(rows), 1, f'{{"numRecords": {len(rows)}}}')
    lake.commit("history", [written], app_id="more", low=low, high=low + 1)


def metadata(lake: Lake, of: LakeTable = "history") -> list[Path]:
    return sorted(Path(lake.url, "iceberg", of, "metadata").iterdir())


def test_export_holds_every_row_and_copies_none(lake: Lake) -> None:
    done = export(lake, "history")
    assert read(done) == [(1, "incoming"), (1, "outgoing"), (90_000, "incoming")]
    assert (done.version, done.files, done.added, done.removed) == (1, 2, 2, 0)
    assert list(Path(lake.url, "iceberg").rglob("*.parquet")) == []
    assert read(done, row_filter="side = 'outgoing'") == [(1, "outgoing")]


def test_unreadable_file_is_named_by_the_export(lake: Lake) -> None:
    fill(lake, table([sent(1)]), table([sent(2)]))
    file = sorted(Path(lake.table_url("history")).glob("day=*/*.parquet"))[-1]
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DurableError, match=f"lake: .*{file.name} cannot be read: .*; put it back"):
        export(lake, "history")


def test_export_partitions_history_by_day(lake: Lake) -> None:
    found = StaticTable.from_metadata(export(lake, "history").metadata)
    parts = [row["partition"] for row in found.inspect.partitions().to_pylist()]
    assert sorted(row["finished_at_day"] for row in parts) == [date(2026, 1, 1), date(2026, 1, 2)]
    assert len(list(found.scan(row_filter="finished_at >= '2026-01-02T00:00:00+00:00'").plan_files())) == 1


def test_second_export_adds_new_rows_and_keeps_the_first_version(lake: Lake) -> None:
    first = export(lake, "history")
    assert export(lake, "history").version == 1
    fill(lake, table([handled(2)]))
    again = export(lake, "history")
    assert (again.version, again.files, again.added) == (2, 3, 1)
    assert len(read(again)) == 4
    assert len(read(first)) == 3, "who has begun with the version before goes on"


def test_export_follows_compaction_and_vacuum(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    for number in range(2, 6):
        fill(lake, table([handled(number)]))
    before = export(lake, "history")
    compact(lake, "history")
    done = export(lake, "history")
    assert (done.files, done.added, done.removed) == (2, 1, 5)
    monkeypatch.setattr("durable.pipeline.compaction._SHORTEST", timedelta(0))
    assert vacuum(lake, "history", timedelta(0)) == 5
    assert read(done) == [(n, "incoming") for n in range(1, 2)] + [(1, "outgoing")] + [
        (n, "incoming") for n in (2, 3, 4, 5, 90_000)
    ]
    assert read(done, row_filter="side = 'outgoing'") == [(1, "outgoing")]
    assert before.files == 6


def test_metadata_holds_no_content_and_does_not_grow_for_ever(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    monkeypatch.setattr(iceberg, "_KEPT_SNAPSHOTS", timedelta(0))
    monkeypatch.setattr(iceberg, "_KEPT_VERSIONS", 2)
    counts = []
    done = export(lake, "history")
    for number in range(2, 10):
        fill(lake, table([handled(number, partition_key=KEY)]))
        done = export(lake, "history")
        counts.append(len(metadata(lake)))
    assert max(counts) <= counts[2] + 10, counts
    assert len(read(done)) == 11
    assert KEY not in str(StaticTable.from_metadata(done.metadata).inspect.files().to_pylist())


def test_letters_are_exported_too(tmp_path: Path) -> None:
    lake = lake_of_earlier_version(tmp_path)
    assert len(read(export(lake, "history"))) == 9
    done = export(lake, "dead_letters")
    fill(lake, table([letter(3)], "dead_letters"), of="dead_letters")
    again = export(lake, "dead_letters")
    assert (done.version, again.version, len(read(again))) == (1, 2, 4)


def test_export_adds_new_columns_and_columns_of_newer_versions(tmp_path: Path) -> None:
    lake = lake_of_earlier_version(tmp_path)
    before = export(lake, "history")
    assert "erasure_id" not in columns(before)
    lake.create("history")
    done = export(lake, "history")
    assert (before.version, done.version, done.added) == (1, 2, 0)
    assert "erasure_id" in columns(done)
    lake.opened("history").alter.add_columns([Field("mood", PrimitiveType("string"), nullable=True)])
    commit(lake, table([handled(77)]).append_column("mood", pa.array(["merry"])))
    newer = export(lake, "history")
    moods = StaticTable.from_metadata(newer.metadata).scan().to_arrow()["mood"].to_pylist()
    assert (moods.count("merry"), moods.count(None)) == (1, 9)
    assert read(newer) == [*read(before), (77, "incoming")]


@pytest.mark.parametrize("folder", ["a#b", "a?b", "a b", "é", "l[a]{b}*", "a&+;=b", "'q\"", "#", "a?b#c d/é"])
def test_export_is_read_back_from_any_folder(tmp_path: Path, folder: str) -> None:
    lake = fill(Lake(str(tmp_path / folder)), table([handled(1)]))
    export(lake, "history")
    fill(lake, table([handled(2)]))
    done = export(lake, "history")
    assert (done.version, done.files, done.added, done.removed) == (2, 2, 1, 0)
    assert read(done) == [(1, "incoming"), (2, "incoming")]
    assert [file.name for file in tmp_path.iterdir()] == [folder.partition("/")[0]]


def test_folder_with_percent_encoding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="a path with per cent signs or backslashes"):
        Lake(str(tmp_path / "a%20b"))


def test_empty_lake_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="no history; fill"):
        export(Lake(str(tmp_path / "nothing")), "history")


def test_lake_in_an_object_store_is_exported(store_url: str, bucket: Mapping[str, str]) -> None:
    lake = Lake(store_url)
    lake.create("history")
    commit(lake, table([handled(1)]))
    done = export(lake, "history")
    assert done.metadata.startswith("s3://")
    assert read(done, iceberg._store(store_url)) == [(1, "incoming")]


def test_command_exports_both_tables(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = Agent(tmp_path, monkeypatch, capsys)
    ended = agent("pipeline", "export", "--format", "iceberg", "--lake", lake.url, "--json")
    assert (ended.code, ended.err) == (0, "")
    (history,) = json.loads(ended.out)["tables"]
    assert (history["table"], history["files"], len(read(Exported(**history)))) == ("history", 2, 3)
    assert "v1.metadata.json" in agent("pipeline", "export", "--lake", lake.url).out
    assert agent("pipeline", "export", "--lake", str(tmp_path / "nothing")).code == 2
    assert agent("pipeline", "export", "--format", "avro", "--lake", lake.url).code == 2
