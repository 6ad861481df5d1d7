"""What the commands of `scheduled` are about: schedules by their names, and messages by their ids or by filters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, NamedTuple
from uuid import UUID

import typer

from durable.cli.arguments import parse_coming_time, with_arguments_of
from durable.cli.target import DatabaseUrl, SchemaName, connection, load_target
from durable.errors import DurableError, InvalidSetting
from durable.settings import Settings, suggestion
from durable.storage import delayed, known_names, migrator, schedules
from durable.storage.delayed import Selection

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="APP:BUS|NAME|ID",
        help="first the bus, if its settings are to count; schedules by their names, messages by their UUIDs",
        show_default=False,
    ),
]
Filters = "Filters"
TypeFilter = Annotated[
    str | None, typer.Option("--type", metavar="TYPE", help="this message type", rich_help_panel=Filters)
]
AddressFilter = Annotated[
    str | None,
    typer.Option("--address", metavar="NAME", help="came in here, or goes there", rich_help_panel=Filters),
]
DueFilter = Annotated[
    str | None,
    typer.Option("--due-before", metavar="TIME", help="due before then: in 2h, or ISO 8601", rich_help_panel=Filters),
]


class Chosen(NamedTuple):
    """What a command works on: these schedules, and these messages unless there are none to be."""

    settings: Settings
    names: Sequence[str]
    selection: Selection

    @property
    def is_about_messages(self) -> bool:
        return self.selection.is_narrowed or not self.names


def over_scheduled(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command with a parameter `chosen` these arguments instead of it."""
    return with_arguments_of(choose, command)


def choose(
    *,
    words: Words = None,
    message_type: TypeFilter = None,
    address: AddressFilter = None,
    due_before: DueFilter = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
) -> Chosen:
    """Raises WiringError for what is no time."""
    app, names, ids = parse_words(words or [])
    before = None if due_before is None else parse_coming_time(due_before, datetime.now(UTC), option="--due-before")
    selection = Selection(ids=ids or None, message_type=message_type, address=address, due_before=before)
    return Chosen(load_target(app, database, schema)[1], names, selection)


def parse_words(words: Sequence[str]) -> tuple[str | None, list[str], list[UUID]]:
    """The bus's name, if there is one, the names of schedules, and the ids of messages."""
    app = words[0] if words and ":" in words[0] else None
    names: list[str] = []
    ids: list[UUID] = []
    for word in words[app is not None :]:
        try:
            ids.append(UUID(word))
        except ValueError:
            names.append(word)
    return app, names, ids


# ---------------------------------------------------------------- in the database


def find_schedules(chosen: Chosen) -> list[schedules.Row]:
    """Those that are named, or all of them. Raises InvalidSetting when one is not there."""
    with connection(chosen.settings) as conn:
        migrator.check_version(conn, chosen.settings.db_schema)
        rows = schedules.read(conn, chosen.settings.db_schema)
    known = {row.name: row for row in rows}
    for name in chosen.names:
        if name not in known:
            raise InvalidSetting(f"NAME: there is no schedule {name!r}{suggestion(name, known)}")
    return [known[name] for name in chosen.names] if chosen.names else rows


def refuse_too_much(command: str, chosen: Chosen, every: bool) -> None:
    if not every and not chosen.names and not chosen.selection.is_narrowed:
        raise InvalidSetting(f"{command}: name messages or schedules, or filter, such as by --type; or give --all")


def refuse_unmatched(chosen: Chosen) -> None:
    """Nothing was selected: raise DurableError for a filter by a name that nothing which waits has."""
    given = {"message_type": chosen.selection.message_type, "address": chosen.selection.address}
    with connection(chosen.settings) as conn:
        for column, name in given.items():
            known = known_names.of_delayed(conn, chosen.settings.db_schema, column) if name is not None else ()
            if name is not None and name not in known:
                option = "--type" if column == "message_type" else "--address"
                raise DurableError(f"{option}: nothing that waits has {name!r}{suggestion(name, known)}")


def refuse_missing(command: str, chosen: Chosen) -> None:
    """Messages that are named must wait for their time still. Raises DurableError, which says where one is instead."""
    ids = chosen.selection.ids
    if not ids:
        return
    with connection(chosen.settings) as conn:
        migrator.check_version(conn, chosen.settings.db_schema)
        waiting = delayed.page(conn, chosen.settings.db_schema, Selection(ids=ids), limit=2 * len(ids))
        found = {each.id: each.state for each in delayed.whereabouts(conn, chosen.settings.db_schema, ids)}
    known = {row.id for row in waiting}
    for each in ids:
        if each not in known:
            state = found.get(each, "does not wait here: it is done, or never was")
            raise DurableError(f"{command}: message {each} {state}; nothing was changed")
