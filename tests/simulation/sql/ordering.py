"""The statements of durable.storage.sql.ordering: claims of what comes in an order, and of what is shared out."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from durable.storage.sql import ordering as sql
from durable.storage.sql.ordering import Ordered, Shared
from durable.storage.sql.work import ALONG_THE_INDEX, ALONG_THE_INDEX_BY_ONE_PLAN
from tests.simulation.rows import Work
from tests.simulation.sql.parts import (
    CLAIMED,
    IN,
    OUT,
    Side,
    by_seq,
    claim,
    in_time,
    is_open,
    is_ordered,
    is_shared,
    next_names,
    unlocked,
)
from tests.simulation.sql.registry import Params, Rows, does
from tests.simulation.tables import Transaction


@does(ALONG_THE_INDEX, "a b c d")
def along_the_index(tx: Transaction, p: Params) -> Rows:
    return [("off",) * 4]


@does(ALONG_THE_INDEX_BY_ONE_PLAN, "a b c d e")
def along_the_index_by_one_plan(tx: Transaction, p: Params) -> Rows:
    return [("off",) * 5]


def _held(row: Work) -> bool:
    return row.ordering_key is not None and (row.owner_id != 0 or (row.execution_time is not None and row.attempts > 0))


Key = tuple[str, str]
"""The scope of a key, and the key."""


class _Keys:
    """The rows of each key, as one statement sees them."""

    def __init__(self, tx: Transaction, side: Side) -> None:
        self._tx = tx
        self._by_key: dict[Key, list[Work]] = {}
        for row in tx.all(side.table):
            if row.ordering_key is not None:
                scope = row.address if side is OUT else ""
                self._by_key.setdefault((scope, row.ordering_key), []).append(row)

    def first(self, key: Key) -> Work | None:
        waiting = [row for row in self._by_key.get(key, ()) if is_ordered(row) and in_time(self._tx, row)]
        return min(waiting, key=by_seq, default=None)

    def ends_before(self, key: Key) -> float | None:
        """The number of the first row that waits for its retry, or infinity; None where a row is owned."""
        held = [row for row in self._by_key.get(key, ()) if _held(row)]
        if any(row.owner_id != 0 for row in held):
            return None
        return min((row.seq for row in held), default=float("inf"))

    def head(self, key: Key) -> Work | None:
        """The row that a claim of this key begins with, if the key is free."""
        first, end = self.first(key), self.ends_before(key)
        return first if first is not None and end is not None and end > first.seq else None

    def run(self, key: Key, longest: int) -> list[Work]:
        end = self.ends_before(key)
        assert end is not None
        rows = [row for row in self._by_key[key] if is_ordered(row) and in_time(self._tx, row) and row.seq < end]
        return sorted(rows, key=by_seq)[:longest]


def _not_parked(tx: Transaction, row: Work) -> bool:
    if row.ordering_key is not None and is_open(tx, "key", row.ordering_key):
        return False
    parks = (circuit for circuit in tx.all("circuits") if circuit.kind == "handler" and circuit.parked)
    return all(circuit.ordering_key != row.ordering_key for circuit in parks)


def _ordered(
    table: Ordered,
    side: Side,
    lanes: Any,
    may_start: Callable[[Transaction, Params, Work], bool],
    fits: Callable[[Transaction, Work, Work], bool],
) -> None:
    def ordered_lanes(tx: Transaction, p: Params) -> Rows:
        if side is OUT:
            return next_names(tx, p, is_ordered)
        return [(lane,) for lane in sorted({row.message_type for row in tx.all(side.table) if is_ordered(row)})]

    def scan(tx: Transaction, p: Params) -> Rows:
        rows, keys, found = tx.all(side.table), _Keys(tx, side), []
        for lane, after in zip(p["lanes"], p["afters"], strict=True):
            names = {row.ordering_key for row in rows if getattr(row, side.lane) == lane and is_ordered(row)}
            for key in sorted(name for name in names if name > after)[: p["count"]]:
                head = keys.head((lane if side is OUT else "", key))
                is_free = head is not None and (side is OUT or _not_parked(tx, head))
                found.append((lane, key, head.message_type if head is not None and is_free else None))
        return found

    def claim_runs(tx: Transaction, p: Params) -> Rows:
        keys, run = _Keys(tx, side), []
        for key in zip(p["scopes"], p["keys"], strict=True):
            head = keys.head(key)
            if head is None or not may_start(tx, p, head):
                continue
            for number, row in enumerate(keys.run(key, p["longest_run"])):
                if not fits(tx, head, row):
                    break
                run.append((number, row))
        rows = [row for _, row in sorted(run, key=lambda each: each[0])[: p["batch_size"]]]
        return claim(tx, side, rows, p["node"])

    def tell(tx: Transaction, p: Params) -> Rows:
        keys = _Keys(tx, side)
        heads = [keys.head(("", key)) for key in p["keys"]]
        others = [row for row in heads if row is not None and row.message_type not in p["message_types"]]
        tx.notifies |= bool(others)
        return [("",)] if others else []

    for work in (ordered_lanes, scan, claim_runs, tell):
        work.__name__ = f"{work.__name__}_{side.table}"
    does(lanes, "name")(ordered_lanes)
    does(table.scan, "name key message_type")(scan)
    does(table.claim, CLAIMED)(claim_runs)
    if side is IN:
        does(table.tell, "pg_notify")(tell)


@does(sql.INCOMING.lock, "scope key")
def lock_keys(tx: Transaction, p: Params) -> Rows:
    """The same statement for both tables."""
    turns = zip(p["scopes"], p["keys"], strict=True)
    return [turn for turn in turns if tx.try_advisory((p["class_id"], zlib.crc32("".join(turn).encode())))]


def _handled_here(tx: Transaction, p: Params, head: Work) -> bool:
    for name, handler in zip(p["message_types"], p["handlers"], strict=True):
        if name == head.message_type and not is_open(tx, "handler", name, handler, is_trial=p["is_trial"]):
            return True
    return False


_ordered(
    sql.OUTGOING,
    OUT,
    sql.ORDERED_DESTINATIONS,
    lambda tx, p, head: not is_open(tx, "destination", head.address),
    lambda tx, head, row: True,
)
_ordered(
    sql.INCOMING,
    IN,
    sql.ORDERED_TYPES,
    lambda tx, p, head: _handled_here(tx, p, head) and _not_parked(tx, head),
    lambda tx, head, row: row.message_type == head.message_type,
)


def _shares(table: Shared, side: Side, may_start: Callable[[Transaction, Params], bool]) -> None:
    def next_tenants(tx: Transaction, p: Params) -> Rows:
        rows = [row for row in tx.all(side.table) if getattr(row, side.lane) == p["lane"] and is_shared(row)]
        names = sorted({row.fair_key for row in rows if row.fair_key >= p["start"]})
        return [(name,) for name in names[: p["count"]]]

    def claim_shares(tx: Transaction, p: Params) -> Rows:
        chosen: list[Work] = []
        for key, quota in zip(p["keys"], p["quotas"], strict=True):

            def fits(row: Work, key: str = key) -> bool:
                lane = getattr(row, side.lane)
                return bool(lane == p["lane"] and is_shared(row) and row.fair_key == key and in_time(tx, row))

            chosen += sorted(unlocked(tx, side, fits), key=by_seq)[:quota]
        return claim(tx, side, chosen[: p["batch_size"]], p["node"]) if may_start(tx, p) else []

    for work in (next_tenants, claim_shares):
        work.__name__ = f"{work.__name__}_{side.table}"
    does(table.next, "key")(next_tenants)
    does(table.claim.whole, CLAIMED)(claim_shares)


_shares(sql.SHARED_OUTGOING, OUT, lambda tx, p: not is_open(tx, "destination", p["lane"]))
_shares(
    sql.SHARED_INCOMING,
    IN,
    lambda tx, p: not is_open(tx, "handler", p["lane"], p["handler"], is_trial=p["is_trial"]),
)
