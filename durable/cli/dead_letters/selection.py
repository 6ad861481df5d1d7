"""The dead letters that a command selects: by number, by message id, or by filters, of an application or a database.

A command decorated with @over_letters() has all these options, and the parameter `chosen`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, NamedTuple
from uuid import UUID

import typer

from durable.bus import Bus
from durable.cli.arguments import parse_period
from durable.cli.command import taking
from durable.cli.target import DatabaseUrl, SchemaName, connection, load_target, schema_connection
from durable.errors import DurableError, InvalidSetting
from durable.grammar import several, suggestion
from durable.settings import Settings
from durable.storage import dead_letters, known_names
from durable.storage.dead_letters import DeadLetter, LetterRange, Selection, Summary
from durable.transports.addresses import canonical_name

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


def _filter(flag: str, metavar: str | None, help: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=help, rich_help_panel="Filters")


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="APP:BUS|LETTER",
        help="bus whose settings apply (first), then letters: their numbers, or the UUIDs of their messages",
        show_default=False,
    ),
]
SideFilter = Annotated[SideName | None, _filter("--side", None, "failed in a handler here, or on the way out")]
TypeFilter = Annotated[str | None, _filter("--type", "TYPE", "message type")]
ExceptionFilter = Annotated[
    str | None, _filter("--exception", "CLASS", "exception type; the last part of its name is enough")
]
FingerprintFilter = Annotated[str | None, _filter("--fingerprint", "HEX", "cause, as shown by groups")]
SourceFilter = Annotated[str | None, _filter("--source", "SERVICE", "service that sent the message")]
AddressFilter = Annotated[str | None, _filter("--address", "NAME", "endpoint received on, or destination")]
KeyFilter = Annotated[str | None, _filter("--key", "KEY", "partition key")]
TextFilter = Annotated[
    str | None, _filter("--text", "TEXT", "part of the reason, in any case, or of the body as it is stored")
]
SinceFilter = Annotated[str | None, _filter("--since", "TIME", "failed then or later: 2h ago, or ISO 8601")]
UntilFilter = Annotated[str | None, _filter("--until", "TIME", "failed before then: 2h ago, or ISO 8601")]
Reason = Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="reason; stored with the letter")]


class Chosen(NamedTuple):
    """The bus, if one is named, the settings that apply, and the letters selected."""

    bus: Bus | None
    settings: Settings
    selection: Selection


def choose_named(words: Words = None, database: DatabaseUrl = None, schema: SchemaName = None) -> Chosen:
    """Select letters by number or id. Raises WiringError."""
    app, letters, ids = parse_words(words or [])
    return Chosen(*load_target(app, database, schema), Selection(letters=letters or None, ids=ids or None))


def choose(
    *,
    words: Words = None,
    side: SideFilter = None,
    message_type: TypeFilter = None,
    exception: ExceptionFilter = None,
    fingerprint: FingerprintFilter = None,
    source: SourceFilter = None,
    address: AddressFilter = None,
    key: KeyFilter = None,
    text: TextFilter = None,
    since: SinceFilter = None,
    until: UntilFilter = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
) -> Chosen:
    """Select letters by number, id and filters. Raises WiringError."""
    chosen, (first, last) = choose_named(words, database, schema), parse_period(since, until)
    selection = replace(
        chosen.selection,
        side=None if side is None else side.value,
        message_type=message_type,
        exception_type=exception,
        fingerprint=fingerprint,
        source=source,
        address=None if address is None else canonical_name(address),
        key=key,
        text=text,
        since=first,
        until=last,
    )
    return chosen._replace(selection=selection)


over_letters = partial(taking, chosen=choose)
"""Give a command with the parameter `chosen` the options that select letters."""


def parse_words(words: Sequence[str]) -> tuple[str | None, list[int], list[UUID]]:
    """Split words into the name of the bus, numbers of letters, and ids of messages. Raises WiringError."""
    app = words[0] if words and ":" in words[0] else None
    letters: list[int] = []
    ids: list[UUID] = []
    for word in words[app is not None :]:
        if re.fullmatch(r"[0-9]{1,19}", word):
            if not 0 < int(word) <= LARGEST_LETTER:
                raise InvalidSetting(f"LETTER: {word} is not the number of a dead letter; give one of 1 or more")
            letters.append(int(word))
        else:
            ids.append(_parse_id(word))
    return app, letters, ids


def _parse_id(word: str) -> UUID:
    try:
        return UUID(word)
    except ValueError:
        raise InvalidSetting(
            f"LETTER: {word!r} is neither the number of a dead letter nor the UUID of a message; "
            "see dead-letters list (a bus comes first, and is written like app:bus)"
        ) from None


# ---------------------------------------------------------------- in the database


def find_letter(chosen: Chosen, *, resolved: bool | None = False) -> DeadLetter:
    """Read the one letter that is named, or the newest of the one message. Raises WiringError when there is none.

    Raises DurableError when the letter was resolved, unless `resolved` is None.
    """
    settings, selection = chosen.settings, chosen.selection
    named = [*(selection.letters or ()), *(selection.ids or ())]
    if not named:
        raise InvalidSetting("LETTER: name a letter, such as 1: `durable-agent dead-letters list APP:BUS` shows them")
    if len(named) != 1:
        raise InvalidSetting(
            f"LETTER: {several(len(named), 'letters', 'are')} named; name one, by its number or its message's UUID"
        )
    with schema_connection(settings) as conn:
        found = dead_letters.page(conn, settings.db_schema, replace(selection, resolved=None), limit=1)
        if not found:
            raise _missing(named[0])
        if resolved is False:
            _refuse_resolved(found)
        number = found[0].letter_id
        only, stretch = Selection(letters=[number], resolved=None), LetterRange(number - 1, number, 1)
        (letter,) = dead_letters.read(conn, settings.db_schema, only, stretch)
    return letter


def refuse_too_much(command: str, chosen: Chosen, everything: bool) -> None:
    """Require letters, a filter or --all. Raises InvalidSetting."""
    if everything and (chosen.selection.letters or chosen.selection.ids):
        raise InvalidSetting(f"{command}: --all excludes letters that are named; leave --all out, or the letters")
    if not everything and not chosen.selection.is_narrowed:
        raise InvalidSetting(
            f"{command}: no letter is selected; name letters, give a filter such as --fingerprint, or give --all"
        )


def refuse_unmatched(chosen: Chosen, selection: Selection) -> None:
    """Report a selection without letters: name the filter that matches none, and the nearest name that exists.

    Raises DurableError unless no filter is a name: filters by time and side may well match nothing.
    """
    filters = known_names.filters_of_letters(selection)
    if not filters:
        return
    with connection(chosen.settings) as conn:
        for column, name in filters.items():
            known = known_names.of_letters(conn, chosen.settings.db_schema, column, name, resolved=selection.resolved)
            short = {each.rpartition(".")[2] for each in known} if column == "exception_type" else set[str]()
            if name not in {*known, *short}:
                raise DurableError(f"{_OPTIONS[column]}: no letter has {name!r}{suggestion(name, [*known, *short])}")
    raise DurableError(
        f"no letter matches all of {', '.join(_OPTIONS[column] for column in filters)}; leave one of them out"
    )


def refuse_unknown(chosen: Chosen) -> None:
    """Require that named letters exist, and that one is unresolved: a stopped run goes on with the others."""
    named = [*(chosen.selection.letters or ()), *(chosen.selection.ids or ())]
    if not named:
        return
    every = Selection(letters=chosen.selection.letters, ids=chosen.selection.ids, resolved=None)
    with schema_connection(chosen.settings) as conn:
        found = dead_letters.page(conn, chosen.settings.db_schema, every, limit=_MOST_NAMED)
    known = {letter.letter_id for letter in found} | {letter.id for letter in found}
    for name in named:
        if name not in known:
            raise _missing(name)
    _refuse_resolved(found)


def _missing(name: object) -> InvalidSetting:
    return InvalidSetting(f"LETTER: no dead letter {name}; see dead-letters list --state any")


def _refuse_resolved(found: Sequence[Summary]) -> None:
    if all(letter.resolution for letter in found):
        letter = found[0]
        raise DurableError(f"letter {letter.letter_id}: already {letter.resolution} by {letter.resolved_by}")
