"""Schedules and delayed messages as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from durable.cli import output
from durable.cli.output import Block, Columns, Table, age, done_of, utc
from durable.dead_letters.bulk import Run
from durable.listed import Listed
from durable.storage.circuits import OpenCircuit
from durable.storage.delayed import Delayed
from durable.storage.schedules import Row


def state(row: Row) -> str:
    """Name the state of a schedule."""
    if not row.is_live:
        return "orphaned"
    return "paused" if row.is_paused else "failing" if row.error else "runs"


def kind(row: Delayed) -> str:
    """Name the reason for the delay of a message."""
    return f"retry {row.attempts}" if row.is_retry else "delayed"


def counted(verb: str, schedules: int) -> str:
    return f"{verb} {output.counted(schedules, 'schedule')}"


def told(run: Run, verb: str, schedules: int) -> list[Block]:
    """Say how many schedules and messages a run changed, and why messages were left."""
    lines: list[Block] = []
    if schedules:
        lines.append(counted(verb, schedules))
    if run.total or not schedules:
        done = f"{verb} {done_of(run.done, run.total, 'message')}"
        lines.append(f"stopped: {done}; run the same command again for the rest" if run.stopped else done)
    if run.waiting:
        lines.append(f"left: {run.waiting:,} (would expire before, or be too old for their receiver)")
    if run.refused:
        lines.append(f"left: {run.refused:,} (the database refuses to change them, for the reason in the log)")
    if gone := run.total - run.done - run.waiting - run.refused if not run.stopped else 0:
        lines.append(f"gone: {gone:,} (became due meanwhile)")
    return lines


def pause(row: Row, pauses: Mapping[str, OpenCircuit]) -> str | None:
    """Write until when a schedule is paused, why, and by whom."""
    paused = pauses.get(row.name)
    if paused is None:
        return None
    return f"{utc(paused.until) if paused.until else 'resumed'}: {paused.reason} ({paused.actor})"


def tables(
    recurring: Listed[Row], messages: Sequence[Delayed], pauses: Mapping[str, OpenCircuit], *, more: bool
) -> list[Block]:
    blocks: list[Block] = []
    if recurring.rows:
        paused: Columns = {"paused until": lambda row: pause(row, pauses)} if pauses else {}
        blocks.append(Table.of("recurring schedules", recurring, {**_SCHEDULES, **paused}))
    if messages:
        blocks.append(Table.of("delayed messages", messages, _MESSAGES))
    if more:
        blocks.append("more messages: raise --limit")
    return blocks or ["no schedule and no delayed message"]


_SCHEDULES: Columns = {
    "name": "name",
    "cron": "cron",
    "time zone": "tz",
    "message type": "message_type",
    "state": state,
    "next": lambda row: None if row.is_paused or not row.is_live else row.due_at,
    "last": "last_at",
    "error": "error",
}
_MESSAGES: Columns = {
    "id": "id",
    "side": "side",
    "message type": "message_type",
    "address": "address",
    "kind": kind,
    "due": "due_at",
    "in": lambda row: age(row.due_in),
    "expires": "deliver_by",
}
