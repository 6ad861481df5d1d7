"""The numbers that stand in owner_id, and what readers of the tables make of each: only those above 0 are nodes."""

from __future__ import annotations

import pytest

from durable.cli.target import schema_connection
from durable.settings import load_settings
from durable.storage import delayed, gauges, leases, status
from durable.storage.gauges import Side
from durable.storage.sql.parked import PARKED_OWNER
from durable.storage.sql.recovery import INCOMING, OUTGOING, REFUSED_OWNER
from tests.support.tables import Tables

NODE = 7
ROW = """
INSERT INTO durable.{side}_envelopes ({address}, id, message_type, source, correlation_id, content_type, body, sent_at,
    owner_id)
SELECT 'tcp://a:1', gen_random_uuid(), 'a.b', 'shop', gen_random_uuid(), 'application/json', '{{}}', now(), %s
"""
REFUSED = "is refused by the database, and waits for an operator"
STATES = [
    (Side.INCOMING, 0, "is due, and waits to be handled"),
    (Side.INCOMING, NODE, "is being handled by node 7"),
    (Side.INCOMING, REFUSED_OWNER, REFUSED),
    (Side.INCOMING, PARKED_OWNER, "is due, and waits for its encryption key"),
    (Side.OUTGOING, 0, "is due, and waits to be sent to tcp://a:1"),
    (Side.OUTGOING, NODE, "is being sent by node 7"),
    (Side.OUTGOING, REFUSED_OWNER, REFUSED),
]


@pytest.mark.parametrize(("side", "owner", "state"), STATES)
def test_reader_tells_nodes_from_marks(tables: Tables, side: Side, owner: int, state: str) -> None:
    address = "endpoint" if side is Side.INCOMING else "destination"
    tables.execute(ROW.format(side=side, address=address), owner)
    message_id = tables.one(f"SELECT id FROM durable.{side}_envelopes")

    with schema_connection(load_settings(database_url=tables.url)) as conn:
        gauged, whole = gauges.read(conn, "durable"), status.read(conn, "durable")
        owners = leases.owners(conn, "durable", INCOMING if side is Side.INCOMING else OUTGOING)
        [found] = delayed.whereabouts(conn, "durable", [message_id])

    owned = {NODE: 1} if owner == NODE else {}
    assert gauged.owned == {each: owned if each is side else {} for each in Side}
    assert (whole.owned_incoming if side is Side.INCOMING else whole.owned_outgoing) == owned
    assert owners == owned.keys()
    assert gauged.refused == {each: int(each is side and owner == REFUSED_OWNER) for each in Side}
    assert sum(each.waiting for each in gauged.parked) == int(owner == PARKED_OWNER)
    assert found.state == state
