"""Latched, paused and parked things, one row each, read by every node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection

from durable.duration import within_calendar
from durable.envelope import NodeId
from durable.listed import SHOWN, Listed, start
from durable.messages.ordering import stream_of
from durable.storage.database import channel
from durable.storage.sql import circuits as circuit_statements

_MOST_PROBED: Final = 10_000
"""The parked keys, the oldest, that are looked at for messages behind them: a bound for the work of one look."""


BY_CODE: Final = ", in its code"
"""The end of the actor of a pause by the code of a service, whose reason may quote messages."""


class CircuitKind(StrEnum):
    DESTINATION = "destination"
    HANDLER = "handler"
    LISTENER = "listener"
    SCHEDULE = "schedule"
    KEY = "key"


class OpenCircuit(NamedTuple):
    kind: str
    key: str
    reason: str
    since: datetime
    until: datetime | None
    """The time at which the circuit closes, or is tried again."""
    actor: str
    probing: bool
    """True if failures opened the circuit, so that a success closes it."""
    parked: bool = False
    """True for a key, or an ordered handler, that a dead letter has stopped until a resume."""
    ordering_key: str | None = None
    """Ordering key of the dead letter, for a park."""

    @property
    def order(self) -> str | None:
        """The ordering key of the messages that it stops: of a key, and of a park."""
        return self.key if self.kind == CircuitKind.KEY else self.ordering_key


class Resumed(NamedTuple):
    """The outcome of a resume: whether it ended something, and the reason of the park that it left, if any."""

    was_open: bool
    still_parked: str | None = None


def open_circuit(
    conn: Connection,
    schema: str,
    kind: CircuitKind,
    key: str,
    *,
    reason: str,
    actor: str,
    duration: timedelta | None = None,
) -> None:
    """Open a circuit because of failures, until close_circuit(), to be tried after this time. An open one stays."""
    params = _named(schema, kind, key) | _said(reason, actor, duration)
    conn.execute(circuit_statements.OPEN_CIRCUIT.within(schema), params)
    _forget_counts(conn, schema, kind, key)


def _said(reason: str, actor: str, duration: timedelta | None) -> dict[str, Any]:
    bounded = None if duration is None else within_calendar(duration)
    return {"reason": reason, "actor": actor, "duration": bounded}


def close_circuit(conn: Connection, schema: str, kind: CircuitKind, key: str) -> bool:
    """Close a circuit that an attempt got through. False when it was not open, or is paused."""
    closed = conn.execute(circuit_statements.CLOSE_CIRCUIT.within(schema), _named(schema, kind, key)).scalar_one()
    return bool(closed)


def pause(
    conn: Connection, schema: str, kind: CircuitKind, key: str, *, reason: str, actor: str, duration: timedelta | None
) -> None:
    """Open it now, for this time or until resume(), and tell the nodes at once: the word of an operator."""
    params = _named(schema, kind, key) | _said(reason, actor, duration)
    conn.execute(circuit_statements.PAUSE.within(schema), params)
    _forget_counts(conn, schema, kind, key)


def pause_each(
    conn: Connection,
    schema: str,
    named: Sequence[tuple[CircuitKind, str]],
    *,
    reason: str,
    actor: str,
    duration: timedelta | None,
) -> None:
    """Pause all of these, or none: an address that is resolved by message type is one destination for each."""
    for kind, key in sorted(named):  # in one order, so that two operators do not wait for each other
        pause(conn, schema, kind, key, reason=reason, actor=actor, duration=duration)


def resume_each(conn: Connection, schema: str, named: Sequence[tuple[CircuitKind, str]]) -> Resumed:
    """Resume all of these, or none."""
    return together([resume(conn, schema, kind, key) for kind, key in sorted(named)])


def together(resumed: Sequence[Resumed]) -> Resumed:
    """Return one outcome for resumes of several."""
    parked = [each.still_parked for each in resumed if each.still_parked is not None]
    return Resumed(any(each.was_open for each in resumed), next(iter(parked), None))


def pause_at_least(
    conn: Connection, schema: str, kind: CircuitKind, key: str, *, reason: str, actor: str, duration: timedelta | None
) -> None:
    """Open it for this time or until resume(), as code does: a pause is lengthened by it, and never cut short."""
    params = _named(schema, kind, key) | _said(reason, actor, duration)
    conn.execute(circuit_statements.PAUSE_AT_LEAST.within(schema), params)


def park(
    conn: Connection, schema: str, kind: CircuitKind, key: str, *, reason: str, actor: str, ordering_key: str
) -> None:
    """Stop a key, or an ordered handler, behind a dead letter until resume(), whatever ends a pause of it.

    `ordering_key`: that of the letter. The handlers of all versions of its message have it, under whatever names.
    """
    params = _named(schema, kind, key) | {"reason": reason, "actor": actor, "ordering_key": ordering_key}
    conn.execute(circuit_statements.PARK.within(schema), params)


def resume(conn: Connection, schema: str, kind: CircuitKind, key: str, *, seen: datetime | None = None) -> Resumed:
    """End its pause, or what failures have opened; without one of these its park. The nodes are told at once.

    `seen`: end only what was stopped at that time. The park of an ordered handler is that of all versions of its
    message, and of the older names that it had.
    """
    parked = {"parked_key": parked_key(kind, key), "orders": orders(conn, schema, kind, key)}
    params = _named(schema, kind, key) | parked | {"seen": seen}
    return Resumed(*conn.execute(circuit_statements.RESUME.within(schema), params).one())


def parked_key(kind: CircuitKind, key: str) -> str:
    """Return the key of a park of this: an ordered handler is parked by its stream."""
    return stream_of(key) if kind is CircuitKind.HANDLER else key


def orders(conn: Connection, schema: str, kind: CircuitKind, key: str) -> list[str]:
    """Read the ordering keys that a park of this has, as far as they are known: nodes declare those of handlers."""
    if kind is not CircuitKind.HANDLER:
        return []
    params = {"key": key, "parked_key": parked_key(kind, key)}
    return list(conn.execute(circuit_statements.READ_ORDERS.within(schema), params).scalars())


def of_name(
    conn: Connection, schema: str, found: Sequence[OpenCircuit], kind: CircuitKind, key: str
) -> Sequence[OpenCircuit]:
    """Choose the circuits of this name from those that are open: what a resume ends first, before its parks."""
    known, parked = orders(conn, schema, kind, key), parked_key(kind, key)
    of_kind = [each for each in found if each.kind == kind]
    parks = [each for each in of_kind if each.parked and (each.key == parked or each.order in known)]
    return [each for each in of_kind if each.key == key and not each.parked] + parks


def parked_types(conn: Connection, schema: str) -> dict[str, set[str]]:
    """Read the message types behind parks of ordered handlers, each with the ordering keys of these parks."""
    found: dict[str, set[str]] = {}
    for name, ordering_key in conn.execute(circuit_statements.READ_PARKED_TYPES.within(schema)):
        found.setdefault(name, set()).add(ordering_key)
    return found


def close_ended(conn: Connection, schema: str) -> None:
    """Close those whose time is over."""
    conn.execute(circuit_statements.CLOSE_ENDED_CIRCUITS.within(schema))


def begin_trial(conn: Connection, schema: str, handler: str, *, lease: timedelta) -> bool:
    """True when this node may try the circuit of this handler; no other node may before `lease` is over."""
    params = {"key": handler, "lease": lease}
    return conn.execute(circuit_statements.BEGIN_TRIAL.within(schema), params).first() is not None


def put_off_probe(
    conn: Connection, schema: str, message_type: str, *, reason: str, shortest: timedelta, longest: timedelta
) -> None:
    """The try has failed: the next one after as long as the circuit is open already, within these bounds."""
    conn.execute(
        circuit_statements.PUT_OFF_PROBE.within(schema),
        {"key": message_type, "reason": reason, "shortest": shortest, "longest": longest},
    )


def try_again(conn: Connection, schema: str, message_type: str) -> None:
    """The try has told nothing about the handler: the next one may follow at once."""
    conn.execute(circuit_statements.TRY_AGAIN.within(schema), {"key": message_type})


def share_counts(
    conn: Connection, schema: str, handler: str, node: NodeId, *, messages: int, failures: int, window: timedelta
) -> tuple[int, int]:
    """Tell the other nodes what this one counts of a handler now; returns what they count, messages and failures."""
    params = {"handler": handler, "node": node, "messages": messages, "failures": failures, "window": window}
    row = conn.execute(circuit_statements.SHARE_COUNTS.within(schema), params).one()
    return row.messages, row.failures


def _forget_counts(conn: Connection, schema: str, kind: CircuitKind, key: str) -> None:
    """Delete the counts from before a handler was stopped."""
    if kind is CircuitKind.HANDLER:
        conn.execute(circuit_statements.FORGET_COUNTS.within(schema), {"handler": key})


def count_behind(
    conn: Connection, schema: str, keys: Sequence[str], *, limit: int | None = None, groups: int | None = None
) -> dict[str, int]:
    """Count the messages that wait in the order of each of these ordering keys, of each up to a limit; with `groups`,
    only of so many keys: the first behind which any waits.
    """
    params = {"keys": list(keys), "limit": limit, "groups": groups}
    rows = conn.execute(circuit_statements.COUNT_BEHIND.within(schema), params) if keys else ()
    return {row.key: row.waiting for row in rows}


def orders_of(circuits: Iterable[OpenCircuit]) -> list[str]:
    """Return the ordering keys that these stop, each once."""
    return list(dict.fromkeys(each.order for each in circuits if each.order is not None))


def read(conn: Connection, schema: str) -> list[OpenCircuit]:
    """Read the open circuits and pauses."""
    return [OpenCircuit(*row) for row in conn.execute(circuit_statements.READ_CIRCUITS.within(schema))]


def read_oldest(conn: Connection, schema: str, most: int) -> list[OpenCircuit]:
    """Read the open circuits and pauses, of keys so many: the oldest, and of those that dead letters have parked the
    oldest behind which messages wait, before the others.
    """
    rows = conn.execute(circuit_statements.READ_OLDEST.within(schema), {"most": most, "most_probed": _MOST_PROBED})
    return [OpenCircuit(*row) for row in rows]


def count(conn: Connection, schema: str) -> dict[str, int]:
    """Count the open circuits and pauses of each kind."""
    return {row.kind: row[1] for row in conn.execute(circuit_statements.COUNT_CIRCUITS.within(schema))}


def listed(
    conn: Connection, schema: str, size: int = SHOWN, page: int = 1, *, kind: CircuitKind | None = None
) -> Listed[OpenCircuit]:
    """Read a page of the open circuits and pauses, of one kind or of all: the longest open first, keys at the end."""
    counts = count(conn, schema)
    params = {"kind": kind and kind.value, "most": size, "start": start(size, page)}
    rows = [OpenCircuit(*row) for row in conn.execute(circuit_statements.LIST_CIRCUITS.within(schema), params)]
    return Listed(rows, sum(counts.values()) if kind is None else counts.get(kind, 0), page)


def _named(schema: str, kind: CircuitKind, key: str) -> dict[str, str]:
    return {"kind": kind.value, "key": key, "channel": channel(schema)}
