"""Columns of files of any origin: those that a replay reads have a type that it can read, or are named at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from durable.errors import InvalidSetting
from durable.pipeline import choosing, places, publishable, repeats, replay, replayable
from durable.pipeline.lake_tables import SOURCES, spark_schema
from durable.pipeline.replayable import TYPES, check_place, check_types
from tests.support.command import Agent

WHOLE: Final = {
    "id": "unhex('00000000000000000000000000000001')",
    "side": "'outgoing'",
    "address": "'tcp://billing:2301'",
    "message_type": "'orders.placed'",
    "source": "'shop'",
    "body": "encode('{}', 'utf-8')",
    "sent_at": "TIMESTAMP'2026-05-01 12:00:00Z'",
}
"""The columns without which there is no replay, and the time."""
VALUES: Final = {
    "binary": WHOLE["id"],
    "string": "'text'",
    "timestamp": WHOLE["sent_at"],
    "timestamp_ntz": "TIMESTAMP_NTZ'2026-05-01 12:00:00'",
    "date": "DATE'2026-05-01'",
    "bigint": "7L",
    "int": "7",
    "smallint": "7S",
    "tinyint": "7Y",
    "decimal": "7.5BD",
    "double": "7.5D",
    "float": "7.5F",
    "boolean": "true",
    "void": "NULL",
    "array": "array('a')",
    "map": "map('a', 'b')",
    "struct": "struct('a')",
    "interval": "INTERVAL '7' DAY",
}
"""A value of each type of Spark's."""
PAIRS: Final = [(name, kind) for name in TYPES for kind in VALUES]
FITTING: Final = [(name, kind) for name, kind in PAIRS if kind in TYPES[name]]
OTHERS: Final = [pair for pair in PAIRS if pair not in FITTING]


def rows(spark: SparkSession, name: str, kind: str) -> DataFrame:
    """A row that is whole, but for the type of this column."""
    columns = {**WHOLE, name: {"address": WHOLE["address"], "side": WHOLE["side"]}.get(name, VALUES[kind])}
    if kind not in TYPES[name]:
        columns[name] = VALUES[kind]
    if name == "destination":
        del columns["side"], columns["address"]
    return spark.sql(f"SELECT {', '.join(f'{value} AS {column}' for column, value in columns.items())}")


@pytest.mark.parametrize(("name", "kind"), OTHERS)
def test_column_of_another_type_is_named_before_spark_runs(spark: SparkSession, name: str, kind: str) -> None:
    given = rows(spark, name, kind)
    shown = dict(given.dtypes)[name].upper()
    with pytest.raises(InvalidSetting) as refused:
        choosing.complete(given)
    said = str(refused.value)
    assert said.startswith(f"column {name}: is {shown}, must be ")
    assert f"({name}" in said
    assert "\n" not in said


@pytest.mark.parametrize("same_ids", [False, True])
@pytest.mark.parametrize(("name", "kind"), FITTING)
def test_column_of_a_fitting_type_is_replayed(spark: SparkSession, name: str, kind: str, same_ids: bool) -> None:
    completed = choosing.matching(choosing.complete(rows(spark, name, kind)), choosing.Choice())
    assert [group.messages for group in choosing.survey(completed)] == [1]
    messages = replay.messages(completed, name="x", same_ids=same_ids)
    publishable.check_schema(messages.schema)
    assert len(messages.collect()) == 1


@pytest.mark.parametrize("table", SOURCES)
def test_rows_of_a_lake_have_fitting_types(table: Any) -> None:
    schema: Any = StructType.fromDDL(spark_schema(table))
    check_types(schema)


@pytest.mark.parametrize("name", [name for name, field in publishable.FIELDS.items() if name in TYPES])
def test_publishable_columns_have_fitting_types(name: str) -> None:
    assert {*publishable.FIELDS[name].types} <= {*TYPES[name]}


