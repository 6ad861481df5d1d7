"""Places of the files of a table of the lake: a folder, or a place in an object store.

An object store is reached as `deltalake` reaches it, so that the credentials in the environment serve both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from durable.pipeline.unwritable import writing

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.dataset import Dataset
    from pyarrow.fs import FileSystem

_BUFFER_BYTES = 1 << 16


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
    with created(table_url, f"{path}.new") as stream:
        yield stream
    with writing(f"{table_url}/{path}"):
        os.replace(Path(table_url) / f"{path}.new", Path(table_url) / path)


def names(table_url: str, folder: str) -> list[str]:
    """The names of the files in a folder of the table; none where there is no such folder."""
    if "://" not in table_url:
        where = Path(table_url) / folder
        return sorted(entry.name for entry in where.iterdir()) if where.is_dir() else []
    from pyarrow.fs import FileSelector

    found = _store(table_url).get_file_info(FileSelector(folder, allow_not_found=True))
    return sorted(each.base_name for each in found if each.is_file)


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


def read(table_url: str, path: str) -> bytes:
    """A whole file."""
    if "://" not in table_url:
        return (Path(table_url) / path).read_bytes()
    with _store(table_url).open_input_file(path) as file:
        found: bytes = file.read()
        return found


def dataset(table_url: str, paths: Sequence[str], schema: pyarrow.Schema) -> Dataset:
    """Open these Parquet files as a dataset."""
    from pyarrow import dataset

    if "://" in table_url:
        return dataset.dataset(list(paths), schema=schema, format="parquet", filesystem=_store(table_url))
    return dataset.dataset([f"{table_url}/{path}" for path in paths], schema=schema, format="parquet")


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
    with writing(f"{table_url}/{path}"):
        if "://" in table_url:
            _store(table_url).delete_file(path)
        else:
            (Path(table_url) / path).unlink(missing_ok=True)


def hadoop(url: str) -> str:
    """Write a URL as Spark's file systems name it."""
    if url.startswith("s3://"):
        return f"s3a://{url.removeprefix('s3://')}"
    return url if "://" in url else f"file://{url}"


def _store(table_url: str) -> FileSystem:
    from deltalake.fs import DeltaStorageHandler
    from pyarrow.fs import PyFileSystem

    return PyFileSystem(DeltaStorageHandler(table_url))
