"""The punctuality service: adds up the delays of each carrier.

The handler is the kind that must run exactly once for each message: it adds, so a message handled twice would count
twice, and one that is lost would be missing. It does nothing about that itself.
"""

from __future__ import annotations

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
WITH added AS (INSERT INTO added_flights (flight_id) VALUES (:flight_id))
INSERT INTO delays AS sum (carrier, added_by, flights, cancelled, departure_minutes, arrival_minutes)
VALUES (:carrier, :added_by, 1, :cancelled, :departure_minutes, :arrival_minutes)
ON CONFLICT (carrier, added_by) DO UPDATE SET
    flights = sum.flights + 1,
    cancelled = sum.cancelled + excluded.cancelled,
    departure_minutes = sum.departure_minutes + excluded.departure_minutes,
    arrival_minutes = sum.arrival_minutes + excluded.arrival_minutes
""")

bus = Bus("punctuality")
bus.listen(os.environ.get("PUNCTUALITY_LISTENS_ON", "tcp://127.0.0.1:2302"))


@bus.handles(FlightRecorded, group=100, concurrency=1)  # up to 100 flights that wait share one transaction
async def add_delays(flight: FlightRecorded, session: AsyncSession) -> None:
    """Add one flight to its carrier's sums; one that never departed counts as cancelled."""
    await session.execute(
        ADD,
        {
            "flight_id": flight.flight_id,
            "carrier": flight.carrier,
            "added_by": ADDED_BY,
            "cancelled": int(flight.departure_delay_minutes is None),
            "departure_minutes": flight.departure_delay_minutes or 0,
            "arrival_minutes": flight.arrival_delay_minutes or 0,
        },
    )
