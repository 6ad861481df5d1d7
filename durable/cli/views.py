"""The state of the service in two forms: plain values for JSON, and tables made from those values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from durable.cli.output import Block, Columns, Table, age
from durable.observability.health import NodeState, node_states
from durable.observability.stops import Stops
from durable.storage.circuits import CircuitKind, OpenCircuit
from durable.storage.leases import Backlog
from durable.storage.status import StatusSnapshot

Row = dict[str, Any]


def status_rows(snapshot: StatusSnapshot, stale: timedelta) -> Row:
    states = list(node_states(snapshot.gauges, stale).values())
    return {
        "outgoing": [_backlog_row("destination", group) for group in snapshot.outgoing],
        "incoming": [_backlog_row("message_type", group) for group in snapshot.incoming],
        "overdue_seconds": _seconds(snapshot.gauges.overdue),
        "parked": [
            {"key": group.key_id, "waiting": group.waiting, "oldest_age_seconds": _seconds(group.oldest_age)}
            for group in snapshot.gauges.parked
        ],
        "dead_letters": [asdict(group) for group in snapshot.dead_letters],
        "circuits": circuit_rows(snapshot),
        "nodes": {state.value: states.count(state) for state in NodeState},
        "partitions_ahead": snapshot.gauges.partitioned_days - 1,
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
        for node_id, state in node_states(snapshot.gauges, stale).items()
        for node in [registered.get(node_id)]
    ]


def circuit_rows(snapshot: StatusSnapshot) -> list[Row]:
    now, stops = snapshot.gauges.now, Stops(snapshot.gauges)
    by_type, by_destination = _due(snapshot.incoming), _due(snapshot.outgoing)
    waiting: Mapping[str, Callable[[OpenCircuit], int]] = {
        CircuitKind.DESTINATION: lambda circuit: by_destination.get(circuit.key, 0),
        CircuitKind.HANDLER: lambda circuit: stops.waiting(circuit, by_type),
        CircuitKind.KEY: lambda circuit: snapshot.parked.get(circuit.key, 0),
    }
    return [
        circuit._asdict()
        | {
            "state": _state(circuit, now),
            "open_seconds": (now - circuit.since).total_seconds(),
            "waiting": waiting[circuit.kind](circuit) if circuit.kind in waiting else None,
        }
        for circuit in snapshot.gauges.circuits
    ]


def _due(groups: Sequence[Backlog]) -> dict[str, int]:
    """Count the messages of each group that do not wait for a time of their own."""
    return {group.name: group.total - group.scheduled for group in groups}


def _state(circuit: OpenCircuit, now: datetime) -> str:
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
    if "nodes" in report:
        blocks += [
            "nodes: " + ", ".join(f"{count} {state}" for state, count in report["nodes"].items()),
            f"partitions: {report['partitions_ahead']} days ahead",
            _backlog_table("outgoing, by destination", "destination", report["outgoing"]),
            _backlog_table("incoming, by message type", "message_type", report["incoming"]),
            *_overdue(report["overdue_seconds"]),
            *_parked(report["parked"]),
            *_dead_letters(report["dead_letters"]),
            *circuits(report["circuits"]),
            "",
        ]
    return [*blocks, *(f"unhealthy: {problem}" for problem in report["problems"]), *_verdict(report)]


def _verdict(report: Row) -> list[Block]:
    """Tell the work that the limits of health leave out: `healthy` alone stands for no work at all."""
    needs = report.get("needs_in_short", "")
    more = len(report.get("needs", ())) - len(report["problems"])
    if not needs:
        return ["healthy"] if report["healthy"] else []
    if report["healthy"]:
        return [f"healthy by its limits; {more} {'thing needs' if more == 1 else 'things need'} you: {needs}"]
    return [f"{more} more {'thing needs' if more == 1 else 'things need'} you: {needs}"]


def nodes(rows: Sequence[Row]) -> list[Block]:
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
    return [Table.of("nodes", rows, columns)] if rows else ["no registered node"]


def circuits(rows: Sequence[Row]) -> list[Block]:
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
    return [Table.of("open circuits", rows, columns)] if rows else ["no open circuit"]


def _backlog_row(name: str, group: Backlog) -> Row:
    return {
        name: group.name,
        "waiting": group.total,
        "unowned": group.unowned,
        "scheduled": group.scheduled,
        "oldest_age_seconds": _seconds(group.oldest_age),
        "oldest_unowned_age_seconds": _seconds(group.oldest_unowned_age),
    }


def _backlog_table(title: str, name: str, rows: Sequence[Row]) -> Block:
    columns: Columns = {
        name.replace("_", " "): name,
        "waiting": "waiting",
        "unowned": "unowned",
        "scheduled": "scheduled",
        "oldest": lambda row: _age(row["oldest_age_seconds"]),
        "oldest unowned": lambda row: _age(row["oldest_unowned_age_seconds"]),
    }
    return Table.of(title, rows, columns) if rows else f"{title}: none waiting"


def _overdue(seconds: float | None) -> list[Block]:
    return [] if seconds is None else [f"scheduled work is overdue by {_age(seconds)}"]


def _parked(rows: Sequence[Row]) -> list[Block]:
    columns: Columns = {"key": "key", "waiting": "waiting", "oldest": lambda row: _age(row["oldest_age_seconds"])}
    return [Table.of("messages that wait for an encryption key", rows, columns)] if rows else []


def _dead_letters(rows: Sequence[Row]) -> list[Block]:
    columns = {
        "message type": "message_type",
        "exception": "exception_type",
        "count": "count",
        "first": "first",
        "last": "last",
    }
    return [Table.of("dead letters", rows, columns)] if rows else ["no dead letters"]


def _end(circuit: Row) -> str | datetime | None:
    is_endless = circuit["until"] is None and not circuit["probing"]
    return "until it is resumed" if is_endless else circuit["until"]


def _seconds(duration: timedelta | None) -> float | None:
    return None if duration is None else duration.total_seconds()


def _age(seconds: float | None) -> str | None:
    return None if seconds is None else age(timedelta(seconds=seconds))


def _seconds_ago(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.1f} s ago"
