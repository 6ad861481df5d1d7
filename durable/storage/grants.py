"""The rights that a node needs, for a role that owns nothing."""

from __future__ import annotations

from sqlalchemy import Connection

from durable.storage.sql import housekeeping


def runtime_sql(schema: str, role: str) -> str:
    """The statements that let this role run a node: it may read and write rows and call the maintenance functions,
    and can create, alter or drop nothing."""
    return housekeeping.GRANT_RUNTIME_RIGHTS.within(schema).text.strip().replace("{role}", _quoted(role))


def grant_runtime(conn: Connection, schema: str, role: str) -> str | None:
    """Grant them, in the caller's transaction. The role must exist; the tables must, too.

    Returns the statement that lets this role connect, which only another role may run; None where it can.
    """
    for statement in runtime_sql(schema, role).split(";\n"):
        _run(conn, statement)
    database, may, grantable = conn.execute(housekeeping.READ_CONNECTING.within(schema), {"role": role}).one()
    if may:
        return None
    connecting = f"GRANT CONNECT ON DATABASE {database} TO {_quoted(role)}"
    if not grantable:
        return connecting
    _run(conn, connecting)
    return None


def _run(conn: Connection, statement: str) -> None:
    conn.exec_driver_sql(statement.replace("%", "%%"))


def _quoted(role: str) -> str:
    return '"' + role.replace('"', '""') + '"'
