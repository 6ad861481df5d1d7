"""Parked messages: they wait in the inbox for an encryption key."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import Connection

from durable.envelope import ANY_NODE, LeaseKey, NodeId
from durable.storage.isolation import count, isolated, quarantining
from durable.storage.leases import fence
from durable.storage.sql import parked as statements
from durable.storage.sql.recovery import INCOMING


class Parked(NamedTuple):
    """Number of messages that wait for a key, and the age of the oldest since it arrived."""

    key_id: str
    waiting: int
    oldest_age: timedelta


def park(conn: Connection, schema: str, node: NodeId, leases: Collection[LeaseKey]) -> int:
    """Let messages of this node wait for their keys, uncounted. Returns how many were still this node's."""

    def park_these(these: Sequence[LeaseKey]) -> int:
        return conn.execute(statements.PARK.within(schema), fence(node, these)).rowcount

    return sum(isolated(conn, list(leases), park_these, quarantining(conn, schema, INCOMING, node, "park")))


def release(conn: Connection, schema: str, key_ids: Collection[str], batch_size: int) -> int:
    """Release parked messages of these keys, and expired ones, for any node to claim. Returns how many."""
    params = {"key_ids": list(key_ids), "batch_size": batch_size}
    refused = quarantining(conn, schema, INCOMING, ANY_NODE, "release")
    return count(conn, schema, statements.RELEASE_PARKED, params, refused)


def read(conn: Connection, schema: str, limit: int) -> list[Parked]:
    """Count the parked messages of each key, up to a limit over all."""
    return [Parked(*row) for row in conn.execute(statements.COUNT_PARKED.within(schema), {"limit": limit})]
