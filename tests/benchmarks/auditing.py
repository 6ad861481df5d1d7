"""The audit of five million messages sent and five million handled, against DuckDB on the same Parquet files.

    python -m tests.benchmarks.auditing [--count 5000000] [--json]

Both answer with the same findings: what is lost (with what looks lost and is a dead letter left out), twice, alien and
late, and with how many rows there are of each service and outcome. DuckDB is given the names of the files.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import duckdb
import numpy as np

from durable.pipeline.audit import Question, audit
from durable.pipeline.lake import Lake
from durable.pipeline.session import spark_session
from tests.benchmarks.rows import Row, show
from tests.support.lakes import fill, many

ROUNDS = 3
FILES = 8
PLANTED = 5
"""So many messages are lost, and so many others alien."""

Findings = Mapping[str, int]

_SQL = """
WITH sends AS (SELECT * FROM read_parquet($sent) WHERE side = 'outgoing' AND sent_at >= $since),
    receipts AS (SELECT * FROM read_parquet($received) WHERE side = 'incoming' AND sent_at >= $since),
    deliveries AS (SELECT id, address, count(*) FILTER (outcome = 'sent') AS sent FROM sends GROUP BY ALL),
    places AS (
        SELECT id, service, address, count(*) FILTER (outcome = 'handled') AS handled FROM receipts GROUP BY ALL
    ),
    sent AS (SELECT id, count(*) FILTER (sent > 0) AS copies FROM deliveries GROUP BY id),
    seen AS (SELECT id, count(*) AS copies, max(handled) AS handled FROM places GROUP BY id)
SELECT count(*) FILTER (sent.copies > coalesce(seen.copies, 0)) AS lost, count(*) FILTER (handled > 1) AS twice,
    count(*) FILTER (sent.id IS NULL) AS alien FROM sent FULL JOIN seen USING (id)
"""
_LATE = """
SELECT count(*) FROM read_parquet($received)
WHERE side = 'incoming' AND outcome = 'handled'
    AND (finished_at - sent_at > INTERVAL 1 HOUR OR finished_at > deliver_by)
"""
_TOTALS = """
SELECT service, side, outcome, count(*), min(finished_at), max(finished_at) FROM read_parquet($1) GROUP BY ALL
"""


class Auditing:
    """The contenders, and the two lakes."""

    def __init__(self, folder: Path, count: int) -> None:
        numbers = np.arange(count)
        lost, alien = numbers[1_007 :: count // PLANTED], numbers[1_011 :: count // PLANTED]
        sends = many(np.setdiff1d(numbers, alien), "outgoing")
        receipts = many(np.random.default_rng(7).permutation(np.setdiff1d(numbers, lost)), "incoming")
        self.planted = {"lost": len(lost), "twice": 0, "alien": len(alien), "late": 0}
        size = -(-len(sends) // FILES)
        self.sender, self.receiver = (
            fill(Lake(str(folder / name)), *(rows.slice(first, size) for first in range(0, len(rows), size)))
            for name, rows in (("sender", sends), ("receiver", receipts))
        )
        self.spark = spark_session(app_name="durable bench")
        self.duckdb = duckdb.connect()

    def floor(self) -> Findings:
        sent, received = self._files(self.sender), self._files(self.receiver)
        firsts = [row[4] for files in (sent, received) for row in self.duckdb.execute(_TOTALS, [files]).fetchall()]
        given = {"sent": sent, "received": received, "since": max(firsts)}
        lost, twice, alien = self._one(_SQL, given)
        (late,) = self._one(_LATE, {"received": received})
        return {"lost": lost, "twice": twice, "alien": alien, "late": late}

    def ours(self) -> Findings:
        verdict = audit(self.spark, [self.sender], [self.receiver], Question(late_after=timedelta(hours=1)))
        return {kind: verdict.counts[kind] for kind in self.planted}

    def seconds(self, contender: Callable[[], Findings]) -> float:
        began = time.monotonic()
        found = contender()
        lasted = time.monotonic() - began
        assert found == self.planted, found
        return lasted

    def _files(self, lake: Lake) -> list[str]:
        return [name.removeprefix("file://") for name in lake.files("history")]

    def _one(self, query: str, given: Mapping[str, object]) -> tuple[int, ...]:
        row = self.duckdb.execute(query, given).fetchone()
        assert row is not None
        return row


def run(count: int) -> Row:
    row = Row("audit", "DuckDB on the same files")
    with tempfile.TemporaryDirectory() as folder:
        auditing = Auditing(Path(folder), count)
        auditing.seconds(auditing.ours)  # the session is warm from here on
        auditing.seconds(auditing.floor)
        for _ in range(ROUNDS):
            row.floor = max(row.floor, count / auditing.seconds(auditing.floor))
            row.ours = max(row.ours, count / auditing.seconds(auditing.ours))
        auditing.spark.stop()
    return row


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.auditing", description=__doc__)
    parser.add_argument("--count", type=int, default=5_000_000, help="messages on each side")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    row = run(arguments.count)
    if arguments.json:
        json.dump(asdict(row) | {"ratio": row.ratio}, sys.stdout, indent=2)
    else:
        show([row], f"{arguments.count:,} messages sent, and as many handled; best of {ROUNDS} rounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
