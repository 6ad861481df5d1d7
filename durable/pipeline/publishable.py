"""The columns of a DataFrame that can be published, and how they are staged.

    Spark                                        staged
    id              BINARY, 16 bytes             uuid
    destination     STRING                       text           "local" for this service's own inbox
    endpoint        STRING        [NULL]         text           where it was received, to go into the inbox again
    message_type    STRING                       text
    source          STRING                       text           the service that sends
    body            BINARY or STRING             bytea          a STRING is stored as UTF-8
    correlation_id  BINARY        [id]           uuid
    causation_id    BINARY        [NULL]         uuid
    partition_key   STRING        [NULL]         text
    content_type    STRING        [JSON]         text
    headers         STRING        [{}]           text           a JSON object of texts
    sent_at         TIMESTAMP     [now]          timestamptz
    deliver_by      TIMESTAMP     [NULL]         timestamptz
    execution_time  TIMESTAMP     [NULL]         timestamptz
    seq             BIGINT or INT [NULL]         -              among rows of one sent_at
    order_by        one that sorts, or a STRUCT of such      instead of sent_at and seq

Of `sent_at` and `seq`, or `order_by`, the position is made that a row with a key has among the others of its key:
durable.pipeline.positions.

`durable.pipeline.publish.envelopes` makes them of any DataFrame with a key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute

from durable.envelope import JSON
from durable.errors import InvalidSetting
from durable.grammar import suggestion
from durable.messages.routing import LOCAL
from durable.pipeline.positions import SORTABLE, is_sortable
from durable.transports.addresses import canonical_name

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


pc: Any = pyarrow.compute  # its functions are made at run time, and no type checker knows them


class Field(NamedTuple):
    """A column, and the types of Spark's that it may have."""

    types: Sequence[str]
    is_required: bool = False


FIELDS: Final[Mapping[str, Field]] = {
    "id": Field(("binary",), True),
    "destination": Field(("string",), True),
    "endpoint": Field(("string",)),
    "message_type": Field(("string",), True),
    "source": Field(("string",), True),
    "body": Field(("binary", "string"), True),
    "correlation_id": Field(("binary",)),
    "causation_id": Field(("binary",)),
    "partition_key": Field(("string",)),
    "content_type": Field(("string",)),
    "headers": Field(("string",)),
    "sent_at": Field(("timestamp",)),
    "deliver_by": Field(("timestamp",)),
    "execution_time": Field(("timestamp",)),
    "seq": Field(("bigint", "int")),
    "order_by": Field(()),
}
STAGED: Final = tuple(name for name in FIELDS if name not in ("seq", "order_by"))
"""The columns that are staged as they are."""
CARRIED: Final = tuple(name for name in STAGED if name not in ("id", "destination"))
"""The columns that reach the receiver of a message, besides its id; `sent_at` counts where it was given."""
DIGESTS: Final = "body_digests"
"""A column of the tasks' own: digests of a body before it was encrypted, 8 bytes each; 'durable.pipeline.sealing'."""
IDS: Final = ("id", "correlation_id", "causation_id")
TEXTS: Final = ("destination", "endpoint", "message_type", "source", "partition_key", "content_type", "headers")
TIMES: Final = ("sent_at", "deliver_by", "execution_time")
NEVER_NULL: Final = ("id", "destination", "message_type", "source", "body")

_MADE_BY = "durable.pipeline.publish.envelopes() makes it from a key"
_MOMENT = pa.timestamp("us", tz="UTC")


def check_schema(schema: StructType) -> None:
    """Raise InvalidSetting, which names the column and what is expected, unless these columns can be published."""
    given = {field.name: field.dataType for field in schema.fields}
    for name, type_ in given.items():
        kind = type_.simpleString()
        if name == DIGESTS and kind == "binary":
            continue
        if name not in FIELDS:
            known = ", ".join(FIELDS)
            raise InvalidSetting(f"column {name}: unknown{suggestion(name, FIELDS)}; the columns are: {known}")
        if name == "order_by":
            if not is_sortable(type_):
                sortable = ", ".join(SORTABLE)
                raise InvalidSetting(f"column order_by: is {kind}, must be decimal, {sortable} or a struct of these")
        elif kind not in FIELDS[name].types:
            raise InvalidSetting(f"column {name}: is {kind.upper()}, must be {_expected(name)}")
    for name, field in FIELDS.items():
        if field.is_required and name not in given:
            hint = f"; {_MADE_BY}" if name == "id" else ""
            raise InvalidSetting(f"column {name}: missing; must be {_expected(name)}{hint}")


def whole(batch: pa.RecordBatch, now: datetime) -> pa.RecordBatch:
    """The batch with every column in its place and type; what is missing, or NULL where it must not be, by default."""
    columns = {name: _column(batch, name) for name in STAGED}
    local = pc.if_else(pc.equal(columns["destination"], LOCAL), LOCAL, pa.scalar(None, pa.string()))
    columns["endpoint"] = pc.coalesce(columns["endpoint"], local)
    columns["destination"] = _canonical(columns["destination"], columns["endpoint"])
    columns["correlation_id"] = pc.coalesce(columns["correlation_id"], columns["id"])
    columns["content_type"] = pc.fill_null(columns["content_type"], JSON)
    columns["headers"] = pc.fill_null(columns["headers"], "{}")
    columns["sent_at"] = pc.fill_null(columns["sent_at"], pa.scalar(now, _MOMENT))
    return pa.RecordBatch.from_pydict(columns)


def _canonical(destinations: pa.Array, endpoints: pa.Array) -> pa.Array:
    """Return the destinations in their one spelling, except for messages that came in; malformed ones as they are."""
    encoded = destinations.dictionary_encode()
    spelled = pa.array([canonical_name(each) for each in encoded.dictionary.to_pylist()], pa.string())
    return pc.if_else(pc.is_null(endpoints), spelled.take(encoded.indices), destinations)


def order_of(batch: pa.RecordBatch) -> pa.Array | None:
    """Return the column that orders the rows of a batch; None: rows are ordered as they lie."""
    if (index := batch.schema.get_field_index("order_by")) >= 0:
        return batch.column(index)
    given = [name for name in ("sent_at", "seq") if batch.schema.get_field_index(name) >= 0]
    return pa.StructArray.from_arrays([batch.column(name) for name in given], names=given) if given else None


def dated(batch: pa.RecordBatch) -> pa.BooleanArray:
    """Return the mask of the rows of a batch, as it was given, that come with a `sent_at` of their own."""
    return pc.is_valid(_column(batch, "sent_at"))


def staged(batch: pa.RecordBatch, more: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """A whole batch as a staging table holds it, with `more` columns: ids are uuids."""
    columns = {name: batch.column(name) for name in STAGED}
    for name in IDS:
        columns[name] = pa.ExtensionArray.from_storage(pa.uuid(), columns[name].cast(pa.binary(16)))
    return pa.RecordBatch.from_pydict({**columns, **more})


def is_local(batch: pa.RecordBatch) -> pa.BooleanArray:
    """Return the mask of the rows that go into this service's own inbox."""
    return pc.is_valid(batch.column("endpoint"))


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    kind = pa.binary() if name in (*IDS, "body") else _MOMENT if name in TIMES else pa.string()
    index = batch.schema.get_field_index(name)
    if index < 0:
        return pa.nulls(batch.num_rows, kind)
    return batch.column(index).cast(kind)


def _expected(name: str) -> str:
    length = " of 16 bytes" if name in IDS else ""
    return " or ".join(kind.upper() for kind in FIELDS[name].types) + length
