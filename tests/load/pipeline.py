"""The pipeline with a lot: a million rows of history are archived, reported on and audited, and published again to a
thousand destinations, nine tenths of them under one key; then each command runs on two workers. `make load`, or
`python -m tests.load.pipeline --rows 100000`.

Each command is a process of its own; told are its seconds, and the most memory that it held with its JVM and workers.
Ends with 1 when anything was counted wrongly.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from rich.console import Console
from rich.table import Table

from tests.load.databases import migrated_database
from tests.support.cluster import SPARK
from tests.support.history import add_history, add_letters, add_old_day
from tests.support.root import ROOT

DAYS, DESTINATIONS, TYPES = 30, 1_000, 50
WORK = SPARK / "work"
TWO_WORKERS = "local-cluster[2,1,1024]"
_REFUSED = {"bad condition": 2, "hostile condition": 2, "failing condition": 1}
_MEBIBYTE = 1 << 20

_MAKE_DAYS = """
SELECT durable.make_partition('envelope_history', CAST(now() AT TIME ZONE 'UTC' AS date) - n)
FROM generate_series(1, %(days)s) AS n
"""
# Conversations of ten messages, spread over days, destinations and types; nine of ten rows have one key.
_FILL = """
INSERT INTO durable.envelope_history (id, side, outcome, address, message_type, source, correlation_id, partition_key,
    content_type, headers, body, sent_at, received_at, finished_at, attempts, interruptions, node_id)
SELECT CAST(lpad(to_hex(n), 32, '0') AS uuid), side, CASE side WHEN 'outgoing' THEN 'sent' ELSE 'handled' END,
    'tcp://shop-' || n %% %(destinations)s || ':2301', 'orders.type-' || n %% %(types)s, 'orders',
    CAST(lpad(to_hex(n / 10), 32, '0') AS uuid), CASE WHEN n %% 10 < 9 THEN 'hot' ELSE 'key ' || n END,
    'application/json', '{}', convert_to('{"number": ' || n || '}', 'UTF8'), moment - interval '3 s',
    CASE side WHEN 'incoming' THEN moment - interval '2 s' END, moment, CAST(n %% 97 = 0 AS integer), 0, 1 + n %% 3
FROM generate_series(1, %(rows)s / 2) AS n
CROSS JOIN LATERAL (SELECT now() - interval '1 h' - n * %(span)s / (%(rows)s / 2) AS moment) AS finished
CROSS JOIN unnest(ARRAY['outgoing', 'incoming']) AS side
"""


class Ended(NamedTuple):
    """How a command ended, what it cost, and its document."""

    code: int
    seconds: float
    most_bytes: int
    said: Any


class Line(NamedTuple):
    """What was counted, and what it must be; None where it may be anything."""

    what: str
    counted: object
    expected: object = None

    @property
    def is_right(self) -> bool:
        return self.expected is None or self.expected == self.counted


def run(module: str, *arguments: str, environment: dict[str, str]) -> Ended:
    """A program of Python in a session of its own."""
    began, most = time.monotonic(), 0
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
            stdout=said,
            start_new_session=True,
        )
        while process.poll() is None:
            most = max(most, _memory(process.pid))
            time.sleep(0.2)
        said.seek(0)
        text = said.read().decode()
    return Ended(process.returncode, time.monotonic() - began, most, json.loads(text) if text.startswith("{") else None)


def _memory(session: int) -> int:
    """What the processes of this session hold, without what they share."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    rollup = (entry / "smaps_rollup").read_text()
                    total += int(rollup.partition("\nPss:")[2].split()[0]) * 1024
            except (OSError, IndexError):
                continue  # it has ended
    return total


def fill(url: str, rows: int) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(_MAKE_DAYS, {"days": DAYS + 1})
        params = {"rows": rows, "destinations": DESTINATIONS, "types": TYPES, "span": timedelta(days=DAYS)}
        conn.execute(_FILL, params)


def with_a_lot(url: str, folder: Path, rows: int) -> list[Line]:
    environment = {"DURABLE_DATABASE_URL": url, "DURABLE_LAKE": str(folder / "lake")}
    lines = []

    def pipeline(name: str, *arguments: str) -> Any:
        print(f"{name} ...", file=sys.stderr, flush=True)
        ended = run("durable.cli", "pipeline", *arguments, "--json", environment=environment)
        cost = f"{ended.seconds:.1f} s, {ended.most_bytes / _MEBIBYTE:,.0f} MiB"
        lines.extend([Line(name, cost), Line("  exit code", ended.code, 0)])
        return ended.said or {}

    archived = pipeline("archive", "archive", "--service", "shop")
    lines.append(Line("  rows", archived["tables"][0]["rows"], rows))
    page = folder / "report.html"
    report = ("report", "--out", str(page), "--by", "partition_key")
    for name in ("report", "report, days known"):
        told = pipeline(name, *report)
        lines.append(Line("  rows", told["totals"]["total"], rows))
        lines.append(Line("  page", f"{page.stat().st_size / _MEBIBYTE:,.1f} MiB"))
        hot = {row["value"]: row["total"] for row in told["volumes"]["partition_key"]}["hot"]
        lines.append(Line("  rows of one key", hot, rows // 2 * 9 // 10))
    told = pipeline("audit", "audit", "--sender", str(folder / "lake"), "--receiver", str(folder / "lake"))
    lines.append(Line("  lost or twice", told["counts"]["lost"] + told["counts"]["twice"], 0))
    told = pipeline("replay", "replay", "--name", "x", "--side", "outgoing", "--all", "--chunk", "100000")
    lines.append(Line("  added", told["added"], rows // 2))
    with psycopg.connect(url) as conn:
        counted = conn.execute(
            "SELECT count(*), count(DISTINCT destination), count(*) FILTER (WHERE partition_key = 'hot') "
            "FROM durable.outgoing_envelopes"
        ).fetchone()
    lines.append(Line("  waiting, destinations, of one key", counted, (rows // 2, DESTINATIONS, rows // 2 * 9 // 10)))
    return lines


def on_two_workers(url: str, folder: Path) -> list[Line]:
    with psycopg.connect(url, autocommit=True) as conn:
        add_history(conn, 50)
        add_letters(conn, 5)
        add_old_day(conn, 40, 20, first=501)
        conn.execute(
            "UPDATE durable.envelope_history SET body = '{}', content_type = 'application/json', headers = '{}'"
        )
    arguments = (url, str(folder / "small"), "--master", TWO_WORKERS)
    known = {*WORK.glob("*")}
    ended = run("tests.support.every_command", *arguments, environment={})
    for left in {*WORK.glob("*")} - known:  # Spark's workers leave their logs there
        shutil.rmtree(left)
    codes = {name: each["code"] for name, each in (ended.said or {}).items()}
    cost = f"{ended.seconds:.1f} s, {ended.most_bytes / _MEBIBYTE:,.0f} MiB"
    return [Line(TWO_WORKERS, cost), *(Line(f"  {name}", code, _REFUSED.get(name, 0)) for name, code in codes.items())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of history, a multiple of 20,000")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        with migrated_database(Path(name)) as url:
            fill(url, options.rows)
            lines = with_a_lot(url, Path(name), options.rows)
        with migrated_database(Path(name) / "other") as url:
            lines += on_two_workers(url, Path(name))
    table = Table("", "counted", "expected", title=f"{options.rows:,} rows of history")
    for line in lines:
        expected = "" if line.expected is None else str(line.expected)
        table.add_row(line.what, str(line.counted), expected, style=None if line.is_right else "bold red")
    Console().print(table)
    return 0 if all(line.is_right for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
