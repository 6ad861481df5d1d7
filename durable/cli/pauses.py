"""pause and resume: a handler, a listener or a key, on every node of the service, by a row of `circuits`."""

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
KeyName = Annotated[
    str | None, typer.Option("--key", metavar="KEY", help="the messages of this key", show_default=False)
]
Seconds = Annotated[
    float | None, typer.Option("--for", metavar="SECONDS", help="resume by itself after this time", show_default=False)
]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="is shown to whoever looks at the circuits")]


def pause(
    app: OptionalBusName = None,
    handler: HandlerName = None,
    listener: ListenerName = None,
    key: KeyName = None,
    seconds: Seconds = None,
    reason: Reason = "paused by an operator",
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Pause a handler, a listener or a key on every node: what waits goes on waiting, and senders see Busy."""
    if seconds is not None and not 0 < seconds < timedelta(days=36_500).total_seconds():
        raise InvalidSetting(f"--for: {seconds:g} is no time; write seconds, such as 60")
    bus, settings = load_target(app, database, schema)
    kind, name = _named(handler, listener, key)
    if bus is not None and kind is Kind.HANDLER and name not in bus.application.handlers:
        known = bus.application.handlers
        raise InvalidSetting(f"--handler: {name!r} has no handler here{suggestion(name, known)}")
    duration = None if seconds is None else timedelta(seconds=seconds)
    with connection(settings) as conn:
        migrator.check_version(conn, settings.db_schema)
        circuits.pause(conn, settings.db_schema, kind, name, reason=reason, actor=_OPERATOR, duration=duration)
    until = "until it is resumed" if duration is None else f"for {age(duration)}"
    if json:
        print_json({"paused": True, "kind": kind.value, "key": name, "seconds": seconds})
    else:
        print(f"the {kind.value} {name} is paused {until}")


def resume(
    app: OptionalBusName = None,
    handler: HandlerName = None,
    listener: ListenerName = None,
    key: KeyName = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """End a pause. Ends with 1 when there was none."""
    _, settings = load_target(app, database, schema)
    kind, name = _named(handler, listener, key)
    with connection(settings) as conn:
        migrator.check_version(conn, settings.db_schema)
        was_paused = circuits.resume(conn, settings.db_schema, kind, name)
    if json:
        print_json({"resumed": was_paused, "kind": kind.value, "key": name})
    else:
        print(f"the {kind.value} {name} {'goes on' if was_paused else 'was not paused'}")
    if not was_paused:
        raise typer.Exit(1)


def _named(handler: str | None, listener: str | None, key: str | None) -> tuple[Kind, str]:
    match handler, listener, key:
        case str(), None, None:
            return Kind.HANDLER, handler
        case None, str(), None:
            return Kind.LISTENER, listener
        case None, None, str():
            return Kind.KEY, key
        case _:
            raise WiringError("give --handler TYPE, --listener NAME or --key KEY, one of them")
