"""Readiness of the tables for whoever counts on them: of the version of this code, and with every row in sight.

Row-level security hides rows without an error: what nobody sees is neither archived, erased nor handled, and looks as
if it were not there.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection

from durable.errors import InvalidSetting
from durable.grammar import several
from durable.storage.migrator import check_version
from durable.storage.sql.readiness import READ_VEILED

_MOST_NAMED: Final = 3


def check_ready(conn: Connection, schema: str) -> None:
    """Raise SchemaMismatch for tables of another version, InvalidSetting where rows of them may be hidden."""
    check_version(conn, schema)
    refuse_veil(conn, schema)


def refuse_veil(conn: Connection, schema: str) -> None:
    """Raise InvalidSetting where row-level security may hide rows of a table, or of a partition, from this role."""
    if veil := veil_of(conn, schema):
        raise InvalidSetting(veil)


def veil_of(conn: Connection, schema: str) -> str | None:
    """Tell from which role row-level security may hide rows, and of which tables; None where every row is in sight."""
    veiled = conn.execute(READ_VEILED.within(schema), {"schema": schema}).all()
    if not veiled:
        return None
    role, tables = veiled[0].role, [row.relation for row in veiled]
    more = len(tables) - _MOST_NAMED
    named = ", ".join(tables[:_MOST_NAMED]) + (f" and {several(more, 'more tables')}" if more > 0 else "")
    return (
        f"role {role}: row-level security may hide rows of {named} in schema {schema!r} from it; as a superuser, run: "
        f"ALTER ROLE {role} BYPASSRLS, or disable row-level security on these tables, or name another role"
    )