def test_unread_columns_are_of_any_type(spark: SparkSession) -> None:
    columns = {**WHOLE, "destination": "7", "finished_at": WHOLE["sent_at"], "failed_at": "7", "attempts": "'one'"}
    given = spark.sql(f"SELECT {', '.join(f'{value} AS {column}' for column, value in columns.items())}")
    assert choosing.complete(given).count() == 1


def test_time_without_a_zone_is_of_utc(spark: SparkSession) -> None:
    found = [
        replay.messages(choosing.complete(rows(spark, "sent_at", kind)), name="x").collect()
        for kind in ("timestamp", "timestamp_ntz")
    ]
    assert found[0] == found[1]


NOON: Final = datetime(2026, 5, 1, 12)
FILES: Final = {
    "sent_at as text": (
        {"sent_at": pa.array(["2026-05-01T12:00:00Z"])},
        "column sent_at: is STRING, must be TIMESTAMP",
    ),
    "sent_at in nanoseconds": (
        {"sent_at": pa.array([NOON], pa.timestamp("ns"))},
        "--parquet: Spark reads no column of the type INT64 (TIMESTAMP(NANOS,false)), as column sent_at of messages.",
    ),
    "id of a type of its own": (
        {"sent_at": pa.array([NOON], pa.timestamp("us")), "id": pa.array([bytes(16)], pa.uuid())},
        "--parquet: Spark reads no column of the type FIXED_LEN_BYTE_ARRAY (UUID), as column id of messages.",
    ),
    "a time of the day": (
        {"t": [time(3)]},
        "--parquet: Spark reads no column of the type TIME, as column t of messages.",
    ),
    "two bodies": ({"Body": [b"{}"]}, "column body: one file has several of this name, in upper or lower case; rename"),
    "only NULL": ({"causation_id": pa.nulls(1)}, "column causation_id: is INT, must be BINARY of 16 bytes"),
}


@pytest.mark.parametrize("what", FILES)
@pytest.mark.parametrize("more", [(), ("--same-ids",)], ids=["new ids", "same ids"])
def test_command_names_a_column_of_another_type_and_begins_nothing(
    agent: Agent, conn: psycopg.Connection[Any], tmp_path: Path, what: str, more: tuple[str, ...]
) -> None:
    columns, said = FILES[what]
    pq.write_table(message_table(1, columns), tmp_path / "messages.parquet")
    ended = agent("pipeline", "replay", "--parquet", str(tmp_path / "messages.parquet"), "--all", "--name", "x", *more)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
    assert ended.err.startswith(f"error: {said}")
    assert conn.execute("SELECT count(*) FROM durable.replays").fetchone() == (0,)


def test_column_of_another_type_is_found_behind_marks_of_writers(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "_SUCCESS").touch()
    pq.write_table(message_table(1, {"t": [time(3)]}), tmp_path / "a.parquet")
    with pytest.raises(InvalidSetting, match=r"of the type TIME, as column t of a.parquet"):
        replayable.read(spark, str(tmp_path))


def message_table(number: int, more: Mapping[str, Any], names: Mapping[str, str] = MappingProxyType({})) -> pa.Table:
    """One message; `names`: other names of its columns."""
    whole = {
        "id": pa.array([UUID(int=number).bytes], pa.binary()),
        "destination": ["tcp://billing:2301"],
        "message_type": ["orders.placed"],
        "source": ["shop"],
        "body": pa.array([b"{}"], pa.binary()),
    }
    return pa.table({names.get(name, name): values for name, values in {**whole, **more}.items()})


MORE: Final = {
    "partition_key": (["k"], "k"),
    "headers": (['{"a":"b"}'], '{"a":"b"}'),
    "content_type": (["text/plain"], "text/plain"),
    "causation_id": (pa.array([bytes(16)], pa.binary()), bytearray(16)),
    "sent_at": (pa.array([NOON], pa.timestamp("us", tz="UTC")), NOON),
}
"""Columns that may be missing, and what a replay reads in them."""


