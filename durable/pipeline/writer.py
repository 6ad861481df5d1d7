"""The writing half of the data source: DataFrames into the outbox, or into this service's own inbox.

                   each task                                       once, when all tasks are done
    atomic    COPY into a staging table of the attempt         the batch's id and all rows, in one transaction
    fast      the same, and move it in a second transaction    the batch's id; nodes are told

What a task finds wrong with its rows it does not raise, since Spark would let it try three times more: it is in the
task's message, and the commit refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, Literal, get_args
from uuid import UUID

import pyarrow as pa
import pyarrow.compute
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType
from sqlalchemy import Connection

from durable.encryption.ring import KeyRing
from durable.envelope import new_id
from durable.errors import InvalidMessage, InvalidSetting, StorageUnavailable
from durable.failpoints import failpoint
from durable.grammar import suggestion
from durable.pipeline import bodies, contents
from durable.pipeline.contents import Contents
from durable.pipeline.copying import arrow_connection, connection, publishing, told
from durable.pipeline.positions import positions
from durable.pipeline.publishable import DIGESTS, check_schema, dated, is_local, order_of, staged, whole
from durable.pipeline.queueing import queueing
from durable.pipeline.screens import Limits, flaw, misencoded
from durable.pipeline.sealing import Sealing, seal_batch
from durable.pipeline.texts import check_name
from durable.settings import load_settings
from durable.storage import placements, staging
from durable.storage.placements import Placements
from durable.storage.readiness import check_ready
from durable.storage.staging import Batch, Published, Staged

pc: Any = pyarrow.compute  # its functions are made at run time, and no type checker knows them

Mode = Literal["atomic", "fast"]
_SETTINGS: Final = ("max_message_bytes", "dedupe_window", "encryption_key_file", "encrypt_all")
OPTIONS: Final = ("url", "schema", "mode", "batch", "job", "once", *_SETTINGS)
_SPARKS_OWN: Final = ("checkpointlocation", "queryname")
_BOOLEANS: Final = {"true": True, "false": False}
"""In any case, as Spark takes them."""
_NOTHING: Final = "nothing of this batch (of a replay, of this chunk) was published"
_ALL_PARTS: Final = "all parts are published, and the batch is not remembered"


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of the rows, and the limits of messages there."""

    url: str = field(repr=False)
    schema: str
    limits: Limits
    placements: Placements
    mode: Mode
    job: UUID
    batch: str | None
    once: bool
    sealing: Sealing | None = None


@dataclass
class Written(WriterCommitMessage):
    """Result of a task."""

    job: UUID
    staged: Staged
    contents: Contents
    added: int = 0
    flaw: str | None = None
    query: str | None = None


