"""The files that a task of the archive writes, as readers of the lake find them."""

from __future__ import annotations

from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from durable.pipeline.files import TaskFiles
from durable.pipeline.lake_tables import Whose, file_schema
from tests.support.lakes import handled, table

TYPES = ["orders.placed", "orders.paid", "orders.shipped"]


def written(folder: Path, count: int) -> pq.ParquetFile:
    """One file, of rows whose message types come in turns."""
    rows = table([handled(number, message_type=TYPES[number % len(TYPES)]) for number in range(count)])
    as_read = rows.select([name for name in file_schema("history").names if name not in ("service", "database")])
    with TaskFiles(str(folder), "history", Whose("billing", "billing-1"), "test") as writing:
        for batch in as_read.to_batches(max_chunksize=10):
            writing.add(batch)
    (file,) = writing.files
    assert file.rows == count
    return pq.ParquetFile(folder / file.path)


def test_rows_of_one_message_type_lie_together_in_their_order(tmp_path: Path) -> None:
    rows = written(tmp_path, 90).read(columns=["message_type", "sent_at"])
    kinds = rows["message_type"].to_pylist()
    assert [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before] == TYPES
    for kind in TYPES:
        sent_at = rows.filter(ds.field("message_type") == kind)["sent_at"].to_pylist()
        assert sent_at == sorted(sent_at)
        assert len(sent_at) == 30


@pytest.mark.parametrize("column", ["message_type", "finished_at"])
def test_archived_files_have_a_page_index(tmp_path: Path, column: str) -> None:
    file = written(tmp_path, 90)
    described = file.metadata.row_group(0).column(file.schema_arrow.get_field_index(column))
    assert described.has_column_index
    assert described.has_offset_index
