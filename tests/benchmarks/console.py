"""What the pages of the console cost with a large database: `python -m tests.benchmarks.console --rows 10000000`.

Each read of a page is timed on an empty database, then with so many rows of history, a tenth of that waiting, and a
hundredth of that as dead letters; the best of five on one warm connection. So a figure holds the database's time and
that of the driver. The bound of a page is 100 ms.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from sqlalchemy import Connection, Engine, create_engine, text

from durable.console import pipeline, reading
from durable.embedded import postgres
from durable.envelope import new_id
from durable.storage import actions, dead_letters, receipts, upkeep
from durable.storage.dead_letters import Selection
from tests.benchmarks.databases import Databases

SCHEMA: Final = "durable"
BOUND_MS: Final = 100
ROUNDS: Final = 5

HISTORY: Final = text("""
INSERT INTO durable.envelope_history (id, side, outcome, address, message_type, source, correlation_id, sent_at,
    finished_at, attempts, interruptions, node_id)
SELECT uuidv7(moment - now()), CASE WHEN n % 2 = 0 THEN 'incoming' ELSE 'outgoing' END,
    CASE WHEN n % 2 = 0 THEN 'handled' ELSE 'sent' END, 'shop', 'shop.type-' || n % 20, 'shop', gen_random_uuid(),
    moment - interval '1 s', moment, 1, 0, 7
FROM generate_series(1, :rows) AS n,
    LATERAL (SELECT now() - interval '20 h' * (1 - n / CAST(:rows AS float8)) AS moment)
""")
WAITING: Final = text("""
INSERT INTO durable.incoming_envelopes (endpoint, id, message_type, source, correlation_id, content_type, body, sent_at,
    owner_id, execution_time)
SELECT 'local', uuidv7(), 'shop.type-' || n % 20, 'shop', gen_random_uuid(), 'application/json', '{}', now(),
    0, CASE WHEN n % 10 = 0 THEN now() + interval '1 h' END
FROM generate_series(1, :rows) AS n
""")
LETTERS: Final = text("""
INSERT INTO durable.dead_letters (side, address, id, message_type, source, correlation_id, content_type, headers, body,
    sent_at, attempts, interruptions, exception_type, reason, fingerprint, node_id, message_digest, replayable, epoch)
SELECT 'incoming', 'local', uuidv7(), 'shop.type-' || n % 20, 'shop', gen_random_uuid(), 'application/json',
    '{}', convert_to(repeat('x', 400) || n, 'UTF8'), now(), 3, 0, 'ValueError', 'order ' || n || ' is odd',
    'cause-' || n % 50, 7, 0, true, 0
FROM generate_series(1, :rows) AS n
""")

Read = Callable[[Connection], object]


def pages(conn: Connection) -> dict[str, Read]:
    """The reads of each page."""
    newest = conn.execute(text("SELECT max(letter_id) FROM durable.dead_letters")).scalar_one() or 1
    some = conn.execute(text("SELECT id FROM durable.incoming_envelopes LIMIT 1")).scalar_one_or_none() or new_id()

    def page(function: Callable[..., object], *args: Any, **options: Any) -> Read:
        return lambda conn: function(conn, SCHEMA, *args, **options)

    letters = partial(page, dead_letters.page, limit=51)
    return {
        "overview, handlers, circuits, nodes": page(reading.read_overview),
        "dead letters by cause": page(dead_letters.groups, Selection()),
        "dead letters of a cause": letters(Selection(fingerprint="cause-7")),
        "dead letters of a type, a later page": letters(Selection(message_type="shop.type-3"), before=newest // 2),
        "dead letters with a text, found": letters(Selection(text="order 7")),
        "dead letters with a text, not found": letters(Selection(text="no such text")),
        "one letter": page(reading.read_letter, newest),
        "a message that waits": page(
            reading.read_message, some, ended_after=receipts.made_after([some], timedelta(minutes=5))
        ),
        "scheduled": page(reading.read_scheduled),
        "database": page(upkeep.read),
        "pipeline": page(pipeline.read, timedelta(days=30)),
        "actions": page(actions.page, actions.Selection(), limit=51),
    }


def measure(engine: Engine) -> dict[str, float]:
    """Time the reads of each page, in milliseconds."""
    found: dict[str, float] = {}
    with engine.connect() as conn:
        for name, read in pages(conn).items():
            times = []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                read(conn)
                conn.rollback()
                times.append((time.perf_counter() - began) * 1_000)
            found[name] = min(times)
    return found


def fill(engine: Engine, rows: int) -> None:
    with engine.begin() as conn:
        for statement, count in ((HISTORY, rows), (WAITING, rows // 10), (LETTERS, rows // 100)):
            conn.execute(statement, {"rows": count})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.execute(text("VACUUM ANALYZE"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of history")
    rows: int = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder, postgres(Path(folder)) as server:
        url = Databases(server).fresh()
        engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
        empty = measure(engine)
        fill(engine, rows)
        full = measure(engine)
        engine.dispose()
    table = Table("page", "empty, ms", f"{rows:,} rows, ms", "ratio", title="Reads of the console's pages")
    for name, took in full.items():
        table.add_row(name, f"{empty[name]:.1f}", f"{took:.1f}", f"{took / empty[name]:.1f}")
    Console(width=110).print(table)
    slow = [name for name, took in full.items() if took > BOUND_MS]
    if slow:
        raise SystemExit(f"over {BOUND_MS} ms: {', '.join(slow)}")


if __name__ == "__main__":
    main()
