"""Messages of the past, sent or handled once more: out of the lake, or out of any DataFrame that has them.

    choosing ──> messages(): under new ids ──> chunk after chunk, in their order ──> publish()

A new id follows from the name of the replay, the old id, and when that message was sent: the same replay adds nothing
the second time, and one with another name does it again. With `same_ids` the ids stay, and only who has never seen a
message handles it.

The order is that of `sent_at`, then of `seq`, which is the order of commits, then of the old ids; or of other columns.
All rows are in it, so chunks follow each other in it too, and messages of one key are handled in it. Rows with the
columns of publish.envelopes() keep their own order and times; what was archived is replayed without a deadline.

What was outgoing goes into the outbox again, and what was incoming into the inbox. Both remember what was replayed for
as long as duplicates are recognised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from durable.envelope import new_id
from durable.errors import DurableError, InvalidSetting
from durable.grammar import several, suggestion
from durable.messages.routing import LOCAL
from durable.pipeline.chunks import chunks
from durable.pipeline.positions import SORTABLE, is_sortable
from durable.pipeline.progress import Show
from durable.pipeline.publish import publish, uuid8, uuid8_of
from durable.pipeline.sealing import OLD_ID, Sealing, opening, sealed, unopened
from durable.pipeline.session import spark_errors
from durable.pipeline.statistics import quoted
from durable.pipeline.texts import check_name, check_texts
from durable.settings import Settings
from durable.transports.addresses import canonical

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

CHUNK: Final = 50_000
ORDER: Final = ("sent_at", "seq")
"""The columns of order by default."""
_OWN: Final = ("order_by", "deliver_by", "execution_time")
"""The columns of publish.envelopes() that no history has, or that are of its first sending there."""
_OF_REPEATS: Final = ("service", "side", "address", "message_type", "id", "sent_at", "seq", "headers", "body")
"""The columns by which repeats are known and bodies are opened, besides `outcome`."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_SECONDS_OF_A_CHUNK = 5  # when the rate is limited: nobody is to be flooded for longer


class Replayed(NamedTuple):
    """Result of a replay: the replayed messages, and the number of those that were added."""

    rows: int
    added: int


def messages(
    rows: DataFrame,
    *,
    name: str,
    same_ids: bool = False,
    destination: str | None = None,
    order_by: Sequence[str] = ORDER,
    sealing: Sealing | None = None,
    leave_unopened: bool = False,
) -> DataFrame:
    """The rows that have a body, as the messages of this replay: for where they went, or came in, or `destination`.

    They keep their correlation and causation, and rows with the columns of envelopes() their `deliver_by` and
    `execution_time`. With `same_ids` they also keep the time at which they were sent, and what came in keeps its
    endpoint where the destination is `local`: its receiver knows it there. They are published in the order of
    `order_by`, which by default is their own where they have one. Encrypted bodies are sealed anew by `sealing`, where
    the id or the address is another; without it Spark fails at the first of them. `leave_unopened`: leave out those
    that do not open.

    Raises InvalidSetting when `order_by` names a column which they do not have, for a name that is not printable or too
    long, for a destination that is no address, and for encrypted bodies that do not open.
    """
    from pyspark.sql import functions as F

    check_name("name", name)
    check_texts(destination=destination, order_by=order_by)
    if destination is not None and destination != LOCAL:
        destination = canonical(destination)
    came_in, goes_back = _came_in(), _goes_back(same_ids=same_ids, destination=destination)
    sent_at = F.coalesce(F.concat(F.lit("/"), F.unix_micros("sent_at").cast("string")), F.lit(""))
    new_ids = F.when(_is_whole("id"), uuid8(F.concat(F.lit(f"{name}/"), F.lower(F.hex("id")), sent_at)))
    columns: dict[str, Column] = {
        "id": F.col("id") if same_ids else new_ids.otherwise(F.col("id")),
        "destination": _destination(same_ids=same_ids, destination=destination),
        "endpoint": F.when(goes_back & came_in, F.col("address")),
        **{kept: F.col(kept) for kept in ("message_type", "source", "body", "correlation_id", "causation_id")},
        **{kept: F.col(kept) for kept in ("partition_key", "content_type", "headers")},
        **({"sent_at": F.col("sent_at")} if same_ids else {}),
        **_times_of(rows),
        "order_by": _order(rows, order_by),
    }
    if not same_ids or destination is not None:
        columns[OLD_ID] = _old_id(same_ids=same_ids, destination=destination)
    found = rows.where(F.col("body").isNotNull()).select(*(column.alias(kept) for kept, column in columns.items()))
    if OLD_ID in columns and leave_unopened:
        found = opening(found, sealing)
    elif OLD_ID in columns and sealing is not None:
        with spark_errors():
            left = unopened(found, sealing)
        if left:
            advice = "give each key, or " if left.missing else ""
            raise InvalidSetting(f"encryption_keys: {left}; {advice}leave them out with --leave-unopened")
    return sealed(found, sealing)


