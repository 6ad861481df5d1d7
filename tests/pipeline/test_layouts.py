"""Files of a place of any layout: all of them are read, or the first that Spark would leave out is named."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Final

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from durable.errors import InvalidSetting
from durable.pipeline import places, replayable
from durable.pipeline.replayable import check_place
from tests.pipeline.test_replayable import message_table
from tests.support.command import Agent

READ: Final = {
    "one folder": ["a.parquet", "b", "c.parquet"],
    "partitions": ["day=2030-05-01/a.parquet", "day=2030-05-02/a.parquet"],
    "partitions of two columns": ["day=2030-05-01/hour=1/a", "day=2030-05-01/hour=2/a"],
    "partitions in another case": ["day=2030-05-01/a", "Day=2030-05-02/a"],
    "partitions below one folder": ["more/day=2030-05-01/a", "more/day=2030-05-02/a"],
    "partition with _": ["_day=2030-05-01/a", "_day=2030-05-02/a"],
}
LEFT: Final = {
    "file beside a folder": (["a.parquet", "more/b.parquet"], "more/b.parquet"),
    "only a folder": (["more/b.parquet"], "more/b.parquet"),
    "file beside a partition": (["a.parquet", "day=2030-05-01/b.parquet"], "a.parquet"),
    "folder in a partition": (["day=2030-05-01/a", "day=2030-05-01/more/b"], "day=2030-05-01/more/b"),
    "partitions of other columns": (["day=2030-05-01/a", "month=2030-05/b"], "month=2030-05/b"),
    "name with _": (["_b.parquet", "a.parquet"], "_b.parquet"),
    "name with .": ([".b.parquet", "a.parquet"], ".b.parquet"),
    "name of a copy": (["a.parquet", "b.parquet._COPYING_"], "b.parquet._COPYING_"),
    "folder with _": (["_more/b.parquet", "a.parquet"], "_more/b.parquet"),
    "only a hidden name": (["_b.parquet"], "_b.parquet"),
}
MARKS: Final = ["_SUCCESS", "_metadata", "_common_metadata", "_temporary/0/b.parquet", ".a.parquet.crc", ".DS_Store"]


def write(folder: Path, paths: list[str]) -> None:
    for number, path in enumerate(paths):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(message_table(number, {}), folder / path)


@pytest.mark.parametrize("name", [*READ, *LEFT])
def test_file_is_read_or_named(spark: SparkSession, tmp_path: Path, name: str) -> None:
    paths, left = LEFT[name] if name in LEFT else (READ[name], None)
    write(tmp_path, paths)
    if left is None:
        check_place(str(tmp_path))
        assert replayable.read(spark, str(tmp_path)).count() == len(paths)
        return
    with pytest.raises(InvalidSetting, match=f"^--parquet: {left} in {tmp_path} would be left out, "):
        check_place(str(tmp_path))


def test_marks_of_writers_are_no_messages(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path, ["a.parquet"])
    for mark in MARKS:
        (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
        if mark.startswith("_"):
            pq.write_table(message_table(7, {}), tmp_path / mark)
        else:
            (tmp_path / mark).write_bytes(b"crc or so")
    (tmp_path / "_SUCCESS").write_bytes(b"")
    check_place(str(tmp_path))
    assert replayable.read(spark, str(tmp_path)).count() == 1


def test_hidden_file_is_named_when_no_folder_is_given(tmp_path: Path) -> None:
    write(tmp_path, ["_b.parquet"])
    with pytest.raises(InvalidSetting, match=r"^--parquet: _b.parquet in .* would be left out"):
        check_place(str(tmp_path / "_b.parquet"))


def test_hidden_file_of_a_store_is_named(store_url: str) -> None:
    for path in ("a.parquet", "_b.parquet"):
        with places.created(f"{store_url}/files", path) as file:
            file.write(b"PAR1")
    with pytest.raises(InvalidSetting, match=r"^--parquet: _b.parquet in .* would be left out"):
        check_place(f"{store_url}/files")


def test_command_names_a_file_in_a_linked_folder(agent: Agent, tmp_path: Path) -> None:
    write(tmp_path, ["files/a.parquet", "more/b.parquet"])
    (tmp_path / "files/link").symlink_to(tmp_path / "more")
    ended = agent("pipeline", "replay", "--parquet", str(tmp_path / "files"), "--all", "--name", "x")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
    assert ended.err.startswith(f"error: --parquet: link/b.parquet in {tmp_path}/files would be left out, ")


@pytest.mark.parametrize(
    ("link", "is_named"), [("b.parquet", True), ("more/b", True), ("_SUCCESS", False), (".#b", False)]
)
def test_link_to_nothing_is_named(tmp_path: Path, link: str, is_named: bool) -> None:
    write(tmp_path, ["a.parquet"])
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(tmp_path / "nowhere")
    with (
        pytest.raises(InvalidSetting, match=f"^--parquet: {link} in .* is a symbolic link to nothing")
        if is_named
        else nullcontext()
    ):
        check_place(str(tmp_path))
