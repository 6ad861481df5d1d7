"""pause and resume: a handler or a listener, on every node of the service, by a row of `circuits`."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from durable.cli.output import age, print_json
from durable.cli.target import DatabaseUrl, Debug, Json, OptionalBusName, SchemaName, connection, load_target
from durable.errors import InvalidSetting, WiringError
from durable.settings import suggestion
from durable.storage import circuits, migrator
from durable.storage.circuits import Kind

_OPERATOR = "durable-agent"

HandlerName = Annotated[
    str | None, typer.Option("--handler", metavar="TYPE", help="the handler of this message type", show_default=False)
]
ListenerName = Annotated[
    str | None, typer.Option("--listener", metavar="NAME", help="the listener of this name", show_default=False)
]
Seconds = Annotated[
    float | None, typer.Option("--for", metavar="SECONDS", help="resume by itself after this time", show_default=False)
]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="is shown to whoever looks at the circuits")]


def pause(
    app: OptionalBusName = None,
    handler: HandlerName = None,
    listener: ListenerName = None,
    seconds: Seconds = None,
    reason: Reason = "paused by an operator",
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Pause a handler or a listener on every node: what waits goes on waiting, and senders see Busy."""
    if seconds is not None and not 0 < seconds < timedelta(days=36_500).total_seconds():
        raise InvalidSetting(f"--for: {seconds:g} is no time; write seconds, such as 60")
    bus, settings = load_target(app, database, schema)
    kind, key = _named(handler, listener)
    if bus is not None and kind is Kind.HANDLER and key not in (known := bus.application.by_type()):
        raise InvalidSetting(f"--handler: {key!r} has no handler here{suggestion(key, known)}")
    duration = None if seconds is None else timedelta(seconds=seconds)
    with connection(settings) as conn:
        migrator.check_version(conn, settings.db_schema)
        circuits.pause(conn, settings.db_schema, kind, key, reason=reason, actor=_OPERATOR, duration=duration)
    until = "until it is resumed" if duration is None else f"for {age(duration)}"
    if json:
        print_json({"paused": True, "kind": kind.value, "key": key, "seconds": seconds})
    else:
        print(f"the {kind.value} {key} is paused {until}")


def resume(
    app: OptionalBusName = None,
    handler: HandlerName = None,
    listener: ListenerName = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """End a pause. Ends with 1 when there was none."""
    _, settings = load_target(app, database, schema)
    kind, key = _named(handler, listener)
    with connection(settings) as conn:
        migrator.check_version(conn, settings.db_schema)
        was_paused = circuits.resume(conn, settings.db_schema, kind, key)
    if json:
        print_json({"resumed": was_paused, "kind": kind.value, "key": key})
    else:
        print(f"the {kind.value} {key} {'goes on' if was_paused else 'was not paused'}")
    if not was_paused:
        raise typer.Exit(1)


def _named(handler: str | None, listener: str | None) -> tuple[Kind, str]:
    match handler, listener:
        case str(), None:
            return Kind.HANDLER, handler
        case None, str():
            return Kind.LISTENER, listener
        case _:
            raise WiringError("give --handler TYPE or --listener NAME, one of them")
