"""migrate: brings the schema to this code's version, and grants rights to a role that only runs nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from sqlalchemy.exc import DBAPIError

from durable.cli.command import taking
from durable.cli.output import emit
from durable.cli.target import DatabaseUrl, OptionalBusName, SchemaName, connection, load_target
from durable.errors import DurableError, InvalidSetting, WiringError
from durable.settings import Settings, load_settings
from durable.storage import grants, migrator
from durable.storage.database import sync_url
from durable.storage.outages import Lack, described, lacking_right

Sql = Annotated[bool, typer.Option("--sql", help="print the statements for an empty database, without running them")]
Status = Annotated[bool, typer.Option("--status", help="compare the versions only; ends with 1 when they differ")]
GrantTo = Annotated[
    str | None,
    typer.Option("--grant-to", metavar="ROLE", help="role to grant the rights that a node needs, without DDL"),
]


@taking()
def migrate(
    app: OptionalBusName = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    sql: Sql = False,
    status: Status = False,
    grant_to: GrantTo = None,
) -> None:
    """Upgrade the schema to the version that this code needs; a second run changes nothing."""
    if status and (sql or grant_to is not None):
        raise WiringError("--status: excludes --sql and --grant-to; leave them out, or --status")
    if grant_to == "":
        raise InvalidSetting("--grant-to: the role is empty; name one")
    if sql:
        _print_sql(_offline_settings(app, schema), grant_to)
    elif status:
        _print_status(load_target(app, database, schema).settings)
    else:
        _upgrade(load_target(app, database, schema).settings, grant_to)


def _upgrade(settings: Settings, grant_to: str | None) -> None:
    schema, after = settings.db_schema, migrator.SCHEMA_VERSION
    with _lack_of_rights_told(settings):
        before = _version(settings)
        if before is not None and before > after:
            with connection(settings) as conn:
                migrator.check_version(conn, schema)  # says that the code must be upgraded
        migrator.upgrade(sync_url(settings).render_as_string(hide_password=False), schema)
        lacking = None
        if grant_to is not None:
            with connection(settings) as conn:
                lacking = grants.grant_runtime(conn, schema, grant_to)
    emit(
        {"schema": schema, "from": before, "to": after, "changed": before != after, "granted_to": grant_to},
        f"schema {schema} is up to date at version {before}"
        if before == after
        else f"schema {schema} upgraded from {before or 'nothing'} to version {after}",
        *([] if grant_to is None else [f"granted to {grant_to} the rights that a node needs"]),
        *([] if lacking is None else [f"it may not connect to the database; as its owner, run: {lacking}"]),
    )


@contextmanager
def _lack_of_rights_told(settings: Settings) -> Iterator[None]:
    """Tell who has the right that this role lacks: --grant-to grants none to make tables."""
    try:
        yield
    except (DBAPIError, Lack) as error:
        refusal = lacking_right(error)
        if refusal is None:
            raise
        with connection(settings) as conn:
            owner = migrator.owner_of(conn, settings.db_schema)
            role, database = migrator.asked_by(conn)
        advice = (
            f"as owner of the database, run: GRANT CREATE ON DATABASE {database} TO {role}; or run migrate as the owner"
            if owner is None
            else f"run migrate as {owner}, who owns the schema {settings.db_schema}"
        )
        raise DurableError(f"migrate: {described(refusal)}; {advice}") from error


def _print_status(settings: Settings) -> None:
    version, needed = _version(settings), migrator.SCHEMA_VERSION
    verdict = "they match" if version == needed else "they differ; run: durable-agent migrate"
    emit(
        {"schema": settings.db_schema, "database": version, "code": needed, "match": version == needed},
        f"schema {settings.db_schema}: database {version or '(none)'}, code {needed}: {verdict}",
    )
    if version != needed:
        raise typer.Exit(1)


def _print_sql(settings: Settings, grant_to: str | None) -> None:
    script = migrator.upgrade_sql("", settings.db_schema)
    if grant_to is not None:
        script += f"\n{grants.runtime_sql(settings.db_schema, grant_to)}\n"
    emit({"schema": settings.db_schema, "sql": script}, script.removesuffix("\n"))


def _offline_settings(app: str | None, schema: str | None) -> Settings:
    """Load settings without a database."""
    overrides = {} if schema is None else {"db_schema": schema}
    return load_settings(**overrides) if app is None else load_target(app, schema=schema).settings


def _version(settings: Settings) -> str | None:
    with connection(settings) as conn:
        return migrator.current_version(conn, settings.db_schema)
