"""The names of handlers, listeners, destinations and keys that a database knows: of what waits, failed, or runs.

An operator's command that names another one would do nothing and say that it did.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from sqlalchemy import Connection

from durable.storage import nodes
from durable.storage.circuits import CircuitKind
from durable.storage.dead_letters import Selection
from durable.storage.sql.statement import Statement

_MOST = 10_000

# The tables are read to their ends, which an operator can wait for; no index serves these columns alone.
_OF_CIRCUITS: Final = "SELECT key FROM {schema}.circuits WHERE kind = '%s'"
_KNOWN: Final[Mapping[CircuitKind, Statement]] = {
    kind: Statement(f"SELECT name FROM ({source} UNION {_OF_CIRCUITS % kind.value}) AS known (name) LIMIT {_MOST}")
    for kind, source in {
        CircuitKind.HANDLER: "SELECT message_type FROM {schema}.incoming_envelopes",
        CircuitKind.LISTENER: (
            "SELECT endpoint FROM {schema}.incoming_envelopes UNION SELECT service FROM {schema}.nodes "
            "UNION SELECT address FROM {schema}.dead_letters WHERE side = 'incoming'"
        ),
        CircuitKind.DESTINATION: (
            "SELECT destination FROM {schema}.outgoing_envelopes UNION SELECT destination FROM {schema}.schedules "
            "WHERE destination IS NOT NULL UNION SELECT address FROM {schema}.dead_letters WHERE side = 'outgoing'"
        ),
        CircuitKind.KEY: (
            "SELECT partition_key FROM {schema}.incoming_envelopes WHERE partition_key IS NOT NULL UNION "
            "SELECT partition_key FROM {schema}.outgoing_envelopes WHERE partition_key IS NOT NULL UNION "
            "SELECT partition_key FROM {schema}.dead_letters WHERE partition_key IS NOT NULL AND resolved_at IS NULL"
        ),
        CircuitKind.SCHEDULE: "SELECT name FROM {schema}.schedules",
    }.items()
}

# What a filter of dead letters may be given, by its column.
_OF_LETTERS: Final[Mapping[str, Statement]] = {
    column: Statement(
        f"SELECT DISTINCT {column} FROM {{schema}}.dead_letters WHERE {column} IS NOT NULL AND "
        f"(CAST(:resolved AS boolean) IS NULL OR (resolved_at IS NOT NULL) = CAST(:resolved AS boolean)) LIMIT {_MOST}"
    )
    for column in ("message_type", "exception_type", "fingerprint", "source", "address")
}

# What a filter of messages that wait for their time may be given.
_OF_DELAYED: Final[Mapping[str, Statement]] = {
    name: Statement(
        f"SELECT {incoming} FROM {{schema}}.incoming_envelopes WHERE execution_time IS NOT NULL UNION "
        f"SELECT {outgoing} FROM {{schema}}.outgoing_envelopes WHERE execution_time IS NOT NULL UNION "
        f"SELECT {scheduled} FROM {{schema}}.schedules WHERE {scheduled} IS NOT NULL LIMIT {_MOST}"
    )
    for name, incoming, outgoing, scheduled in (
        ("message_type", "message_type", "message_type", "message_type"),
        ("address", "endpoint", "destination", "destination"),
    )
}


def read(conn: Connection, schema: str, kind: CircuitKind) -> list[str]:
    """The names of this kind."""
    names = list(conn.execute(_KNOWN[kind].within(schema)).scalars())
    return sorted({*names, *_handled(conn, schema)}) if kind is CircuitKind.HANDLER else sorted(names)


def filters_of_letters(selection: Selection) -> Mapping[str, str]:
    """The filters of this selection that are names, by their columns."""
    return {column: value for column in _OF_LETTERS if (value := getattr(selection, column)) is not None}


def of_letters(conn: Connection, schema: str, column: str, *, resolved: bool | None) -> Sequence[str]:
    """Read the values of this column of the letters."""
    return list(conn.execute(_OF_LETTERS[column].within(schema), {"resolved": resolved}).scalars())


def of_delayed(conn: Connection, schema: str, name: str) -> Sequence[str]:
    """The message types, or addresses, of what waits for its time and of schedules."""
    return list(conn.execute(_OF_DELAYED[name].within(schema)).scalars())


def _handled(conn: Connection, schema: str) -> set[str]:
    """The message types that nodes have said they handle."""
    told = (json.loads(node.capabilities).get("message_types", []) for node in nodes.read(conn, schema))
    return {name for names in told for name in names}
