"""What a monitor reads, on every supported Postgres: right, bounded, and by index whatever the backlog."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text

from durable.embedded import Embedded
from durable.messages.ordering import Rule
from durable.storage import circuits, gauges, placements
from durable.storage.circuits import CircuitKind
from durable.storage.gauges import MOST_COUNTED, Side
from durable.storage.placements import Declared
from durable.storage.sql import circuits as circuit_statements
from durable.storage.sql import gauges as gauge_statements
from durable.storage.sql.statement import Statement
from tests.conftest import fresh_databases

MANY = 20 * MOST_COUNTED

# A third is owned by node 7, a third is put off and overdue, and a third is nobody's.
BACKLOG = """
INSERT INTO durable.incoming_envelopes (endpoint, id, message_type, source, correlation_id, content_type, body, sent_at,
    owner_id, execution_time)
SELECT 'orders', gen_random_uuid(), 'type ' || n % 3, 'shop', gen_random_uuid(), 'application/json', '{}',
    now() - interval '1 hour' + n * interval '1 ms',
    CASE n % 3 WHEN 0 THEN 7 ELSE 0 END, CASE n % 3 WHEN 1 THEN now() - interval '1 minute' END
FROM generate_series(1, :many) AS n
"""

PAUSED_KEYS = """
INSERT INTO durable.circuits (kind, key, reason, actor, since, parked)
SELECT 'key', :actor || ' ' || n, 'broken', :actor, now() - :age * interval '1 day' + n * interval '1 ms',
    :actor = 'node 7'
