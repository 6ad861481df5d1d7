"""The statements about nodes, locks, placements and recurring schedules."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from durable.storage.sql import housekeeping as sql
from durable.storage.sql import placements, schedules
from tests.simulation.rows import Circuit, Placement, Schedule
from tests.simulation.sql.parts import insert
from tests.simulation.sql.registry import Params, Rows, does, does_sql
from tests.simulation.tables import Transaction


@does_sql("SELECT 1", "one")
def answer(tx: Transaction, p: Params) -> Rows:
    return [(1,)]


@does(sql.READ_NODES, "node_id service description version started_at heartbeat_at heartbeat_age capabilities")
def read_nodes(tx: Transaction, p: Params) -> Rows:
    rows = sorted(tx.all("nodes"), key=lambda row: row.node_id)
    return [
        (
            row.node_id, row.service, "simulated", "0", row.started_at, row.heartbeat_at, tx.clock - row.heartbeat_at,
            row.capabilities,
        )
        for row in rows
    ]  # fmt: skip


@does(sql.READ_LOCKED_NODES, "node_id")
def read_locked_nodes(tx: Transaction, p: Params) -> Rows:
    return [(node,) for node in sorted(tx.store.node_locks)]


@does(sql.REMOVE_NODE)
def remove_node(tx: Transaction, p: Params) -> int:
    if tx.get("nodes", p["node"]) is None:
        return 0
    tx.delete("nodes", p["node"])
    return 1


@does(sql.READ_SERVER_TIMES, "started_at now")
def read_server_times(tx: Transaction, p: Params) -> Rows:
    return [(tx.store.started_at, tx.clock)]


@does(sql.READ_CLOCK, "now")
def read_clock(tx: Transaction, p: Params) -> Rows:
    return [(tx.clock,)]


@does(sql.TRY_JOB_LOCK, "locked")
def try_job_lock(tx: Transaction, p: Params) -> Rows:
    return [(tx.try_advisory((p["class_id"], p["key"])),)]


@does(placements.DECLARE_PLACEMENTS)
def declare_placements(tx: Transaction, p: Params) -> int:
    names = sorted(zip(p["side"], p["name"], p["ordering_key"], p["fair_by"], strict=True), key=lambda row: row[:2])
    for side, name, ordering_key, fair_by in names:
        row = Placement(side=side, name=name, ordering_key=ordering_key, fair_by=fair_by)
        if not insert(tx, "placements", (side, name), row) and tx.get("placements", (side, name)) != row:
            tx.put("placements", (side, name), row)
    return len(names)


# ---------------------------------------------------------------- recurring schedules


def _is_live(tx: Transaction, node: int) -> bool:
    return tx.get("nodes", node) is not None


def _pause(tx: Transaction, name: str) -> Circuit | None:
    return tx.get("circuits", ("schedule", name, False, ""))


def _is_paused(tx: Transaction, name: str) -> bool:
    row = _pause(tx, name)
    return row is not None and (row.until is None or row.until > tx.now)


@does(
    schedules.READ_SCHEDULES,
    "name cron tz misfire message_type destination declaration declared_by declared_at is_live is_paused "
    "occurrence_at due_at due_in asked_in last_at ran_at changed_by changed_at error",
)
def read_schedules(tx: Transaction, p: Params) -> Rows:
    rows = sorted(tx.all("schedules"), key=lambda row: row.name)
    return [
        (
            row.name, row.cron, row.tz, row.misfire, row.message_type, row.destination, row.declaration,
            row.declared_by, row.declared_at, _is_live(tx, row.declared_by), _is_paused(tx, row.name),
            row.occurrence_at, row.due_at, row.due_at - tx.now,
            None if row.asked_at is None else row.asked_at - tx.now, row.last_at, row.ran_at, row.changed_by,
            row.changed_at, row.error,
        )
        for row in rows
        if p["names"] is None or row.name in p["names"]
    ]  # fmt: skip


@does(schedules.READ_NAMES, "name")
def read_names(tx: Transaction, p: Params) -> Rows:
    return [(name,) for name in sorted(row.name for row in tx.all("schedules"))]


@does(schedules.DECLARE_SCHEDULES)
def declare_schedules(tx: Transaction, p: Params) -> int:
    columns = ("name", "cron", "tz", "misfire", "message_type", "destination", "declaration")
    count = 0
    for values in sorted(zip(*(p[name] for name in columns), strict=True)):
        named: dict[str, Any] = dict(zip(columns, values, strict=True))
        row = Schedule(**named, declared_by=p["node"], declared_at=tx.clock, due_at=tx.now)
        if insert(tx, "schedules", row.name, row):
            count += 1
            continue
        tx.lock("schedules", row.name)
        known: Schedule = tx.get("schedules", row.name)  # type: ignore[assignment]
        if known.declared_by < p["node"] or not _is_live(tx, known.declared_by):
            same = (known.cron, known.tz) == (row.cron, row.tz)
            changed = replace(known, **named, declared_by=p["node"], declared_at=tx.clock)
            if not same:
                changed = replace(changed, occurrence_at=None, due_at=tx.now, failing_since=None, error=None)
            tx.put("schedules", row.name, changed)
            count += 1
    return count


def _is_asked(tx: Transaction, row: Schedule) -> bool:
    return row.asked_at is not None and row.asked_at <= tx.now


def _wanted(tx: Transaction, p: Params) -> Schedule | None:
    row: Schedule | None = tx.get("schedules", p["name"])
    return row if row is not None and row.declaration == p["declaration"] else None


@does(
    schedules.LOCK_DUE_SCHEDULE,
    "occurrence_at due_at has_failed is_due asked_at is_paused now paused_since paused_until",
)
def lock_due_schedule(tx: Transaction, p: Params) -> Rows:
    row = _wanted(tx, p)
    if row is None or (row.due_at > tx.now and not _is_asked(tx, row)) or tx.is_locked("schedules", row.name):
        return []
    tx.lock("schedules", row.name)
    pause = _pause(tx, row.name)
    paused = (None, None) if pause is None else (pause.since, pause.until)
    is_due, is_paused = row.due_at <= tx.now, _is_paused(tx, row.name)
    asked_at = row.asked_at if _is_asked(tx, row) else None
    return [
        (row.occurrence_at, row.due_at, row.failing_since is not None, is_due, asked_at, is_paused, tx.now, *paused)
    ]


@does(schedules.MOVE_SCHEDULE_ON)
def move_schedule_on(tx: Transaction, p: Params) -> int:
    row: Schedule | None = tx.get("schedules", p["name"])
    pause = _pause(tx, p["name"])
    if pause is not None and pause.until is not None and pause.until <= min(tx.now, p["occurrence_at"]):
        tx.delete("circuits", pause.name)
    if row is None:
        return 0
    moved = _ran(tx, p, replace(row, occurrence_at=p["occurrence_at"], due_at=p["occurrence_at"]))
    tx.put("schedules", row.name, replace(moved, failing_since=None, error=None, last_at=p["last_at"] or row.last_at))
    return 1


@does(schedules.SCHEDULE_FAILED)
def schedule_failed(tx: Transaction, p: Params) -> int:
    row: Schedule | None = tx.get("schedules", p["name"])
    if row is None:
        return 0
    since = row.failing_since or min(p["occurrence_at"], tx.now)
    failed = replace(row, occurrence_at=p["occurrence_at"], due_at=p["due_at"], failing_since=since, error=p["error"])
    tx.put("schedules", row.name, failed)
    return 1


@does(schedules.SCHEDULE_RAN_AS_ASKED)
def schedule_ran_as_asked(tx: Transaction, p: Params) -> int:
    row: Schedule | None = tx.get("schedules", p["name"])
    if row is None:
        return 0
    error = None if row.failing_since is None else row.error
    tx.put("schedules", row.name, _ran(tx, p, replace(row, asked_at=None, error=error)))
    return 1


@does(schedules.SCHEDULE_FAILED_AS_ASKED)
def schedule_failed_as_asked(tx: Transaction, p: Params) -> int:
    row: Schedule | None = tx.get("schedules", p["name"])
    if row is None:
        return 0
    tx.put("schedules", row.name, replace(row, asked_at=tx.now + p["delay"], error=p["error"]))
    return 1


def _ran(tx: Transaction, p: Params, row: Schedule) -> Schedule:
    if p["message_type"] is None:
        return row
    return replace(row, ran_at=tx.clock, message_type=p["message_type"])


@does(schedules.ASK_FOR_SCHEDULE, "name pg_notify")
def ask_for_schedule(tx: Transaction, p: Params) -> Rows:
    row: Schedule | None = tx.get("schedules", p["name"])
    if row is None or not _is_live(tx, row.declared_by):
        return []
    asked_at = tx.clock if row.asked_at is None else min(row.asked_at, tx.clock)
    return _changed(tx, p, replace(row, asked_at=asked_at))


@does(schedules.RESCHEDULE, "name pg_notify")
def reschedule(tx: Transaction, p: Params) -> Rows:
    row: Schedule | None = tx.get("schedules", p["name"])
    if row is None or row.occurrence_at is None:
        return []
    return _changed(tx, p, replace(row, due_at=p["at"], failing_since=None))


def _changed(tx: Transaction, p: Params, row: Schedule) -> Rows:
    tx.put("schedules", row.name, replace(row, changed_by=p["actor"], changed_at=tx.clock))
    tx.notifies = True
    return [(row.name, "")]


@does(schedules.REMOVE_ORPHAN, "name")
def remove_orphan(tx: Transaction, p: Params) -> Rows:
    row: Schedule | None = tx.get("schedules", p["name"])
    if row is None or _is_live(tx, row.declared_by):
        return []
    tx.delete("schedules", row.name)
    if (pause := _pause(tx, row.name)) is not None:
        tx.delete("circuits", pause.name)
    return [(row.name,)]
