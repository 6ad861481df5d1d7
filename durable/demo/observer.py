"""Observer of the two databases, while the demo runs and at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, LiteralString
from uuid import UUID

import psycopg
from psycopg.rows import TupleRow

from durable.grammar import several

RECORDED = "SELECT count(*) FROM recorded_flights"
HANDLED = "SELECT coalesce(sum(flights), 0) FROM delays"
NODES = "SELECT CAST(split_part(description, ':', 2) AS integer), node_id FROM durable.nodes"
OWNED: Mapping[str, LiteralString] = {
    "airline": "SELECT id FROM durable.outgoing_envelopes WHERE owner_id = %s",
    "punctuality": "SELECT id FROM durable.incoming_envelopes WHERE owner_id = %s",
}
RECOVERABLE: Mapping[str, LiteralString] = {
    service: f"{query} FOR UPDATE SKIP LOCKED" for service, query in OWNED.items()
}
UNSETTLED = (
    "SELECT (SELECT count(*) FROM durable.outgoing_envelopes) + (SELECT count(*) FROM durable.incoming_envelopes)"
)
NOW = "SELECT clock_timestamp()"
WAITING = """
SELECT 'outgoing' AS side, owner_id, count(*) FROM durable.outgoing_envelopes GROUP BY owner_id
UNION ALL SELECT 'incoming', owner_id, count(*) FROM durable.incoming_envelopes GROUP BY owner_id ORDER BY 1, 2
"""
DEAD_LETTERS = "SELECT reason, count(*) FROM durable.dead_letters GROUP BY reason ORDER BY 2 DESC LIMIT 5"
CIRCUITS = "SELECT key, reason FROM durable.circuits"
FINISHED_AFTER = """
SELECT count(*) FROM durable.envelope_history
WHERE side = 'incoming' AND node_id = %s AND finished_at > %s AND id = ANY(%s)
"""


class Observer:
    """A connection to each database, in autocommit: every look sees what is committed."""

    def __init__(self, connections: Mapping[str, psycopg.Connection[TupleRow]]) -> None:
        self._connections = connections

    def rows(self, service: str, query: LiteralString, *parameters: object) -> list[TupleRow]:
        return self._connections[service].execute(query, parameters).fetchall()

    def value(self, service: str, query: LiteralString, *parameters: object) -> Any:
        return self.rows(service, query, *parameters)[0][0]

    def recorded(self) -> int:
        """Count the flights in the airline's table."""
        return int(self.value("airline", RECORDED))

    def handled(self) -> int:
        """Count the flights in the punctuality service's sums."""
        return int(self.value("punctuality", HANDLED))

    def nodes(self, service: str) -> dict[int, int]:
        """The ids of the nodes that are members, by process id."""
        return dict(self.rows(service, NODES))

    def owned(self, service: str, node_id: int) -> list[UUID]:
        """Return the messages that this node has in hand, to send or to handle."""
        return [id_ for (id_,) in self.rows(service, OWNED[service], node_id)]

    def recoverable(self, service: str, node_id: int) -> list[UUID]:
        """Count those of its rows that no open transaction holds: others take them when it is silent."""
        return [id_ for (id_,) in self.rows(service, RECOVERABLE[service], node_id)]

    def finished_after(self, node_id: int, moment: datetime, messages: Sequence[UUID]) -> int:
        """Count how many of these messages this node finished after the moment, by the database's clock."""
        return int(self.value("punctuality", FINISHED_AFTER, node_id, moment, list(messages)))

    def now(self) -> datetime:
        """The clock of the punctuality service's database."""
        moment: datetime = self.value("punctuality", NOW)
        return moment

    def is_settled(self) -> bool:
        """True when nothing waits on either side."""
        return not any(self.value(service, UNSETTLED) for service in self._connections)

    def what_waits(self) -> list[str]:
        """Tell where envelopes wait, for a demo that stalls."""
        lines: list[str] = []
        for service in self._connections:
            for side, owner, count in self.rows(service, WAITING):
                lines.append(f"{service}: {count} {side} owned by {f'node {owner}' if owner else 'nobody'}")
            for reason, count in self.rows(service, DEAD_LETTERS):
                lines.append(f"{service}: {several(count, 'dead letters')}: {reason}")
            for key, reason in self.rows(service, CIRCUITS):
                lines.append(f"{service}: {key} is latched: {reason}")
        return lines


@contextmanager
def observing(urls: Mapping[str, str]) -> Iterator[Observer]:
    connections = {service: psycopg.connect(url, autocommit=True) for service, url in urls.items()}
    try:
        yield Observer(connections)
    finally:
        for connection in connections.values():
            connection.close()
