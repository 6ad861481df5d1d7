"""The statements of each message are planned once for a connection, not each time: planning costs more than they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from durable.embedded import Embedded
from durable.envelope import LeasedEnvelope, NodeId
from durable.storage import inbox, outbox
from durable.storage.inbox import Arrival
from durable.storage.outbox import Sent
from tests.conftest import fresh_databases
from tests.support import letters

SCHEMA, NODE, TIMES = "durable", NodeId(1), 40
FIRST_PLANS = 5
"""Postgres plans a prepared statement so often with its parameters, before it compares that with one plan for all."""
MANY = 20_000

FILL = """
INSERT INTO durable.{table}_envelopes ({address}, id, message_type, source, correlation_id, content_type, body, sent_at,
    owner_id)
SELECT 'elsewhere', gen_random_uuid(), 'plans.any', 'shop', gen_random_uuid(), 'application/json', '{{}}', now(), 0
FROM generate_series(1, :many)
"""
PLANS = text(
    "SELECT statement, custom_plans, generic_plans FROM pg_prepared_statements WHERE statement LIKE '%durable%'"
)


@pytest.fixture
def engine(every_server: Embedded) -> Iterator[Engine]:
    """An engine of one connection to tables with many rows, whose statistics are known."""
    with fresh_databases(every_server) as make:
        engine = create_engine(make("plans").replace("postgresql://", "postgresql+psycopg://"), pool_size=1)
        with engine.begin() as conn:
            for table, address in (("outgoing", "destination"), ("incoming", "endpoint")):
                conn.execute(text(FILL.format(table=table, address=address)), {"many": MANY})
            conn.execute(text("ANALYZE"))
        yield engine
        engine.dispose()


def leases(first: int, count: int) -> list[LeasedEnvelope]:
    return [LeasedEnvelope(letters.envelope(first + number), endpoint="shop") for number in range(count)]


def stores(conn: Connection, leases: Sequence[LeasedEnvelope]) -> None:
    inbox.store(conn, SCHEMA, [Arrival(each.endpoint, each.envelope, NODE) for each in leases])


def finishes(conn: Connection, leases: Sequence[LeasedEnvelope]) -> None:
    stores(conn, leases)
    assert inbox.finish_handled(conn, SCHEMA, NODE, leases) == len(leases)


def sends(conn: Connection, leases: Sequence[LeasedEnvelope]) -> None:
    outbox.store(conn, SCHEMA, [Sent(each.envelope, None, NODE) for each in leases])


def sends_to_itself(conn: Connection, leases: Sequence[LeasedEnvelope]) -> None:
    outbox.store(conn, SCHEMA, [Sent(each.envelope, "local", NODE) for each in leases])


def deletes(conn: Connection, leases: Sequence[LeasedEnvelope]) -> None:
    sends(conn, leases)
    sent = [LeasedEnvelope(each.envelope, endpoint=each.envelope.destination) for each in leases]
    assert outbox.delete_sent(conn, SCHEMA, NODE, sent) == len(leases)


@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize("work", [stores, finishes, sends, sends_to_itself, deletes])
def test_statement_is_planned_once_for_a_connection(
    engine: Engine, work: Callable[[Connection, Sequence[LeasedEnvelope]], None], count: int
) -> None:
    for number in range(TIMES):
        with engine.begin() as conn:
            work(conn, leases(number * count, count))
    with engine.connect() as conn:
        plans = conn.execute(PLANS).all()
    assert plans
    for statement, custom, generic in plans:
        assert custom <= FIRST_PLANS, statement
        assert generic > 0, statement
