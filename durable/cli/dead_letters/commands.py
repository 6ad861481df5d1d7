"""dead-letters: messages that failed for good. A database is enough, except for a rehearsal.

groups · list · show          inspect
replay · discard · edit       resolve, in batches; the first Ctrl-C ends a run after its batch
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from typing import Annotated

import msgspec
import typer

from durable.cli.arguments import ListSize
from durable.cli.command import group, taking
from durable.cli.dead_letters import views
from durable.cli.dead_letters.debug import debug_letter
from durable.cli.dead_letters.runs import rehearse_all, resolve_all
from durable.cli.dead_letters.selection import (
    LARGEST_LETTER,
    Chosen,
    Reason,
    choose_named,
    find_letter,
    over_letters,
    refuse_too_much,
    refuse_unknown,
    refuse_unmatched,
)
from durable.cli.dead_letters.views import Row
from durable.cli.output import document_of, emit
from durable.cli.runs import Work, Yes, actor_name, confirm, work_options
from durable.cli.send import read_body
from durable.cli.target import Target, ring_of, schema_connection
from durable.dead_letters import bodies as letter_bodies
from durable.dead_letters.bulk import Run
from durable.encryption.ring import KeyRing
from durable.errors import DurableError, InvalidMessage, InvalidSetting
from durable.listed import SHOWN, Listed
from durable.storage import actions, circuits
from durable.storage import dead_letters as storage
from durable.storage.actions import Action
from durable.storage.circuits import CircuitKind
from durable.storage.dead_letters import DeadLetter, Selection

app = group("Inspect, replay, edit or discard messages that failed for good.")


class State(StrEnum):
    UNRESOLVED = "unresolved"
    RESOLVED = "resolved"
    ANY = "any"


_RESOLVED = {State.UNRESOLVED: False, State.RESOLVED: True, State.ANY: None}

StateOption = Annotated[State, typer.Option("--state", help="resolved: replayed, handled or discarded")]
PageSize = Annotated[int, typer.Option("--limit", min=1, max=10_000, metavar="N", help="letters on a page")]
Before = Annotated[
    int | None, typer.Option("--before", min=1, max=LARGEST_LETTER, metavar="LETTER", help="page after this letter")
]
Rate = Annotated[
    float | None, typer.Option("--rate", min=0.01, max=1_000_000, metavar="N", help="largest number per second")
]
Rehearse = Annotated[
    bool, typer.Option("--rehearse", help="run the handlers of APP:BUS, roll back, and show each outcome")
]
DiscardReason = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="reason for discarding; stored with the letter")
]
Decrypt = Annotated[bool, typer.Option("--decrypt", help="decrypt the body with the keys of APP:BUS or the settings")]
Body = Annotated[str, typer.Option("--body", metavar="JSON", help="new body; - reads standard input")]


# ---------------------------------------------------------------- inspect


@app.command()
@over_letters()
def groups(chosen: Chosen, state: StateOption = State.UNRESOLVED, limit: ListSize = SHOWN) -> None:
    """Group dead letters by cause: their number, first and last time, and an example."""
    selection = replace(chosen.selection, resolved=_RESOLVED[state])
    with schema_connection(chosen.settings) as conn:
        listed = Listed.of(views.group_rows(storage.groups(conn, chosen.settings.db_schema, selection)), limit)
    emit(document_of({"groups": listed}), *views.groups(listed))
    if not listed.rows:
        refuse_unmatched(chosen, selection)


@app.command("list")
@over_letters()
def list_letters(
    chosen: Chosen, state: StateOption = State.UNRESOLVED, limit: PageSize = SHOWN, before: Before = None
) -> None:
    """List dead letters, the newest first, one page at a time."""
    selection = replace(chosen.selection, resolved=_RESOLVED[state])
    with schema_connection(chosen.settings) as conn:
        found = storage.page(conn, chosen.settings.db_schema, selection, limit=limit + 1, before=before)
    rows = views.summary_rows(found[:limit])
    following = found[limit - 1].letter_id if len(found) > limit else None
    emit({"letters": rows, "before": following}, *views.summaries(rows, following))
    if not rows and before is None:
        refuse_unmatched(chosen, selection)


@app.command()
@taking(chosen=choose_named)
def show(chosen: Chosen, decrypt: Decrypt = False) -> None:
    """Show one letter whole: its body, each attempt with its traceback, and the rest of its conversation."""
    letter = find_letter(chosen, resolved=None)
    if decrypt:
        letter = letter_bodies.opened(letter, _ring_of(chosen))
    schema = chosen.settings.db_schema
    with schema_connection(chosen.settings) as conn:
        attempts = views.attempt_rows(storage.attempts(conn, schema, letter.summary.letter_id))
        relatives = views.relative_rows(storage.relatives(conn, schema, letter))
    row = views.letter_row(letter)
    emit({"letter": row, "attempts": attempts, "related": relatives}, *views.letter(row, attempts, relatives))


# ---------------------------------------------------------------- resolve


@app.command()
@over_letters(work=work_options)
def replay(
    chosen: Chosen,
    work: Work,
    rate: Rate = None,
    rehearse: Rehearse = False,
    reason: Reason = None,
    yes: Yes = False,
) -> None:
    """Return messages, as new, to the queue that they failed in; the nodes handle or send them.

    Ctrl-C ends the run after a batch, and the same command continues it. Ends with 1 when letters are selected, and
    none of them can be replayed. With --rehearse nothing is stored and
    nothing is sent, and the command ends with 1 when one of the messages would fail.
    """
    refuse_too_much("replay", chosen, work.everything)
    refuse_unknown(chosen)
    if rehearse:
        _rehearse(chosen, work.limit)
        return
    if work.everything:
        confirm("replay all these letters?", None, yes=yes)
    replaying = partial(storage.replay, actor=work.actor, reason=reason)
    change = actions.recorded(replaying, _action("replay", chosen, work.actor, reason))
    resolve = resolve_all(chosen, change, verb="replayed", replayable=True, rate=rate, limit=work.limit)
    run = asyncio.run(resolve)
    _report(run, "replayed", _parked(chosen) if run.done else [], lambda: refuse_unmatched(chosen, chosen.selection))


@app.command()
@over_letters(work=work_options)
def discard(chosen: Chosen, work: Work, reason: DiscardReason, yes: Yes = False) -> None:
    """Discard letters. They can be inspected for dead_letter_retention, with the reason."""
    refuse_too_much("discard", chosen, work.everything)
    refuse_unknown(chosen)
    if work.everything:
        confirm("discard all these letters?", "--all: give --yes to discard them without being asked", yes=yes)
    discarding = partial(storage.discard, actor=work.actor, reason=reason)
    change = actions.recorded(discarding, _action("discard", chosen, work.actor, reason))
    run = asyncio.run(resolve_all(chosen, change, verb="discarded", limit=work.limit))
    _report(run, "discarded", or_else=lambda: refuse_unmatched(chosen, chosen.selection))


@app.command()
@taking(chosen=choose_named, actor=actor_name)
def edit(chosen: Chosen, actor: str, body: Body, rehearse: Rehearse = False, reason: Reason = None) -> None:
    """Replay one letter with another body; the old body stays with the letter.

    The new body is written in JSON, for every codec. With APP:BUS the message's class must accept it; without APP:BUS
    only JSON bodies can be edited.
    """
    letter = find_letter(chosen)
    changed = _checked_body(letter, body, chosen)
    chosen = chosen._replace(selection=Selection(letters=[letter.summary.letter_id]))
    if rehearse:
        _rehearse(chosen, None, changed)
        return
    replaying = partial(storage.replay, actor=actor, reason=reason, body=changed)
    change = actions.recorded(replaying, _action("edit", chosen, actor, reason))
    run = asyncio.run(resolve_all(chosen, change, verb="replayed", replayable=True))
    if not run.done:
        raise DurableError(f"letter {letter.summary.letter_id}: not replayed: {views.left(run)}")
    _report(run, "replayed", _parked(chosen))


app.command("debug")(debug_letter)


def _action(verb: str, chosen: Chosen, actor: str, reason: str | None) -> Action:
    return Action(actor=actor, verb=verb, target=actions.told("dead letters", chosen.selection), reason=reason)


def _checked_body(letter: DeadLetter, body: str, chosen: Chosen) -> bytes:
    """Encode the new body. Raises WiringError for a body that the handler could not decode."""
    limit = chosen.settings.max_message_bytes
    application = chosen.bus.application if chosen.bus is not None else None
    try:
        changed = letter_bodies.edited(letter, read_body(body, limit), application)
        if len(changed) > limit:
            raise InvalidMessage(f"the body has {len(changed)} bytes; max_message_bytes is {limit}")
    except (InvalidMessage, msgspec.DecodeError) as error:
        raise InvalidSetting(f"--body: {error}") from error
    return letter_bodies.sealed_as(letter, changed, _ring_of(chosen))


def _ring_of(chosen: Chosen) -> KeyRing:
    return ring_of(Target(chosen.bus, chosen.settings))


def _rehearse(chosen: Chosen, limit: int | None, body: bytes | None = None) -> None:
    if chosen.bus is None:
        raise InvalidSetting("--rehearse: no application to take handlers from; name its bus, such as app:bus")
    rehearsed = asyncio.run(rehearse_all(chosen.bus, chosen.selection, limit=limit, body=body))
    rows = [views.rehearsed_row(each) for each in rehearsed]
    emit({"rehearsed": rows}, *views.rehearsal(rows))
    if not rows:
        refuse_unmatched(chosen, chosen.selection)
    if any(each.outcome == "fails" for each in rehearsed):
        raise typer.Exit(1)


def _parked(chosen: Chosen) -> list[Row]:
    """The keys and handlers that dead letters have parked: what is replayed waits there until they are resumed."""
    with schema_connection(chosen.settings) as conn:
        stopped = [each for each in circuits.read(conn, chosen.settings.db_schema) if each.parked]
        waiting = circuits.count_behind(conn, chosen.settings.db_schema, circuits.orders_of(stopped))
    return [
        {"kind": circuit.kind, "key": circuit.key, "waiting": waiting.get(circuit.order or "")}
        for circuit in stopped
        if circuit.kind != CircuitKind.KEY or circuit.order in waiting
    ]


def _report(run: Run, verb: str, parked: Sequence[Row] = (), or_else: Callable[[], None] = lambda: None) -> None:
    """Print how far a run came, and what is parked; call `or_else` if nothing was selected. Ends with 1 when every
    selected letter was left.
    """
    more = document_of({"parked": Listed.of(parked)}) if parked else {}
    emit({"resolution": verb} | asdict(run) | more, *views.told(run, verb), *views.parked(parked))
    if run.stopped:
        raise typer.Exit(130)
    if not run.total and not run.unfit:
        or_else()
    elif not run.done:
        raise typer.Exit(1)
