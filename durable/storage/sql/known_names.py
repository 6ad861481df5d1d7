"""The SQL statements that read the names which a database knows, for commands that refuse any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from durable.storage.sql.statement import Statement

_MOST: Final = 10_000


def _some_of(names: str) -> Statement:
    """Read those that are asked for, if they are among these, and others for suggestions."""
    return Statement(f"""
SELECT name FROM ({names}) AS known (name)
ORDER BY name = ANY (CAST(:asked AS text[])) DESC, name LIMIT {_MOST}
""")


# The tables are read to their ends, which an operator can wait for; no index serves these columns alone.
_OF_CIRCUITS: Final = "SELECT key FROM {schema}.circuits WHERE kind = '%s'"
OF_KIND: Final[Mapping[str, Statement]] = {
    kind: _some_of(f"{source} UNION {_OF_CIRCUITS % kind}")
    for kind, source in {
        "handler": "SELECT message_type FROM {schema}.incoming_envelopes",
        "listener": (
            "SELECT endpoint FROM {schema}.incoming_envelopes UNION SELECT service FROM {schema}.nodes "
            "UNION SELECT address FROM {schema}.dead_letters WHERE side = 'incoming'"
        ),
        "destination": (
            "SELECT destination FROM {schema}.outgoing_envelopes UNION SELECT destination FROM {schema}.schedules "
            "WHERE destination IS NOT NULL UNION SELECT address FROM {schema}.dead_letters WHERE side = 'outgoing'"
        ),
        "key": (
            "SELECT partition_key FROM {schema}.incoming_envelopes WHERE partition_key IS NOT NULL UNION "
            "SELECT partition_key FROM {schema}.outgoing_envelopes WHERE partition_key IS NOT NULL UNION "
            "SELECT partition_key FROM {schema}.dead_letters WHERE partition_key IS NOT NULL AND resolved_at IS NULL"
        ),
        "schedule": "SELECT name FROM {schema}.schedules",
    }.items()
}

# Of the oldest rows that the inbox remembers, which an index tells: their number bounds the work.
READ_OLDEST_ENDPOINTS = Statement("""
SELECT endpoint FROM (
    (SELECT endpoint FROM {schema}.received_ids ORDER BY id LIMIT :most)
    UNION ALL (SELECT endpoint FROM {schema}.undated_ids ORDER BY received_at LIMIT :most)
) AS oldest GROUP BY endpoint ORDER BY endpoint
""")

# What a filter of dead letters may be given, by its column.
OF_LETTERS: Final[Mapping[str, Statement]] = {
    column: _some_of(
        f"SELECT DISTINCT {column} FROM {{schema}}.dead_letters WHERE {column} IS NOT NULL AND "
        "(CAST(:resolved AS boolean) IS NULL OR (resolved_at IS NOT NULL) = CAST(:resolved AS boolean))"
    )
    for column in ("message_type", "exception_type", "fingerprint", "source", "address")
}

# What a filter of messages that wait for their time may be given.
OF_DELAYED: Final[Mapping[str, Statement]] = {
    name: _some_of(
        f"SELECT {incoming} FROM {{schema}}.incoming_envelopes WHERE execution_time IS NOT NULL UNION "
        f"SELECT {outgoing} FROM {{schema}}.outgoing_envelopes WHERE execution_time IS NOT NULL UNION "
        f"SELECT {scheduled} FROM {{schema}}.schedules WHERE {scheduled} IS NOT NULL"
    )
    for name, incoming, outgoing, scheduled in (
        ("message_type", "message_type", "message_type", "message_type"),
        ("address", "endpoint", "destination", "destination"),
    )
}
