"""The statements of durable.storage.sql.circuits."""

from __future__ import annotations

from msgspec.structs import replace

from durable.storage.sql import circuits as sql
from tests.simulation.rows import Circuit, Counts
from tests.simulation.sql.parts import insert, is_open
from tests.simulation.sql.registry import Params, Rows, does
from tests.simulation.tables import Transaction


def _new(tx: Transaction, p: Params, *, probing: bool) -> Circuit:
    until = None if p["duration"] is None else tx.now + p["duration"]
    return Circuit(
        kind=p["kind"], key=p["key"], reason=p["reason"], since=tx.clock, until=until, actor=p["actor"], probing=probing
    )


def _put(tx: Transaction, row: Circuit) -> Rows:
    tx.put("circuits", row.name, row)
    tx.notifies = True
    return [("",)]


def _get(tx: Transaction, kind: str, key: str) -> Circuit | None:
    found: Circuit | None = tx.get("circuits", (kind, key, False, ""))
    return found


def _locked(tx: Transaction, kind: str, key: str) -> Circuit | None:
    """The row, locked; None where there is none."""
    row = _get(tx, kind, key)
    if row is not None:
        tx.lock("circuits", row.name)
    return _get(tx, kind, key)


def _is_over(tx: Transaction, row: Circuit) -> bool:
    """Is it no pause, or one that has ended?"""
    return row.probing or (row.until is not None and row.until <= tx.now)


@does(sql.OPEN_CIRCUIT, "pg_notify")
def open_circuit(tx: Transaction, p: Params) -> Rows:
    row = _new(tx, p, probing=True)
    if insert(tx, "circuits", row.name, row):
        tx.notifies = True
        return [("",)]
    known = _locked(tx, row.kind, row.key)
    if known is None or known.until is None or known.until > tx.now or known.probing:
        return []
    return _put(tx, row)


@does(sql.CLOSE_CIRCUIT, "count")
def close_circuit(tx: Transaction, p: Params) -> Rows:
    row = _get(tx, p["kind"], p["key"])
    if row is None or not row.probing:
        return [(0,)]
    tx.delete("circuits", row.name)
    tx.notifies = True
    return [(1,)]


@does(sql.PAUSE, "pg_notify")
def pause(tx: Transaction, p: Params) -> Rows:
    row, known = _new(tx, p, probing=False), _locked(tx, p["kind"], p["key"])
    return _put(tx, row if known is None or _is_over(tx, known) else replace(row, since=known.since))


@does(sql.PAUSE_AT_LEAST, "pg_notify")
def pause_at_least(tx: Transaction, p: Params) -> Rows:
    row = _new(tx, p, probing=False)
    if insert(tx, "circuits", row.name, row):
        tx.notifies = True
        return [("",)]
    known = _locked(tx, row.kind, row.key)
    assert known is not None
    is_shorter = known.until is not None and (row.until is None or known.until < row.until)
    if not (known.probing or is_shorter):
        return []
    return _put(tx, row if _is_over(tx, known) else replace(row, since=known.since))


@does(sql.PARK, "pg_notify")
def park(tx: Transaction, p: Params) -> Rows:
    row = replace(_new(tx, {**p, "duration": None}, probing=False), parked=True, ordering_key=p["ordering_key"])
    if insert(tx, "circuits", row.name, row):
        tx.notifies = True
        return [("",)]
    return []


@does(sql.READ_ORDERS, "ordering_key")
def read_orders(tx: Transaction, p: Params) -> Rows:
    parks = [row for row in tx.all("circuits") if row.kind == "handler" and row.parked]
    declared = tx.get("placements", ("incoming", p["key"]))
    own = {row.ordering_key for row in parks if row.key == p["parked_key"]}
    own |= set() if declared is None else {declared.ordering_key}
    names = {row.key for row in parks if row.ordering_key in own}
    keys = own | {row.ordering_key for row in parks if row.key in names}
    return [(key,) for key in sorted(keys - {"", None})]


def _parks(tx: Transaction, p: Params) -> list[Circuit]:
    rows = [row for row in tx.all("circuits") if row.kind == p["kind"] and row.parked]
    found = [row for row in rows if row.key == p["parked_key"] or row.ordering_key in p["orders"]]
    return sorted(found, key=lambda row: row.since)


