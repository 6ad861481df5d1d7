"""The punctuality service: adds up the delays of each carrier.

The handler is the kind that must run exactly once for each message: it adds, so a message handled twice would count
twice, and one that is lost would be missing. It does nothing about that itself.
"""

from __future__ import annotations

import asyncio
import os

from sqlalchemy import Column, Integer, MetaData, Table, Text, text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus
from durable.demo.messages import FlightRecorded

metadata = MetaData()

delays = Table(
    "delays",
    metadata,
    Column("carrier", Text, primary_key=True),
    Column("added_by", Text, primary_key=True),
    Column("flights", Integer, nullable=False),
    Column("cancelled", Integer, nullable=False),
    Column("departure_minutes", Integer, nullable=False),
    Column("arrival_minutes", Integer, nullable=False),
)
# One line for each flight that was added up, with nothing that would refuse a second: evidence for the report.
added_flights = Table("added_flights", metadata, Column("flight_id", Integer, nullable=False))

# Each process adds to rows of its own. Were they shared, processes would wait for each other's transactions, and two
# that add the same carriers in another order would deadlock.
ADDED_BY = f"process {os.getpid()}"

ADD = text("""
WITH these AS (
    SELECT * FROM unnest(CAST(:flight_ids AS integer[]), CAST(:carriers AS text[]),
        CAST(:departure_delays AS integer[]), CAST(:arrival_delays AS integer[]))
    AS flight (flight_id, carrier, departure_delay, arrival_delay)
), added AS (
    INSERT INTO added_flights (flight_id) SELECT flight_id FROM these
)
INSERT INTO delays AS total (carrier, added_by, flights, cancelled, departure_minutes, arrival_minutes)
SELECT carrier, :added_by, count(*), count(*) FILTER (WHERE departure_delay IS NULL),
    coalesce(sum(departure_delay), 0), coalesce(sum(arrival_delay), 0)
FROM these GROUP BY carrier
ON CONFLICT (carrier, added_by) DO UPDATE SET
    flights = total.flights + excluded.flights,
    cancelled = total.cancelled + excluded.cancelled,
    departure_minutes = total.departure_minutes + excluded.departure_minutes,
    arrival_minutes = total.arrival_minutes + excluded.arrival_minutes
""")
PAUSE_SECONDS = float(os.environ.get("PUNCTUALITY_PAUSE_SECONDS", "0"))
"""Time for each flight, when a few of them are to last."""

bus = Bus("punctuality")
bus.listen(os.environ.get("PUNCTUALITY_LISTENS_ON", "tcp://127.0.0.1:2302"))


# Whatever waits, up to 100 flights, is added by one statement in one transaction.
@bus.handles(FlightRecorded, max_batch=100, concurrency=1)
async def add_delays(flights: list[FlightRecorded], session: AsyncSession) -> None:
    """Add these flights to the sums of their carriers; one that never departed counts as cancelled."""
    await asyncio.sleep(PAUSE_SECONDS * len(flights))
    await session.execute(
        ADD,
        {
            "added_by": ADDED_BY,
            "flight_ids": [flight.flight_id for flight in flights],
            "carriers": [flight.carrier for flight in flights],
            "departure_delays": [flight.departure_delay_minutes for flight in flights],
            "arrival_delays": [flight.arrival_delay_minutes for flight in flights],
        },
    )
