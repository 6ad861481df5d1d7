"""History for the pipeline's tests: a few rows by hand, any number by Spark, and lakes that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from durable.pipeline.lake import DataFile, Lake, LakeTable, arrow_schema

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
SHOP, BILLING = "shop", "billing"
TO_BILLING = "tcp://billing:2302"


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def message_id(number: int) -> UUID:
    return UUID(int=number)


def sent(number: int, **changes: Any) -> dict[str, Any]:
    """The sender's row of a message: sent a second after the one before, acknowledged 10 ms later."""
    row = _row(number) | {
        "side": "outgoing",
        "outcome": "sent",
        "service": SHOP,
        "address": TO_BILLING,
        "finished_at": at(number + 0.010),
    }
    return row | changes


def handled(number: int, **changes: Any) -> dict[str, Any]:
    """The receiver's row of it: stored after 5 ms, handled after 25."""
    row = _row(number) | {
        "side": "incoming",
        "outcome": "handled",
        "service": BILLING,
        "address": "main",
        "received_at": at(number + 0.005),
        "finished_at": at(number + 0.025),
    }
    return row | changes


def letter(number: int, **changes: Any) -> dict[str, Any]:
    row = _row(number) | {
        "letter_id": number,
        "side": "incoming",
        "service": BILLING,
        "address": "main",
        "failed_at": at(number + 0.025),
        "exception_type": "LookupError",
        "reason": "no such customer",
        "fingerprint": "c1901199ced90889",
        "body": b"{}",
        "replayable": True,
    }
    return row | changes


def _row(number: int) -> dict[str, Any]:
    return {
        "id": message_id(number),
        "message_type": "orders.placed",
        "source": SHOP,
        "correlation_id": message_id(number),
        "sent_at": at(number),
        "attempts": 0,
        "interruptions": 0,
        "node_id": 1,
        "xid": 1,
    }


def frame(spark: SparkSession, rows: Sequence[Mapping[str, Any]], table: LakeTable = "history") -> DataFrame:
    """These rows as the lake holds them."""
    schema = arrow_schema(table)
    return spark.createDataFrame(pa.Table.from_pylist([_as_stored(row) for row in rows], schema=schema))


def _as_stored(row: Mapping[str, Any]) -> dict[str, Any]:
    moment = row.get("finished_at") or row["failed_at"]
    plain = {name: value.bytes if isinstance(value, UUID) else value for name, value in row.items()}
    return {"day": moment.date(), **plain}


# ---------------------------------------------------------------- many rows, made by Spark


def many(spark: SparkSession, first: int, count: int, side: str) -> DataFrame:
    """Rows like sent() and handled(), a thousand a second."""
    numbers = spark.range(first, first + count, 1, 2)
    sent_at = F.timestamp_millis(F.lit(int(BEGAN.timestamp() * 1_000)) + F.col("id"))
    is_sent = side == "outgoing"
    row_id = F.unhex(F.lpad(F.hex("id"), 32, "0"))
    columns: dict[str, Column] = {
        "service": F.lit(SHOP if is_sent else BILLING),
        "side": F.lit(side),
        "outcome": F.lit("sent" if is_sent else "handled"),
        "address": F.lit(TO_BILLING if is_sent else "main"),
        "message_type": F.concat(F.lit("orders.type-"), F.col("id") % 8),
        "source": F.lit(SHOP),
        "correlation_id": row_id,
        "partition_key": F.concat(F.lit("customer-"), F.col("id") % 1_000),
        "sent_at": sent_at,
        "received_at": F.lit(None) if is_sent else _after(sent_at, 5),
        "finished_at": _after(sent_at, 10 if is_sent else 25),
        "attempts": F.lit(0),
        "interruptions": F.lit(0),
        "node_id": F.lit(1),
        "xid": F.col("id"),
        "day": F.to_date(_after(sent_at, 10 if is_sent else 25)),
    }
    rows = numbers.withColumns({name: value for name, value in columns.items()} | {"id": row_id})
    return rows.select(*(_typed(rows, field) for field in arrow_schema("history")))


def _after(moment: Column, milliseconds: int) -> Column:
    return F.timestamp_micros(F.unix_micros(moment) + milliseconds * 1_000)


_SPARK = {pa.string(): "string", pa.binary(): "binary", pa.int32(): "int", pa.int64(): "bigint", pa.date32(): "date"}


def _typed(rows: DataFrame, field: pa.Field) -> Column:
    value = F.col(field.name) if field.name in rows.columns else F.lit(None)
    return value.cast(_SPARK.get(field.type, "timestamp")).alias(field.name)


# ---------------------------------------------------------------- lakes


def fill(lake: Lake, *frames: DataFrame, table: LakeTable = "history") -> Lake:
    """Write these rows and commit them, as archive does."""
    lake.create(table)
    folder = Path(lake.table_url(table))
    for rows in frames:
        before = set(folder.rglob("*.parquet"))
        rows.write.mode("append").partitionBy("day").parquet(f"file://{folder}")
        files = [_data_file(folder, path) for path in sorted(set(folder.rglob("*.parquet")) - before)]
        low = lake.offset("tests", table)
        lake.commit(table, files, app_id="tests", low=low, high=low + 1)
    return lake


def _data_file(folder: Path, path: Path) -> DataFile:
    day = date.fromisoformat(path.parent.name.removeprefix("day="))
    rows = pq.read_metadata(path).num_rows
    return DataFile(str(path.relative_to(folder)), day, rows, path.stat().st_size, f'{{"numRecords": {rows}}}')
