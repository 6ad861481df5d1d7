"""The ids that do not balance, found by Python tasks that read the lakes' Parquet files themselves, through Arrow.

The tasks run on Spark's workers, or, for few rows, one after the other in this process.

    files of both sides ──> task k of n: the ids whose last byte is k modulo n, summed up by id ──> those that differ
                        ──> tasks that share the files: how many rows of what                   ──> totals
                        ──> tasks that share the files: the rows of a few ids, or may-be-late   ──> matching.Judge

No row passes the JVM and none is shuffled, which costs a fifth of `many_suspects.unbalanced`, for the price that each
of the n tasks reads all ids. So beyond MOST_SLICES tasks, which is some hundred million rows, Spark's shuffle is the
better way. Both find the same ids, and either may suspect too many, never too few: they are judged exactly later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from durable.pipeline.session import needs_spark

with needs_spark():
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.dataset as ds
    from pyspark.sql import DataFrame

from durable.messages.routing import LOCAL
from durable.pipeline import places
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import LakeTable, file_schema
from durable.pipeline.matching import LETTER, MAY_BE_LATE, RECEIVED, ROWS, SENT, Edges
from durable.pipeline.uses import PRECISION

pc: Any = pyarrow.compute  # its functions are made at run time, and no type checker knows them

if TYPE_CHECKING:
    from datetime import date

    from pyspark.sql import SparkSession

MOST_SLICES: Final = 32
_ROWS_OF_A_SLICE: Final = 5_000_000
_ROWS_OF_A_TASK: Final = 4_000_000  # less would be no work beside what Spark's workers do at the end of each task
_SAMPLED_FROM: Final = 1_000_000  # rows
_BATCH_ROWS: Final = 1 << 17
_CODED: Final = ("service", "database", "side", "outcome", "address")
"""Columns that are read as the codes of their few values."""
_SAMPLE: Final = 128  # one id in so many tells where an address leads

# As in durable.pipeline.matching: what a row adds to the sum of its id.
_SENT, _RECEIVED, _LOCAL, _ODD = 1, 1 << 20, 1 << 40, 1 << 50
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_SAME_TIME: Final = PRECISION // timedelta(microseconds=1)
_INNOCENT: Final = (_SENT + _RECEIVED, _LOCAL)
_ID: Final = pa.binary(16)
SPARK_TYPES: Final = {
    pa.string(): "STRING",
    pa.binary(): "BINARY",
    pa.int64(): "BIGINT",
    pa.timestamp("us", "UTC"): "TIMESTAMP",
}
_IDS: Final = pa.schema([("id", pa.binary())])
_COUNTED: Final = (
    "lake STRING, service STRING, database STRING, side STRING, outcome STRING, local BOOLEAN, count BIGINT, "
    "first TIMESTAMP, last TIMESTAMP"
)
_ROWS_DDL: Final = ", ".join(f"{each.name} {SPARK_TYPES[each.type]}" for each in ROWS)

Ids: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"  # two numbers each
Times: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"  # microseconds
Weights: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Flags: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"
Batches: TypeAlias = Iterable[pa.RecordBatch]
Task: TypeAlias = Callable[[Batches], Batches]
Tasks: TypeAlias = Callable[[int, Task, str], list[pa.RecordBatch]]
"""Runs so many tasks, each with a number, and returns what they made: rows with the columns of this DDL."""


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of one side in one lake, and in which files they may be."""

    lake: str
    url: str
    side: str
    files: Mapping[str, int]
    """How many rows each has."""
    table: LakeTable = "history"

    @property
    def rows(self) -> int:
        return sum(self.files.values())

    @property
    def expected(self) -> str:
        """Return the outcome that these rows should have."""
        return "sent" if self.side == "outgoing" else "handled"

    def batches(self, columns: Sequence[str], condition: ds.Expression, files: Sequence[str] | None = None) -> Batches:
        """Read batches in a task, which has one core."""
        paths = list(self.files) if files is None else files
        schema = file_schema(self.table)
        data = places.ParquetFiles(self.url, paths, schema, coded=[name for name in _CODED if name in schema.names])
        wanted = condition & (ds.field("side") == self.side)
        yield from data.to_batches(columns=list(columns), filter=wanted, use_threads=False, batch_size=_BATCH_ROWS)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows of a source that the judge is shown, and in which role."""

    source: Source
    role: str
    which: ds.Expression

    @property
    def files(self) -> Mapping[str, int]:
        return self.source.files

    @property
    def rows(self) -> int:
        return self.source.rows


_Filed = TypeVar("_Filed", Source, Wanted)


Share: TypeAlias = Sequence[tuple[Source, str]]
"""The files of one task."""


def sources(
    lakes: Iterable[Lake],
    side: str,
    since: date | None = None,
    until: date | None = None,
    table: LakeTable = "history",
) -> list[Source]:
    """List the sources of these lakes, each once, with the files of these days; `until` is not included."""
    found = []
    for lake in {lake.url: lake for lake in lakes}.values():
        files = lake.sizes(table, since, until)
        if files:
            found.append(Source(lake.url, lake.table_url(table), side, files, table))
    return found


# ---------------------------------------------------------------- for the driver


def on(spark: SparkSession) -> Tasks:
    """Run tasks on the workers of this session."""
    return lambda count, task, ddl: _tasks(spark, count, task, ddl).toArrow().to_batches()


def here(count: int, task: Task, _ddl: str) -> list[pa.RecordBatch]:
    """Run tasks in this process, one after the other."""
    return [*task([pa.RecordBatch.from_pydict({"id": pa.array(range(count), pa.int64())})])]


def counted(tasks: Tasks, of: Sequence[Source]) -> list[dict[str, Any]]:
    """Count the rows of each lake by service and outcome, and find when the first of them ended."""
    shares = _shared(of)
    counts = tasks(len(shares), partial(_count, shares), _COUNTED)
    if not counts:
        return []
    table = pa.Table.from_batches(counts)
    table = table.append_column("of_local", pc.if_else(table["local"], table["count"], 0))
    keys = ["lake", "service", "database", "side", "outcome"]
    sums = [("count", "sum"), ("of_local", "sum"), ("first", "min"), ("last", "max")]
    found = table.group_by(keys).aggregate(sums).select([*keys, *("_".join(each) for each in sums)])
    found = found.rename_columns([*keys, "count", "local", "first", "last"])
    by = [(name, "ascending") for name in ("lake", "service", "database", "side", "outcome")]
    rows: list[dict[str, Any]] = found.sort_by(by).to_pylist()
    return rows


def suspects(tasks: Tasks, of: Sequence[Source], edges: Edges, most: int | None) -> list[bytes] | None:
    """The ids that do not balance, and some that may; None when they are more than so many, or too much for slices."""
    slices = _slices(of)
    if slices is None:
        return None
    few = 0 if most is None else most // slices  # so few are not looked at twice
    found = tasks(slices, partial(_unbalanced, tuple(of), edges.of_suspects(), slices, few, most), "id BINARY")
    ids: list[bytes] = [id_ for batch in found for id_ in batch.column(0).to_pylist()]
    return ids if most is None or len(ids) <= most else None


def many_suspects(spark: SparkSession, of: Sequence[Source], edges: Edges) -> DataFrame | None:
    """The ids that do not balance, however many; None when this is too much for slices."""
    slices = _slices(of)
    if slices is None:
        return None
    return _tasks(spark, slices, partial(_unbalanced, tuple(of), edges.of_suspects(), slices, 0, None), "id BINARY")


def _slices(of: Sequence[Source]) -> int | None:
    slices = max(-(-sum(source.rows for source in of) // _ROWS_OF_A_SLICE), 2)
    return slices if slices <= MOST_SLICES else None


def routes(tasks: Tasks, sent: Sequence[Source], received: Sequence[Source]) -> dict[str, set[str]]:
    """Find the services that have received messages sent to each address, among a sample of the ids."""
    every = 1 if sum(source.rows for source in (*sent, *received)) < _SAMPLED_FROM else _SAMPLE
    sampled = []
    for side, whither in ((sent, "address"), (received, "service")):
        shares = _shared(side)
        sampled.append(tasks(len(shares), partial(_sample, shares, whither, every), f"id BINARY, {whither} STRING"))
    if not all(sampled):
        return {}
    sends, receipts = (pa.Table.from_batches(batches) for batches in sampled)
    copies = sends.group_by("id").aggregate([("address", "count_distinct")])
    alone = copies.filter(pc.equal(copies["address_count_distinct"], 1))["id"].combine_chunks()
    of_one = sends.filter(pc.is_in(sends["id"], alone))  # the copies of an event do not tell which of them came where
    return _leads(sends, receipts) | _leads(of_one, receipts)


def _leads(sends: pa.Table, receipts: pa.Table) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    met = sends.join(receipts, "id", join_type="inner").group_by(["address", "service"]).aggregate([])
    for row in met.to_pylist():
        found.setdefault(row["address"], set()).add(row["service"])
    return found


def rows(tasks: Tasks, wanted: Sequence[Wanted], most: int | None) -> pa.Table | None:
    """All of these rows, as ROWS; None when they are more than so many."""
    shares = _shared(wanted)
    found = pa.Table.from_batches(tasks(len(shares), partial(_select, shares, most), _ROWS_DDL), ROWS)
    return found if most is None or len(found) <= most else None


def many_rows(spark: SparkSession, wanted: Sequence[Wanted]) -> DataFrame:
    """All of these rows, however many."""
    shares = _shared(wanted)
    return _tasks(spark, len(shares), partial(_select, shares, None), _ROWS_DDL)


def of_ids(
    sent: Sequence[Source], received: Sequence[Source], letters: Sequence[Source], ids: Sequence[bytes]
) -> list[Wanted]:
    """All rows of these ids."""
    roles = ((SENT, sent), (RECEIVED, received), (LETTER, letters))
    which = ds.field("id").isin(pa.array(ids, pa.binary()))
    return [Wanted(source, role, which) for role, of in roles for source in of] if ids else []


def possibly_late(received: Sequence[Source], edges: Edges, late_after: timedelta | None) -> list[Wanted]:
    """All rows that are late, which durable.pipeline.matching defines, and copies of them."""
    which = _late(late_after, edges)
    return [Wanted(source, MAY_BE_LATE, which) for source in received]


def _shared(of: Sequence[_Filed]) -> list[list[tuple[_Filed, str]]]:
    """All files, shared out among some tasks: one costs more than a small file does."""
    files = sorted(((each, file) for each in of for file in each.files), key=lambda pair: -pair[0].files[pair[1]])
    tasks = min(max(-(-sum(each.rows for each in of) // _ROWS_OF_A_TASK), 2), len(files))
    return [files[number::tasks] for number in range(tasks)]


def _tasks(spark: SparkSession, count: int, task: Task, ddl: str) -> DataFrame:
    """Run a number of tasks, each with its number."""
    return spark.range(0, count, 1, max(count, 1)).mapInArrow(task, ddl)  # type: ignore[arg-type]


def _late(late_after: timedelta | None, edges: Edges) -> ds.Expression:
    is_handled, passed = ds.field("outcome") == "handled", ds.field("finished_at") > ds.field("deliver_by")
    if late_after is not None:
        took = pc.subtract(ds.field("finished_at"), ds.field("sent_at"))
        passed = passed | (took > pa.scalar(late_after, pa.duration("us")))
    return is_handled & passed & _between(edges.widened())


# ---------------------------------------------------------------- in a task


def _numbers(batches: Batches) -> Iterator[int]:
    for batch in batches:
        yield from batch.column(0).to_pylist()


def _files(shares: Sequence[Sequence[tuple[_Filed, str]]], batches: Batches) -> Iterator[tuple[_Filed, str]]:
    for number in _numbers(batches):
        yield from shares[number]


def _count(shares: Sequence[Share], batches: Batches) -> Iterator[pa.RecordBatch]:
    columns = ["service", "database", "outcome", "address", "finished_at"]
    for source, file in _files(shares, batches):
        batches_of_file = list(source.batches(columns, pc.scalar(True), [file]))
        if not batches_of_file:
            continue
        local = [pa.array(_each(batch["address"], LOCAL)) for batch in batches_of_file]
        table = pa.Table.from_batches(batches_of_file).drop_columns("address").unify_dictionaries()
        table = table.append_column("local", pa.chunked_array(local, pa.bool_()))
        found = table.group_by(["service", "database", "outcome", "local"], use_threads=False).aggregate(
            [([], "count_all"), ("finished_at", "min"), ("finished_at", "max")]
        )
        yield from pa.table(
            {
                "lake": pa.repeat(source.lake, len(found)),
                "service": found["service"].cast(pa.string()),
                "database": found["database"].cast(pa.string()),
                "side": pa.repeat(source.side, len(found)),
                "outcome": found["outcome"].cast(pa.string()),
                "local": found["local"],
                "count": found["count_all"],
                "first": found["finished_at_min"],
                "last": found["finished_at_max"],
            }
        ).to_batches()


def _unbalanced(
    of: Sequence[Source], edges: Edges, slices: int, few: int, most: int | None, batches: Batches
) -> Iterator[pa.RecordBatch]:
    """The ids that do not balance; up to `few` of a slice are not looked at once more. Ends when there are more than
    `most`.
    """
    yield from _up_to(most, chain.from_iterable(_of_slice(of, edges, slices, few, n) for n in _numbers(batches)))


def _of_slice(of: Sequence[Source], edges: Edges, slices: int, few: int, number: int) -> Iterator[pa.RecordBatch]:
    pieces = [piece for source in of for piece in _weighed(source, edges, number, slices)]
    if pieces:
        ids, weights, times = (np.concatenate(column) for column in zip(*pieces, strict=True))
        pieces.clear()
        rest = _uneven(ids, weights, times)
        if len(rest) > few:
            yield from _looked_at(of, edges, number, slices, rest)
        elif len(rest):
            yield pa.RecordBatch.from_arrays([_as_arrow(rest).cast(pa.binary())], schema=_IDS)


def _up_to(most: int | None, batches: Batches) -> Iterator[pa.RecordBatch]:
    """The same until there are more than so many rows: one more tells that there are."""
    left = None if most is None else most + 1
    for batch in batches:
        found = batch if left is None else batch.slice(0, left)
        if found.num_rows:
            yield found
        if left is not None:
            left -= found.num_rows
            if not left:
                return


def _uneven(ids: Ids, weights: Weights, times: Times) -> Ids:
    """Select the ids whose weights do not come to those of an innocent one, or whose rows were sent at several times:
    they may be messages of their own under one business key.

    Rows are sorted by a number of 64 bits for each id. Where different ids have the same number, none is innocent.
    """
    if not len(ids):
        return ids
    numbers = ids[:, 0] * _MIX ^ ids[:, 1]
    order = np.argsort(numbers)
    numbers, weights, times = numbers[order], weights[order], times[order]
    first, second = (np.ascontiguousarray(ids[:, half])[order] for half in (0, 1))
    is_same = numbers[1:] == numbers[:-1]
    weights[1:][is_same & ((first[1:] != first[:-1]) | (second[1:] != second[:-1]))] = _ODD
    starts = np.concatenate([[0], np.flatnonzero(~is_same) + 1])
    is_innocent = np.isin(np.add.reduceat(weights, starts), _INNOCENT) & (np.maximum.reduceat(weights, starts) < _ODD)
    is_innocent &= np.maximum.reduceat(times, starts) - np.minimum.reduceat(times, starts) <= _SAME_TIME
    is_left = np.repeat(~is_innocent, np.diff(starts, append=len(weights)))
    return np.unique(np.stack([first[is_left], second[is_left]], axis=1), axis=0)


def _looked_at(of: Sequence[Source], edges: Edges, number: int, slices: int, ids: Ids) -> Iterator[pa.RecordBatch]:
    """Select ids with several rows, such as events, that were not handled once at as many places as they went to."""
    rest = _as_arrow(ids)
    pieces = [piece for source in of for piece in _placed(source, edges, number, slices, rest)]
    each = pa.Table.from_batches(pieces).group_by(["id", "service", "address", "side"], use_threads=False)
    found = each.aggregate([([], "count_all"), ("weight", "max"), ("first", "min"), ("last", "max")])
    weight, count = found["weight_max"], found["count_all"]
    is_sent, is_received = pc.equal(weight, _SENT), pc.equal(weight, _RECEIVED)
    by_id = pa.table(
        {
            "id": found["id"],
            "weight": weight,
            "sent": pc.if_else(is_sent, count, 0),
            "places": pc.if_else(is_received, 1, 0),
            "repeated": pc.if_else(is_sent, 0, count),
            "first": found["first_min"],
            "last": found["last_max"],
        }
    ).group_by("id", use_threads=False)
    sums = by_id.aggregate(
        [("weight", "max"), ("sent", "sum"), ("places", "sum"), ("repeated", "max"), ("first", "min"), ("last", "max")]
    )
    is_balanced = pc.and_(
        pc.and_(pc.less(sums["weight_max"], _ODD), pc.equal(sums["sent_sum"], sums["places_sum"])),
        pc.and_(
            pc.less_equal(sums["repeated_max"], 1),
            pc.less_equal(pc.subtract(sums["last_max"], sums["first_min"]), _SAME_TIME),
        ),
    )
    yield from sums.filter(pc.invert(is_balanced)).select(["id"]).cast(_IDS).to_batches()


def _weighed(source: Source, edges: Edges, number: int, slices: int) -> Iterator[tuple[Ids, Weights, Times]]:
    """The ids of one slice, what each of their rows adds to the sum, and when it was sent."""
    for batch in source.batches(["id", "outcome", "address", "sent_at"], _between(edges)):
        ids = _ids(batch["id"])
        here = _is_of(ids, number, slices)
        yield ids[here], _weights(source, batch)[here], _times(batch).to_numpy(zero_copy_only=False)[here]


def _placed(source: Source, edges: Edges, number: int, slices: int, rest: pa.Array) -> Iterator[pa.RecordBatch]:
    """The rows of these ids of one slice: `id`, what it adds to the sum, when it was sent, and where it was."""
    names = ("service", "address")
    for batch in source.batches(["id", "outcome", "sent_at", *names], _between(edges)):
        here = pc.and_(_is_of(_ids(batch["id"]), number, slices), pc.is_in(batch["id"].cast(_ID), rest))
        columns = {"id": batch["id"].cast(_ID), "weight": pa.array(_weights(source, batch))}
        columns |= dict.fromkeys(("first", "last"), _times(batch))
        columns |= {name: batch[name].cast(pa.string()) for name in names}
        yield pa.RecordBatch.from_pydict(columns | {"side": pa.repeat(source.side, len(batch))}).filter(here)


def _weights(source: Source, batch: pa.RecordBatch) -> Weights:
    """The number that each row adds to the sum of its id."""
    weight = _SENT if source.side == "outgoing" else _RECEIVED
    is_local, is_expected = _each(batch["address"], LOCAL), _each(batch["outcome"], source.expected)
    return np.where(is_expected, np.where(is_local, _LOCAL, weight), _ODD)


def _times(batch: pa.RecordBatch) -> pa.Array:
    return pc.fill_null(batch["sent_at"].cast(pa.int64()), 0)


def _each(coded: pa.DictionaryArray, value: str) -> Flags:
    """Tell of each row whether it has this value."""
    codes = coded.indices.to_numpy(zero_copy_only=False)
    found: Flags = np.array([each == value for each in coded.dictionary.to_pylist()], bool)[codes]
    return found


def _ids(column: pa.Array) -> Ids:
    """Two numbers for each id."""
    fixed = column.cast(_ID)
    return np.frombuffer(fixed.buffers()[1] or b"", np.uint64).reshape(-1, 2)[fixed.offset :][: len(fixed)]


def _as_arrow(ids: Ids) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(_ID, len(ids), [None, pa.py_buffer(np.ascontiguousarray(ids))])


def _is_of(ids: Ids, number: int, slices: int) -> Flags:
    """Select ids by their last byte: in every kind of UUID it is as good as random."""
    found: Flags = ids.view(np.uint8)[:, 15] % slices == number
    return found


def _sample(shares: Sequence[Share], column: str, every: int, batches: Batches) -> Iterator[pa.RecordBatch]:
    remote = ds.field("address") != LOCAL
    for source, file in _files(shares, batches):
        for batch in source.batches(list(dict.fromkeys(["id", "address", column])), remote, [file]):
            found = batch.filter(pa.array(_is_of(_ids(batch["id"]), 0, every))).select(["id", column])
            if found.num_rows:
                yield _decoded(found)


def _select(shares: Sequence[Sequence[tuple[Wanted, str]]], most: int | None, batches: Batches) -> Batches:
    """The rows of these shares that are wanted, as ROWS. Ends when there are more than `most`."""
    found = (_of_file(wanted, file) for wanted, file in _files(shares, batches))
    yield from _up_to(most, chain.from_iterable(found))


def _of_file(wanted: Wanted, file: str) -> Batches:
    there = {*file_schema(wanted.source.table).names}
    for batch in wanted.source.batches([name for name in ROWS.names if name in there], wanted.which, [file]):
        if batch.num_rows:
            yield from in_role(wanted.role, pa.Table.from_batches([_decoded(batch)])).to_batches()


def in_role(role: str, rows: pa.Table) -> pa.Table:
    """The same with the columns of ROWS."""
    columns = {each.name: pa.nulls(len(rows), each.type) for each in ROWS} | {"role": pa.repeat(role, len(rows))}
    columns |= {name: rows[name] for name in rows.column_names}
    return pa.Table.from_pydict({name: columns[name] for name in ROWS.names}, ROWS)


def _decoded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same with texts in place of their codes."""
    return batch.cast(
        pa.schema([field.with_type(pa.string()) if field.name in _CODED else field for field in batch.schema])
    )


def _between(edges: Edges) -> ds.Expression:
    sent_at = ds.field("sent_at")
    low = pc.scalar(True) if edges.since is None else sent_at >= edges.since
    return low if edges.until is None else low & (sent_at < edges.until)
