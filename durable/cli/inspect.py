"""status, nodes and circuits: what the database says about itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.live import Live
from sqlalchemy import Connection

from durable.cli import health, views
from durable.cli.output import Block, print_blocks, print_json, rich
from durable.cli.target import DatabaseUrl, Debug, Json, OptionalBusName, SchemaName, connection, load_target
from durable.errors import SchemaMismatch, WiringError
from durable.settings import Settings
from durable.storage import migrator
from durable.storage import status as storage
from durable.version import __version__

Watch = Annotated[bool, typer.Option("--watch", help="show it again every two seconds, on a terminal")]
_WATCH_SECONDS = 2.0


def status(
    app: OptionalBusName = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    watch: Watch = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """What waits, what failed, who is there; ends with 1 and the reason when something is wrong."""
    settings = load_target(app, database, schema)[1]
    if watch:
        _watch(settings, json)
    report = _report(settings)
    if json:
        print_json(report)
    else:
        print_blocks(views.status(report))
    if report["problems"]:
        raise typer.Exit(1)


def nodes(
    app: OptionalBusName = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Every node that is registered, or that owns something: is it alive, and what does it own?"""
    settings = load_target(app, database, schema)[1]
    rows = views.node_rows(_read(settings), settings.heartbeat_stale)
    _print(rows, json, views.nodes(rows))


def circuits(
    app: OptionalBusName = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """What is latched or paused, since when and why."""
    rows = views.circuit_rows(_read(load_target(app, database, schema)[1]))
    _print(rows, json, views.circuits(rows))


def _print(rows: Sequence[dict[str, Any]], json: bool, blocks: Sequence[Block]) -> None:
    if json:
        print_json(rows)
    else:
        print_blocks(blocks)


def _watch(settings: Settings, json: bool) -> None:
    """Until it is interrupted."""
    if json or not sys.stdout.isatty():
        raise WiringError("--watch: it needs a terminal; elsewhere run status --json again and again")
    with Live(auto_refresh=False) as live:
        while True:
            live.update(rich(views.status(_report(settings))), refresh=True)
            time.sleep(_WATCH_SECONDS)


def _report(settings: Settings) -> dict[str, Any]:
    with connection(settings) as conn:
        server = storage.server(conn, settings.db_schema)
        version = migrator.current_version(conn, settings.db_schema)
        mismatch = _mismatch(conn, settings.db_schema)
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
    picture, dormant = health.read_twice(lambda: _read(settings), settings)
    found = health.problems(picture, dormant, settings)
    return report | {"healthy": not found, "problems": found} | views.status_rows(picture, settings.heartbeat_stale)


def _mismatch(conn: Connection, schema: str) -> str | None:
    try:
        migrator.check_version(conn, schema)
    except SchemaMismatch as error:
        return str(error)
    return None


def _read(settings: Settings) -> storage.StatusSnapshot:
    """Raises SchemaMismatch."""
    with connection(settings) as conn:
        migrator.check_version(conn, settings.db_schema)
        return storage.read(conn, settings.db_schema)
