"""The times that leave the database: from 1900 to 8999.

Plain SQL may write times that neither Python's calendar nor a lake's readers reach: 'infinity', years before Christ and
after 9999. Such a time leaves the database as the first or the last one of this range. Arithmetic with those, such as a
retention, stays within the calendar.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

FIRST: Final = datetime(1900, 1, 1, tzinfo=UTC)
LAST: Final = datetime(8999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
_FIRST: Final = "TIMESTAMPTZ '1900-01-01 00:00:00Z'"
_LAST: Final = "TIMESTAMPTZ '8999-12-31 23:59:59.999999Z'"


def in_range(time: str) -> str:
    """Write the time in this range that is nearest to a column or expression; NULL stays NULL."""
    return f"CASE WHEN {time} < {_FIRST} THEN {_FIRST} WHEN {time} > {_LAST} THEN {_LAST} ELSE {time} END"
