"""status, nodes and circuits: the state of the service, read from its database."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer
from rich.live import Live
from sqlalchemy import Connection

from durable.cli import health, views
from durable.cli.arguments import ListSize
from durable.cli.output import document_of, emit, is_json, rich
from durable.cli.target import Target, connection, on_target, schema_connection
from durable.errors import WiringError
from durable.listed import SHOWN, Listed
from durable.observability.health import in_short
from durable.settings import Settings
from durable.storage import migrator
from durable.storage import status as storage
from durable.storage.outages import PRIMARY
from durable.storage.readiness import check_ready
from durable.version import __version__

Watch = Annotated[bool, typer.Option("--watch", help="show the status again every two seconds, on a terminal")]
_WATCH_SECONDS = 2.0


@on_target()
def status(target: Target, watch: Watch = False, limit: ListSize = SHOWN) -> None:
    """Show backlog, failures and nodes; print each problem and end with 1 when there is one."""
    if watch:
        _watch(target.settings, limit)
    report = _report(target.settings, limit)
    emit(report, *views.status(report))
    if report["problems"]:
        raise typer.Exit(1)


@on_target()
def nodes(target: Target, limit: ListSize = SHOWN) -> None:
    """List the nodes that are registered or own messages: whether they are alive, and how many messages they own.

    Those that do not work come first.
    """
    listed = Listed.of(views.node_rows(_read(target.settings, 1), target.settings.heartbeat_stale), limit)
    emit(listed.rows, *views.nodes(listed))


@on_target()
def circuits(target: Target, limit: ListSize = SHOWN) -> None:
    """List latches, open circuits and pauses, the longest ones of each kind first: since when, why, and until when."""
    listed = views.circuit_rows(_read(target.settings, limit))
    emit(listed.rows, *views.circuits(listed))


def _watch(settings: Settings, size: int) -> None:
    """Show the status until interrupted."""
    if is_json() or not sys.stdout.isatty():
        raise WiringError("--watch: needs a terminal, and no --json; elsewhere repeat status --json")
    with Live(auto_refresh=False) as live:
        while True:
            live.update(rich(views.status(_report(settings, size))), refresh=True)
            time.sleep(_WATCH_SECONDS)


def _report(settings: Settings, size: int) -> dict[str, Any]:
    with connection(settings) as conn:
        server = storage.server(conn, settings.db_schema)
        version = migrator.current_version(conn, settings.db_schema)
        mismatch = _mismatch(conn, settings.db_schema)
        is_read_only = storage.is_read_only(conn, settings.db_schema)
    report: dict[str, Any] = {
        "versions": {
            "durable": __version__,
            "postgres": server.version,
            "database": server.database,
            "schema": settings.db_schema,
            "schema_version": version,
            "needed_schema_version": migrator.SCHEMA_VERSION,
        }
    }
    if mismatch is not None:
        return report | {"healthy": False, "problems": [mismatch]}
    snapshot, dormant = health.read_twice(lambda: _read(settings, size), settings)
    found = health.problems(snapshot, dormant, settings)
    if is_read_only:
        found = [f"transactions are read-only, and no node can work: {PRIMARY}", *found]
    needs = health.needs(snapshot, found, settings)
    judged = {
        "healthy": not found,
        "needs_in_short": in_short([need for need in needs if not need.is_problem]),
    }
    lists = {
        "problems": Listed.of(found, size),
        "needs": Listed.of([need.text for need in needs], size),
        **views.status_lists(snapshot, size),
    }
    return report | judged | document_of(lists) | views.status_figures(snapshot, settings.heartbeat_stale)


def _mismatch(conn: Connection, schema: str) -> str | None:
    try:
        check_ready(conn, schema)
    except WiringError as error:
        return str(error)
    return None


def _read(settings: Settings, size: int) -> storage.StatusSnapshot:
    """Read the state of the service, with so many circuits. Raises SchemaMismatch."""
    with schema_connection(settings) as conn:
        return storage.read(conn, settings.db_schema, size)
