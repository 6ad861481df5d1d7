"""Declared order and fairness of a service, kept for publishers without its code.

A node writes it when it starts, for the message types that it handles and the destinations that it knows, and the last
one to start has the say. Names that were never declared are placed by their keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sqlalchemy import Connection

from durable.messages.ordering import BY_ITS_KEY, Rule
from durable.storage.sql import placements as statements


class Declared(NamedTuple):
    """Declared rule of one incoming message type, or of one destination."""

    side: str
    name: str
    rule: Rule


@dataclass(frozen=True, slots=True)
class Placements:
    """The rules of message types and destinations that have one besides the keys."""

    by_type: Mapping[str, Rule] = field(default_factory=dict)
    by_destination: Mapping[str, Rule] = field(default_factory=dict)

    def of_type(self, message_type: str) -> Rule:
        return self.by_type.get(message_type, BY_ITS_KEY)

    def of_destination(self, destination: str) -> Rule:
        return self.by_destination.get(destination, BY_ITS_KEY)


def declare(conn: Connection, schema: str, declared: Sequence[Declared]) -> None:
    """Write the rules of these names, also of those that have none any more."""
    if not declared:
        return
    columns = {
        "side": [each.side for each in declared],
        "name": [each.name for each in declared],
        "ordering_key": [each.rule.ordering_key for each in declared],
        "fair_by": [each.rule.fair_by for each in declared],
    }
    conn.execute(statements.DECLARE_PLACEMENTS.within(schema), columns)


def left_orders(conn: Connection, schema: str, declared: Sequence[Declared]) -> dict[str, str]:
    """Read the orders that message types had before this declaration and that are not empty, by their types."""
    types = [each for each in declared if each.side == "incoming" and each.rule.ordering_key is not None]
    columns = {"name": [each.name for each in types], "ordering_key": [each.rule.ordering_key for each in types]}
    rows = conn.execute(statements.READ_LEFT_ORDERS.within(schema), columns) if types else ()
    return {row.name: row.ordering_key for row in rows}


def read(conn: Connection, schema: str) -> Placements:
    """Read the declarations of the nodes."""
    found: dict[str, dict[str, Rule]] = {"incoming": {}, "outgoing": {}}
    for side, name, ordering_key, fair_by in conn.execute(statements.READ_PLACEMENTS.within(schema)):
        found[side][name] = Rule(ordering_key, fair_by)
    return Placements(found["incoming"], found["outgoing"])
