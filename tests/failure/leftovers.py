"""Puts into a database what a node that died would have left there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from uuid import UUID

import msgspec
import psycopg
from sqlalchemy import Connection, create_engine, make_url

from durable.envelope import ANY_NODE, Envelope, NodeId, new_id
from durable.storage import inbox, outbox
from durable.storage.inbox import Arrival
from durable.storage.outbox import Sent
from tests.failure.app import OrderPlaced

SCHEMA = "durable"
MESSAGE_TYPE = "failure.order-placed"
DEAD = 0
"""The process of a dead node: none."""


@contextmanager
def transaction(database: str) -> Iterator[Connection]:
    """A transaction on a connection of its own, for the functions of storage."""
    engine = create_engine(make_url(database).set(drivername="postgresql+psycopg"))
    try:
        with engine.begin() as conn:
            yield conn
    finally:
        engine.dispose()


def dead_node(database: str) -> NodeId:
    """A node that is registered and holds no lock."""
    with psycopg.connect(database) as conn:
        row = conn.execute(
            "INSERT INTO durable.nodes (service, description, version) VALUES ('orders', 'nowhere:0', '0') "
            "RETURNING node_id"
        ).fetchone()
    assert row is not None
    return NodeId(row[0])


def envelope(
    order_id: int, *, destination: str = "billing", behaviour: str = "", envelope_id: UUID | None = None
) -> Envelope:
    envelope_id = envelope_id or new_id()
    return Envelope(
        id=envelope_id,
        message_type=MESSAGE_TYPE,
        destination=destination,
        source="orders",
        correlation_id=envelope_id,
        body=msgspec.json.encode(OrderPlaced(order_id, behaviour)),
        sent_at=datetime.now(UTC),
    )


def unsent_orders(database: str, orders: Iterable[int], destination: str, owner: NodeId) -> list[Envelope]:
    """Orders that were committed with their messages, which this node owns and has not sent."""
    envelopes = [envelope(order_id, destination=destination) for order_id in orders]
    with transaction(database) as conn:
        outbox.store(conn, SCHEMA, [Sent(each, None, owner) for each in envelopes])
    record_orders(database, envelopes)
    return envelopes


def received_orders(
    orders_database: str, billing_database: str, envelopes: Iterable[Envelope], owner: NodeId = ANY_NODE
) -> None:
    """Orders whose messages were received, and which this node owns and has not handled."""
    received = list(envelopes)
    with transaction(billing_database) as conn:
        inbox.store(conn, SCHEMA, [Arrival("billing", each, owner) for each in received])
    record_orders(orders_database, received)


def record_orders(database: str, envelopes: Iterable[Envelope]) -> None:
    """What the application has committed with these."""
    rows = [(msgspec.json.decode(each.body, type=OrderPlaced).order_id, each.id) for each in envelopes]
    with psycopg.connect(database) as conn:
        conn.cursor().executemany("INSERT INTO orders (order_id, envelope_id) VALUES (%s, %s)", rows)


def old_ids(database: str, count: int) -> None:
    """Ids that carry no day, received so long ago that they should be forgotten."""
    with psycopg.connect(database) as conn:
        conn.execute(
            "INSERT INTO durable.undated_ids (id, endpoint, message_digest, received_at, sent_at) "
            "SELECT gen_random_uuid(), 'billing', 0, now() - interval '30 days', now() - interval '30 days' "
            "FROM generate_series(1, %s)",
            (count,),
        )
