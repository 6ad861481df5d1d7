"""Uses of a business key: one id, and a message of its own in each of them.

    messages of one id, in time ──> the first of each use, and those within `dedupe_window` of it

A use ends `dedupe_window` after its first message was sent: from then on the key is another message's. An id that
carries its time is of one message, however often that is sent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import Column


MICROSECOND: Final = timedelta(microseconds=1)
# Transports may carry times with less precision than the database keeps: the counterpart of a row just inside the
# edge must not be cut off.
PRECISION: Final = timedelta(seconds=1)
DEDUPE_WINDOW: Final = timedelta(days=7)
"""The `dedupe_window` of services that have the default."""


def beginnings(times: Iterable[int], dedupe_window: int) -> list[int]:
    """The time of the first message of each use. All are of one unit."""
    found: list[int] = []
    for time in sorted(times):
        if not found or time >= found[-1] + dedupe_window:
            found.append(time)
    return found


def use_of(begins: Sequence[int], time: int) -> int:
    """The number of the use that a time belongs to, in microseconds; what was before the first one belongs to it."""
    return max(bisect_right(begins, time + PRECISION // MICROSECOND) - 1, 0)


def after_the_first(places: str, dedupe_window: timedelta) -> Column:
    """The sorted `places` of one id, structs with a `sent_at`, without the first one of each use."""
    from pyspark.sql import functions as F

    window = F.make_dt_interval(secs=F.lit(dedupe_window.total_seconds()))
    nothing = F.struct(
        F.lit(None).cast("timestamp").alias("since"), F.filter(places, lambda _: F.lit(False)).alias("found")
    )

    def follow(known: Column, place: Column) -> Column:
        is_first = known["since"].isNull() | (place["sent_at"] >= known["since"] + window)
        since = F.when(is_first, place["sent_at"]).otherwise(known["since"])
        found = F.when(is_first, known["found"]).otherwise(F.concat(known["found"], F.array(place)))
        return F.struct(since.alias("since"), found.alias("found"))

    return F.aggregate(places, nothing, follow, lambda known: known["found"])


def begun(times: str, dedupe_window: timedelta) -> Column:
    """Compute beginnings() of an array of sorted times."""
    from pyspark.sql import functions as F

    window = F.make_dt_interval(secs=F.lit(dedupe_window.total_seconds()))

    def follow(known: Column, time: Column) -> Column:
        is_first = (F.size(known) == 0) | (time >= F.array_max(known) + window)
        return F.when(is_first, F.concat(known, F.array(time))).otherwise(known)

    return F.aggregate(times, F.filter(times, lambda _: F.lit(False)), follow)
