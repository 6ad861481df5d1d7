"""The schedules and delayed messages that a command selects: schedules by name, messages by id or by filters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, NamedTuple
from uuid import UUID

import typer

from durable.cli.arguments import parse_coming_time
from durable.cli.command import taking
from durable.cli.target import DatabaseUrl, SchemaName, connection, load_target, schema_connection
from durable.errors import DurableError, InvalidSetting
from durable.grammar import suggestion
from durable.settings import Settings
from durable.storage import delayed, known_names, schedules
from durable.storage.delayed import Selection
from durable.transports.addresses import canonical_name

_PANEL = "Filters"

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="APP:BUS|NAME|ID",
        help="bus whose settings apply (first), then names of schedules and UUIDs of messages",
        show_default=False,
    ),
]
TypeFilter = Annotated[str | None, typer.Option("--type", metavar="TYPE", help="message type", rich_help_panel=_PANEL)]
AddressFilter = Annotated[
    str | None,
    typer.Option("--address", metavar="NAME", help="endpoint received on, or destination", rich_help_panel=_PANEL),
]
DueFilter = Annotated[
    str | None,
    typer.Option("--due-before", metavar="TIME", help="due before then: in 2h, or ISO 8601", rich_help_panel=_PANEL),
]


class Chosen(NamedTuple):
    """The schedules named and the messages selected; no messages when only schedules are named."""

    settings: Settings
    names: Sequence[str]
    selection: Selection

    @property
    def has_messages(self) -> bool:
        return self.selection.is_narrowed or not self.names


def choose(
    *,
    words: Words = None,
    message_type: TypeFilter = None,
    address: AddressFilter = None,
    due_before: DueFilter = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
) -> Chosen:
    """Select schedules and messages. Raises WiringError."""
    app, names, ids = parse_words(words or [])
    before = None if due_before is None else parse_coming_time(due_before, datetime.now(UTC), option="--due-before")
    address = None if address is None else canonical_name(address)
    selection = Selection(ids=ids or None, message_type=message_type, address=address, due_before=before)
    return Chosen(load_target(app, database, schema).settings, names, selection)


over_scheduled = partial(taking, chosen=choose)
"""Give a command with the parameter `chosen` the options that select schedules and messages."""


def parse_words(words: Sequence[str]) -> tuple[str | None, list[str], list[UUID]]:
    """Split words into the name of the bus, names of schedules, and ids of messages."""
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
    """Read the schedules named, or all. Raises InvalidSetting when one does not exist."""
    with schema_connection(chosen.settings) as conn:
        rows = schedules.read(conn, chosen.settings.db_schema)
    known = {row.name: row for row in rows}
    refuse_unknown(chosen.names, known)
    return [known[name] for name in chosen.names] if chosen.names else rows


def refuse_unknown(names: Sequence[str], known: Collection[str]) -> None:
    """Raise InvalidSetting for a name that no schedule has."""
    for name in names:
        if name not in known:
            raise InvalidSetting(f"NAME: no schedule {name!r}{suggestion(name, known) or '; see scheduled list'}")


def refuse_too_much(command: str, chosen: Chosen, everything: bool) -> None:
    """Require messages, schedules, a filter or --all. Raises InvalidSetting."""
    if not everything and not chosen.names and not chosen.selection.is_narrowed:
        raise InvalidSetting(
            f"{command}: no message or schedule is selected; name some, give a filter such as --type, or give --all"
        )


def refuse_unmatched(chosen: Chosen) -> None:
    """Report an empty selection. Raises DurableError for a filter by a name that no delayed message has."""
    given = {"message_type": chosen.selection.message_type, "address": chosen.selection.address}
    with connection(chosen.settings) as conn:
        for column, name in given.items():
            known = known_names.of_delayed(conn, chosen.settings.db_schema, column, name) if name is not None else ()
            if name is not None and name not in known:
                option = "--type" if column == "message_type" else "--address"
                raise DurableError(f"{option}: no delayed message has {name!r}{suggestion(name, known)}")


def refuse_missing(command: str, chosen: Chosen) -> None:
    """Require that named messages are still delayed. Raises DurableError, which says where a message is instead."""
    ids = chosen.selection.ids
    if not ids:
        return
    with schema_connection(chosen.settings) as conn:
        waiting = delayed.page(conn, chosen.settings.db_schema, Selection(ids=ids), limit=2 * len(ids))
        found = {each.id: each.state for each in delayed.whereabouts(conn, chosen.settings.db_schema, ids)}
    known = {row.id for row in waiting}
    for each in ids:
        if each not in known:
            state = found.get(each, "is not delayed here: it is finished, or never existed")
            raise DurableError(f"{command}: message {each} {state}; nothing was changed")
