"""scheduled: what waits for its time, and the recurring schedules. A database is enough.

list                               look
cancel · run-now · reschedule      messages in batches, the first Ctrl-C ends a run after its batch; schedules by name
pause · resume                     a schedule, on every node
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Protocol

import typer
from sqlalchemy import Connection

from durable.cli.arguments import parse_coming_time, parse_duration
from durable.cli.output import print_blocks, print_json
from durable.cli.pauses import Span
from durable.cli.runs import actor_name, change_until_done
from durable.cli.scheduled import views
from durable.cli.scheduled.selection import (
    Chosen,
    find_schedules,
    over_scheduled,
    refuse_missing,
    refuse_too_much,
    refuse_unmatched,
)
from durable.cli.target import Debug, Json, connection
from durable.dead_letters.bulk import Run
from durable.errors import DurableError, InvalidSetting
from durable.storage import circuits, delayed, schedules
from durable.storage.circuits import CircuitKind
from durable.storage.dead_letters import LetterRange, Resolved
from durable.storage.delayed import SIDES, Delayed, Selection, Side
from durable.storage.schedules import Row

app = typer.Typer(help="What waits for its time: look at it, and cancel it, move it or run it now.")

PageSize = Annotated[int, typer.Option("--limit", min=1, max=10_000, metavar="N", help="messages that are shown")]
All = Annotated[bool, typer.Option("--all", help="every message that waits, where no filter narrows it down")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="no more messages than so many")]
By = Annotated[str | None, typer.Option("--by", metavar="NAME", help="who does it; default: USER@HOST")]
Why = Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="why; it stays in the history")]
Shown = Annotated[str, typer.Option("--reason", metavar="TEXT", help="is shown to whoever looks at the circuits")]
At = Annotated[str, typer.Option("--at", metavar="TIME", help="when it is to be due: in 2h, or ISO 8601")]

ByName = Callable[[Connection, str, str], bool]
"""Changes one schedule; False when it is not to be changed now."""


class ChangeSide(Protocol):
    """Changes a stretch of the messages on one side."""

    def __call__(
        self, conn: Connection, schema: str, selection: Selection, stretch: LetterRange, *, side: Side
    ) -> Resolved: ...


@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@app.command("list")
@over_scheduled
def list_scheduled(chosen: Chosen, limit: PageSize = 50, json: Json = False, debug: Debug = False) -> None:
    """The recurring schedules, and the messages that are due next."""
    recurring = [row for row in find_schedules(chosen) if _is_selected(row, chosen.selection)]
    messages: list[Delayed] = []
    if chosen.is_about_messages:
        with connection(chosen.settings) as conn:
            messages = delayed.page(conn, chosen.settings.db_schema, chosen.selection, limit=limit + 1)
    shown = messages[:limit]
    if json:
        rows = [{**row._asdict(), "state": views.state(row)} for row in recurring]
        kinds = [{**row._asdict(), "kind": views.kind(row)} for row in shown]
        print_json({"schedules": rows, "messages": kinds, "more": len(messages) > limit})
    else:
        print_blocks(views.tables(recurring, shown, more=len(messages) > limit))
    if not recurring and not shown:
        refuse_unmatched(chosen)


@app.command()
@over_scheduled
def cancel(
    chosen: Chosen,
    every: All = False,
    limit: Limit = None,
    by: By = None,
    reason: Why = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Let nothing become of messages; the history records them. Or forget schedules that no node declares."""
    keep_body = chosen.settings.history_bodies
    change = partial(delayed.cancel, actor=by or actor_name(), reason=reason, keep_body=keep_body)

    def forget(conn: Connection, schema: str, name: str) -> bool:
        return schedules.remove_orphan(conn, schema, name)

    why_not = "a running node declares it: pause it, or remove it from the code first"
    _change("cancel", "cancelled", chosen, change, forget, why_not, every=every, limit=limit, json=json)


