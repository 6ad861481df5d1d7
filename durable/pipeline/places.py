"""Places of the files of a table of the lake: a folder, or a place in an object store.

An object store is reached as `deltalake` reaches it, so that the credentials in the environment serve both.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

from durable.errors import DurableError
from durable.pipeline.unwritable import in_one_line, writing

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.dataset import Dataset, Expression
    from pyarrow.fs import FileSystem

NEW = ".new"
"""What the name of a file ends with that is written to take the place of another."""
_BUFFER_BYTES = 1 << 16
_ID_BYTES: Final = 16
_ALWAYS: Final = ("service", "id", "side", "outcome", "address", "sent_at", "finished_at")
_ALWAYS_OF_LETTERS: Final = ("service", "letter_id", "side", "address", "failed_at")
"""Columns that have a value in every row of a lake, of every version."""
DAMAGE = (OSError, ValueError, NotImplementedError)  # Arrow's errors are of these kinds


class _Foreign(ValueError):
    """File of Parquet with rows of something else."""


@contextmanager
def created(table_url: str, path: str) -> Iterator[IO[bytes] | Any]:
    """A new file to write into. It is on the disk, or in the store, when the context has ended without an error.

    Raises DurableError, which names the file, when it cannot be written.
    """
    with writing(f"{table_url}/{path}"):
        if "://" in table_url:
            with _store(table_url).open_output_stream(path, buffer_size=_BUFFER_BYTES) as stream:  # takes bytes
                yield stream
            return
        where = Path(table_url) / path
        where.parent.mkdir(parents=True, exist_ok=True)
        with where.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def replaced(table_url: str, path: str) -> Iterator[IO[bytes] | Any]:
    """A file that takes the place of the one of this name, if there is one, when the context has ended without an
    error. Readers find the one or the other.
    """
    if "://" in table_url:
        with created(table_url, path) as stream:
            yield stream
        return
    new = f"{path}{NEW}"
    try:
        with created(table_url, new) as stream:
            yield stream
        with writing(f"{table_url}/{path}"):
            os.replace(Path(table_url) / new, Path(table_url) / path)
    except BaseException:
        with suppress(DurableError):  # the first error is the one to tell
            remove(table_url, new)
        raise


def names(table_url: str, folder: str) -> list[str]:
    """The names of the files in a folder of the table; none where there is no such folder."""
    if "://" not in table_url:
        where = Path(table_url) / folder
        return sorted(entry.name for entry in where.iterdir()) if where.is_dir() else []
    from pyarrow.fs import FileSelector

    found = _store(table_url).get_file_info(FileSelector(folder, allow_not_found=True))
    return sorted(each.base_name for each in found if each.is_file)


def around(place: str) -> Iterator[str]:
    """The place itself, the places around it, and those that it directly holds."""
    if "://" not in place:
        for folder in {Path(place), Path(place).resolve()}:
            yield from map(str, (folder, *folder.parents))
        if Path(place).is_dir():
            yield from (str(entry) for entry in Path(place).iterdir() if entry.is_dir())
        return
    from pyarrow.fs import FileSelector

    store, _, path = place.rstrip("/").partition("://")
    parts = path.split("/")
    yield from (f"{store}://{'/'.join(parts[:count])}" for count in range(len(parts), 0, -1))
    below = _store(place).get_file_info(FileSelector("", allow_not_found=True))
    yield from (f"{place.rstrip('/')}/{each.base_name}" for each in below if not each.is_file)


class FileState(NamedTuple):
    """A file of the table, which has not changed as long as all of this is the same."""

    path: str
    size: int
    changed_ns: int


def states(table_url: str, paths: Sequence[str]) -> frozenset[FileState]:
    """The states of these files of the table, without those that are not there."""
    if "://" not in table_url:
        return frozenset(_states_of(Path(table_url), paths))
    infos = _store(table_url).get_file_info(list(paths))
    return frozenset(FileState(info.path, info.size, info.mtime_ns) for info in infos if info.is_file)


def _states_of(folder: Path, paths: Sequence[str]) -> Iterator[FileState]:
    for path in paths:
        with suppress(FileNotFoundError):
            stat = (folder / path).stat()
            yield FileState(path, stat.st_size, stat.st_ctime_ns)


class StoredFile(NamedTuple):
    """A file below a table's folder: `path` is relative to it."""

    path: str
    modified: datetime


