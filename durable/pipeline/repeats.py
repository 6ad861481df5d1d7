"""Repeats: messages that were sent once more under the same business key, and that their receiver has recognised.

    history of the sender ──> sent messages of one id, content and address, in time ──> the first of each use, repeats

A use of a key is that of durable.pipeline.uses. What has another content is no repeat, but a message under a key that
was freed: both are messages of their own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from durable.messages.sealed import DIGEST_BYTES, MAGIC
from durable.pipeline.replay import unix_ms
from durable.pipeline.sealing import is_sealed_column
from durable.pipeline.uses import after_the_first

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_CONTENT: Final = "content of the message"
"""Files may have columns of any name that is one word."""
_ONE: Final = ("service", "address", "message_type", "id", _CONTENT)
"""What the messages of one use have in common."""
_PLACE: Final = ("sent_at", "seq")


def repeats(rows: DataFrame, dedupe_window: timedelta) -> DataFrame:
    """The repeats among these rows of a history, as one row for each place in it. Ids that carry their time are of one
    message each.
    """
    from pyspark.sql import functions as F

    sent = (F.col("side") == "outgoing") & F.col("sent_at").isNotNull() & F.col("body").isNotNull()
    if dict(rows.dtypes).get("outcome") == "string":  # files may have another column of that name
        sent &= F.col("outcome").isNull() | (F.col("outcome") == "sent")
    places = _with_content(rows.where(sent & unix_ms("id").isNull())).groupBy(*_ONE)
    found = places.agg(F.sort_array(F.collect_set(F.struct(*_PLACE))).alias("places")).where(F.size("places") > 1)
    return found.select(*_ONE, F.inline(after_the_first("places", dedupe_window)))


def without(rows: DataFrame, repeated: DataFrame) -> DataFrame:
    """The rows that are no repeats()."""
    from pyspark.sql import functions as F

    is_same = [F.col(f"row.{name}").eqNullSafe(F.col(f"repeat.{name}")) for name in (*_ONE, *_PLACE)]
    is_sent = F.col("row.side") == "outgoing"
    kept = _with_content(rows).alias("row").join(repeated.alias("repeat"), [is_sent, *is_same], "left_anti")
    return kept.drop(_CONTENT)


def _with_content(rows: DataFrame) -> DataFrame:
    """Add what tells contents apart: an encrypted body is another each time, and carries a digest of its content."""
    from pyspark.sql import functions as F

    of_sealed = F.hex(F.substring("body", len(MAGIC) + 1, DIGEST_BYTES))
    return rows.withColumn(_CONTENT, F.when(is_sealed_column(), of_sealed).otherwise(F.sha2("body", 256)))
