"""migrate: the schema brought to this code's version, and the rights for a role that only runs nodes."""

from __future__ import annotations

from typing import Annotated

import typer

from durable.cli.output import print_json
from durable.cli.target import DatabaseUrl, Debug, Json, OptionalBusName, SchemaName, connection, load_target
from durable.errors import InvalidSetting, WiringError
from durable.settings import Settings, load_settings
from durable.storage import grants, migrator
from durable.storage.database import sync_url

Sql = Annotated[bool, typer.Option("--sql", help="print the statements for an empty database, and change nothing")]
Status = Annotated[bool, typer.Option("--status", help="compare the versions, and change nothing; 1 when they differ")]
GrantTo = Annotated[
    str | None,
    typer.Option(
        "--grant-to", metavar="ROLE", help="also grant this role what a node needs, and no right to make tables"
    ),
]


def migrate(
    app: OptionalBusName = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    sql: Sql = False,
    status: Status = False,
    grant_to: GrantTo = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Bring the schema to the version that this code needs; a second run changes nothing."""
    if status and (sql or grant_to is not None):
        raise WiringError("--status: it only looks; leave out --sql and --grant-to, or --status")
    if grant_to == "":
        raise InvalidSetting("--grant-to: name a role")
    if sql:
        _print_sql(app, schema, grant_to, json)
    elif status:
        _print_status(load_target(app, database, schema)[1], json)
    else:
        _upgrade(load_target(app, database, schema)[1], grant_to, json)


def _upgrade(settings: Settings, grant_to: str | None, json: bool) -> None:
    schema = settings.db_schema
    before = _version(settings)
    if before is not None and before > migrator.SCHEMA_VERSION:
        with connection(settings) as conn:
            migrator.check_version(conn, schema)  # says that the code is what must be brought up
    migrator.upgrade(sync_url(settings).render_as_string(hide_password=False), schema)
    if grant_to is not None:
        with connection(settings) as conn:
            grants.grant_runtime(conn, schema, grant_to)
    if json:
        after = migrator.SCHEMA_VERSION
        print_json({"schema": schema, "from": before, "to": after, "changed": before != after, "granted_to": grant_to})
        return
    if before == migrator.SCHEMA_VERSION:
        print(f"schema {schema} is up to date at version {before}")
    else:
        print(f"schema {schema} migrated from {before or 'nothing'} to version {migrator.SCHEMA_VERSION}")
    if grant_to is not None:
        print(f"granted to {grant_to} what a node needs")


def _print_status(settings: Settings, json: bool) -> None:
    version, needed = _version(settings), migrator.SCHEMA_VERSION
    if json:
        print_json({"schema": settings.db_schema, "database": version, "code": needed, "match": version == needed})
    else:
        verdict = "they match" if version == needed else "they do not match"
        print(f"schema {settings.db_schema}: database {version or '(none)'}, code {needed}: {verdict}")
    if version != needed:
        raise typer.Exit(1)


def _print_sql(app: str | None, schema: str | None, grant_to: str | None, json: bool) -> None:
    """Needs no database, and no setting of one."""
    overrides = {} if schema is None else {"db_schema": schema}
    settings = load_settings(**overrides) if app is None else load_target(app, schema=schema)[1]
    script = migrator.upgrade_sql("", settings.db_schema)
    if grant_to is not None:
        script += f"\n{grants.runtime_sql(settings.db_schema, grant_to)}\n"
    if json:
        print_json({"schema": settings.db_schema, "sql": script})
    else:
        print(script, end="")


def _version(settings: Settings) -> str | None:
    with connection(settings) as conn:
        return migrator.current_version(conn, settings.db_schema)
