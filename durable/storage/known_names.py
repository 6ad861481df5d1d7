"""The names of handlers, listeners, destinations and keys that a database knows: of what waits, failed, or runs.

An operator's command that names another one would do nothing and say that it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from sqlalchemy import Connection

from durable.storage import nodes
from durable.storage.circuits import CircuitKind
from durable.storage.dead_letters import Selection
from durable.storage.sql import known_names as statements

_OLDEST: Final = 1_000


def read(conn: Connection, schema: str, kind: CircuitKind, asked: Sequence[str]) -> list[str]:
    """Read the names of this kind: those that are asked for, as far as they are known, and many others."""
    names = list(conn.execute(statements.OF_KIND[kind].within(schema), {"asked": list(asked)}).scalars())
    return sorted({*names, *_handled(conn, schema)}) if kind is CircuitKind.HANDLER else sorted(names)


def oldest_endpoints(conn: Connection, schema: str) -> Sequence[str]:
    """Read the endpoints of the oldest messages that the inbox remembers."""
    return list(conn.execute(statements.READ_OLDEST_ENDPOINTS.within(schema), {"most": _OLDEST}).scalars())


def filters_of_letters(selection: Selection) -> Mapping[str, str]:
    """The filters of this selection that are names, by their columns."""
    return {column: value for column in statements.OF_LETTERS if (value := getattr(selection, column)) is not None}


def of_letters(conn: Connection, schema: str, column: str, asked: str, *, resolved: bool | None) -> Sequence[str]:
    """Read the values of this column of the letters, the one that is asked for and many others."""
    params = {"asked": [asked], "resolved": resolved}
    return list(conn.execute(statements.OF_LETTERS[column].within(schema), params).scalars())


def of_delayed(conn: Connection, schema: str, name: str, asked: str) -> Sequence[str]:
    """Read the message types, or addresses, of messages that wait for their time and of schedules, as of_letters()."""
    return list(conn.execute(statements.OF_DELAYED[name].within(schema), {"asked": [asked]}).scalars())


def _handled(conn: Connection, schema: str) -> set[str]:
    """The message types that nodes have said they handle."""
    return {name for node in nodes.read(conn, schema) for name in node.message_types}