def opened(rows: DataFrame, *, same_ids: bool, destination: str | None, sealing: Sealing | None) -> DataFrame:
    """The parts by which repeats are known, of the rows that messages() does not leave out with `leave_unopened`."""
    from pyspark.sql import functions as F

    if same_ids and destination is None:
        return rows
    if destination is not None and destination != LOCAL:
        destination = canonical(destination)
    outcome = [name for name, kind in rows.dtypes if (name, kind) == ("outcome", "string")]
    made = {
        "destination": _destination(same_ids=same_ids, destination=destination),
        OLD_ID: _old_id(same_ids=same_ids, destination=destination),
    }
    bodies = rows.where(F.col("body").isNotNull())
    return opening(
        bodies.select(*_OF_REPEATS, *outcome, *(column.alias(name) for name, column in made.items())), sealing
    )


def _came_in() -> Column:
    from pyspark.sql import functions as F

    return F.col("side").eqNullSafe("incoming")


def _goes_back(*, same_ids: bool, destination: str | None) -> Column:
    """Tell whether a message goes to where it was before."""
    from pyspark.sql import functions as F

    return _came_in() if same_ids and destination == LOCAL else F.lit(destination is None)


def _destination(*, same_ids: bool, destination: str | None) -> Column:
    from pyspark.sql import functions as F

    goes_back = _goes_back(same_ids=same_ids, destination=destination)
    return F.when(goes_back, F.col("address")).otherwise(F.lit(destination).cast("string"))


def _old_id(*, same_ids: bool, destination: str | None) -> Column:
    """The id that a body was sealed for, where it has to be opened."""
    from pyspark.sql import functions as F

    goes_back = _goes_back(same_ids=same_ids, destination=destination)
    return F.when(F.lit(not same_ids) | ~goes_back, F.col("id"))


def _is_whole(column: str) -> Column:
    """Tell ids of 16 bytes: a new id of any other would hide from the writer that it is none."""
    from pyspark.sql import functions as F

    return F.octet_length(column) == 16


def new_id_of(old: UUID, *, name: str, sent_at: datetime | None) -> UUID:
    """The id that a message has in the replay of this name. A business key that was freed and used again has the same
    old id for two messages, which were sent at two times.
    """
    return uuid8_of(f"{name}/{old.hex}" + (f"/{(sent_at - _EPOCH) // _MICROSECOND}" if sent_at else ""))


def replay(
    chosen: DataFrame,
    settings: Settings,
    *,
    total: int,
    chunk_size: int = CHUNK,
    rate: float | None = None,
    show: Show = lambda done, total: None,
    check: Callable[[], None] = lambda: None,
) -> Replayed:
    """Publish messages(), `chunk_size` at a time and no more than `rate` new ones a second. `total`: how many they are.

    Each chunk is one transaction; who is interrupted begins again under the same name, with the same messages. `check`
    is called before each chunk and after the last, and what it raises ends the replay. Raises as publish() does, and
    DurableError when the chunks had another number of messages than `total`.
    """
    if rate is not None:
        chunk_size = max(1, min(chunk_size, int(rate * _SECONDS_OF_A_CHUNK)))
    due, rows, added = time.monotonic(), 0, 0
    for chunk in chunks(chosen, "order_by", total=total, size=chunk_size):
        if rate is not None:
            time.sleep(max(0.0, due - time.monotonic()))
        check()
        began = time.monotonic()
        published = publish(chunk, settings, batch=f"replay {new_id()}", once=True)
        if published is not None:
            rows, added = rows + published.rows, added + published.added
            due = began + (published.added / rate if rate is not None else 0)
        show(rows, total)
    check()
    if rows != total:
        raise DurableError(
            f"replay: {rows:,} of {several(total, 'messages', 'were')} found when they were read again; run it again "
            "under its name once nothing else changes their files, which adds what is missing"
        )
    return Replayed(rows, added)


def refuse_forgotten(chosen: DataFrame, dedupe_window: timedelta, dropped_until: datetime | None = None) -> None:
    """Raise InvalidSetting when duplicates of these messages would not be recognised any more under the same ids.

    Of local messages only the history knows which were handled: `dropped_until`, which ones it may have lost.
    """
    from pyspark.sql import functions as F

    sent = F.unix_millis("sent_at")
    made = F.coalesce(unix_ms("id"), sent)
    oldest = F.unix_millis(F.current_timestamp()) - int(dedupe_window.total_seconds() * 1_000)
    kept = F.lit(0 if dropped_until is None else int(dropped_until.timestamp() * 1_000) + 1)
    is_local = F.coalesce(F.col("endpoint") == LOCAL, F.col("destination") == LOCAL)
    with spark_errors():
        forgotten, undated, local = chosen.select(
            F.count_if(made < oldest), F.count_if(made.isNull()), F.count_if(is_local & (F.least(made, sent) < kept))
        ).collect()[0]
    if forgotten:
        raise InvalidSetting(
            f"same_ids: {forgotten:,} of these messages are older than dedupe_window ({dedupe_window}), and nobody "
            "could tell whether they were received; choose later ones, or replay them under new ids"
        )
    if undated:
        raise InvalidSetting(
            f"same_ids: {undated:,} of these messages have no sent_at, and ids without a time in them, and nobody "
            f"could tell whether they are older than dedupe_window ({dedupe_window}); write the column sent_at, leave "
            "them out, such as by --where, or replay them under new ids"
        )
    if local:
        raise InvalidSetting(
            f"same_ids: {local:,} of these messages are local and were sent before {_shown(dropped_until)}; history "
            "was dropped up to then, and nothing else knew whether they were handled; choose later ones, by --where, "
            "or replay them under new ids. pipeline purge --keep and history_retention must not be below dedupe_window"
        )


