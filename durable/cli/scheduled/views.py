"""What waits for its time, as text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from durable.cli.output import Block, Table, age
from durable.dead_letters.bulk import Run
from durable.storage.delayed import Delayed
from durable.storage.schedules import Row


def state(row: Row) -> str:
    """What a schedule does."""
    if not row.is_live:
        return "orphaned"
    return "paused" if row.is_paused else "failing" if row.error else "runs"


def kind(row: Delayed) -> str:
    """Why a message waits."""
    return f"retry {row.attempts}" if row.is_retry else "delayed"


def told(run: Run, verb: str, schedules: int) -> list[Block]:
    lines: list[Block] = []
    if schedules:
        lines.append(f"{verb} {schedules} schedule{'s' if schedules != 1 else ''}")
    if run.total or not schedules:
        done = f"{verb} {run.done:,} of {run.total:,} message{'s' if run.total != 1 else ''}"
        lines.append(f"stopped: {done}; the same command goes on with the rest" if run.stopped else done)
    if run.waiting:
        lines.append(f"left: {run.waiting:,} (would expire before, or be too old for their receiver)")
    if gone := run.total - run.done - run.waiting if not run.stopped else 0:
        lines.append(f"gone: {gone:,} (became due meanwhile)")
    return lines


def tables(recurring: Sequence[Row], messages: Sequence[Delayed], *, more: bool) -> list[Block]:
    blocks: list[Block] = []
    if recurring:
        columns = ("name", "cron", "time zone", "message type", "state", "next", "last", "error")
        rows = [
            (row.name, row.cron, row.tz, row.message_type, state(row), _next(row), _time(row.last_at), row.error)
            for row in recurring
        ]
        blocks.append(Table("recurring schedules", columns, rows))
    if messages:
        headings = ("id", "side", "message type", "address", "why", "due", "in", "expires")
        found = [
            (str(m.id), m.side, m.message_type, m.address, kind(m), _time(m.due_at), age(m.due_in), _time(m.deliver_by))
            for m in messages
        ]
        blocks.append(Table("messages that wait for their time", headings, found))
    if more:
        blocks.append("there are more; see --limit")
    return blocks or ["nothing waits for its time"]


def _next(row: Row) -> str | None:
    return None if row.is_paused or not row.is_live else _time(row.due_at)


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"
