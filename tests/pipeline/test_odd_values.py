"""Values of files that Spark has and Python has not, in each column: they are named, or they are replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pipeline.test_replayable import message_table
from tests.support.command import Agent
from tests.support.publishing import Outbox

LATIN_1: Final = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xe9")])
YEAR_11476: Final = pa.array([300_000_000_000_000_000], pa.timestamp("us", tz="UTC"))
ODD: Final[dict[str, Any]] = {
    "text": LATIN_1,
    "time": YEAR_11476,
    "time without a zone": YEAR_11476.cast(pa.timestamp("us")),
    "day": pa.array([4_000_000], pa.date32()),
}


@pytest.mark.parametrize("arguments", [["--dry-run"], [], ["--type", "misspelt"]], ids=" ".join)
@pytest.mark.parametrize("column", ["message_type", "destination", "service"])
def test_name_in_latin_1_is_told_in_one_line(
    agent: Agent, database_url: str, tmp_path: Path, column: str, arguments: list[str]
) -> None:
    pq.write_table(message_table(1, {column: LATIN_1}), tmp_path / "a.parquet")
    ended = agent("pipeline", "replay", "--parquet", str(tmp_path), "--all", "--name", "x", *arguments)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
    named = f"column {column}: text is not UTF-8 (row 00000000-0000-0000-0000-000000000001, "
    assert ended.err.startswith(
        "error: --type: no message has 'misspelt'" if "--type" in arguments else f"error: {named}"
    )
    assert Outbox(database_url).orders == []


@pytest.mark.parametrize("kind", ODD)
def test_odd_values_are_an_order_of_messages(agent: Agent, tmp_path: Path, kind: str) -> None:
    for number in range(3):
        pq.write_table(message_table(number + 1, {"place": ODD[kind]}), tmp_path / f"{number}.parquet")
    chunks = ("--order-by", "place", "--chunk", "1")
    ended = agent("pipeline", "replay", "--parquet", str(tmp_path), "--all", "--name", "x", *chunks)
    assert (ended.code, ended.err) == (0, ""), ended
    assert "3 messages replayed, 3 of them added" in ended.out
