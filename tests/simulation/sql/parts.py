"""Parts that several statements share: inserts, fences, claims, history and letters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from datetime import datetime
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from tests.simulation.rows import History, Letter, Work
from tests.simulation.sql.registry import Params
from tests.simulation.tables import Transaction, Waits


class Side(NamedTuple):
    """One of the two tables of work."""

    table: str
    lane: str


OUT: Final = Side("outgoing", "address")
IN: Final = Side("incoming", "message_type")

CLAIMED: Final = (
    "id message_type source correlation_id causation_id partition_key content_type headers body sent_at deliver_by "
    "address epoch attempts interruptions ordering_key seq"
)


def by_seq(row: Work) -> int:
    return row.seq


def insert(tx: Transaction, table: str, key: Hashable, row: Any) -> bool:
    """INSERT ... ON CONFLICT DO NOTHING; False when the row is there. Waits for another that inserts or deletes it."""
    if tx.is_locked(table, key):
        raise Waits(tx.store.tables[table].locks[key])
    if tx.get(table, key) is not None:
        return False
    tx.put(table, key, row)
    return True


def work_rows(p: Params, addresses: list[str]) -> list[dict[str, Any]]:
    """The arrays of an insert, as the columns of each row."""
    return [
        {
            "id": p["id"][i],
            "address": addresses[i],
            "message_type": p["message_type"][i],
            "source": p["source"][i],
            "correlation_id": p["correlation_id"][i],
            "causation_id": p["causation_id"][i],
            "partition_key": p["partition_key"][i],
            "content_type": p["content_type"][i],
            "headers": p["headers"][i],
            "body": p["body"][i],
            "sent_at": p["sent_at"][i],
            "deliver_by": p["deliver_by"][i],
            "execution_time": p["execution_time"][i],
            "owner_id": p["owner_id"][i],
            "ordering_key": p["ordering_key"][i],
            "fair_key": p["fair_key"][i],
        }
        for i in range(len(addresses))
    ]


def is_free(row: Work) -> bool:
    return row.owner_id == 0 and row.execution_time is None and row.ordering_key is None and row.fair_key is None


def is_ordered(row: Work) -> bool:
    return row.ordering_key is not None and row.owner_id == 0 and row.execution_time is None


def is_shared(row: Work) -> bool:
    return row.fair_key is not None and row.owner_id == 0 and row.execution_time is None and row.ordering_key is None


def in_time(tx: Transaction, row: Work) -> bool:
    return row.deliver_by is None or row.deliver_by > tx.now


def next_names(tx: Transaction, p: Params, fits: Callable[[Work], bool]) -> list[tuple[str]]:
    """The next destinations behind one that have such rows."""
    names = {row.address for row in tx.all(OUT.table) if fits(row) and row.address > p["after"]}
    return [(name,) for name in sorted(names)[: p["count"]]]


def is_open(tx: Transaction, kind: str, *keys: str, is_trial: bool = False) -> bool:
    """Tell whether one of these circuits is open, for a trial besides those that failures have opened."""
    rows = [row for row in tx.all("circuits") if row.kind == kind and row.key in keys]
    found = [row for row in rows if kind == "key" or not row.parked]  # a park of a handler stops an order
    return any(row.is_open(tx.now) and not (is_trial and row.probing) for row in found)


def unlocked(tx: Transaction, side: Side, fits: Callable[[Work], bool]) -> list[Work]:
    """The rows that FOR UPDATE SKIP LOCKED finds."""
    return [row for row in tx.all(side.table) if fits(row) and not tx.is_locked(side.table, row.key)]


def change(tx: Transaction, side: Side, row: Work, **values: Any) -> Work:
    changed = replace(row, **values)
    tx.put(side.table, row.key, changed)
    return changed


def claim(tx: Transaction, side: Side, rows: Iterable[Work], node: int) -> list[tuple[Any, ...]]:
    """Make rows the node's, and return them in their order."""
    mine = [change(tx, side, row, owner_id=node, epoch=row.epoch + 1) for row in rows]
    return [claimed(row) for row in sorted(mine, key=by_seq)]


def claimed(row: Work) -> tuple[Any, ...]:
    return (
        row.id, row.message_type, row.source, row.correlation_id, row.causation_id, row.partition_key,
        row.content_type, row.headers, row.body, row.sent_at, row.deliver_by, row.address, row.epoch, row.attempts,
        row.interruptions, row.ordering_key, row.seq,
    )  # fmt: skip


def mine(tx: Transaction, side: Side, p: Params) -> list[Work]:
    """The rows of these leases that still belong to the node: the fence."""
    found = []
    for each, address, epoch in zip(p["ids"], p["addresses"], p["epochs"], strict=True):
        row = tx.get(side.table, (each, address))
        if row is not None and row.epoch == epoch and row.owner_id == p["node"]:
            tx.lock(side.table, row.key)
            found.append(row)
    return found


def this(tx: Transaction, p: Params) -> Work | None:
    """The one row of the inbox that still belongs to the node."""
    row = tx.get("incoming", (p["id"], p["endpoint"]))
    if row is None or row.owner_id != p["node"] or row.epoch != p["epoch"]:
        return None
    tx.lock("incoming", row.key)
    found: Work = row
    return found


def finish(tx: Transaction, side: Side, row: Work, outcome: str, p: Params, error: str | None = None) -> None:
    """Delete a row and write its history, with the attempts that it does not count."""
    tx.delete(side.table, row.key)
    number = tx.store.next("history")
    entry = History(
        id=row.id,
        side=side.table,
        outcome=outcome,
        address=row.address,
        message_type=row.message_type,
        attempts=row.attempts + p.get("counted", 0),
        interruptions=row.interruptions,
        node_id=p["node"],
        error=error,
        has_body=p["keep_body"],
        finished_at=tx.clock,
    )
    tx.put("history", number, entry)


def known_digest(tx: Transaction, row: Work) -> int | None:
    for table in ("received_ids", "undated_ids"):
        if (found := tx.get(table, row.key)) is not None:
            digest: int = found.message_digest
            return digest
    return None


def remember_expired(tx: Transaction, key: Hashable, deliver_by: datetime | None) -> None:
    """Note the deadline of what expired with its id."""
    for table in ("received_ids", "undated_ids"):
        if (known := tx.get(table, key)) is not None:
            tx.put(table, key, replace(known, expired=deliver_by))


def bury(tx: Transaction, side: Side, row: Work, p: Params, *, counted: int = 0, digest: int | None = None) -> int:
    """Make a dead letter of a row; returns the number of the letter."""
    earlier = [each.replay_count for each in tx.all("letters") if each.id == row.id and each.address == row.address]
    number = tx.store.next("letters")
    letter = Letter(
        letter_id=number,
        side=side.table,
        address=row.address,
        id=row.id,
        message_type=row.message_type,
        partition_key=row.partition_key,
        attempts=row.attempts + counted,
        interruptions=row.interruptions,
        exception_type=p["exception_type"],
        reason=p["reason"],
        node_id=p["node"],
        message_digest=digest,
        replayable=True,
        epoch=row.epoch,
        replay_count=max(earlier, default=0),
        ordering_key=row.ordering_key,
        fair_key=row.fair_key,
        body=row.body,
    )
    tx.put("letters", number, letter)
    return number
