"""Publishing in bulk: the rows of a DataFrame become messages, exactly once.

    orders = spark.read.parquet(...)
    messages = publish.envelopes(
        orders, key="order_id", message_type="orders.order-placed", source="shop", destination="tcp://billing:2301"
    )
    messages.write.format("durable").mode("append").option("url", url).save()

The id of a message follows from its source, its type without the version, and its key, in Spark's own SQL: a repeat
makes the same ids, and adds nothing. It is a UUIDv8 (RFC 9562) of the first bits of a SHA-256.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING
from uuid import UUID

from durable.encryption.ring import KeyRing
from durable.envelope import JSON, new_id
from durable.errors import InvalidSetting
from durable.messages.versions import unversioned
from durable.pipeline.copying import connection
from durable.pipeline.sealing import Sealing, sealed
from durable.pipeline.session import needs_spark, spark_errors
from durable.pipeline.texts import check_name, check_texts
from durable.settings import Settings
from durable.storage import staging
from durable.storage.staging import Published

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

__all__ = ["envelopes", "message_id", "publish"]

_VARIANTS = "89ab" * 4
_HEX = "0123456789abcdef"


def envelopes(
    rows: DataFrame,
    *,
    key: str | Column,
    message_type: str,
    source: str,
    destination: str | Column,
    body: str | Column | None = None,
    content_type: str = JSON,
    partition_key: str | Column | None = None,
    headers: Column | None = None,
    correlation_id: Column | None = None,
    causation_id: Column | None = None,
    deliver_by: str | Column | None = None,
    execution_time: str | Column | None = None,
    order_by: str | Column | Sequence[str | Column] | None = None,
) -> DataFrame:
    """A message for each row, in the columns that the data source `durable` takes.

    `key`: a column, or an expression, that is another for each message; rows under one key are one message. `source`:
    the service that sends. `destination`: a literal URI, `"local"` for the service's own inbox, or an expression.
    `body`: a column of bytes or text; by default the whole row as JSON. `headers`: a map of texts. `order_by`: the
    columns by which messages of one `partition_key` are in order, NULL before all others; by default `sent_at`, then
    `seq`, where the rows have them, and what is level as it lies in the DataFrame.
    """
    from pyspark.sql import functions as F

    check_texts(destination=destination, content_type=content_type, order_by=order_by)
    check_texts(body=body, partition_key=partition_key, deliver_by=deliver_by, execution_time=execution_time)
    columns = {
        "id": message_id(key, message_type=message_type, source=source),
        "destination": F.lit(destination) if isinstance(destination, str) else destination,
        "message_type": F.lit(message_type),
        "source": F.lit(source),
        "body": _json(rows, F.struct("*"), ignoreNullFields="false") if body is None else _column(body),
        "content_type": F.lit(content_type),
        "partition_key": None if partition_key is None else _column(partition_key).cast("string"),
        "headers": None if headers is None else _json(rows, _column(headers)),
        "correlation_id": correlation_id,
        "causation_id": causation_id,
        "deliver_by": None if deliver_by is None else _column(deliver_by),
        "execution_time": None if execution_time is None else _column(execution_time),
        "order_by": _order(rows, order_by),
    }
    return rows.select(*(column.alias(name) for name, column in columns.items() if column is not None))


def publish(
    messages: DataFrame, settings: Settings, *, mode: str = "atomic", batch: str | None = None, once: bool = False
) -> Published | None:
    """Write messages with envelopes()' columns into the database of these settings.

    Bodies are encrypted with the keys of the settings, if their types are, or with encrypt_all.

    Returns how many rows there were and how many of them are new; None when the batch was published before. A batch
    without a name is known by its rows. `once`: add nothing that was published before, also when it was sent since; it
    takes longer. Raises InvalidSetting when a column or the name does not fit, InvalidMessage when a row does not,
    StorageUnavailable; with the mode "atomic" nothing was published then, unless the database went away at the COMMIT:
    publish the same again.
    """
    if batch is not None:
        check_name("batch", batch)
    check_texts(mode=mode)
    with needs_spark():
        from durable.pipeline.source import register
    if settings.database_url is None:
        raise InvalidSetting("database_url: not set; give the database's URL, or set DURABLE_DATABASE_URL")
    url, job = settings.database_url.get_secret_value(), new_id()
    options = {
        "url": url,
        "schema": settings.db_schema,
        "mode": mode,
        "job": job.hex,
        "once": str(once),
        "max_message_bytes": str(settings.max_message_bytes),
        "dedupe_window": str(settings.dedupe_window.total_seconds()),
    }
    register(messages.sparkSession)
    if (sealing := Sealing.of(KeyRing.of(settings))) is not None:
        messages = sealed(messages, sealing, with_digests=True)
    with spark_errors():
        named = {} if batch is None else {"batch": batch}
        messages.write.format("durable").mode("append").options(**options, **named).save()
    with connection(url) as conn:
        return staging.find(conn, settings.db_schema, job)


def _order(rows: DataFrame, order_by: str | Column | Sequence[str | Column] | None) -> Column | None:
    from pyspark.sql import functions as F

    if order_by is None:
        order_by = [name for name in ("sent_at", "seq") if name in rows.columns]
    columns = list(order_by) if isinstance(order_by, Sequence) and not isinstance(order_by, str) else [order_by]
    numbered = [_column(column).alias(f"order_{number}") for number, column in enumerate(columns)]
    return F.struct(*numbered) if numbered else None


def _json(rows: DataFrame, value: Column, **options: str) -> Column:
    """The value as JSON; where a text in it is not UTF-8, a text that is not either: to_json() would put others into
    its place, and the writer refuses it.
    """
    from pyspark.sql import functions as F

    (field,) = rows.select(value.alias("value")).schema.fields
    sound = F.coalesce(_is_utf8(value, field.dataType), F.lit(True))
    return F.when(sound, F.to_json(value, options)).otherwise(F.lit(b"\xff").cast("string"))


def _is_utf8(value: Column, kind: DataType) -> Column:
    """Tell whether all texts of a value are UTF-8; never true of NULL. Fields with one name cannot be told apart."""
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    match kind:
        case T.StringType():
            return F.is_valid_utf8(value)
        case T.ArrayType(elementType=of):
            return F.forall(value, lambda element: _is_utf8(element, of))
        case T.MapType(keyType=of_keys, valueType=of_values):
            keys, values = (T.ArrayType(of_keys), F.map_keys(value)), (T.ArrayType(of_values), F.map_values(value))
            return reduce(and_, [_is_utf8(each, of) for of, each in (keys, values)])
        case T.StructType(fields=fields):
            names = Counter(field.name.lower() for field in fields)
            alone = [field for field in fields if names[field.name.lower()] == 1]
            return reduce(and_, [_is_utf8(value.getField(each.name), each.dataType) for each in alone], F.lit(True))
        case _:
            return F.lit(True)


def message_id(key: str | Column, *, message_type: str, source: str) -> Column:
    """The id of the message of this key, as Spark computes it: 16 bytes, NULL for a key that is NULL."""
    from pyspark.sql import functions as F

    check_texts(key=key, message_type=message_type, source=source)
    return uuid8(F.concat(F.lit(f"{source}/{unversioned(message_type)}/"), _column(key).cast("string")))


def uuid8(text: Column) -> Column:
    """A UUIDv8 of this text, as 16 bytes."""
    from pyspark.sql import functions as F

    digest = F.sha2(text, 256)
    variant = F.translate(F.substring(digest, 17, 1), _HEX, _VARIANTS)
    parts = (F.substring(digest, 1, 12), F.lit("8"), F.substring(digest, 14, 3), variant, F.substring(digest, 18, 15))
    return F.unhex(F.concat(*parts))


def message_id_of(key: str, *, message_type: str, source: str) -> UUID:
    """The same id, computed here: to look for the message of one key."""
    return uuid8_of(f"{source}/{unversioned(message_type)}/{key}")


def uuid8_of(text: str) -> UUID:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return UUID(f"{digest[:12]}8{digest[13:16]}{_VARIANTS[_HEX.index(digest[16])]}{digest[17:32]}")


def _column(named: str | Column) -> Column:
    from pyspark.sql import functions as F

    return F.col(named) if isinstance(named, str) else named