@pytest.mark.parametrize("spelt", [str, str.upper, str.title], ids=["lower case", "upper case", "title case"])
@pytest.mark.parametrize("whole", [0, 1], ids=["first", "last"])
@pytest.mark.parametrize("column", MORE)
def test_column_of_some_files_is_read_in_any_case_of_its_name(
    spark: SparkSession, tmp_path: Path, column: str, whole: int, spelt: Callable[[str], str]
) -> None:
    values, read = MORE[column]
    for number in range(2):
        more, names = ({column: values}, {column: spelt(column)}) if number == whole else ({}, {"id": "Id"})
        pq.write_table(message_table(number, more, names), tmp_path / f"{number}.parquet")
    rows = choosing.complete(replayable.read(spark, str(tmp_path))).orderBy("id").collect()
    assert [row[column] for row in rows] == ([read, None] if whole == 0 else [None, read])


@pytest.mark.parametrize("column", ["partition_key", "attempts"], ids=["that is read", "that is not read"])
def test_column_with_two_types_in_the_files_is_named(spark: SparkSession, tmp_path: Path, column: str) -> None:
    for number, values in enumerate((["k"], [7])):
        pq.write_table(message_table(number, {column: values}), tmp_path / f"{number}.parquet")
    with pytest.raises(InvalidSetting, match=f"column {column}: is (STRING|BIGINT) in some files and .* in others"):
        replayable.read(spark, str(tmp_path))


@pytest.mark.parametrize("microseconds", [300_000_000_000_000_000, -70_000_000_000_000_000], ids=["after", "before"])
def test_time_outside_of_the_calendar_is_named(spark: SparkSession, tmp_path: Path, microseconds: int) -> None:
    sent_at = pa.array([microseconds], pa.timestamp("us", tz="UTC"))
    pq.write_table(message_table(1, {"sent_at": sent_at}), tmp_path / "a.parquet")
    with pytest.raises(InvalidSetting, match="column sent_at: a time lies outside the years 1 to 9999; correct it"):
        choosing.survey(choosing.complete(replayable.read(spark, str(tmp_path))))


@pytest.mark.parametrize("place", ["a.parquet", ""], ids=["file", "folder"])
def test_command_refuses_an_empty_file(agent: Agent, tmp_path: Path, place: str) -> None:
    files = tmp_path / "files"
    (files / "_temporary").mkdir(parents=True)
    for name in ("a.parquet", "_SUCCESS", "_temporary/b.parquet", ".c.parquet.crc"):
        (files / name).touch()
    pq.write_table(message_table(1, {}), files / "d.parquet")
    ended = agent("pipeline", "replay", "--parquet", str(files / place), "--all", "--name", "x")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
    assert ended.err.startswith("error: --parquet: a.parquet in ")
    (files / "a.parquet").unlink()
    check_place(str(files))


def test_command_refuses_a_place_without_files_of_parquet(agent: Agent, tmp_path: Path) -> None:
    ended = agent("pipeline", "replay", "--parquet", str(tmp_path), "--all", "--name", "x")
    assert (ended.code, ended.out) == (2, "")
    assert (
        ended.err == f"error: --parquet: there is no file of Parquet in {tmp_path}; name the files, or their folder\n"
    )


@pytest.mark.parametrize("content", [b"h", b"a text of more than some bytes"], ids=["short", "long"])
def test_command_names_a_file_of_something_else(agent: Agent, tmp_path: Path, content: bytes) -> None:
    pq.write_table(message_table(1, {}), tmp_path / "a.parquet")
    (tmp_path / "README.md").write_bytes(content)
    ended = agent("pipeline", "replay", "--parquet", str(tmp_path), "--all", "--name", "x")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
    assert ended.err.startswith(f"error: --parquet: {tmp_path}/README.md is no whole file of Parquet; write it again")