class EnvelopeWriter(DataSourceArrowWriter):
    """Publishes a DataFrame."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        self._target = target(options, schema, overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return stage(self._target, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        written = _sound(self._target, messages)
        found = contents.merged(each.contents for each in written)
        names = contents.names_of(found) if self._target.batch is None else [self._target.batch]
        if self._target.mode == "atomic":
            batch = Batch(names[0], contents=contents.written(found), plain=contents.plain(found), others=names[1:])
            _publish(self._target, self._target.job, batch, written)
        else:
            done = Published(names[0], sum(each.staged.rows for each in written), sum(each.added for each in written))
            _remember(self._target, done, contents.written(found))
        failpoint("P2")

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        with connection(self._target.url) as conn:
            staging.drop(conn, self._target.schema, self._target.job)


class EnvelopeStreamWriter(DataSourceStreamArrowWriter):
    """Publishes the micro-batches of a query, each once. Another instance commits than the one that writes.

    A query has the id that its checkpoint keeps, also under a name of a batch: a new checkpoint, or another query under
    that name, begins to count anew, and what another query has published says nothing of its micro-batches.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        self._target = target(options, schema, overwrite)
        if self._target.mode != "atomic":
            raise InvalidSetting(f"mode: is {self._target.mode!r}; a streaming query writes 'atomic'")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return stage(self._target, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        written = _sound(self._target, messages)
        if not written:  # no task, which would have told the query
            return
        found = contents.merged(each.contents for each in written)
        name = _name_of(self._target, written[0].query)
        batch = Batch(name, batchId, contents=contents.written(found), plain=contents.plain(found))
        _publish(self._target, written[0].job, batch, written)
        failpoint("P2")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        with connection(self._target.url) as conn:
            for job in {each.job for each in messages if isinstance(each, Written)}:
                staging.drop(conn, self._target.schema, job)


def target(options: Mapping[str, str], schema: StructType, overwrite: bool) -> Target:
    """Read the target from the options. Raises InvalidSetting and SchemaMismatch."""
    if overwrite:
        raise InvalidSetting('mode: only "append": what was published cannot be taken back')
    for name in options:
        if name not in OPTIONS and name not in _SPARKS_OWN:
            raise InvalidSetting(f"option {name}: unknown{suggestion(name, OPTIONS)}")
    mode = options.get("mode", "atomic")
    if mode not in get_args(Mode):
        raise InvalidSetting(f"option mode: {mode!r}; must be atomic or fast")
    once = options.get("once", "false")
    if once.lower() not in _BOOLEANS:
        raise InvalidSetting(f"option once: {once!r}; must be true or false")
    if "batch" in options:
        check_name("option batch", options["batch"])
    check_schema(schema)
    named = {"database_url": "url", "db_schema": "schema"}
    named |= {name: name for name in _SETTINGS}
    settings = load_settings(**{name: options[given] for name, given in named.items() if given in options})
    if settings.database_url is None:
        raise InvalidSetting("option url: missing; give the database's URL, or set DURABLE_DATABASE_URL")
    url = settings.database_url.get_secret_value()
    with connection(url) as conn:
        check_ready(conn, settings.db_schema)
        declared = placements.read(conn, settings.db_schema)
    limits = Limits(settings.max_message_bytes, settings.dedupe_window, settings.clock_lead)
    try:
        job = UUID(options["job"]) if "job" in options else new_id()
    except ValueError:
        raise InvalidSetting(f"option job: {options['job']!r} is no UUID; leave it out") from None
    return Target(
        url,
        settings.db_schema,
        limits,
        declared,
        mode="fast" if mode == "fast" else "atomic",
        job=job,
        batch=options.get("batch"),
        once=_BOOLEANS[once.lower()],
        sealing=Sealing.of(KeyRing.of(settings)),
    )


# ---------------------------------------------------------------- in the tasks


class _Flawed(Exception):
    """Ends the COPY."""


class _Intake:
    """Screens what Spark hands over, turns it into staged rows, and counts it on the way."""

    def __init__(self, to: Target, partition: int) -> None:
        self.rows = self.local_rows = self.ordered_rows = 0
        self.flaw: str | None = None
        self.contents: Contents = contents.NOTHING
        self._to = to
        self._ring = to.sealing.ring if to.sealing is not None else None
        self._partition = partition
        self._now = datetime.now(UTC)

    def staged(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for given in batches:
            if not given.num_rows:
                continue
            self._refuse(misencoded(given))
            batch = whole(given, self._now)
            self._refuse(flaw(batch, self._to.limits, self._now))
            local = is_local(batch)
            queues = self._queueing(given, batch, local)
            digests = given.column(DIGESTS) if DIGESTS in given.schema.names else None
            if self._ring is not None and self._to.sealing is not None:
                found = batch if digests is None else batch.append_column(DIGESTS, digests)
                batch = seal_batch(found, self._to.sealing, self._ring)
                digests = batch.column(DIGESTS)
            known = bodies.of(batch, digests)
            self.rows += batch.num_rows
            self.local_rows += pc.sum(local).as_py()
            given_times = dated(given)
            words = contents.words(batch, given_times, known)
            self.contents = contents.merged([self.contents, contents.of(words)])
            more = {
                **queues,
                "carried": contents.carried(words),
                "dated": given_times,
                "message_digest": pa.array(known.own),
                "digests": known.others,
            }
            yield staged(batch, more)

    def _queueing(self, given: pa.RecordBatch, batch: pa.RecordBatch, local: pa.BooleanArray) -> dict[str, pa.Array]:
        lie = {"partition": self._partition, "first_row": self.rows, "count": batch.num_rows}
        columns = queueing(batch, local, positions(order_of(given), **lie), self._to.placements)
        ordered = batch.num_rows - columns["ordering_key"].null_count
        self.ordered_rows += ordered
        if ordered and self._to.mode == "fast":
            self._refuse(
                f"{ordered} rows of a task have a key, or come in an order, which 'fast' would not keep; "
                "use the mode 'atomic'"
            )
        return columns

    def _refuse(self, reason: str | None) -> None:
        """End the COPY, unless there is no reason."""
        self.flaw = reason
        if reason is not None:
            raise _Flawed


def stage(to: Target, batches: Iterator[pa.RecordBatch]) -> Written:
    """Stage the rows of one attempt of one task, and publish them in fast mode."""
    if to.mode == "atomic":
        return _staged(to, batches)
    with _telling("not all parts were published, as far as is known"):
        written = _staged(to, batches)
        return _part(to, written) if written.staged.rows else written


def _staged(to: Target, batches: Iterator[pa.RecordBatch]) -> Written:
    context = TaskContext.get()
    assert context is not None
    table = staging.table_name(to.job, context.taskAttemptId())
    intake = _Intake(to, context.partitionId())
    try:
        _copy(to, table, intake.staged(batches))
    except Exception:
        if intake.flaw is None:
            raise
    found = Staged(table, 0 if intake.flaw else intake.rows, intake.local_rows, intake.ordered_rows)
    written = Written(to.job, found, intake.contents, flaw=intake.flaw)
    written.query = context.getLocalProperty("sql.streaming.queryId")
    return written


def _part(to: Target, written: Written) -> Written:
    def publish(conn: Connection) -> int:
        return staging.publish_part(conn, to.schema, written.staged, once=to.once)

    try:
        return replace(written, added=publishing(to.url, publish, done="nothing of this part was published"))
    except InvalidMessage as error:
        return replace(written, flaw=f"of one part, {error}")


@contextmanager
def _telling(known: str) -> Iterator[None]:
    """Begin errors of the database with what is published then."""
    try:
        yield
    except StorageUnavailable as error:
        raise StorageUnavailable(f"{known}: {error}") from error.__cause__  # of the chain, Spark tells the first error


def _copy(to: Target, table: str, batches: Iterator[pa.RecordBatch]) -> None:
    """Copy into a table that this transaction makes: an attempt that dies leaves no rows."""
    first = next(batches, None)
    if first is None:
        return
    rows = pa.RecordBatchReader.from_batches(first.schema, _chain(first, batches))
    with told("the rows could not be staged"), arrow_connection(to.url) as conn, closing(conn.cursor()) as cursor:
        cursor.execute(staging.make_sql(to.schema), (table,))
        cursor.adbc_ingest(table, rows, mode="append", db_schema_name=to.schema)
        conn.commit()


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


# ---------------------------------------------------------------- when they are done


def _publish(to: Target, job: UUID, batch: Batch, written: list[Written]) -> None:
    def publish(conn: Connection) -> None:
        staging.publish(conn, to.schema, job, batch, [each.staged for each in written], once=to.once)

    publishing(to.url, publish, done=_NOTHING)


def _remember(to: Target, published: Published, found: Mapping[str, str]) -> None:
    """Remember a batch all parts of which were published."""

    def remember(conn: Connection) -> None:
        staging.parts_published(conn, to.schema, to.job, published, contents=found)

    with _telling("all parts are published, and the batch may not be remembered; publish the same rows again"):
        publishing(to.url, remember, done=_ALL_PARTS)


def _name_of(to: Target, query: str | None) -> str:
    """The name under which the last micro-batch of a query is remembered."""
    return f"query {query}" if to.batch is None else f"{to.batch}, query {query}"


def _sound(to: Target, messages: list[WriterCommitMessage | None]) -> list[Written]:
    """The messages; raises InvalidMessage when a task has met a row that cannot be published."""
    written = [each for each in messages if isinstance(each, Written)]
    for each in written:
        if each.flaw is not None:
            done = "nothing was published" if to.mode == "atomic" else "not all parts were published"
            raise InvalidMessage(f"{done}: {each.flaw}")
    return written
