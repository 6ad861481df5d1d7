"""Bringing the database to this code's schema version, and refusing to run on any other.

The version table lies in durable's own schema, so an application's Alembic history is never touched.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, create_engine, pool, text

from durable.errors import InvalidSetting, SchemaMismatch
from durable.storage.locks import Job, jobs_class, lock
from durable.storage.session_limits import LIMITS
from durable.storage.sql.housekeeping import LIFT_LIMITS, READ_VERSION, VERSION_TABLE_EXISTS

if TYPE_CHECKING:
    from alembic.config import Config

SCHEMA_VERSION = "0001"
"""The Alembic revision that this code reads and writes."""


def upgrade(url: str, schema: str) -> None:
    """Bring the database up to SCHEMA_VERSION. Two migrators wait for each other; a second run changes nothing."""
    from alembic import command

    command.upgrade(_config(url, schema), SCHEMA_VERSION)


def upgrade_sql(url: str, schema: str) -> str:
    """The statements that upgrade() would run on an empty database, for review or for another tool."""
    from alembic import command

    script = io.StringIO()
    config = _config(url, schema)
    config.output_buffer = script
    command.upgrade(config, SCHEMA_VERSION, sql=True)
    return script.getvalue()


def refuse_encoding(name: str | None) -> None:
    """Raise InvalidSetting for a database whose texts are not UTF-8: bodies, keys and names are."""
    if name != "UTF8":
        raise InvalidSetting(
            f"database: encoding {name} cannot store every message; dump it, and restore it into a database made by "
            "CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0"
        )


def current_version(conn: Connection, schema: str) -> str | None:
    """The revision the database is at; None when durable's tables are not there."""
    if not conn.execute(VERSION_TABLE_EXISTS.within(schema), {"schema": schema}).scalar_one():
        return None
    return conn.execute(READ_VERSION.within(schema)).scalar_one_or_none()


def asked_by(conn: Connection) -> tuple[str, str]:
    """The role that asks, and the database that it asks, as SQL names them."""
    role, database = conn.execute(text("SELECT quote_ident(current_user), quote_ident(current_database())")).one()
    return role, database


def owner_of(conn: Connection, schema: str) -> str | None:
    """The role that owns this schema, and with it may upgrade it; None when there is no such schema."""
    owner = text("SELECT quote_ident(pg_get_userbyid(nspowner)) FROM pg_namespace WHERE nspname = :schema")
    return conn.execute(owner, {"schema": schema}).scalar_one_or_none()


def check_version(conn: Connection, schema: str) -> None:
    """Raise SchemaMismatch, saying what to run, unless the database is at SCHEMA_VERSION."""
    version = current_version(conn, schema)
    if version is None:
        raise SchemaMismatch(f"schema {schema!r} has no durable tables; run: durable-agent migrate APP:BUS")
    if version < SCHEMA_VERSION:
        raise SchemaMismatch(
            f"schema {schema!r} is at version {version}, this code needs {SCHEMA_VERSION}; "
            "run: durable-agent migrate APP:BUS"
        )
    if version > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"schema {schema!r} is at version {version}, newer than this code ({SCHEMA_VERSION}); "
            "run: pip install --upgrade durable-bus"
        )


def migrate_online(context: Any, url: str, schema: str) -> None:
    """Called by Alembic's environment: one transaction for all versions, one migrator at a time."""
    from durable.storage.answering import CLIENT_KEEPALIVES
    from durable.storage.engines import OWN_PATH

    engine = create_engine(url, poolclass=pool.NullPool, connect_args={**CLIENT_KEEPALIVES, "client_encoding": "utf8"})
    with engine.begin() as conn:
        refuse_encoding(conn.exec_driver_sql("SHOW server_encoding").scalar_one())
        conn.exec_driver_sql(f"SET LOCAL search_path = {OWN_PATH}")
        conn.execute(LIFT_LIMITS.within(schema), {"names": list(LIMITS)})
        lock(conn, schema, Job.MIGRATE)
        conn.exec_driver_sql("SET LOCAL lock_timeout TO DEFAULT")  # who waits for a table stops all who come after
        if owner_of(conn, schema) is None:  # Postgres asks for the right to make one also where it is there
            conn.execute(text(f'CREATE SCHEMA IF NOT EXISTS "{schema}"'))
        context.configure(connection=conn, version_table_schema=schema)
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


def configure_offline(context: Any, schema: str) -> None:
    """Called by Alembic's environment for --sql."""
    context.configure(
        dialect_name="postgresql",
        literal_binds=True,
        version_table_schema=schema,
        output_buffer=context.config.output_buffer,
    )
    context.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')


def _config(url: str, schema: str) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "durable:migrations")
    config.attributes.update(url=url, schema=schema, jobs_class_id=jobs_class(schema))
    return config
