"""Rows that the statistics of files of Parquet do not know of: none is left out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial, reduce
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from durable.errors import DurableError
from durable.pipeline import choosing, replay, replayable
from durable.pipeline.chunks import chunks
from durable.settings import load_settings
from tests.pipeline.test_replayable import message_table

NAN: Final = float("nan")
FILES: Final[dict[str, tuple[list[list[Any]], Any, str]]] = {
    "NaN": ([[2.0, 3.0], [1.0, NAN]], pa.float64(), "v > 2.5"),
    "NaN in a float": ([[2.0, 3.0], [1.0, NAN]], pa.float32(), "v > 2.5"),
    "NaN in a struct": (
        [[{"n": 2.0}, {"n": 3.0}], [{"n": 1.0}, {"n": NAN}]],
        pa.struct({"n": pa.float64()}),
        "v.n > 2.5",
    ),
    "decimals": ([[Decimal("1.5"), Decimal("2.5")], [Decimal("1.5"), Decimal("1234567891234567.5")]], None, "v > 2"),
}
"""Values in each file, and a condition for the second row of each."""


def written(spark: SparkSession, folder: Path, name: str) -> DataFrame:
    values, kind, _ = FILES[name]
    for number, some in enumerate(values):
        messages = pa.concat_tables([message_table(2 * number, {}), message_table(2 * number + 1, {})])
        pq.write_table(messages.append_column("v", pa.array(some, kind)), folder / f"{number}.parquet")
    return choosing.complete(replayable.read(spark, str(folder)))


@pytest.mark.parametrize("name", FILES)
def test_condition_finds_rows_against_statistics(spark: SparkSession, tmp_path: Path, name: str) -> None:
    rows = choosing.matching(written(spark, tmp_path, name), choosing.Choice(where=FILES[name][2]))
    assert sorted(int.from_bytes(row.id) for row in rows.collect()) == [1, 3]


@pytest.mark.parametrize("name", FILES)
def test_chunks_have_all_rows_against_statistics(spark: SparkSession, tmp_path: Path, name: str) -> None:
    completed = written(spark, tmp_path, name)
    rows = spark.read.option("mergeSchema", "true").parquet(str(tmp_path))
    found = replay.messages(completed.drop("v").join(rows.select("id", "v"), "id"), name="x", order_by=["v"])
    for chosen in (replay.messages(completed, name="x", order_by=["v"]), found):
        parts = [part.select("id").collect() for part in chunks(chosen, "order_by", total=4, size=1)]
        assert [len(part) for part in parts] == [1, 1, 1, 1]


BEGINNINGS: Final = (datetime(2026, 5, 1, tzinfo=UTC), datetime(1960, 5, 1, tzinfo=UTC))
MICROSECOND, MILLISECOND = timedelta(microseconds=1), timedelta(milliseconds=1)
MOMENTS: Final = [begin + more for begin in BEGINNINGS for more in (timedelta(0), MILLISECOND)]
BOUNDS: Final = [begin + more for begin in BEGINNINGS for more in (MICROSECOND, MILLISECOND)]
UNITS: Final[dict[str, Mapping[str, Any]]] = {
    "with a zone": {
        "ms": pa.timestamp("ms", tz="UTC"),
        "us": pa.timestamp("us", tz="UTC"),
        "INT96": pa.timestamp("us"),
    },
    "without a zone": {"ms": pa.timestamp("ms"), "us": pa.timestamp("us")},
}
"""Types of a time in the files of one folder."""
OPERATORS: Final[dict[str, tuple[str, Callable[[datetime, datetime], bool]]]] = {
    "<": ("sent_at < {}", operator.lt),
    "not before": ("NOT sent_at < {}", operator.ge),
    "<=": ("sent_at <= {}", operator.le),
    ">": ("sent_at > {}", operator.gt),
    ">=": ("sent_at >= {}", operator.ge),
    "before": ("NOT sent_at >= {}", operator.lt),
    "=": ("sent_at = {}", operator.eq),
    "<>": ("sent_at <> {}", operator.ne),
    "not in": ("sent_at NOT IN ({}, TIMESTAMP'2000-01-01 00:00:00Z')", operator.ne),
    "in a struct": ("v.at < {}", operator.lt),
}


def meeting(condition: str, rows: DataFrame, bound: datetime) -> DataFrame:
    """The rows that meet a condition of somebody's on a time."""
    return choosing.matching(rows, choosing.Choice(where=condition.format(f"TIMESTAMP'{bound:%Y-%m-%d %H:%M:%S.%fZ}'")))


