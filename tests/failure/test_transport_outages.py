"""The sending agent, with its database, over each transport while the way is cut, and afterwards."""

from __future__ import annotations

import psycopg
import pytest

from durable.envelope import ANY_NODE
from durable.telemetry import Event
from durable.testing.transports import PATIENT
from durable.testing.transports.link import needed
from tests.contract.links import LinkOver
from tests.failure import leftovers
from tests.failure.books import open_books
from tests.failure.test_guards import A
from tests.failure.waiting import eventually
from tests.failure.workbench import Workbench


@pytest.mark.parametrize("transport", ["memory", "tcp", "unix", "http", "rabbitmq"])
async def test_outage_latches_the_destination_and_the_first_ping_afterwards_unlatches(
    transport: str, link_over: LinkOver, database_url: str
) -> None:
    open_books(database_url)
    async with Workbench(database_url) as bench, link_over(transport) as link:
        way, receiver = needed(link.way), link.receiver
        agent = bench.sending(A, link.destination, link.sender(PATIENT))
        for outage in range(1, 3):  # the second is like the first: an agent that was latched is a whole one again
            way.cut()
            leftovers.unsent_orders(database_url, [outage], link.destination, ANY_NODE)
            await bench.claim_outgoing(agent, A)

            await eventually(lambda: circuits(database_url) == [link.destination])
            await eventually(lambda: owned(database_url) == 0)
            assert agent.circuit.latched
            assert receiver.arrivals == outage - 1

            way.restore()
            await eventually(lambda: circuits(database_url) == [])
            await bench.claim_outgoing(agent, A)
            await receiver.stores(outage)
            await eventually(lambda: not agent.held())

    assert bench.counters[Event.LATCHED] == bench.counters[Event.UNLATCHED] == 2
    assert receiver.arrivals == 2  # while it was latched, only pings were sent


def circuits(database: str) -> list[str]:
    """The latched destinations, as every node sees them."""
    with psycopg.connect(database) as conn:
        return [key for (key,) in conn.execute("SELECT key FROM durable.circuits")]


def owned(database: str) -> int:
    with psycopg.connect(database) as conn:
        row = conn.execute("SELECT count(*) FROM durable.outgoing_envelopes WHERE owner_id <> 0").fetchone()
    assert row is not None
    return int(row[0])