FROM generate_series(1, :many) AS n
"""


@pytest.fixture
def conn(every_server: Embedded) -> Iterator[Connection]:
    with fresh_databases(every_server) as make:
        engine = create_engine(make("gauges").replace("postgresql://", "postgresql+psycopg://"))
        with engine.begin() as conn:
            yield conn
        engine.dispose()


def test_empty_schema_has_empty_gauges(conn: Connection) -> None:
    found = gauges.read(conn, "durable")

    assert found.unowned == {Side.OUTGOING: [], Side.INCOMING: []}
    assert found.owned == {Side.OUTGOING: {}, Side.INCOMING: {}}
    assert (found.overdue, found.dead_letters, found.circuits, found.nodes) == (None, 0, [], [])
    assert found.estimates.keys() == {"outgoing_envelopes", "incoming_envelopes", "dead_letters"}
    assert found.partitioned_days >= 2


def test_a_backlog_is_counted_up_to_the_limit_and_its_oldest_found(conn: Connection) -> None:
    conn.execute(text(BACKLOG), {"many": MANY})
    circuits.open_circuit(conn, "durable", CircuitKind.HANDLER, "type 2", reason="month end", actor="accounting")

    found = gauges.read(conn, "durable")

    [unowned] = found.unowned[Side.INCOMING]
    assert (unowned.name, unowned.waiting) == ("type 2", MOST_COUNTED)
    assert timedelta(minutes=59) < unowned.oldest_age < timedelta(minutes=62)
    assert found.owned[Side.INCOMING] == {7: MOST_COUNTED}
    assert found.scheduled == {Side.OUTGOING: 0, Side.INCOMING: MOST_COUNTED}
    assert found.overdue is not None
    assert timedelta(minutes=1) <= found.overdue < timedelta(minutes=3)
    assert [(circuit.key, circuit.reason) for circuit in found.circuits] == [("type 2", "month end")]


def test_messages_behind_a_dead_letter_are_counted_by_their_key(conn: Connection) -> None:
    conn.execute(text(BACKLOG), {"many": MANY})
    conn.execute(text("UPDATE durable.incoming_envelopes SET ordering_key = 'k' || seq % 100 WHERE owner_id = 0"))
    for key in ("k1", "gone"):
        circuits.park(conn, "durable", CircuitKind.KEY, key, reason="broken", actor="node 7", ordering_key=key)
    for key in ("k1", "k2"):
        circuits.pause(conn, "durable", CircuitKind.KEY, key, reason="moving", actor="ada", duration=None)

    behind = gauges.read(conn, "durable").behind

    assert behind.keys() == {"k1"}
    assert 0 < behind["k1"] <= MOST_COUNTED
    conn.execute(text("ANALYZE durable.incoming_envelopes"))
    plan = "\n".join(
        conn.execute(
            text(f"EXPLAIN {circuit_statements.COUNT_BEHIND.within('durable').text}"),
            {"limit": MOST_COUNTED, "groups": 200, "keys": ["k1", "gone"]},
        ).scalars()
    )
    assert "Seq Scan on incoming_envelopes" not in plan, plan


@pytest.mark.parametrize("placed", ["rows", "declaration"])
def test_types_behind_a_park_are_those_placed_in_its_order(conn: Connection, placed: str) -> None:
    said: Any = {"reason": "broken", "actor": "node 7", "ordering_key": "whole"}
    circuits.park(conn, "durable", CircuitKind.HANDLER, "type 9", **said)
    if placed == "rows":
        conn.execute(text(BACKLOG), {"many": 9})
        conn.execute(text("UPDATE durable.incoming_envelopes SET ordering_key = 'whole' WHERE message_type = 'type 2'"))
    else:
        rules = {"type 2": Rule("whole"), "type 1": Rule("other")}
        placements.declare(conn, "durable", [Declared("incoming", *rule) for rule in rules.items()])

    assert gauges.read(conn, "durable").parked_types == {"type 2": {"whole"}}


def test_resume_of_a_version_ends_the_park_of_all(conn: Connection) -> None:
    said: Any = {"reason": "broken", "actor": "node 7", "ordering_key": "whole"}
    circuits.park(conn, "durable", CircuitKind.HANDLER, "shop.order", **said)
    assert circuits.resume(conn, "durable", CircuitKind.HANDLER, "shop.order.v2").was_open


def test_messages_behind_the_youngest_of_many_parked_keys_are_counted(conn: Connection) -> None:
    conn.execute(text(BACKLOG), {"many": MANY})
    conn.execute(text("UPDATE durable.incoming_envelopes SET ordering_key = 'waits' WHERE owner_id = 0 AND seq < 100"))
    conn.execute(text(PAUSED_KEYS), {"many": 2 * MOST_COUNTED, "actor": "node 7", "age": 1})
    circuits.park(conn, "durable", CircuitKind.KEY, "waits", reason="broken", actor="node 7", ordering_key="waits")

    found = gauges.read(conn, "durable")

    assert "waits" in {each.key for each in found.circuits}
    assert found.behind.keys() == {"waits"}


def test_oldest_paused_keys_are_read_and_all_are_counted(conn: Connection) -> None:
    conn.execute(text(PAUSED_KEYS), {"many": 2 * MOST_COUNTED + 1, "actor": "ada", "age": 2})
    conn.execute(text(PAUSED_KEYS), {"many": MOST_COUNTED + 1, "actor": "node 7", "age": 1})
    circuits.pause(conn, "durable", CircuitKind.HANDLER, "type 2", reason="month end", actor="ada", duration=None)

    found = gauges.read(conn, "durable")

    read = Counter((each.kind, each.actor) for each in found.circuits)
    assert read == {("key", "ada"): MOST_COUNTED, ("key", "node 7"): MOST_COUNTED, ("handler", "ada"): 1}
    assert found.open_circuits == {"key": 3 * MOST_COUNTED + 2, "handler": 1}
    keys = {each.key for each in found.circuits}
    assert not keys & {f"ada {MOST_COUNTED + 1}", f"node 7 {MOST_COUNTED + 1}"}


def test_no_statement_walks_a_whole_table_of_work(conn: Connection) -> None:
    conn.execute(text(BACKLOG), {"many": MANY})
    conn.execute(text(BACKLOG.replace("incoming", "outgoing").replace("endpoint", "destination")), {"many": MANY})
    for statement in (
        *gauge_statements.READ_UNOWNED_OUTGOING,
        *gauge_statements.READ_UNOWNED_INCOMING,
        gauge_statements.READ_OWNED_OUTGOING,
        gauge_statements.READ_OWNED_INCOMING,
        gauge_statements.READ_SCHEDULED,
    ):
        plan = _plan(conn, statement)
        assert "Index" in plan
        assert "Seq Scan" not in plan, plan
        assert "Sort" not in plan, plan


def _plan(conn: Connection, statement: Statement) -> str:
    sql = statement.within("durable").text
    params = {name: value for name, value in {"limit": MOST_COUNTED, "groups": 200}.items() if f":{name}" in sql}
    return "\n".join(conn.execute(text(f"EXPLAIN {sql}"), params).scalars())
