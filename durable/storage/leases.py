"""Leases of work: released, unowned, due or expired.

The same for both tables: `table` is `OUTGOING` or `INCOMING` of durable.storage.sql.recovery.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection

from durable.envelope import ANY_NODE, LeaseKey, NodeId
from durable.storage.isolation import count, isolated, quarantining
from durable.storage.sql.recovery import INCOMING, Recovery


class Backlog(NamedTuple):
    """Waiting rows of one destination or message type.

    Ages are those of the oldest since it was sent, leaving out what is put off to a later time.
    """

    name: str
    total: int
    unowned: int
    scheduled: int
    oldest_age: timedelta | None
    oldest_unowned_age: timedelta | None


class Burials(NamedTuple):
    """Expired messages of which types become dead letters: all but the excepted ones, or those alone."""

    others: bool = False
    excepted: Sequence[str] = ()

    def parameters(self) -> dict[str, Any]:
        return {"buries_others": self.others, "excepted": list(self.excepted)}

    def of(self, table: Recovery) -> Burials:
        """Return the burials that concern this table."""
        return self if table is INCOMING else Burials(self.others)

    def has(self, message_type: str) -> bool:
        return self.others != (message_type in self.excepted)


NO_BURIALS: Final = Burials()


def owners(conn: Connection, schema: str, table: Recovery) -> set[NodeId]:
    """Every node that owns a row."""
    return {NodeId(owner) for owner in conn.execute(table.owners.within(schema)).scalars()}


def release_dormant(conn: Connection, schema: str, table: Recovery, node: NodeId, batch_size: int) -> int:
    """Take up to `batch_size` rows from a dead node; each is marked as interrupted. Returns how many."""
    refused = quarantining(conn, schema, table, node, "release")
    return count(conn, schema, table.release_dormant, {"node": node, "batch_size": batch_size}, refused)


def release_former(conn: Connection, schema: str, table: Recovery, node: NodeId, batch_size: int) -> int:
    """Take up to `batch_size` rows back from a membership that this process has lost. Returns how many."""
    refused = quarantining(conn, schema, table, node, "release")
    return count(conn, schema, table.release_former, {"node": node, "batch_size": batch_size}, refused)


def release_all(conn: Connection, schema: str, table: Recovery, node: NodeId) -> int:
    """Release everything that this node owns."""
    return count(conn, schema, table.release_all, {"node": node}, quarantining(conn, schema, table, node, "release"))


def owned_by(conn: Connection, schema: str, table: Recovery, node: NodeId) -> set[LeaseKey]:
    rows = conn.execute(table.owned_by.within(schema), {"node": node})
    return {(row.id, row.address, row.epoch) for row in rows}


def release(
    conn: Connection,
    schema: str,
    table: Recovery,
    node: NodeId,
    leases: Collection[LeaseKey],
    *,
    is_interrupted: bool = False,
) -> int:
    """Hand these back: any node may claim them. Returns how many were still this node's.

    `is_interrupted`: marks them as those of a node that died.
    """

    def release_these(these: Sequence[LeaseKey]) -> int:
        params = fence(node, these) | {"is_interrupted": is_interrupted}
        return conn.execute(table.release.within(schema), params).rowcount

    return sum(isolated(conn, list(leases), release_these, quarantining(conn, schema, table, node, "release")))


def fence(node: NodeId, leases: Collection[LeaseKey]) -> dict[str, Any]:
    """The parameters of every statement that may only touch this node's rows."""
    ids, addresses, epochs = zip(*leases, strict=True) if leases else ((), (), ())
    return {"node": node, "ids": list(ids), "addresses": list(addresses), "epochs": list(epochs)}


def promote_due(conn: Connection, schema: str, table: Recovery, batch_size: int) -> int:
    """Make due rows claimable. Returns how many; a full batch means that there may be more."""
    refused = quarantining(conn, schema, table, ANY_NODE, "promote")
    return count(conn, schema, table.promote_due, {"batch_size": batch_size}, refused)


def expire(
    conn: Connection,
    schema: str,
    table: Recovery,
    node: NodeId,
    batch_size: int,
    burials: Burials = NO_BURIALS,
    *,
    keep_body: bool = False,
) -> int:
    """Finish unowned rows whose deliver_by has passed; the history records them. Returns how many."""
    params = {"node": node, "batch_size": batch_size, "keep_body": keep_body} | burials.parameters()
    return count(conn, schema, table.expire, params, quarantining(conn, schema, table, node, "expire"))


def backlog(conn: Connection, schema: str, table: Recovery) -> list[Backlog]:
    return [Backlog(*row) for row in conn.execute(table.backlog.within(schema))]
