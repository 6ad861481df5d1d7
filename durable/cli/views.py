"""The state of the service in two forms: plain values for JSON, and tables made from those values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, Final

from durable.cli.output import Block, Columns, Lists, Table, age, and_more, lists_of
from durable.listed import Listed
from durable.observability.health import NodeState, node_states, troubled_first
from durable.observability.stops import Stops
from durable.storage.circuits import CircuitKind, OpenCircuit
from durable.storage.leases import Backlog
from durable.storage.status import StatusSnapshot

Row = dict[str, Any]
_STATUS_LISTS: Final = ("problems", "needs", "outgoing", "incoming", "parked", "dead_letters", "circuits")


def status_figures(snapshot: StatusSnapshot, stale: timedelta) -> Row:
    states = list(node_states(snapshot.gauges, stale).values())
    return {
        "overdue_seconds": _seconds(snapshot.gauges.overdue),
        "nodes": {state.value: states.count(state) for state in NodeState},
        "partitions_ahead": snapshot.gauges.partitioned_days - 1,
    }


def status_lists(snapshot: StatusSnapshot, size: int) -> Lists:
    """Write the lists of a status, each up to this size: of a backlog what waits in the largest numbers."""
    parked = [
        {"key": group.key_id, "waiting": group.waiting, "oldest_age_seconds": _seconds(group.oldest_age)}
        for group in snapshot.gauges.parked
    ]
    return {
        "outgoing": Listed.of(_backlog_rows("destination", snapshot.outgoing), size),
        "incoming": Listed.of(_backlog_rows("message_type", snapshot.incoming), size),
        "parked": Listed.of(parked, size),
        "dead_letters": Listed.of([asdict(group) for group in snapshot.dead_letters], size),
        "circuits": circuit_rows(snapshot),
    }


def node_rows(snapshot: StatusSnapshot, stale: timedelta) -> list[Row]:
    """Write the registered nodes, and the owners that are no longer registered, of which only the id is known."""
    registered = {node.node_id: node for node in snapshot.gauges.nodes}
    return [
        {
            "node_id": node_id,
            "service": node and node.service,
            "description": node and node.description,
            "version": node and node.version,
            "started_at": node and node.started_at,
            "heartbeat_age_seconds": node and node.heartbeat_age.total_seconds(),
            "holds_lock": node_id in snapshot.gauges.locked,
            "owned_outgoing": snapshot.owned_outgoing.get(node_id, 0),
            "owned_incoming": snapshot.owned_incoming.get(node_id, 0),
            "state": state.value,
        }
        for node_id, state in troubled_first(node_states(snapshot.gauges, stale))
        for node in [registered.get(node_id)]
    ]


def circuit_rows(snapshot: StatusSnapshot) -> Listed[Row]:
    now, stops = snapshot.gauges.now, Stops(snapshot.gauges)
    by_type, by_destination = _due(snapshot.incoming), _due(snapshot.outgoing)
    waiting: Mapping[str, Callable[[OpenCircuit], int]] = {
        CircuitKind.DESTINATION: lambda circuit: by_destination.get(circuit.key, 0),
        CircuitKind.HANDLER: lambda circuit: stops.waiting(circuit, by_type, snapshot.parked),
        CircuitKind.KEY: lambda circuit: stops.waiting(circuit, by_type, snapshot.parked),
    }
    rows = [
        {name: value for name, value in circuit._asdict().items() if name != "ordering_key"}
        | {
            "state": _state(circuit, now),
            "open_seconds": (now - circuit.since).total_seconds(),
            "waiting": waiting[circuit.kind](circuit) if circuit.kind in waiting else None,
        }
        for circuit in snapshot.circuits.rows
    ]
    return Listed(rows, snapshot.circuits.total)


def _due(groups: Sequence[Backlog]) -> dict[str, int]:
    """Count the messages of each group that do not wait for a time of their own."""
    return {group.name: group.total - group.scheduled for group in groups}


def _state(circuit: OpenCircuit, now: datetime) -> str:
    if circuit.parked:
        return "parked"
    if not circuit.probing:
        return "paused"
    if circuit.kind == CircuitKind.DESTINATION:
        return "latched"
    return "open" if circuit.until is not None and circuit.until > now else "half-open"


def status(report: Row) -> list[Block]:
    """Show the status; only the versions when the schema is at another version."""
    versions = report["versions"]
    blocks: list[Block] = [
        f"durable {versions['durable']} on Postgres {versions['postgres']}, database {versions['database']}, "
        f"schema {versions['schema']} at version {versions['schema_version'] or '(none)'}"
    ]
    listed = lists_of(report, _STATUS_LISTS)
    if "nodes" in report:
        blocks += [
            "nodes: " + ", ".join(f"{count} {state}" for state, count in report["nodes"].items()),
            f"partitions: {report['partitions_ahead']} days ahead",
            _backlog_table("outgoing, by destination", "destination", listed["outgoing"]),
            _backlog_table("incoming, by message type", "message_type", listed["incoming"]),
            *_overdue(report["overdue_seconds"]),
            *_parked(listed["parked"]),
            *_dead_letters(listed["dead_letters"]),
            *circuits(listed["circuits"]),
            "",
        ]
    problems = listed["problems"]
    more = [and_more(problems.left)] if problems.left else []
    return [*blocks, *(f"unhealthy: {problem}" for problem in problems.rows), *more, *_verdict(report, listed)]


def _verdict(report: Row, listed: Lists) -> list[Block]:
    """Tell the work that the limits of health leave out: `healthy` alone stands for no work at all."""
    needs = report.get("needs_in_short", "")
    more = listed["needs"].total - listed["problems"].total
    if not needs:
        return ["healthy"] if report["healthy"] else []
    if report["healthy"]:
        return [f"healthy by its limits; {more} {'thing needs' if more == 1 else 'things need'} you: {needs}"]
    return [f"{more} more {'thing needs' if more == 1 else 'things need'} you: {needs}"]


def nodes(listed: Listed[Row]) -> list[Block]:
    columns: Columns = {
        "node": "node_id",
        "service": "service",
        "process": "description",
        "version": "version",
        "started": "started_at",
        "heartbeat": lambda row: _seconds_ago(row["heartbeat_age_seconds"]),
        "lock": lambda row: "held" if row["holds_lock"] else "absent",
        "outgoing": "owned_outgoing",
        "incoming": "owned_incoming",
        "state": "state",
    }
    return [Table.of("nodes", listed, columns)] if listed.rows else ["no registered node"]


def circuits(listed: Listed[Row]) -> list[Block]:
    columns: Columns = {
        "kind": "kind",
        "key": "key",
        "state": "state",
        "waiting": "waiting",
        "for": lambda row: _age(row["open_seconds"]),
        "until": _end,
        "reason": "reason",
        "by": "actor",
    }
    return [Table.of("open circuits", listed, columns)] if listed.rows else ["no open circuit"]


def _backlog_rows(name: str, groups: Sequence[Backlog]) -> list[Row]:
    """Write the groups, the largest first."""
    return [
        {
            name: group.name,
            "waiting": group.total,
            "unowned": group.unowned,
            "scheduled": group.scheduled,
            "oldest_age_seconds": _seconds(group.oldest_age),
            "oldest_unowned_age_seconds": _seconds(group.oldest_unowned_age),
        }
        for group in sorted(groups, key=_smallness)
    ]


def _smallness(group: Backlog) -> int:
    return -group.total


def _backlog_table(title: str, name: str, listed: Listed[Row]) -> Block:
    columns: Columns = {
        name.replace("_", " "): name,
        "waiting": "waiting",
        "unowned": "unowned",
        "scheduled": "scheduled",
        "oldest": lambda row: _age(row["oldest_age_seconds"]),
        "oldest unowned": lambda row: _age(row["oldest_unowned_age_seconds"]),
    }
    return Table.of(title, listed, columns) if listed.rows else f"{title}: none waiting"


def _overdue(seconds: float | None) -> list[Block]:
    return [] if seconds is None else [f"scheduled work is overdue by {_age(seconds)}"]


def _parked(listed: Listed[Row]) -> list[Block]:
    columns: Columns = {"key": "key", "waiting": "waiting", "oldest": lambda row: _age(row["oldest_age_seconds"])}
    return [Table.of("messages that wait for an encryption key", listed, columns)] if listed.rows else []


def _dead_letters(listed: Listed[Row]) -> list[Block]:
    columns = {
        "message type": "message_type",
        "exception": "exception_type",
        "count": "count",
        "first": "first",
        "last": "last",
    }
    return [Table.of("dead letters", listed, columns)] if listed.rows else ["no dead letters"]


def _end(circuit: Row) -> str | datetime | None:
    is_endless = circuit["until"] is None and not circuit["probing"]
    return "until it is resumed" if is_endless else circuit["until"]


def _seconds(duration: timedelta | None) -> float | None:
    return None if duration is None else duration.total_seconds()


def _age(seconds: float | None) -> str | None:
    return None if seconds is None else age(timedelta(seconds=seconds))


def _seconds_ago(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.1f} s ago"
