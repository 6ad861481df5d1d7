"""The airline: writes each flight into its own table and tells of it, both in one transaction.

A node may be killed at any moment. Then it has recorded a flight and its message is stored, or neither. The node
that takes its place looks into the airline's own table, and goes on with what is not there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from itertools import filterfalse
from pathlib import Path

from sqlalchemy import Column, DateTime, Integer, MetaData, Table, Text, func, select
from sqlalchemy.dialects.postgresql import insert

from durable import Bus
from durable.demo.flights import read_flights
from durable.demo.messages import FlightRecorded

AT_ONCE = 8
"""Units of work that a node has open at once: enough to keep its database busy while each waits for its commit."""

metadata = MetaData()

recorded_flights = Table(
    "recorded_flights",
    metadata,
    Column("flight_id", Integer, primary_key=True, autoincrement=False),
    Column("carrier", Text, nullable=False),
    Column("recorded_at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
)

ADD = insert(recorded_flights).on_conflict_do_nothing().returning(recorded_flights.c.flight_id)

bus = Bus("airline")
bus.route(FlightRecorded, to=os.environ.get("PUNCTUALITY_ADDRESS", "tcp://127.0.0.1:2302"))


async def record(flight: FlightRecorded) -> None:
    """Record a flight, unless it is recorded already."""
    async with bus.unit_of_work() as uow:
        added = await uow.session.execute(ADD, {"flight_id": flight.flight_id, "carrier": flight.carrier})
        if added.first() is not None:
            bus.send(flight)


async def record_share(file: Path, *, share: int, shares: int, pause_seconds: float = 0.0) -> None:
    """Record every flight of this share, AT_ONCE at a time, with a pause after each when they are to last."""
    async with bus.unit_of_work() as uow:
        recorded = set(await uow.session.scalars(select(recorded_flights.c.flight_id)))
    mine = (flight for flight in read_flights(file) if flight.flight_id % shares == share)
    flights = filterfalse(lambda flight: flight.flight_id in recorded, mine)
    async with asyncio.TaskGroup() as tasks:
        for number in range(AT_ONCE):
            tasks.create_task(_record_each(flights, pause_seconds), name=f"record {number}")


async def _record_each(flights: Iterator[FlightRecorded], pause_seconds: float) -> None:
    for flight in flights:
        await record(flight)
        await asyncio.sleep(pause_seconds)
