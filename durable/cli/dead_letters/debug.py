"""dead-letters debug: the handler of one dead letter, run in this process for a debugger."""

from __future__ import annotations

import asyncio
import pdb
import sys
from typing import Annotated

import typer

from durable.bus import Bus
from durable.cli.dead_letters import views
from durable.cli.dead_letters.commands import By, Note
from durable.cli.dead_letters.selection import find_letter, parse_words
from durable.cli.output import print_blocks, print_json
from durable.cli.runs import actor_name
from durable.cli.target import BusName, Debug, Json, load_bus
from durable.dead_letters.rehearsal import AlreadyResolved, Rehearsed, handle, handler_of, rehearsal, whole
from durable.storage.dead_letters import DeadLetter, Selection
from durable.storage.rows import error_text

Letter = Annotated[str, typer.Argument(metavar="LETTER", help="its number, or the UUID of its message")]
Commit = Annotated[
    bool, typer.Option("--commit", help="keep what the handler does, send what it sends, and resolve the letter")
]
Pdb = Annotated[bool, typer.Option("--pdb", help="open the debugger where the handler failed")]


def debug_letter(
    app: BusName,
    letter: Letter,
    commit: Commit = False,
    pdb_: Pdb = False,
    by: By = None,
    reason: Note = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Run the handler of one letter in this process, without any time limit; breakpoint() works.

    All of it is rolled back, unless --commit is given and the handler succeeds. What the handler locks in the database
    stays locked while you look at it. Ends with 1 when the handler fails.
    """
    bus = load_bus(app)
    _, letters, ids = parse_words([letter])
    found = find_letter(bus.settings, Selection(letters=letters, ids=ids, resolved=False if commit else None))
    handler_of(bus, found)
    whole(found)
    rehearsed = asyncio.run(_commit(bus, found, by or actor_name(), reason) if commit else _rehearse(bus, found))
    row = views.rehearsed_row(rehearsed)
    if json:
        print_json(row | {"committed": commit and rehearsed.error is None})
    elif rehearsed.error is None:
        done, title = ("handled, committed", "sent") if commit else ("succeeds, rolled back", "would be sent")
        print_blocks([f"letter {found.summary.letter_id}: {done}", *views.sends([row], title), *views.does([row])])
    if rehearsed.error is None:
        return
    if not json:
        print(error_text(rehearsed.error)[2], end="", file=sys.stderr)
    if pdb_:
        pdb.post_mortem(rehearsed.error.__traceback__)
    raise typer.Exit(1)


async def _rehearse(bus: Bus, letter: DeadLetter) -> Rehearsed:
    await _check(bus)
    async with rehearsal(bus, unhurried=True) as stage:
        return await stage.run(letter)


async def _commit(bus: Bus, letter: DeadLetter, actor: str, reason: str | None) -> Rehearsed:
    await _check(bus)
    try:
        sends = await handle(bus, letter, actor=actor, reason=reason)
    except AlreadyResolved:
        raise
    except Exception as error:  # the handler's: it is shown as it is
        return Rehearsed(letter, "fails", error=error)
    return Rehearsed(letter, "succeeds", sends)


async def _check(bus: Bus) -> None:
    """Is this application one that may run on this database?"""
    try:
        await bus.runtime.check()
    finally:
        await bus.runtime.database.close()
