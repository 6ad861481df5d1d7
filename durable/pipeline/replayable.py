"""The columns that a replay reads in files of any origin, and the types of Spark's that each may have.

    id, correlation_id, causation_id                            BINARY
    side and address, or destination; message_type, source      STRING
    service, partition_key, content_type, headers               STRING
    body                                                        BINARY or STRING
    sent_at, finished_at, failed_at                             TIMESTAMP; without a time zone, of UTC
    seq                                                         a number
    outcome                                                     STRING, as in the history; of any other type, unread

Files may have more columns, of any types that Spark reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from durable.errors import DurableError, InvalidSetting
from durable.pipeline import places
from durable.pipeline.layouts import check_files
from durable.pipeline.session import needs_spark, spark_errors
from durable.pipeline.table_log import FOLDER
from durable.pipeline.unwritable import in_one_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.types import DataType, StructType

MOMENTS: Final = ("finished_at", "failed_at", "sent_at")
"""The time of a message is the first of these columns that has a value in its row."""
_BINARY: Final = ("binary",)
_TEXT: Final = ("string",)
_TIME: Final = ("timestamp", "timestamp_ntz")
_NUMBER: Final = ("bigint", "int", "smallint", "tinyint", "decimal", "double", "float")
TYPES: Final[Mapping[str, Sequence[str]]] = {
    "id": _BINARY,
    "side": _TEXT,
    "address": _TEXT,
    "destination": _TEXT,
    "message_type": _TEXT,
    "source": _TEXT,
    "body": ("binary", "string"),
    "service": _TEXT,
    "correlation_id": _BINARY,
    "causation_id": _BINARY,
    "partition_key": _TEXT,
    "content_type": _TEXT,
    "headers": _TEXT,
    "finished_at": _TIME,
    "failed_at": _TIME,
    "sent_at": _TIME,
    "seq": _NUMBER,
}
_CONVERSIONS: Final[Mapping[Sequence[str], str]] = {
    _BINARY: "UNHEX(REPLACE({}, '-'))",
    _TIME: "CAST({} AS TIMESTAMP)",
    _NUMBER: "CAST({} AS BIGINT)",
}
_NESTED: Final = ("array", "map", "struct")
_NOT_MERGED: Final = re.compile(r'CANNOT_MERGE_SCHEMAS.*?"STRUCT<(.*?)>".*?"STRUCT<(.*?)>"', re.DOTALL)
_INFERRED: Final = "spark.sql.sources.partitionColumnTypeInference.enabled"
_NO_FOOTER: Final = re.compile(
    r"CANNOT_READ_FILE_FOOTER\] Encountered error while reading file (?:file:)?(.+?)\. Could not read"
)
_THIS_MACHINE: Final = re.compile("^file://(localhost)?", re.IGNORECASE)


def check_place(place: str) -> None:
    """Raise InvalidSetting for a place whose files are those of a table of a lake: the log alone tells which of them
    were replaced, such as by an erasure; and for one with a file that Spark would pass over. Raises DurableError for a
    store that cannot be looked at.
    """
    from deltalake.exceptions import DeltaError

    bare = _THIS_MACHINE.sub("", place)
    try:
        is_table = any(places.names(each, FOLDER) for each in places.around(bare))
        if not is_table:
            check_files(bare)
    except DeltaError:  # a store that no lake can be in
        return
    except OSError as error:
        raise DurableError(
            f"--parquet: {place} cannot be read: {in_one_line(str(error))}; give the credentials of the store in the "
            "environment, as for a lake"
        ) from error
    if is_table:
        raise InvalidSetting(
            f"--parquet: {place} is a table of a lake, whose files may hold erased messages; use --lake with the "
            "folder of the lake, or copy the rows that its readers see elsewhere"
        )


def read(spark: SparkSession, place: str) -> DataFrame:
    """The rows of the files of Parquet in this place, with the columns of all of them, those of TYPES in lower case.

    Raises InvalidSetting where there is no such file, for a type that Spark does not read, and for a column that has
    different types in the files.
    """
    with needs_spark():
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException
    options = {"mergeSchema": "true", "__globPaths__": "false"}  # brackets are no patterns
    with spark_errors():
        try:
            rows = _with_texts(spark.read.options(**options), place)
        except (PySparkException, Py4JError) as error:
            explained = _differing(str(error)) or _foreign(str(error)) or _unread(error, place)
            if explained is None:
                raise
            raise explained from error
    return rows.withColumnsRenamed({name: name.lower() for name in rows.columns if name.lower() in (*TYPES, "outcome")})


def _with_texts(reader: DataFrameReader, place: str) -> DataFrame:
    """Read the files, with texts in the names of their folders as they are: a service `001` is not the number 1."""
    rows = reader.parquet(place)
    texts = [name for name, kind in rows.dtypes if TYPES.get(name.lower()) is _TEXT and kind != "string"]
    if not texts:
        return rows
    conf = rows.sparkSession.conf
    before = conf.get(_INFERRED)
    conf.set(_INFERRED, "false")
    try:
        named = reader.parquet(place).schema
    finally:
        conf.set(_INFERRED, str(before))
    schema = rows.schema
    for name in texts:
        schema[name].dataType = named[name].dataType
    return reader.schema(schema).parquet(place)


def _unread(error: Exception, place: str) -> InvalidSetting | None:
    """Explain why Spark reads no columns there, if it has named a condition that is known."""
    from pyspark.errors import PySparkException

    if not isinstance(error, PySparkException):
        return None
    match error.getCondition():
        case "PARQUET_TYPE_ILLEGAL":
            kind = (error.getMessageParameters() or {}).get("parquetType", "a type")
            return InvalidSetting(
                f"--parquet: Spark reads no column of the type {kind}{_of_type(kind, place)}; write times in "
                "microseconds and ids as bytes without a type of their own, or leave the column out"
            )
        case "UNABLE_TO_INFER_SCHEMA":
            return InvalidSetting(f"--parquet: there is no file of Parquet in {place}; name the files, or their folder")
        case "UNSUPPORTED_TIME_TYPE":
            return InvalidSetting(
                f"--parquet: Spark reads no column of the type TIME{_of_type('TIME', place)}; write it as text or as a "
                "number, or leave the column out"
            )
        case "COLUMN_ALREADY_EXISTS":
            name = (error.getMessageParameters() or {}).get("columnName", "").strip("`")
            return InvalidSetting(
                f"column {name}: one file has several of this name, in upper or lower case; rename all but one of them"
            )
        case _:
            return None


def _of_type(kind: str, place: str) -> str:
    """Name the first column of a type that Spark writes so, where the files can be looked at."""
    import pyarrow.parquet as pq
    from deltalake.exceptions import DeltaError

    bare, asked = _THIS_MACHINE.sub("", place), _words(kind)
    with suppress(DeltaError, *places.DAMAGE):
        for path in sorted(places.sizes(bare)):
            with suppress(*places.DAMAGE), places.opened(places.folder_of(bare), path) as stream:
                schema = pq.read_metadata(stream).schema
                for column in map(schema.column, range(len(schema))):
                    if asked <= _words(f"{column.physical_type} {column.logical_type}"):
                        return f", as column {column.path} of {path}"
    return ""


def _words(kind: str) -> set[str]:
    """Take the name of a type apart, by Spark `INT64 (TIMESTAMP(NANOS,true))`, or by Arrow in more words."""
    return set(re.findall(r"\w+", kind.upper().replace("SECONDS", "S")))


def _foreign(said: str) -> InvalidSetting | None:
    """Explain which file is none of Parquet."""
    if (found := _NO_FOOTER.search(said)) is None:
        return None
    return InvalidSetting(f"--parquet: {found[1]} is no whole file of Parquet; write it again, or remove it")


def _differing(said: str) -> InvalidSetting | None:
    """Explain why the columns of the files cannot be merged, by the first that has two types."""
    from pyspark.sql.types import StructType

    if (found := _NOT_MERGED.search(said)) is None:
        return None
    schemas: list[Any] = [StructType.fromDDL(each) for each in found.groups()]
    one, other = ({field.name.lower(): field.dataType for field in schema.fields} for schema in schemas)
    name = next(name for name in one if name in other and one[name] != other[name])
    kinds = " in some files and ".join(kinds[name].simpleString().upper() for kinds in (one, other))
    return InvalidSetting(f"column {name}: is {kinds} in others; write it with one type, or replay the files apart")


def check_types(schema: StructType) -> None:
    """Raise InvalidSetting, which names the column and what is expected, unless a replay can read these columns."""
    given = {field.name: field.dataType for field in schema.fields}
    for name in _read_of(given):
        kind = given[name].simpleString()
        if _plain(kind) not in TYPES[name]:
            raise InvalidSetting(
                f"column {name}: is {kind.upper()}, must be {_expected(name)}; convert it where the files are "
                f"written, such as by {_conversion(name, kind)}, or leave it out where it has no value"
            )


def times_of(rows: DataFrame) -> list[str]:
    """The columns of these rows that the time of a message is taken from; those of another type tell nothing."""
    kinds = dict(rows.dtypes)
    return [name for name in MOMENTS if kinds.get(name) in _TIME]


def with_time_zone(rows: DataFrame) -> DataFrame:
    """Make moments of times that were written without a time zone."""
    from pyspark.sql import functions as F

    bare = [name for name, kind in rows.dtypes if name in MOMENTS and kind == "timestamp_ntz"]
    return rows.withColumns({name: F.col(name).cast("timestamp") for name in bare}) if bare else rows


def _read_of(given: Mapping[str, DataType]) -> list[str]:
    """Return the columns among these that a replay reads."""
    unread = ("destination",) if "side" in given else ("address",) if "destination" in given else ()
    moment = next((name for name in MOMENTS if name in given), None)
    return [
        name
        for name in TYPES
        if name in given and name not in unread and (name not in MOMENTS or name in (moment, "sent_at"))
    ]


def _plain(kind: str) -> str:
    return kind.partition("(")[0]


def _expected(name: str) -> str:
    match TYPES[name]:
        case types if types is _TIME:
            return "TIMESTAMP"
        case types if types is _NUMBER:
            return "a number, such as BIGINT"
        case types:
            return " or ".join(kind.upper() for kind in types) + (" of 16 bytes" if types is _BINARY else "")


def _conversion(name: str, kind: str) -> str:
    in_text = "TO_JSON({})" if kind.startswith(_NESTED) else "CAST({} AS STRING)"
    return _CONVERSIONS.get(TYPES[name], in_text).format(name)
