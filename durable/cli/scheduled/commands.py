"""scheduled: delayed messages and recurring schedules. A database is enough.

list                               inspect
cancel · run-now · reschedule      messages in batches, the first Ctrl-C ends a run after its batch; schedules by name
pause · resume                     a schedule, on every node
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Protocol

import typer
from sqlalchemy import Connection

from durable.cli.arguments import parse_due_time, parse_duration
from durable.cli.command import group
from durable.cli.output import document_of, emit
from durable.cli.pauses import PauseReason, Span
from durable.cli.runs import Job, Work, Yes, actor_name, confirm, run_job, work_options
from durable.cli.scheduled import views
from durable.cli.scheduled.selection import (
    Chosen,
    find_schedules,
    over_scheduled,
    refuse_missing,
    refuse_too_much,
    refuse_unknown,
    refuse_unmatched,
)
from durable.cli.target import connection, schema_connection
from durable.dead_letters.bulk import Run
from durable.errors import DurableError, InvalidSetting
from durable.listed import SHOWN, Listed
from durable.storage import actions, circuits, delayed, schedules
from durable.storage.actions import Action
from durable.storage.circuits import CircuitKind, OpenCircuit
from durable.storage.dead_letters import LetterRange, Resolved
from durable.storage.delayed import SIDES, Delayed, Selection, Side
from durable.storage.schedules import Row, troubled_first

app = group("Inspect delayed messages and schedules; cancel them, change their time, or run them now.")

PageSize = Annotated[int, typer.Option("--limit", min=1, max=10_000, metavar="N", help="rows of a list")]
Reason = Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="reason; stored in the history")]
At = Annotated[str, typer.Option("--at", metavar="TIME", help="new due time: in 2h, or ISO 8601")]


class ChangeMessages(Protocol):
    """A change of a range of the delayed messages on one side."""

    def __call__(
        self, conn: Connection, schema: str, selection: Selection, stretch: LetterRange, *, side: Side
    ) -> Resolved: ...


@dataclass(frozen=True, slots=True)
class Change:
    """A change of messages or schedules; `schedule` returns False for a schedule that refuses it."""

    command: str
    verb: str
    messages: ChangeMessages
    schedule: Callable[[Connection, str, str], bool]
    refusal: str


@app.command("list")
@over_scheduled()
def list_scheduled(chosen: Chosen, limit: PageSize = SHOWN) -> None:
    """List the recurring schedules, and the messages due next."""
    recurring = [row for row in find_schedules(chosen) if _is_selected(row, chosen.selection)]
    messages: list[Delayed] = []
    with connection(chosen.settings) as conn:
        pauses = pauses_of(recurring, circuits.read(conn, chosen.settings.db_schema))
        if chosen.has_messages:
            messages = delayed.page(conn, chosen.settings.db_schema, chosen.selection, limit=limit + 1)
    shown, more = messages[:limit], len(messages) > limit
    listed = Listed.of(troubled_first(recurring), limit)
    reasons = {name: pause._asdict() for name, pause in pauses.items()}
    rows = [{**row._asdict(), "state": views.state(row), "pause": reasons.get(row.name)} for row in listed.rows]
    kinds = [{**row._asdict(), "kind": views.kind(row)} for row in shown]
    document = document_of({"schedules": Listed(rows, listed.total)})
    emit({**document, "messages": kinds, "more": more}, *views.tables(listed, shown, pauses, more=more))
    if not recurring and not shown:
        refuse_unmatched(chosen)


def pauses_of(recurring: Sequence[Row], open_circuits: Sequence[OpenCircuit]) -> dict[str, OpenCircuit]:
    """Return the pauses of these schedules, by name."""
    names = {row.name for row in recurring if row.is_paused}
    return {each.key: each for each in open_circuits if each.kind == CircuitKind.SCHEDULE and each.key in names}


@app.command()
@over_scheduled(work=work_options)
def cancel(chosen: Chosen, work: Work, reason: Reason = None, yes: Yes = False) -> None:
    """Cancel messages, which the history records; remove schedules that no node declares."""
    messages = partial(delayed.cancel, actor=work.actor, reason=reason, keep_body=chosen.settings.history_bodies)
    remove = partial(actions.remove_schedule, actor=work.actor)
    refusal = "a running node declares it; pause it, or remove it from the code first"
    _apply(Change("cancel", "cancelled", messages, remove, refusal), chosen, work, reason=reason, yes=yes)


@app.command("run-now")
@over_scheduled(work=work_options)
def run_now(chosen: Chosen, work: Work, yes: Yes = False) -> None:
    """Make messages due now; run schedules once, besides their own times."""
    refusal = "no running node declares it, so its message is unknown; start a node that does"
    run_schedule = partial(actions.run_schedule, actor=work.actor)
    _apply(Change("run-now", "made due", delayed.run_now, run_schedule, refusal), chosen, work, yes=yes)


@app.command()
@over_scheduled(work=work_options)
def reschedule(chosen: Chosen, work: Work, at: At, yes: Yes = False) -> None:
    """Change the due time of messages, or of the next occurrence of schedules."""
    moment = parse_due_time(at, datetime.now(UTC), option="--at")
    messages = partial(delayed.reschedule, at=moment, dedupe_window=chosen.settings.dedupe_window)
    move_schedule = partial(actions.reschedule, at=moment, actor=work.actor)
    refusal = "no node has computed its next time yet; try again once a node runs"
    _apply(Change("reschedule", "rescheduled", messages, move_schedule, refusal), chosen, work, yes=yes)


@app.command()
@over_scheduled(actor=actor_name)
def pause(chosen: Chosen, actor: str, span: Span = None, reason: PauseReason = "paused by an operator") -> None:
    """Pause schedules on every node: their occurrences are skipped."""
    duration = None if span is None else parse_duration(span, option="--for")
    names, schema = _only_names("pause", chosen), chosen.settings.db_schema
    find_schedules(chosen)
    named = [(CircuitKind.SCHEDULE, name) for name in names]
    with connection(chosen.settings) as conn:
        actions.pause(conn, schema, named, reason=reason, actor=actor, duration=duration)
    emit({"change": "paused", "schedules": names}, views.counted("paused", len(names)))


@app.command()
@over_scheduled(actor=actor_name)
def resume(chosen: Chosen, actor: str) -> None:
    """Resume paused schedules, also one whose name no schedule has any more. Ends with 1 when one was not paused."""
    names, schema = _only_names("resume", chosen), chosen.settings.db_schema
    with schema_connection(chosen.settings) as conn:
        paused = {each.key for each in circuits.read(conn, schema) if each.kind == CircuitKind.SCHEDULE}
        refuse_unknown(names, sorted({*schedules.names(conn, schema), *paused}))
        named = {name: [(CircuitKind.SCHEDULE, name)] for name in names}
        resumed = [name for name in names if actions.resume(conn, schema, named[name], actor=actor).was_open]
    emit({"change": "resumed", "schedules": resumed}, views.counted("resumed", len(resumed)))
    if resumed != names:
        raise typer.Exit(1)


# ---------------------------------------------------------------- changes


def _apply(change: Change, chosen: Chosen, work: Work, *, reason: str | None = None, yes: bool) -> None:
    """Change the schedules that are named, then the messages that are selected, and print how many."""
    refuse_too_much(change.command, chosen, work.everything)
    refuse_missing(change.command, chosen)
    if work.everything:
        refusal = f"--all: give --yes to {change.command} all messages without being asked"
        confirm(f"{change.command} all delayed messages?", refusal, yes=yes)
    if chosen.names:
        _change_schedules(change, chosen)
    has_messages = work.everything or chosen.has_messages
    told = actions.told("delayed messages", chosen.selection)
    action = Action(actor=work.actor, verb=change.command, target=told, reason=reason)
    run = _change_messages(change, action, chosen, work.limit) if has_messages else Run(0)
    document = {"change": change.verb, "schedules": chosen.names, "messages": asdict(run)}
    emit(document, *views.told(run, change.verb, len(chosen.names)))
    if not run.total and not chosen.names:
        refuse_unmatched(chosen)
    if run.stopped:
        raise typer.Exit(130)
    if run.done < run.total:
        raise typer.Exit(1)


def _change_schedules(change: Change, chosen: Chosen) -> None:
    """Change all schedules that are named, or none. Raises DurableError."""
    find_schedules(chosen)
    with connection(chosen.settings) as conn:
        for name in chosen.names:
            if not change.schedule(conn, chosen.settings.db_schema, name):
                raise DurableError(f"{change.command}: schedule {name!r} was not changed: {change.refusal}")


def _change_messages(change: Change, action: Action, chosen: Chosen, limit: int | None) -> Run:
    """Change the messages of one side, then of the other."""
    total = Run(0)
    for side in SIDES:
        left = None if limit is None else limit - total.done
        if left == 0 or total.stopped:
            break
        changing = actions.recorded(partial(change.messages, side=side), action)
        job = Job(partial(delayed.survey, side=side), changing, change.verb, "messages")
        run = asyncio.run(run_job(chosen.settings, job, chosen.selection, limit=left))
        total = Run(
            total.total + run.total,
            total.done + run.done,
            total.waiting + run.waiting,
            refused=total.refused + run.refused,
            stopped=run.stopped,
        )
    return total


def _only_names(command: str, chosen: Chosen) -> Sequence[str]:
    if not chosen.names or chosen.selection.is_narrowed:
        raise InvalidSetting(f"{command}: schedules are selected by name only; give names, and no other filter")
    return chosen.names


def _is_selected(row: Row, selection: Selection) -> bool:
    return (
        selection.ids is None
        and selection.message_type in (None, row.message_type)
        and selection.address in (None, row.destination)
        and (selection.due_before is None or row.due_at < selection.due_before)
    )
