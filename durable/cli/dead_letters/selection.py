"""Which dead letters a command is about: an application or a database, letters by name, and filters.

A command that is decorated with @over_letters takes all these as arguments, and is given them as one `Chosen`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, NamedTuple
from uuid import UUID

import typer

from durable.bus import Bus
from durable.cli.arguments import parse_time, with_arguments_of
from durable.cli.target import DatabaseUrl, SchemaName, connection, load_target
from durable.errors import DurableError, InvalidSetting
from durable.settings import Settings, suggestion
from durable.storage import dead_letters, known_names, migrator
from durable.storage.dead_letters import DeadLetter, LetterRange, Selection, Summary

LARGEST_LETTER = 2**63 - 1
_MOST_NAMED = 100_000
_OPTIONS = {
    "message_type": "--type",
    "exception_type": "--exception",
    "fingerprint": "--fingerprint",
    "source": "--source",
    "address": "--address",
}


class SideName(StrEnum):
    INCOMING = "incoming"
    OUTGOING = "outgoing"


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="APP:BUS|LETTER",
        help="first the bus, if its settings are to count; letters, by their numbers or the UUIDs of their messages",
        show_default=False,
    ),
]
Filters = "Filters"
SideFilter = Annotated[
    SideName | None, typer.Option("--side", help="what failed here, or at its destination", rich_help_panel=Filters)
]
TypeFilter = Annotated[
    str | None, typer.Option("--type", metavar="TYPE", help="this message type", rich_help_panel=Filters)
]
ExceptionFilter = Annotated[
    str | None,
    typer.Option(
        "--exception",
        metavar="CLASS",
        help="failed with this type of exception; its last part will do",
        rich_help_panel=Filters,
    ),
]
FingerprintFilter = Annotated[
    str | None, typer.Option("--fingerprint", metavar="HEX", help="this cause; see groups", rich_help_panel=Filters)
]
SourceFilter = Annotated[
    str | None, typer.Option("--source", metavar="SERVICE", help="sent by this service", rich_help_panel=Filters)
]
AddressFilter = Annotated[
    str | None,
    typer.Option("--address", metavar="NAME", help="came in here, or was meant for there", rich_help_panel=Filters),
]
SinceFilter = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="failed then or later: 2h ago, or ISO 8601", rich_help_panel=Filters),
]
UntilFilter = Annotated[
    str | None, typer.Option("--until", metavar="TIME", help="failed before that", rich_help_panel=Filters)
]


class Chosen(NamedTuple):
    """What a command works on."""

    bus: Bus | None
    settings: Settings
    selection: Selection


def over_letters(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command with a parameter `chosen` these arguments instead of it."""
    return with_arguments_of(choose, command)


def choose(
    *,
    words: Words = None,
    side: SideFilter = None,
    message_type: TypeFilter = None,
    exception: ExceptionFilter = None,
    fingerprint: FingerprintFilter = None,
    source: SourceFilter = None,
    address: AddressFilter = None,
    since: SinceFilter = None,
    until: UntilFilter = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
) -> Chosen:
    """The bus, the settings and the selection; raises WiringError for what is none."""
    app, letters, ids = parse_words(words or [])
    now = datetime.now(UTC)
    selection = Selection(
        letters=letters or None,
        ids=ids or None,
        side=None if side is None else side.value,
        message_type=message_type,
        exception_type=exception,
        fingerprint=fingerprint,
        source=source,
        address=address,
        since=None if since is None else parse_time(since, now, option="--since"),
        until=None if until is None else parse_time(until, now, option="--until"),
    )
    return Chosen(*load_target(app, database, schema), selection)