def files(table_url: str) -> list[StoredFile]:
    """Every file of the table, in all folders; none where there is no table."""
    from pyarrow.fs import FileSelector, LocalFileSystem

    if "://" in table_url:
        found, root = _store(table_url).get_file_info(FileSelector("", allow_not_found=True, recursive=True)), ""
    else:
        root = f"{table_url}/"
        found = LocalFileSystem().get_file_info(FileSelector(table_url, allow_not_found=True, recursive=True))
    return [StoredFile(info.path.removeprefix(root), info.mtime) for info in found if info.is_file]


def sizes(place: str) -> dict[str, int]:
    """The sizes of the files at this place and in all of its folders, by their paths below it; of a file, its own."""
    from pyarrow.fs import FileSelector, LocalFileSystem

    if "://" in place:
        found, root = _store(place).get_file_info(FileSelector("", allow_not_found=True, recursive=True)), ""
    elif Path(place).is_dir():
        found, root = LocalFileSystem().get_file_info(FileSelector(place, recursive=True)), f"{place.rstrip('/')}/"
    else:
        found, root = LocalFileSystem().get_file_info([place]), f"{folder_of(place)}/"
    return {info.path.removeprefix(root): info.size for info in found if info.is_file}


def dangling(place: str) -> list[str]:
    """The symbolic links to nothing in all folders of this place, by their paths below it; stores have none."""
    if "://" in place:
        return []
    found = (Path(folder) / name for folder, _, files in os.walk(place, followlinks=True) for name in files)
    return sorted(str(path.relative_to(place)) for path in found if not path.exists())


def beginning(place: str, path: str, length: int) -> bytes:
    """The first bytes of a file at this place."""
    with opened(folder_of(place), path) as stream:
        return bytes(stream.read(length))


def folder_of(place: str) -> str:
    """The folder of files at this place, which may be one of them."""
    return place if "://" in place or Path(place).is_dir() else str(Path(place).parent)


def read(table_url: str, path: str) -> bytes:
    """A whole file."""
    if "://" not in table_url:
        return (Path(table_url) / path).read_bytes()
    with _store(table_url).open_input_file(path) as file:
        found: bytes = file.read()
        return found


def check_present(table_url: str, paths: Iterable[str]) -> None:
    """Raise DurableError, which names it, for the first of these files that is not there, or is no file."""
    there = {file.path for file in files(table_url)} if "://" in table_url else None
    for path in paths:
        if there is None and (Path(table_url) / path).is_dir():
            raise unreadable(f"{table_url}/{path}", "it is a folder")
        if path not in there if there is not None else not (Path(table_url) / path).exists():
            raise unreadable(f"{table_url}/{path}", "it is not there")


def unreadable(file: str, why: str) -> DurableError:
    return DurableError(
        f"lake: {file} cannot be read: {why.rstrip('.')}; put it back from a backup of the lake, or let durable-agent "
        "pipeline archive --new-lake write what the database still has into another lake; pipeline verify names all "
        "such files"
    )