WAYS: Final[dict[str, tuple[Callable[[DataFrame, datetime], DataFrame], Callable[[datetime, datetime], bool]]]] = {
    "since": (lambda rows, bound: choosing.matching(rows, choosing.Choice(since=bound)), operator.ge),
    "until": (lambda rows, bound: choosing.matching(rows, choosing.Choice(until=bound)), operator.lt),
    "end of a plan": (choosing.before, operator.lt),
    **{name: (partial(meeting, condition), is_met) for name, (condition, is_met) in OPERATORS.items()},
}


@pytest.fixture(scope="module")
def times(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for each unit, with a row group for each moment. The ids have the number of the moment at their end."""
    place = tmp_path_factory.mktemp("times")
    for zone, units in UNITS.items():
        (place / zone).mkdir()
        for unit, (name, kind) in enumerate(units.items()):
            rows = []
            for number, moment in enumerate(MOMENTS):
                at = pa.array([moment if kind.tz else moment.replace(tzinfo=None)], kind)
                more = {"sent_at": at, "v": pa.StructArray.from_arrays([at], names=["at"])}
                rows.append(message_table(len(MOMENTS) * unit + number, more))
            written: dict[str, Any] = {"row_group_size": 1, "use_deprecated_int96_timestamps": name == "INT96"}
            pq.write_table(pa.concat_tables(rows), place / zone / f"{name}.parquet", **written)
    return place


@pytest.mark.parametrize("zone", UNITS)
@pytest.mark.parametrize("way", WAYS)
def test_times_are_chosen_against_statistics(spark: SparkSession, times: Path, way: str, zone: str) -> None:
    choose, is_met = WAYS[way]
    rows = choosing.complete(replayable.read(spark, str(times / zone)))
    found = [choose(rows, bound).select(F.lit(number), "id") for number, bound in enumerate(BOUNDS)]
    chosen = {(number, int.from_bytes(id_)) for number, id_ in reduce(DataFrame.union, found).collect()}
    ids = range(len(UNITS[zone]) * len(MOMENTS))
    assert chosen == {
        (number, id_)
        for number, bound in enumerate(BOUNDS)
        for id_ in ids
        if is_met(MOMENTS[id_ % len(MOMENTS)], bound)
    }


def test_replay_fails_when_messages_are_missing_at_its_end(
    spark: SparkSession, database_url: str, tmp_path: Path
) -> None:
    chosen = replay.messages(written(spark, tmp_path, "NaN"), name="x")
    settings = load_settings(database_url=database_url)
    with pytest.raises(DurableError, match="replay: 4 of 5 messages were found when they were read again; run it"):
        replay.replay(chosen, settings, total=5)
    assert replay.replay(chosen, settings, total=4) == (4, 0)


@pytest.mark.parametrize("kind", [pa.int64(), pa.timestamp("us", tz="UTC")], ids=str)
def test_times_and_whole_numbers_are_compared_with_statistics(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: Any
) -> None:
    for number in range(2):
        pq.write_table(message_table(number, {"n": pa.array([number], kind)}), tmp_path / f"{number}.parquet")
    chosen = replay.messages(choosing.complete(replayable.read(spark, str(tmp_path))), name="x", order_by=["n"])
    *_, last = chunks(chosen, "order_by", total=2, size=1)
    capsys.readouterr()
    last.explain()
    assert "GreaterThanOrEqual(n," in capsys.readouterr().out.partition("PushedFilters: ")[2]
