"""dead-letters debug: the handler of one dead letter, run in this process under a debugger."""

from __future__ import annotations

import asyncio
import pdb
import sys
from typing import Annotated

import typer

from durable.bus import Bus
from durable.cli.dead_letters import views
from durable.cli.dead_letters.selection import Chosen, Reason, find_letter, parse_words
from durable.cli.output import emit, is_json, print_json
from durable.cli.runs import actor_name
from durable.cli.target import on_bus
from durable.dead_letters.rehearsal import AlreadyResolved, Rehearsed, handle, handler_of, rehearsal, whole
from durable.storage.dead_letters import DeadLetter, Selection
from durable.storage.rows import error_text

Letter = Annotated[str, typer.Argument(metavar="LETTER", help="number of the letter, or UUID of its message")]
Commit = Annotated[
    bool, typer.Option("--commit", help="commit the handler's transaction, send its messages, resolve the letter")
]
Pdb = Annotated[bool, typer.Option("--pdb", help="open the debugger where the handler failed")]


@on_bus(actor=actor_name)
def debug_letter(
    bus: Bus, actor: str, letter: Letter, commit: Commit = False, pdb_: Pdb = False, reason: Reason = None
) -> None:
    """Run the handler of one letter in this process, without a time limit; breakpoint() works.

    The transaction is rolled back, unless --commit is given and the handler succeeds. Rows that the handler locks stay
    locked until the command ends. Ends with 1 when the handler fails.
    """
    _, letters, ids = parse_words([letter])
    chosen = Chosen(bus, bus.settings, Selection(letters=letters, ids=ids))
    found = find_letter(chosen, resolved=False if commit else None)
    handler_of(bus, found)
    whole(found)
    rehearsed = asyncio.run(_commit(bus, found, actor, reason) if commit else _rehearse(bus, found))
    row = views.rehearsed_row(rehearsed)
    if rehearsed.error is None:
        done, title = ("handled, committed", "sent") if commit else ("succeeds, rolled back", "would be sent")
        blocks = [f"letter {found.summary.letter_id}: {done}", *views.sends([row], title), *views.does([row])]
        emit(row | {"committed": commit}, *blocks)
        return
    if is_json():
        print_json(row | {"committed": False})
    else:
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
    except Exception as error:  # the handler's, shown unchanged
        return Rehearsed(letter, "fails", error=error)
    return Rehearsed(letter, "succeeds", sends)


async def _check(bus: Bus) -> None:
    """Check that this application may run on this database."""
    try:
        await bus.runtime.check()
    finally:
        await bus.runtime.database.close()
