"""dead-letters: what failed for good, and what becomes of it. A database is enough, but for a rehearsal.

groups · list · show          look
replay · discard · edit       resolve, in batches; the first Ctrl-C ends a run after its batch
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from typing import Annotated

import msgspec
import typer

from durable.application.application import Application
from durable.cli.dead_letters import bodies as letter_bodies
from durable.cli.dead_letters import views
from durable.cli.dead_letters.runs import rehearse_all, resolve_all
from durable.cli.dead_letters.selection import (
    LARGEST_LETTER,
    Chosen,
    Words,
    find_letter,
    over_letters,
    parse_words,
    refuse_too_much,
    refuse_unknown,
    refuse_unmatched,
)
from durable.cli.output import Block, print_blocks, print_json
from durable.cli.runs import actor_name
from durable.cli.send import read_body
from durable.cli.target import DatabaseUrl, Debug, Json, SchemaName, connection, load_target
from durable.dead_letters.bulk import Run
from durable.errors import DurableError, InvalidMessage, InvalidSetting
from durable.settings import Settings
from durable.storage import dead_letters as storage
from durable.storage import migrator
from durable.storage.dead_letters import DeadLetter, Selection

app = typer.Typer(help="What failed for good: look at it, and replay, edit or discard it.")


class State(StrEnum):
    UNRESOLVED = "unresolved"
    RESOLVED = "resolved"
    ANY = "any"


_RESOLVED = {State.UNRESOLVED: False, State.RESOLVED: True, State.ANY: None}

StateOption = Annotated[State, typer.Option("--state", help="resolved: replayed, handled or discarded")]
PageSize = Annotated[int, typer.Option("--limit", min=1, max=10_000, metavar="N", help="letters on a page")]
Before = Annotated[
    int | None, typer.Option("--before", min=1, max=LARGEST_LETTER, metavar="LETTER", help="the page after this letter")
]
All = Annotated[bool, typer.Option("--all", help="every unresolved letter, where no filter narrows it down")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="no more than so many, the oldest")]
Rate = Annotated[
    float | None, typer.Option("--rate", min=0.01, max=1_000_000, metavar="N", help="at most so many a second")
]
Rehearse = Annotated[
    bool,
    typer.Option("--rehearse", help="run today's handlers of APP:BUS, roll back, and say what would become of each"),
]
By = Annotated[str | None, typer.Option("--by", metavar="NAME", help="who does it; default: USER@HOST")]
Note = Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="why; it stays with the letter")]
Why = Annotated[str, typer.Option("--reason", metavar="TEXT", help="why nothing is to become of it; stays with it")]
Body = Annotated[str, typer.Option("--body", metavar="JSON", help="the new body; - reads it from standard input")]


@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


# ---------------------------------------------------------------- look


@app.command()
@over_letters
def groups(chosen: Chosen, state: StateOption = State.UNRESOLVED, json: Json = False, debug: Debug = False) -> None:
    """The causes: how many letters each has, since when, and an example."""
    selection = replace(chosen.selection, resolved=_RESOLVED[state])
    with connection(chosen.settings) as conn:
        migrator.check_version(conn, chosen.settings.db_schema)
        found = storage.groups(conn, chosen.settings.db_schema, selection)
    rows = views.group_rows(found)
    _print({"groups": rows}, json, views.groups(rows))
    if not rows:
        refuse_unmatched(chosen, selection)


@app.command("list")
@over_letters
def list_letters(
    chosen: Chosen,
    state: StateOption = State.UNRESOLVED,
    limit: PageSize = 50,
    before: Before = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """The letters, the newest first, a page at a time."""
    selection = replace(chosen.selection, resolved=_RESOLVED[state])
    with connection(chosen.settings) as conn:
        migrator.check_version(conn, chosen.settings.db_schema)
        found = storage.page(conn, chosen.settings.db_schema, selection, limit=limit + 1, before=before)
    rows = views.summary_rows(found[:limit])
    following = found[limit - 1].letter_id if len(found) > limit else None
    _print({"letters": rows, "before": following}, json, views.summaries(rows, following))
    if not rows and before is None:
        refuse_unmatched(chosen, selection)


@app.command()
def show(
    words: Words = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """One letter whole: its body, every attempt with its traceback, and what else its conversation left here."""
    name, letters, ids = parse_words(words or [])
    settings = load_target(name, database, schema)[1]
    letter = find_letter(settings, Selection(letters=letters, ids=ids, resolved=None))
    with connection(settings) as conn:
        attempts = views.attempt_rows(storage.attempts(conn, settings.db_schema, letter.summary.letter_id))
        relatives = views.relative_rows(storage.relatives(conn, settings.db_schema, letter))
    row = views.letter_row(letter)
    _print({"letter": row, "attempts": attempts, "related": relatives}, json, views.letter(row, attempts, relatives))


# ---------------------------------------------------------------- resolve


@app.command()
@over_letters
def replay(
    chosen: Chosen,
    every: All = False,
    rate: Rate = None,
    limit: Limit = None,
    rehearse: Rehearse = False,
    by: By = None,
    reason: Note = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Put messages back to where they failed, as new; the nodes handle or send them.

    Ctrl-C ends it after a batch, and the same command goes on with the rest. With --rehearse nothing is stored and
    nothing is sent, and it ends with 1 when one of them would fail.
    """
    refuse_too_much("replay", chosen, every)
    refuse_unknown(chosen)
    if rehearse:
        _rehearse(chosen, limit, json)
        return
    resolution = partial(storage.replay, actor=by or actor_name(), reason=reason)
    run = asyncio.run(
        resolve_all(
            chosen.settings,
            resolution,
            chosen.selection,
            verb="replayed",
            replayable=True,
            rate=rate,
            limit=limit,
        )
    )
    _report(run, "replayed", json)
    if not run.total and not run.unfit:
        refuse_unmatched(chosen, chosen.selection)


