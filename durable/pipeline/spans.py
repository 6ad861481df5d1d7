"""The time over which a lake has every row of a database, and the gaps in it.

    begin ────────── gap ──────────────────── gap ───────── until
          complete         complete                complete

A gap holds rows that the lake never had, or lost, and that the database has dropped. What lies there is unknown: it is
neither lost nor all there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

_EVER: Final = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


class Gap(NamedTuple):
    """Time of which rows are missing; `end` is not part of it."""

    begin: datetime
    end: datetime


class Span(NamedTuple):
    """Span of time from which every row is there, but for gaps; None where a limit is not known."""

    begin: datetime | None = None
    until: datetime | None = None
    gaps: tuple[Gap, ...] = ()


NO_SPAN: Final = Span()


def merged(gaps: Iterable[Gap]) -> tuple[Gap, ...]:
    """Put gaps in order, and those that touch into one."""
    found: list[Gap] = []
    for gap in sorted(each for each in gaps if each.begin < each.end):
        if found and gap.begin <= found[-1].end:
            found[-1] = Gap(found[-1].begin, max(found[-1].end, gap.end))
        else:
            found.append(gap)
    return tuple(found)


def after(gaps: Iterable[Gap], until: datetime | None) -> tuple[Gap, ...]:
    """Return the parts of gaps that lie behind this moment."""
    return merged(gaps if until is None else (Gap(max(gap.begin, until), gap.end) for gap in gaps))


def settled(span: Span, settle: timedelta) -> Span:
    """Leave a time to settle before each limit behind which rows are missing."""
    gaps = merged(Gap(gap.begin - settle, gap.end) for gap in span.gaps)
    return Span(span.begin, span.until and span.until - settle, gaps)


def joint(spans: Iterable[Span]) -> Span:
    """Join the spans that several lakes have of one database: each may fill gaps of the others."""
    found = list(spans)
    begins, ends = [span.begin for span in found if span.begin], [span.until for span in found if span.until]
    reached = min(span.begin or _EVER[0] for span in found)
    until = max(span.until or _EVER[1] for span in found)
    gaps = []
    for part in [*sorted(part for span in found for part in _complete(span)), Gap(until, until)]:
        if part.begin > reached:
            gaps.append(Gap(reached, part.begin))
        reached = max(reached, part.end)
    return Span(min(begins, default=None), max(ends, default=None), tuple(gaps))


def common(spans: Iterable[Span]) -> Span:
    """Return the overlap of all spans."""
    found = list(spans)
    begins, ends = [span.begin for span in found if span.begin], [span.until for span in found if span.until]
    gaps = merged(gap for span in found for gap in span.gaps)
    return Span(max(begins, default=None), min(ends, default=None), gaps)


def of_any(spans: Iterable[Span]) -> Span:
    """Return the span of several databases, each of which may have had a message: it begins with the first of them.

    A database that joins later, empty or with rows of late, takes nothing from what the others can tell of before.
    """
    found = list(spans)
    begins = [span.begin for span in found if span.begin]
    return common(found)._replace(begin=min(begins) if begins and len(begins) == len(found) else None)


def _complete(span: Span) -> Iterator[Gap]:
    """The parts of a span between its gaps."""
    begin, until = span.begin or _EVER[0], span.until or _EVER[1]
    for gap in merged(span.gaps):
        if begin < min(gap.begin, until):
            yield Gap(begin, min(gap.begin, until))
        begin = max(begin, gap.end)
    if begin < until:
        yield Gap(begin, until)
