"""One function for each statement of durable/storage/sql that the simulation meets.

tests/simulation/test_conformance.py holds each to the real one.
"""

from tests.simulation.sql import agenda, circuits, inbox, nodes, ordering, outbox, recovery
from tests.simulation.sql.registry import SCHEMA, Known, UnknownStatement, does_sql, known, statements, take_unknown

__all__ = [
    "SCHEMA",
    "Known",
    "UnknownStatement",
    "agenda",
    "circuits",
    "does_sql",
    "inbox",
    "known",
    "nodes",
    "ordering",
    "outbox",
    "recovery",
    "statements",
    "take_unknown",
]