def parse_words(words: Sequence[str]) -> tuple[str | None, list[int], list[UUID]]:
    """The bus's name, if there is one, the numbers of letters, and the ids of messages. Raises WiringError."""
    app = words[0] if words and ":" in words[0] else None
    letters: list[int] = []
    ids: list[UUID] = []
    for word in words[app is not None :]:
        if re.fullmatch(r"[0-9]{1,19}", word):
            if not 0 < int(word) <= LARGEST_LETTER:
                raise InvalidSetting(f"LETTER: {word} is no number of a dead letter")
            letters.append(int(word))
        else:
            ids.append(_parse_id(word))
    return app, letters, ids


def _parse_id(word: str) -> UUID:
    try:
        return UUID(word)
    except ValueError:
        raise InvalidSetting(
            f"LETTER: {word!r} is neither the number of a dead letter nor the UUID of a message "
            "(a bus comes first, and is written like app:bus)"
        ) from None


# ---------------------------------------------------------------- in the database


def find_letter(settings: Settings, selection: Selection) -> DeadLetter:
    """The one letter, or the newest of the one message, that is named. Raises WiringError when there is none, and
    DurableError when it was resolved and the selection leaves those out."""
    named = [*(selection.letters or ()), *(selection.ids or ())]
    if len(named) != 1:
        raise InvalidSetting("LETTER: name one, by its number or by the UUID of its message")
    with connection(settings) as conn:
        migrator.check_version(conn, settings.db_schema)
        found = dead_letters.page(conn, settings.db_schema, replace(selection, resolved=None), limit=1)
        if not found:
            raise InvalidSetting(f"LETTER: there is no dead letter {named[0]}")
        _refuse_resolved(found, selection)
        number = found[0].letter_id
        only, stretch = Selection(letters=[number], resolved=None), LetterRange(number - 1, number, 1)
        (letter,) = dead_letters.read(conn, settings.db_schema, only, stretch)
    return letter


def refuse_too_much(command: str, chosen: Chosen, every: bool) -> None:
    if not every and not chosen.selection.is_narrowed:
        raise InvalidSetting(f"{command}: name letters, or filter them, such as by --fingerprint; or give --all")


def refuse_unmatched(chosen: Chosen, selection: Selection) -> None:
    """Nothing was selected: say which of the filters has no letter at all, with the nearest name that has one.

    Raises DurableError unless no filter is a name. Filters by time and side may well meet nothing.
    """
    filters = known_names.filters_of_letters(selection)
    if not filters:
        return
    with connection(chosen.settings) as conn:
        for column, name in filters.items():
            known = known_names.of_letters(conn, chosen.settings.db_schema, column, resolved=selection.resolved)
            short = {each.rpartition(".")[2] for each in known} if column == "exception_type" else set[str]()
            if name not in {*known, *short}:
                raise DurableError(f"{_OPTIONS[column]}: no letter has {name!r}{suggestion(name, [*known, *short])}")
    raise DurableError("no letter has all of these: " + ", ".join(_OPTIONS[column] for column in filters))


def refuse_unknown(chosen: Chosen) -> None:
    """Letters that are named must be there. Some may be resolved: a run that was stopped goes on with the others."""
    named = [*(chosen.selection.letters or ()), *(chosen.selection.ids or ())]
    if not named:
        return
    every = Selection(letters=chosen.selection.letters, ids=chosen.selection.ids, resolved=None)
    with connection(chosen.settings) as conn:
        migrator.check_version(conn, chosen.settings.db_schema)
        found = dead_letters.page(conn, chosen.settings.db_schema, every, limit=_MOST_NAMED)
    known = {letter.letter_id for letter in found} | {letter.id for letter in found}
    for name in named:
        if name not in known:
            raise InvalidSetting(f"LETTER: there is no dead letter {name}")
    _refuse_resolved(found, chosen.selection)


def _refuse_resolved(found: Sequence[Summary], selection: Selection) -> None:
    if selection.resolved is False and all(letter.resolution for letter in found):
        letter = found[0]
        raise DurableError(f"letter {letter.letter_id} was {letter.resolution} already, by {letter.resolved_by}")