@app.command()
@over_letters
def discard(
    chosen: Chosen,
    reason: Why,
    every: All = False,
    limit: Limit = None,
    by: By = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Give letters up. They stay to be looked at for dead_letter_retention, with the reason."""
    if not reason.strip():
        raise InvalidSetting("--reason: it is empty; say why nothing is to become of these letters")
    refuse_too_much("discard", chosen, every)
    refuse_unknown(chosen)
    resolution = partial(storage.discard, actor=by or actor_name(), reason=reason)
    run = asyncio.run(resolve_all(chosen.settings, resolution, chosen.selection, verb="discarded", limit=limit))
    _report(run, "discarded", json)
    if not run.total:
        refuse_unmatched(chosen, chosen.selection)


@app.command()
def edit(
    body: Body,
    words: Words = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    rehearse: Rehearse = False,
    by: By = None,
    reason: Note = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Replay one letter with another body; the old one stays with the letter.

    It is written in JSON, whatever the body is encoded in. With APP:BUS it must be one of the message's class; without
    it only JSON, and only for what is JSON already.
    """
    name, letters, ids = parse_words(words or [])
    bus, settings = load_target(name, database, schema)
    letter = find_letter(settings, Selection(letters=letters, ids=ids))
    changed = _checked_body(letter, body, settings, bus.application if bus is not None else None)
    chosen = Chosen(bus, settings, Selection(letters=[letter.summary.letter_id]))
    if rehearse:
        _rehearse(chosen, None, json, changed)
        return
    resolution = partial(storage.replay, actor=by or actor_name(), reason=reason, body=changed)
    run = asyncio.run(resolve_all(settings, resolution, chosen.selection, verb="replayed", replayable=True))
    if not run.done:
        raise DurableError(f"letter {letter.summary.letter_id} was not replayed: {_why_not(run)}")
    _report(run, "replayed", json)


def _checked_body(letter: DeadLetter, body: str, settings: Settings, application: Application | None) -> bytes:
    """The new body; raises WiringError for what its handler could not read."""
    try:
        changed = letter_bodies.edited(letter, read_body(body, settings.max_message_bytes), application)
        if len(changed) > settings.max_message_bytes:
            raise InvalidMessage(f"it has {len(changed)} bytes, more than max_message_bytes")
    except (InvalidMessage, msgspec.DecodeError) as error:
        raise InvalidSetting(f"--body: {error}") from error
    return changed


def _rehearse(chosen: Chosen, limit: int | None, json: bool, body: bytes | None = None) -> None:
    if chosen.bus is None:
        raise InvalidSetting("--rehearse: it runs the handlers of an application; name its bus, such as app:bus")
    rehearsed = asyncio.run(rehearse_all(chosen.bus, chosen.selection, limit=limit, body=body))
    rows = [views.rehearsed_row(each) for each in rehearsed]
    _print({"rehearsed": rows}, json, views.rehearsal(rows))
    if not rows:
        refuse_unmatched(chosen, chosen.selection)
    if any(each.outcome == "fails" for each in rehearsed):
        raise typer.Exit(1)


def _report(run: Run, verb: str, json: bool) -> None:
    if json:
        print_json({"resolution": verb} | asdict(run))
    else:
        print_blocks(_told(run, verb))
    if run.stopped:
        raise typer.Exit(130)


def _told(run: Run, verb: str) -> list[Block]:
    done = f"{verb} {run.done:,} of {run.total:,} letter{'s' if run.total != 1 else ''}"
    lines: list[Block] = [f"stopped: {done}; the same command goes on with the rest" if run.stopped else done]
    return lines + ([f"left: {_why_not(run)}"] if run.waiting or run.taken or run.unfit else [])


def _why_not(run: Run) -> str:
    reasons = {
        "the message waits already": run.waiting,
        "its id was used meanwhile, by another message or once more by this one: look at it, and discard it": run.taken,
        "no whole envelope, only bytes: look at it, and discard it": run.unfit,
    }
    counted = [f"{count:,} ({reason})" for reason, count in reasons.items() if count]
    return ", ".join(counted) or "somebody else has resolved it"


def _print(document: object, json: bool, blocks: list[Block]) -> None:
    if json:
        print_json(document)
    else:
        print_blocks(blocks)