class ParquetFiles:
    """Parquet files of a table, read as one. Reading raises DurableError, which names a file that is damaged.

    `coded`: columns of texts that come as dictionaries, which is fast where they have few values.
    """

    def __init__(
        self, table_url: str, paths: Sequence[str], schema: pyarrow.Schema, *, coded: Collection[str] = ()
    ) -> None:
        self._table_url, self._paths, self._coded = table_url, list(paths), coded
        self._schema = _as_codes(schema, coded)

    def to_table(self, columns: list[str] | None = None, filter: Expression | None = None) -> pyarrow.Table:
        with self._reading():
            found = self._dataset(self._paths).to_table(columns=columns, filter=filter)
            self._check(found)
            return found

    def to_batches(self, **options: Any) -> Iterator[pyarrow.RecordBatch]:
        batches = self._batches(self._paths, options)
        while True:
            with self._reading():
                batch = next(batches, None)
                if batch is not None:
                    self._check(batch)
            if batch is None:
                return
            yield batch

    def count_rows(self, filter: Expression | None = None) -> int:
        with self._reading():
            return int(self._dataset(self._paths).count_rows(filter=filter))

    def _check(self, rows: pyarrow.Table | pyarrow.RecordBatch) -> None:
        """Raise _Foreign for rows that no archive wrote: all readers count on these columns."""
        import pyarrow.compute

        pc: Any = pyarrow.compute  # its functions are made at run time, and no type checker knows them
        always = _ALWAYS_OF_LETTERS if "letter_id" in self._schema.names else _ALWAYS
        for name in rows.schema.names:
            if name in always and rows[name].null_count:
                raise _Foreign(f"column {name} has no value in some rows; no archive writes such ones")
        if "id" in rows.schema.names and pc.any(pc.not_equal(pc.binary_length(rows["id"]), _ID_BYTES)).as_py():
            raise _Foreign(
                f"column id has values of another length than {_ID_BYTES} bytes; no archive writes such ones"
            )

    def _batches(self, paths: Sequence[str], options: Mapping[str, Any]) -> Iterator[pyarrow.RecordBatch]:
        yield from self._dataset(paths).to_batches(**options)

    def _dataset(self, paths: Sequence[str]) -> Dataset:
        from pyarrow import dataset

        options = dataset.ParquetReadOptions(dictionary_columns=set(self._coded))
        kind = dataset.ParquetFileFormat(read_options=options)
        if "://" in self._table_url:
            store = _store(self._table_url)
            return dataset.dataset(list(paths), schema=self._schema, format=kind, filesystem=store)
        named = [f"{self._table_url}/{path}" for path in paths]
        return dataset.dataset(named, schema=self._schema, format=kind)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except DAMAGE as error:
            check_present(self._table_url, self._paths)
            raise self.named(error) from error

    def named(self, error: Exception) -> DurableError:
        """An error that names the first file that cannot be read by itself."""
        for path in self._paths:
            try:
                for batch in self._batches([path], {}):
                    self._check(batch)
            except DAMAGE as its_own:
                return unreadable(f"{self._table_url}/{path}", in_one_line(str(its_own)))
        return unreadable(self._table_url, in_one_line(str(error)))


def _as_codes(schema: pyarrow.Schema, coded: Collection[str]) -> pyarrow.Schema:
    import pyarrow as pa

    codes = pa.dictionary(pa.int32(), pa.string())
    return pa.schema([field.with_type(codes) if field.name in coded else field for field in schema])


@contextmanager
def opened(table_url: str, path: str) -> Iterator[Any]:
    """A file, to be read. Raises FileNotFoundError."""
    from pyarrow.fs import LocalFileSystem

    if "://" in table_url:
        with _store(table_url).open_input_file(path) as stream:
            yield stream
        return
    with LocalFileSystem().open_input_file(f"{table_url}/{path}") as stream:
        yield stream


def remove(table_url: str, path: str) -> None:
    """A file that is not there any more is as good."""
    with writing(f"{table_url}/{path}"), suppress(FileNotFoundError):
        if "://" in table_url:
            _store(table_url).delete_file(path)  # not every store takes the removal of what is not there
        else:
            (Path(table_url) / path).unlink()


def hadoop(url: str) -> str:
    """Write a URL as Spark's file systems name it."""
    if url.startswith("s3://"):
        return f"s3a://{url.removeprefix('s3://')}"
    return url if "://" in url else f"file://{url}"


def _store(table_url: str) -> FileSystem:
    from deltalake.fs import DeltaStorageHandler
    from pyarrow.fs import PyFileSystem

    return PyFileSystem(DeltaStorageHandler(table_url))