@app.command("run-now")
@over_scheduled
def run_now(
    chosen: Chosen,
    every: All = False,
    limit: Limit = None,
    by: By = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Let messages be due now; run schedules once more than they would."""

    def ask(conn: Connection, schema: str, name: str) -> bool:
        return schedules.ask(conn, schema, name, actor=by or actor_name())

    why_not = "no running node declares it, so nobody knows its message"
    _change("run-now", "made due", chosen, delayed.run_now, ask, why_not, every=every, limit=limit, json=json)


@app.command()
@over_scheduled
def reschedule(
    chosen: Chosen,
    at: At,
    every: All = False,
    limit: Limit = None,
    by: By = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Let messages, or the next occurrence of schedules, be due at another time."""
    moment = parse_coming_time(at, datetime.now(UTC), option="--at")
    change = partial(delayed.reschedule, at=moment, dedupe_window=chosen.settings.dedupe_window)

    def move(conn: Connection, schema: str, name: str) -> bool:
        return schedules.reschedule(conn, schema, name, at=moment, actor=by or actor_name())

    why_not = "no node has looked at it yet"
    _change("reschedule", "rescheduled", chosen, change, move, why_not, every=every, limit=limit, json=json)


@app.command()
@over_scheduled
def pause(
    chosen: Chosen,
    span: Span = None,
    reason: Shown = "paused by an operator",
    by: By = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Pass over the occurrences of schedules, on every node."""
    duration = None if span is None else parse_duration(span, option="--for")
    names, actor = _only_names("pause", chosen), by or actor_name()
    with connection(chosen.settings) as conn:
        for name in names:
            schema = chosen.settings.db_schema
            circuits.pause(conn, schema, CircuitKind.SCHEDULE, name, reason=reason, actor=actor, duration=duration)
    _report_names("paused", names, json)


@app.command()
@over_scheduled
def resume(chosen: Chosen, json: Json = False, debug: Debug = False) -> None:
    """End the pause of schedules. Ends with 1 when one was not paused."""
    names = _only_names("resume", chosen)
    with connection(chosen.settings) as conn:
        was_paused = [circuits.resume(conn, chosen.settings.db_schema, CircuitKind.SCHEDULE, name) for name in names]
    _report_names("resumed", [name for name, was in zip(names, was_paused, strict=True) if was], json)
    if not all(was_paused):
        raise typer.Exit(1)


# ---------------------------------------------------------------- how


def _change(
    command: str,
    verb: str,
    chosen: Chosen,
    change: ChangeSide,
    by_name: ByName,
    why_not: str,
    *,
    every: bool,
    limit: int | None,
    json: bool,
) -> None:
    """Change the schedules that are named, then the messages that are chosen, and say what was done."""
    refuse_too_much(command, chosen, every)
    refuse_missing(command, chosen)
    if chosen.names:
        _change_named(command, chosen, by_name, why_not)
    run = Run(0)
    if every or chosen.is_about_messages:
        run = _change_messages(chosen, change, verb, limit)
    if json:
        print_json({"change": verb, "schedules": chosen.names, "messages": asdict(run)})
    else:
        print_blocks(views.told(run, verb, len(chosen.names)))
    if not run.total and not chosen.names:
        refuse_unmatched(chosen)
    if run.stopped:
        raise typer.Exit(130)
    if run.done < run.total:
        raise typer.Exit(1)


def _change_named(command: str, chosen: Chosen, by_name: ByName, why_not: str) -> None:
    """All of them, or none. Raises DurableError."""
    find_schedules(chosen)
    with connection(chosen.settings) as conn:
        for name in chosen.names:
            if not by_name(conn, chosen.settings.db_schema, name):
                raise DurableError(f"{command}: schedule {name!r} was not changed: {why_not}")


def _change_messages(chosen: Chosen, change: ChangeSide, verb: str, limit: int | None) -> Run:
    """On one side, then on the other."""
    total = Run(0)
    for side in SIDES:
        left = None if limit is None else limit - total.done
        if left == 0 or total.stopped:
            break
        count, here = partial(delayed.survey, side=side), partial(change, side=side)
        run = asyncio.run(change_until_done(chosen.settings, count, here, chosen.selection, verb=verb, limit=left))
        total = Run(total.total + run.total, total.done + run.done, total.waiting + run.waiting, stopped=run.stopped)
    return total


def _only_names(command: str, chosen: Chosen) -> Sequence[str]:
    if not chosen.names or chosen.selection.is_narrowed:
        raise InvalidSetting(f"{command}: name schedules, and nothing else")
    return [row.name for row in find_schedules(chosen)]


def _report_names(verb: str, names: Sequence[str], json: bool) -> None:
    if json:
        print_json({"change": verb, "schedules": names})
    else:
        print(f"{verb} {len(names)} schedule{'s' if len(names) != 1 else ''}")


def _is_selected(row: Row, selection: Selection) -> bool:
    return (
        selection.ids is None
        and selection.message_type in (None, row.message_type)
        and selection.address in (None, row.destination)
        and (selection.due_before is None or row.due_at < selection.due_before)
    )
