"""The audit of five million messages sent and five million handled, against DuckDB on the same Parquet files.

Both answer with the same findings: what is lost (with what looks lost and is a dead letter left out), twice, alien and
late, and with how many rows there are of each service and outcome. DuckDB is given the names of the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import numpy as np

from durable.pipeline.audit import Question, audit
from durable.pipeline.lake import Lake
from tests.benchmarks.processors import Meter, Place, Taken
from tests.benchmarks.rows import Timing
from tests.support.lakes import fill, many

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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

    def __init__(self, spark: SparkSession, folder: Path, count: int, meter: Meter) -> None:
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
        self.spark, self._meter = spark, meter
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

    def taken(self, contender: Callable[[], Findings]) -> Taken:
        taken, found = self._meter.taken(contender)
        assert found == self.planted, found
        return taken

    def _files(self, lake: Lake) -> list[str]:
        return [name.removeprefix("file://") for name in lake.files("history")]

    def _one(self, query: str, given: Mapping[str, object]) -> tuple[int, ...]:
        row = self.duckdb.execute(query, given).fetchone()
        assert row is not None
        return row


def run(at: Place, count: int, rounds: int) -> Sequence[Timing]:
    timing = Timing("audit", "DuckDB on the same files")
    auditing = Auditing(at.spark, at.folder, count, at.meter)
    auditing.taken(auditing.ours)  # the session is warm from here on
    auditing.taken(auditing.floor)
    for _ in range(rounds):
        timing.measured(auditing.taken(auditing.floor), auditing.taken(auditing.ours))
    return [timing]
