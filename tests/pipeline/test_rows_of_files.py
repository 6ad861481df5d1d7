"""Rows of files of other programs: the times that choose them, and the outcomes that leave them out."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pipeline.test_replayable import message_table
from tests.support.command import Agent

BEGIN: Final = datetime(2026, 5, 1, tzinfo=UTC)
EARLY: Final = BEGIN - timedelta(days=1)
LATE: Final = BEGIN + timedelta(days=1)
TIMES: Final[dict[str, tuple[list[dict[str, datetime]], int]]] = {
    "one column in one file": ([{"finished_at": LATE, "sent_at": EARLY}, {"sent_at": LATE}], 2),
    "two columns in two files": ([{"finished_at": LATE}, {"failed_at": LATE}], 2),
    "the first column goes first": ([{"finished_at": EARLY, "sent_at": LATE}, {"failed_at": LATE}], 1),
}
"""Times of a message of each file, and how many lie in the period."""
TIMELESS: Final[dict[str, tuple[list[dict[str, datetime]], str]]] = {
    "no column": ([{}, {}], "2 messages have no time in sent_at"),
    "no column in one file": ([{"finished_at": LATE}, {}], "1 message has no time in finished_at, sent_at"),
}
OUTCOMES: Final = ["sent", "handled", "expired", "dead-lettered", "cancelled", None]


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    for number, row in enumerate(rows):
        more = {
            name: pa.array([value], pa.timestamp("us", tz="UTC") if isinstance(value, datetime) else None)
            for name, value in row.items()
        }
        pq.write_table(message_table(number, more), folder / f"{number}.parquet")


def replayed(agent: Agent, place: Path, *arguments: str) -> dict[str, Any]:
    ended = agent("pipeline", "replay", "--json", "--parquet", str(place), "--name", "x", "--dry-run", *arguments)
    assert ended.code == 0, ended
    told: dict[str, Any] = json.loads(ended.out)
    return told


@pytest.mark.parametrize("name", TIMES)
def test_time_of_a_row_is_its_first(agent: Agent, tmp_path: Path, name: str) -> None:
    rows, count = TIMES[name]
    write(tmp_path, rows)
    since = replayed(agent, tmp_path, "--since", BEGIN.isoformat())
    until = replayed(agent, tmp_path, "--until", BEGIN.isoformat())
    assert (since["messages"], until["messages"]) == (count, len(rows) - count)


@pytest.mark.parametrize("option", ["--since", "--until"])
@pytest.mark.parametrize("name", TIMELESS)
def test_rows_without_a_time_are_counted_when_a_period_is_given(
    agent: Agent, tmp_path: Path, name: str, option: str
) -> None:
    rows, said = TIMELESS[name]
    write(tmp_path, rows)
    ended = agent(
        "pipeline", "replay", "--parquet", str(tmp_path), "--name", "x", option, BEGIN.isoformat(), "--dry-run"
    )
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
    assert ended.err.startswith(f"error: --since, --until: {said}; write one in the files")
    assert replayed(agent, tmp_path, "--all")["messages"] == 2


@pytest.mark.parametrize("spelt", ["outcome", "OUTCOME"])
def test_outcomes_of_files_choose_as_those_of_a_lake(agent: Agent, tmp_path: Path, spelt: str) -> None:
    write(tmp_path, [{} if outcome is None else {spelt: outcome} for outcome in OUTCOMES])
    told = replayed(agent, tmp_path, "--all")
    assert (told["messages"], told["other_outcomes"]) == (3, 3)
    told = replayed(agent, tmp_path, "--all", "--from", "dead-letters")
    assert (told["messages"], told["other_outcomes"]) == (6, 0)
    ended = agent("pipeline", "replay", "--parquet", str(tmp_path), "--name", "x", "--all", "--dry-run")
    assert "3 messages would be replayed; 3 messages have another outcome, and stay out" in ended.out


def test_outcomes_of_another_type_choose_nothing(agent: Agent, tmp_path: Path) -> None:
    write(tmp_path, [{"outcome": 1}, {"outcome": 2}])
    told = replayed(agent, tmp_path, "--all")
    assert (told["messages"], told["other_outcomes"]) == (2, 0)


@pytest.mark.parametrize("beside", [None, "sent", "expired"])
def test_repeats_of_files_without_an_outcome_stay_out(agent: Agent, tmp_path: Path, beside: str | None) -> None:
    """Beside a file with one, too: a column that is missing is one without a value."""
    write(tmp_path, [{"sent_at": EARLY, "seq": number} for number in range(3)])
    for path in tmp_path.iterdir():
        again = pq.read_table(path).set_column(6, "seq", pa.array([9]))
        pq.write_table(again, path.with_stem(f"again-{path.stem}"))
    if beside is not None:
        row = {"sent_at": pa.array([LATE], pa.timestamp("us", tz="UTC")), "outcome": [beside]}
        pq.write_table(message_table(7, row), tmp_path / "other.parquet")
    told = replayed(agent, tmp_path, "--all")
    assert (told["messages"], told["repeats"]) == (4 if beside == "sent" else 3, 3)