def refuse_overdue(chosen: DataFrame) -> None:
    """Raise InvalidSetting when the deadline of some of these messages is over: they would expire, and not be handled.

    Not for a replay that goes on: its messages were in time when it began.
    """
    from pyspark.sql import functions as F

    if "deliver_by" not in chosen.columns:
        return
    with spark_errors():
        (overdue,) = chosen.select(F.count_if(F.col("deliver_by") <= F.current_timestamp())).collect()[0]
    if overdue:
        raise InvalidSetting(
            f"column deliver_by: {overdue:,} of these messages have a deadline that is over, and would expire at once; "
            "choose the others, by --where, or replay files without the column, and so without a deadline"
        )


def refuse_foreign(rows: DataFrame, database: str | None) -> None:
    """Raise InvalidSetting when rows of a lake are local messages of another database than this one, which would handle
    them under the same ids a second time: of local messages only the history of their own database knows.
    """
    from pyspark.sql import functions as F

    is_local = F.col("address") == LOCAL
    other = F.col("database").isNotNull() & ~F.col("database").eqNullSafe(F.lit(database))
    with spark_errors():
        (foreign,) = rows.select(F.count_if(is_local & other & F.col("body").isNotNull())).collect()[0]
    if foreign:
        raise InvalidSetting(
            f"same_ids: {foreign:,} of these messages are local to another database of the lake, and this one cannot "
            f"tell whether they were handled there; choose its own, by --where \"database = '{database}'\", or replay "
            "them under new ids"
        )


def _shown(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"


def unix_ms(column: str) -> Column:
    """The time inside a UUIDv7, as durable.envelope.unix_ms reads it; NULL for ids of other kinds."""
    from pyspark.sql import functions as F

    made = F.conv(F.hex(F.substring(column, 1, 6)), 16, 10).cast("bigint")
    version, variant = (F.substring(F.hex(column), place, 1) for place in (13, 17))
    return F.when((version == "7") & variant.isin("8", "9", "A", "B"), made)


def _own_columns(rows: DataFrame) -> dict[str, str]:
    """Return the columns that only rows of publish.envelopes() have, by their names in lower case."""
    known = {name.lower(): name for name in rows.columns}
    return {name: known[name] for name in _OWN if name in known} if "destination" in known else {}


def _times_of(rows: DataFrame) -> dict[str, Column]:
    from pyspark.sql import functions as F

    own, kinds = _own_columns(rows), dict(rows.dtypes)
    times = {name: written for name, written in own.items() if name != "order_by"}
    for written in times.values():
        if not kinds[written].startswith("timestamp"):
            raise InvalidSetting(
                f"column {written}: is {kinds[written].upper()}, must be TIMESTAMP; convert it where the files are "
                f"written, such as by CAST({written} AS TIMESTAMP), or leave it out"
            )
    return {name: F.col(quoted(written)).cast("timestamp") for name, written in times.items()}


def _order(rows: DataFrame, order_by: Sequence[str]) -> Column:
    """Build the order of the rows. The old id and the address come last, to tell any two rows apart."""
    from pyspark.sql import functions as F

    kinds = {field.name: field.dataType for field in rows.schema.fields}
    if tuple(order_by) == ORDER and "order_by" in (own := _own_columns(rows)):
        order_by = (own["order_by"],)
    for name in order_by:
        if name not in kinds:
            raise InvalidSetting(f"order_by: there is no column {name!r}{suggestion(name, kinds)}")
        if not is_sortable(kinds[name]):
            sortable = ", ".join(SORTABLE)
            raise InvalidSetting(
                f"order_by: column {name} is {kinds[name].simpleString()}, must be decimal, {sortable}"
            )
    fields = [field for name in order_by for field in _fields(F.col(quoted(name)), kinds[name])]
    fields += [F.col("id"), F.col("address")]
    return F.struct(*(field.alias(f"order_{number}") for number, field in enumerate(fields)))


def _fields(column: Column, kind: DataType) -> list[Column]:
    """Take a struct apart: chunks begin at values of the first field, which is none."""
    from pyspark.sql.types import StructType

    if not isinstance(kind, StructType):
        return [column]
    return [each for field in kind.fields for each in _fields(column.getField(field.name), field.dataType)]
