"""Options for what is replayed: the table or the files that the messages are in, and filters of messages."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from durable.cli.arguments import parse_id, parse_period
from durable.cli.dead_letters.selection import SideName
from durable.errors import InvalidSetting

if TYPE_CHECKING:
    from durable.pipeline.choosing import Choice


class Origin(StrEnum):
    HISTORY = "history"
    DEAD_LETTERS = "dead-letters"


def _filter(flag: str, metavar: str | None, help: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=help, rich_help_panel="What is replayed")


From = Annotated[Origin, _filter("--from", None, "table of the lake")]
Parquet = Annotated[
    str | None,
    _filter("--parquet", "PLACE", "files to read instead of a lake; their place is taken literally, without wildcards"),
]
Service = Annotated[str | None, _filter("--service", "NAME", "archived by this service")]
Side = Annotated[SideName | None, _filter("--side", None, "messages that the service has sent, or received")]
Types = Annotated[list[str] | None, _filter("--type", "TYPE", "message types")]
Addresses = Annotated[list[str] | None, _filter("--address", "NAME", "went there, or came in here")]
Ids = Annotated[list[str] | None, _filter("--id", "UUID", "ids of messages")]
Since = Annotated[str | None, _filter("--since", "TIME", "finished then or later: 2h ago, or ISO 8601")]
Until = Annotated[str | None, _filter("--until", "TIME", "finished before that")]
Where = Annotated[str | None, _filter("--where", "SQL", "a condition in Spark's SQL over the columns")]
All = Annotated[bool, _filter("--all", None, "all messages, without any filter")]


class Chosen(NamedTuple):
    """The filters, and the files that are read instead of a lake. `since`, `until`: as they were given."""

    choice: Choice
    parquet: str | None
    since: str | None
    until: str | None


def read_choice(
    origin: From = Origin.HISTORY,
    parquet: Parquet = None,
    service: Service = None,
    side: Side = None,
    types: Types = None,
    addresses: Addresses = None,
    ids: Ids = None,
    since: Since = None,
    until: Until = None,
    where: Where = None,
    every: All = False,
) -> Chosen:
    """Read the filters, of which at least one is given, or --all. Raises InvalidSetting."""
    from durable.pipeline.choosing import Choice

    first, last = parse_period(since, until)
    choice = Choice(
        table="dead_letters" if origin is Origin.DEAD_LETTERS else "history",
        service=service,
        side=None if side is None else side.value,
        types=types or (),
        addresses=addresses or (),
        ids=[parse_id(each) for each in ids or ()],
        since=first,
        until=last,
        where=where,
    )
    if not every and not choice.is_narrowed:
        raise InvalidSetting("replay: filter the messages, such as by --type or --since; or give --all")
    return Chosen(choice, parquet, since, until)