@does(sql.RESUME, "was_open still_parked")
def resume(tx: Transaction, p: Params) -> Rows:
    paused, parked = _get(tx, p["kind"], p["key"]), _parks(tx, p)
    is_paused = paused is not None and paused.is_open(tx.now)
    ended = [row for row in (paused,) if row is not None and p["seen"] in (None, row.since)]
    if not is_paused and any(p["seen"] in (None, row.since) for row in parked):
        ended += parked
    if p["kind"] == "schedule":
        ended = [replace(row, until=tx.now) for row in ended if row.until is None or row.until > tx.now]
        for row in ended:
            tx.put("circuits", row.name, row)
    else:
        for row in ended:
            tx.delete("circuits", row.name)
    tx.notifies |= bool(ended)
    was_open = any(row.kind == "schedule" or row.is_open(tx.now) for row in ended)
    return [(was_open, parked[0].reason if parked and is_paused else None)]


@does(sql.CLOSE_ENDED_CIRCUITS)
def close_ended(tx: Transaction, p: Params) -> int:
    ended = [row for row in tx.all("circuits") if row.until is not None and row.until <= tx.now and not row.probing]
    names = {row.name for row in tx.all("schedules")}
    gone = [row for row in ended if row.kind != "schedule" or row.key not in names]
    for row in gone:
        tx.delete("circuits", row.name)
    return len(gone)


@does(sql.READ_CIRCUITS, "kind key reason since until actor probing parked ordering_key")
def read_circuits(tx: Transaction, p: Params) -> Rows:
    rows = sorted((row for row in tx.all("circuits") if row.is_open(tx.now)), key=lambda row: row.name)
    return [
        (
            row.kind,
            row.key,
            row.reason,
            row.since,
            row.until,
            row.actor,
            row.probing,
            row.parked,
            row.ordering_key or None,
        )
        for row in rows
    ]


@does(sql.BEGIN_TRIAL, "key")
def begin_trial(tx: Transaction, p: Params) -> Rows:
    row = _get(tx, "handler", p["key"])
    if row is None or not row.probing or row.until is None or row.until > tx.now:
        return []
    tx.put("circuits", row.name, replace(row, until=tx.now + p["lease"]))
    return [(p["key"],)]


@does(sql.PUT_OFF_PROBE)
def put_off_probe(tx: Transaction, p: Params) -> int:
    row = _get(tx, "handler", p["key"])
    if row is None or not row.probing:
        return 0
    wait = max(p["shortest"], min(tx.now - row.since, p["longest"]))
    tx.put("circuits", row.name, replace(row, reason=p["reason"], until=tx.now + wait))
    return 1


@does(sql.TRY_AGAIN)
def try_again(tx: Transaction, p: Params) -> int:
    row = _get(tx, "handler", p["key"])
    if row is None or not row.probing:
        return 0
    tx.put("circuits", row.name, replace(row, until=tx.now))
    return 1


@does(sql.SHARE_COUNTS, "messages failures")
def share_counts(tx: Transaction, p: Params) -> Rows:
    handler, node, oldest = p["handler"], p["node"], tx.clock - p["window"]
    others = [row for row in tx.all("counts") if row.handler == handler and row.node_id != node]
    for row in others:
        if row.counted_at < oldest and not tx.is_locked("counts", (handler, row.node_id)):
            tx.delete("counts", (handler, row.node_id))
    if not is_open(tx, "handler", handler):
        own = Counts(handler=handler, node_id=node, messages=p["messages"], failures=p["failures"], counted_at=tx.clock)
        tx.put("counts", (handler, node), own)
    fresh = [row for row in others if row.counted_at >= oldest]
    return [(sum(row.messages for row in fresh), sum(row.failures for row in fresh))]


@does(sql.FORGET_COUNTS)
def forget_counts(tx: Transaction, p: Params) -> int:
    rows = [row for row in tx.all("counts") if row.handler == p["handler"]]
    for row in rows:
        tx.delete("counts", (row.handler, row.node_id))
    return len(rows)
