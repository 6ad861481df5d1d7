"""Small results as Python values: times are aware and in UTC, whatever the time zone of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def records(frame: DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a DataFrame, each by the names of its columns. `Row` would hold naive times of the local time
    zone.
    """
    found: list[dict[str, Any]] = frame.toArrow().to_pylist()
    return found
