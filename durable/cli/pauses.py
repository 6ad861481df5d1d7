"""pause and resume: a handler, a listener, a destination or a key, on every node, by a row of `circuits`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from durable.application.application import Application
from durable.bus import Bus
from durable.cli.arguments import parse_duration
from durable.cli.output import age, print_json
from durable.cli.target import DatabaseUrl, Debug, Json, OptionalBusName, SchemaName, connection, load_target
from durable.errors import InvalidSetting, WiringError
from durable.settings import suggestion
from durable.storage import circuits, known_names, migrator
from durable.storage.circuits import CircuitKind

_OPERATOR = "durable-agent"
_MOST_SHOWN = 5

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
Span = Annotated[
    str | None,
    typer.Option("--for", metavar="TIME", help="resume by itself after it: 60, 10m, 1h30m", show_default=False),
]
Anyway = Annotated[bool, typer.Option("--anyway", help="also a name that neither APP:BUS nor the database knows")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="is shown to whoever looks at the circuits")]


def pause(
    app: OptionalBusName = None,
    handler: HandlerName = None,
    listener: ListenerName = None,
    destination: DestinationName = None,
    key: KeyName = None,
    span: Span = None,
    anyway: Anyway = False,
    reason: Reason = "paused by an operator",
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Pause a handler, a listener, a destination or a key on every node: what waits goes on waiting.

    Ends with 2 for a name that neither APP:BUS declares nor the database knows, unless --anyway is given. A paused
    listener answers Busy to its senders. To a paused destination nothing is sent, not even a ping.
    """
    duration = None if span is None else parse_duration(span, option="--for")
    bus, settings = load_target(app, database, schema)
    kind, name = _named(handler=handler, listener=listener, destination=destination, key=key)
    declared = [] if bus is None else _declared(bus.application, kind)
    with connection(settings) as conn:
        migrator.check_version(conn, settings.db_schema)
        keys = _keys(bus, kind, name)
        if not anyway and set(declared).isdisjoint([name, *keys]):
            _refuse_unknown(kind, name, [*declared, *known_names.read(conn, settings.db_schema, kind)])
        for each in keys:
            circuits.pause(conn, settings.db_schema, kind, each, reason=reason, actor=_OPERATOR, duration=duration)
    until = "until it is resumed" if duration is None else f"for {age(duration)}"
    if json:
        seconds = None if duration is None else duration.total_seconds()
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
        open_now = [row.key for row in circuits.read(conn, settings.db_schema) if row.kind == kind]
        resumed = [circuits.resume(conn, settings.db_schema, kind, each) for each in _keys(bus, kind, name)]
    was_paused = any(resumed)
    near = "" if was_paused else suggestion(name, open_now)
    if json:
        print_json({"resumed": was_paused, "kind": kind.value, "key": name})
    else:
        print(f"the {kind.value} {name} {'goes on' if was_paused else 'was not paused'}{near}")
    if not was_paused:
        raise typer.Exit(1)


def _named(**named: str | None) -> tuple[CircuitKind, str]:
    """By the kinds of circuits that options name."""
    given = [(CircuitKind(kind), name) for kind, name in named.items() if name is not None]
    if len(given) != 1:
        raise WiringError("give --handler TYPE, --listener NAME, --destination URI or --key KEY, one of them")
    kind, name = given[0]
    if not name.strip():
        raise InvalidSetting(f"--{kind.value}: {name!r} is no name; give that of a {kind.value}")
    return kind, name


def _keys(bus: Bus | None, kind: CircuitKind, name: str) -> list[str]:
    """The keys of what is named: an address that is resolved by type names a destination for each."""
    return (
        bus.runtime.envelope_factory.destinations_of(name)
        if bus is not None and kind is CircuitKind.DESTINATION
        else [name]
    )


def _declared(application: Application, kind: CircuitKind) -> Sequence[str]:
    """The names of this kind that an application declares; keys are not declared."""
    match kind:
        case CircuitKind.HANDLER:
            return list(application.by_type())
        case CircuitKind.LISTENER:
            return [application.service, *(listening.endpoint for listening in application.listeners)]
        case CircuitKind.DESTINATION:
            return application.destinations()
        case _:
            return []


def _refuse_unknown(kind: CircuitKind, name: str, known: Sequence[str]) -> None:
    """A pause of a misspelt name would pause nothing, and say that it did."""
    if name not in known:
        some = f"; known: {', '.join(known[:_MOST_SHOWN])}" if known else "; name the bus that declares it"
        near = suggestion(name, known) or f"{some}; or give --anyway"
        raise InvalidSetting(f"--{kind.value}: no {kind.value} {name!r} is declared or stored{near}")
