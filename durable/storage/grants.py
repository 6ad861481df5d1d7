"""The rights that a node needs, for a role that owns nothing."""

from __future__ import annotations

from sqlalchemy import Connection

from durable.storage.sql import housekeeping


def runtime_sql(schema: str, role: str) -> str:
    """The statements that let this role run a node: it may read and write rows and call the maintenance functions,
    and can create, alter or drop nothing."""
    quoted = '"' + role.replace('"', '""') + '"'
    return housekeeping.GRANT_RUNTIME_RIGHTS.within(schema).text.strip().replace("{role}", quoted)


def grant_runtime(conn: Connection, schema: str, role: str) -> None:
    """Grant them, in the caller's transaction. The role must exist; the tables must, too."""
    for statement in runtime_sql(schema, role).split(";\n"):
        conn.exec_driver_sql(statement.replace("%", "%%"))
