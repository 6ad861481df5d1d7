"""pause and resume: a handler, listener, destination or key, on every node, by a row of `circuits`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
from sqlalchemy import Connection

from durable.application.application import Application
from durable.bus import Bus
from durable.cli.arguments import parse_duration
from durable.cli.output import age, emit
from durable.cli.runs import actor_name
from durable.cli.target import Target, on_target, schema_connection
from durable.errors import InvalidSetting, WiringError
from durable.grammar import several, suggestion
from durable.redaction import printable
from durable.storage import actions, circuits, known_names, nodes
from durable.storage.circuits import CircuitKind
from durable.transports.addresses import as_stored, canonical_name

_MOST_SHOWN = 5


def _name(flag: str, metavar: str, help: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=help, show_default=False)


HandlerName = Annotated[
    str | None, _name("--handler", "TYPE", "handler of this message type; of an older version, its messages alone")
]
ListenerName = Annotated[str | None, _name("--listener", "NAME", "listener of this name")]
DestinationName = Annotated[str | None, _name("--destination", "URI", "destination, as shown by status")]
KeyName = Annotated[str | None, _name("--key", "KEY", "messages of this partition key")]
Span = Annotated[str | None, _name("--for", "TIME", "resume automatically after this time: 60, 10m, 1h30m")]
Anyway = Annotated[bool, typer.Option("--anyway", help="accept a name that neither APP:BUS nor the database knows")]
PauseReason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="reason; shown with the circuits")]


class CircuitName(NamedTuple):
    kind: CircuitKind
    name: str


def name_circuit(
    handler: HandlerName = None, listener: ListenerName = None, destination: DestinationName = None, key: KeyName = None
) -> CircuitName:
    """Name the one handler, listener, destination or key. Raises WiringError."""
    named = {"handler": handler, "listener": listener, "destination": destination, "key": key}
    given = [CircuitName(CircuitKind(kind), name) for kind, name in named.items() if name is not None]
    if len(given) != 1:
        told = several(len(given), "names", "are") if given else "no name is"
        raise WiringError(f"{told} given; give one of --handler TYPE, --listener NAME, --destination URI and --key KEY")
    kind, name = given[0]
    if not name:
        raise InvalidSetting(f"--{kind.value}: {name!r} is not a name; give that of a {kind.value}")
    return given[0]


@on_target(circuit=name_circuit, actor=actor_name)
def pause(
    target: Target,
    circuit: CircuitName,
    actor: str,
    span: Span = None,
    anyway: Anyway = False,
    reason: PauseReason = "paused by an operator",
) -> None:
    """Pause a handler, listener, destination or key on every node; its messages stay queued.

    Ends with 2 for a name that neither APP:BUS declares nor the database knows, unless --anyway is given. A paused
    listener answers Busy to its senders. A paused destination receives nothing, not even a ping.
    """
    duration = None if span is None else parse_duration(span, option="--for")
    (bus, settings), (kind, name) = target, circuit
    declared = [] if bus is None else _declared(bus.application, kind)
    with schema_connection(settings) as conn:
        keys = _keys(bus, kind, name)
        if not anyway and set(declared).isdisjoint([name, *keys]):
            known = known_names.read(conn, settings.db_schema, kind, [name, *keys])
            keys = as_stored(keys, name, known)
            _refuse_unknown(circuit, keys, list(dict.fromkeys([*declared, *known])))
        named = [(kind, each) for each in keys]
        handler = _handler(bus, conn, settings.db_schema, circuit)
        actions.pause(conn, settings.db_schema, named, reason=reason, actor=actor, duration=duration)
    until = "until it is resumed" if duration is None else f"for {age(duration)}"
    seconds = None if duration is None else duration.total_seconds()
    document = {"paused": True, "kind": kind.value, "key": name, "seconds": seconds}
    text = f"the {kind.value} {name} is paused {until}"
    if handler != name:
        text = f"handling of {name} is paused {until}; the other versions go on: their handler is {handler}"
    emit(document, text)


@on_target(circuit=name_circuit, actor=actor_name)
def resume(target: Target, circuit: CircuitName, actor: str) -> None:
    """Resume a paused handler, listener, destination or key, or close its circuit.

    A key, or an ordered handler, that is parked by a dead letter besides stays parked until it is resumed again. Ends
    with 1 when it was neither paused, open nor parked.
    """
    (bus, settings), (kind, name) = target, circuit
    with schema_connection(settings) as conn:
        found = [row for row in circuits.read(conn, settings.db_schema) if row.kind == kind]
        open_now, paused = {row.key for row in found}, {row.key for row in found if not row.parked}
        named = [(kind, each) for each in as_stored(_keys(bus, kind, name), name, open_now)]
        handler = _handler(bus, conn, settings.db_schema, circuit)
        resumed = actions.resume(conn, settings.db_schema, named, actor=actor)
    text = "is resumed" if resumed.was_open else f"was not paused{suggestion(name, open_now)}"
    if resumed.still_parked is not None:
        reason = printable(resumed.still_parked)
        text = f"is not paused any more, and still parked by a dead letter: {reason}; resume it again to go on"
    if handler != name and handler in paused:
        text += f"; its handler is {handler}, which stays paused"
    document = {"resumed": resumed.was_open, "kind": kind.value, "key": name, "still_parked": resumed.still_parked}
    emit(document, f"the {kind.value} {name} {text}")
    if not resumed.was_open:
        raise typer.Exit(1)


def _keys(bus: Bus | None, kind: CircuitKind, name: str) -> Sequence[str]:
    """List the keys of a name: an address resolved by message type is one destination for each type."""
    if kind is not CircuitKind.DESTINATION:
        return [name]
    return [canonical_name(name)] if bus is None else bus.runtime.envelope_factory.destinations_of(name)


def _handler(bus: Bus | None, conn: Connection, schema: str, circuit: CircuitName) -> str:
    """Return the handler that takes the messages of this name: of an older version that of a newer one."""
    if circuit.kind is not CircuitKind.HANDLER:
        return circuit.name
    declared = {} if bus is None else bus.application.handler_types()
    return (nodes.handlers(conn, schema) | declared).get(circuit.name, circuit.name)


def _declared(application: Application, kind: CircuitKind) -> Sequence[str]:
    """List the names of this kind that an application declares; keys are not declared."""
    match kind:
        case CircuitKind.HANDLER:
            return list(application.by_type())
        case CircuitKind.LISTENER:
            return [application.service, *(listening.endpoint for listening in application.listeners)]
        case CircuitKind.DESTINATION:
            return application.destinations()
        case _:
            return []


def _refuse_unknown(circuit: CircuitName, keys: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a misspelt name: its pause would pause nothing, and report success."""
    kind, name = circuit
    if set(keys).isdisjoint(known):
        some = f"; known: {', '.join(known[:_MOST_SHOWN])}" if known else "; name the bus that declares it"
        near = suggestion(name, known) or f"{some}; or give --anyway"
        raise InvalidSetting(f"--{kind.value}: no {kind.value} {name!r} is declared or stored{near}")
