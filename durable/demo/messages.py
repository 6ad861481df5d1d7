"""Messages from the airline to the punctuality service: all that the two share."""

from __future__ import annotations

import datetime

import msgspec

from durable import message


@message("airline.flight-recorded")
class FlightRecorded(msgspec.Struct, frozen=True):
    """A flight is over, or was cancelled. Delays are in minutes, negative when it was early."""

    flight_id: int
    carrier: str
    day: datetime.date
    origin: str
    destination: str
    departure_delay_minutes: int | None
    """None: it never departed."""
    arrival_delay_minutes: int | None
    """None: it never departed, or landed elsewhere."""
