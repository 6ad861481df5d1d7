"""pause and resume: a handler, a listener, a destination or a key, on every node, by a row of `circuits`."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from durable.application import Application
from durable.bus import Bus
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
DestinationName = Annotated[
    str | None,
    typer.Option("--destination", metavar="URI", help="what is sent there, as status shows it", show_default=False),
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
    destination: DestinationName = None,
    key: KeyName = None,
    seconds: Seconds = None,
    reason: Reason = "paused by an operator",
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Pause a handler, a listener, a destination or a key on every node: what waits goes on waiting.

    A paused listener answers Busy to its senders. To a paused destination nothing is sent, not even a ping.
    """
    if seconds is not None and not 0 < seconds < timedelta(days=36_500).total_seconds():
        raise InvalidSetting(f"--for: {seconds:g} is no time; write seconds, such as 60")
    bus, settings = load_target(app, database, schema)
    kind, name = _named(handler=handler, listener=listener, destination=destination, key=key)
    if bus is not None:
        _refuse_unknown(bus.application, kind, name)
    duration = None if seconds is None else timedelta(seconds=seconds)
    with connection(settings) as conn:
        migrator.check_version(conn, settings.db_schema)
        for each in _keys(bus, kind, name):
            circuits.pause(conn, settings.db_schema, kind, each, reason=reason, actor=_OPERATOR, duration=duration)
    until = "until it is resumed" if duration is None else f"for {age(duration)}"
    if json:
        print_json({"paused": True, "kind": kind.value, "key": name, "seconds": seconds})
    else:
        print(f"the {kind.value} {name} is paused {until}")


def resume(
    app: OptionalBusName = None,
    handler: HandlerName = None,
    listener: ListenerName = None,
    destination: DestinationName = None,
    key: KeyName = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """End a pause, or close a circuit that failures have opened. Ends with 1 when there was none."""
    bus, settings = load_target(app, database, schema)
    kind, name = _named(handler=handler, listener=listener, destination=destination, key=key)
    with connection(settings) as conn:
        migrator.check_version(conn, settings.db_schema)
        resumed = [circuits.resume(conn, settings.db_schema, kind, each) for each in _keys(bus, kind, name)]
    was_paused = any(resumed)
    if json:
        print_json({"resumed": was_paused, "kind": kind.value, "key": name})
    else:
        print(f"the {kind.value} {name} {'goes on' if was_paused else 'was not paused'}")
    if not was_paused:
        raise typer.Exit(1)


def _named(**named: str | None) -> tuple[Kind, str]:
    """By the kinds of circuits that options name."""
    given = [(Kind(kind), name) for kind, name in named.items() if name is not None]
    if len(given) != 1:
        raise WiringError("give --handler TYPE, --listener NAME, --destination URI or --key KEY, one of them")
    return given[0]


def _keys(bus: Bus | None, kind: Kind, name: str) -> list[str]:
    """The keys of what is named: an address that is resolved by type names a destination for each."""
    return bus.runtime.composer.destinations_of(name) if bus is not None and kind is Kind.DESTINATION else [name]


def _refuse_unknown(application: Application, kind: Kind, key: str) -> None:
    """A pause of a misspelt name would pause nothing, and say that it did. Destinations may be of other versions of
    the code, and listeners of other processes."""
    if kind is Kind.HANDLER and key not in (handled := application.by_type()):
        raise InvalidSetting(f"--handler: {key!r} has no handler here{suggestion(key, handled)}")
    if kind is Kind.DESTINATION and "://" not in key:
        known = application.destinations()
        raise InvalidSetting(f"--destination: {key!r} is no URI{suggestion(key, known)}; known: {', '.join(known)}")