@pytest.mark.parametrize("value", ["001", "2030-05-01", "1.50", "true", "shop"])
def test_texts_in_names_of_folders_stay_as_they_are(spark: SparkSession, tmp_path: Path, value: str) -> None:
    folder = tmp_path / "hour=07" / "day=2030-05-01" / f"service={value}"
    folder.mkdir(parents=True)
    pq.write_table(message_table(1, {}), folder / "a.parquet")
    rows = choosing.complete(replayable.read(spark, str(tmp_path)))
    assert [group.service for group in choosing.survey(rows)] == [value]
    kinds = dict(rows.dtypes)
    assert (kinds["hour"], kinds["day"]) == ("int", "date"), "as Spark takes them"


def test_last_time_of_the_calendar_is_replayed(agent: Agent, tmp_path: Path) -> None:
    last = pa.array([datetime.max.replace(tzinfo=UTC)], pa.timestamp("us", tz="UTC"))
    pq.write_table(message_table(1, {"finished_at": last}), tmp_path / "a.parquet")
    for added in (1, 0):
        ended = agent("pipeline", "replay", "--parquet", str(tmp_path), "--all", "--name", "x")
        assert ended.code == 0, ended
        assert f"1 message replayed, {added} of them added" in ended.out


@pytest.mark.parametrize("column", ["content", "moment", "a.b", "a`b", "order_1"])
def test_messages_are_ordered_by_a_column_of_any_name(spark: SparkSession, tmp_path: Path, column: str) -> None:
    for number, place in enumerate((2, 3, 1)):
        pq.write_table(message_table(number, {column: [place]}), tmp_path / f"{number}.parquet")
    rows = choosing.complete(replayable.read(spark, str(tmp_path)))
    first = repeats.without(rows, repeats.repeats(rows, timedelta(days=7)))
    found = replay.messages(first, name="x", order_by=[column]).orderBy("order_by").select("order_by.order_0").collect()
    assert [place for (place,) in found] == [1, 2, 3]


OF_A_TABLE: Final = ["lake", "lake/", "lake/history", "lake/history/day=2030-05-04", "lake/history/day=2030-05-04/a"]


def table_at(root: str) -> None:
    for path in ("_delta_log/00000000000000000000.json", "day=2030-05-04/a"):
        with places.created(f"{root}/lake/history", path) as file:
            file.write(b"PAR1")
    with places.created(f"{root}/files", "day=2030-05-04/a") as file:
        file.write(b"PAR1")


@pytest.mark.parametrize("place", [*OF_A_TABLE, "link"])
@pytest.mark.parametrize("scheme", ["", "file://", "FILE://localhost"])
def test_files_of_a_table_are_refused(tmp_path: Path, scheme: str, place: str) -> None:
    """Its log tells which of them were replaced, such as by an erasure."""
    table_at(str(tmp_path))
    (tmp_path / "link").symlink_to(tmp_path / "lake/history/day=2030-05-04")
    with pytest.raises(InvalidSetting, match="is a table of a lake, whose files may hold erased messages; use --lake"):
        check_place(f"{scheme}{tmp_path}/{place}")
    check_place(f"{scheme}{tmp_path}/files")
    check_place(f"{scheme}{tmp_path}/nowhere")


@pytest.mark.parametrize("place", OF_A_TABLE)
def test_files_of_a_table_in_an_object_store_are_refused(store_url: str, place: str) -> None:
    table_at(store_url)
    for scheme in ("s3://", "s3a://"):
        url = store_url.replace("s3://", scheme)
        with pytest.raises(InvalidSetting, match="is a table of a lake"):
            check_place(f"{url}/{place}")
        check_place(f"{url}/files")


def test_place_in_a_store_of_another_kind_is_no_table() -> None:
    check_place("foo://bucket/files")


def test_command_refuses_the_files_of_a_table(agent: Agent, tmp_path: Path) -> None:
    table_at(str(tmp_path))
    place = tmp_path / "lake/history"
    ended = agent("pipeline", "replay", "--parquet", str(place), "--all", "--name", "x")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
    assert ended.err.startswith(f"error: --parquet: {place} is a table of a lake")
