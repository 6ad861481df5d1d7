"""Marks: numbers that the log of a table of the lake keeps for each database, whatever becomes of old commits.

durable:begin:SERVICE:DATABASE   durable:until:...   the span of which the table has every row, in microseconds
durable:gaps:...   durable:gap-N-begin:...           what it lacks in between
durable:commit:APP                                   which commit was the last one of this archive
durable:beside:APP                                   that there was the table of dead letters when it was made
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from durable.pipeline.lake_tables import Whose
from durable.pipeline.spans import Gap, Span, merged

if TYPE_CHECKING:
    from deltalake.transaction import Transaction

_BESIDE = "durable:beside:"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Whole(NamedTuple):
    """Span of which a table has every row of a database."""

    whose: Whose
    span: Span


def marked(numbers: Mapping[str, int], whole: Whole | None) -> list[Transaction]:
    """Return what a commit adds to the marks: a later end, gaps, and a beginning where none is named yet."""
    from deltalake.transaction import Transaction

    if whole is None:
        return []
    whose, span = whole
    begin, until = _edges(whose)
    marks = {until: _micros(span.until)} if span.until else {}
    if span.begin and begin not in numbers:
        marks[begin] = _micros(span.begin)
    known = _gaps(numbers, whose)
    gaps = merged([*known, *span.gaps])
    if gaps != known:
        marks[_gap_count(whose)] = len(gaps)
        for number, gap in enumerate(gaps):
            marks |= zip(_edges_of_gap(whose, number), map(_micros, gap), strict=True)
    return [Transaction(name, value) for name, value in marks.items()]


def span_of(numbers: Mapping[str, int], whose: Whose) -> Span:
    """Return the span of which the table has every row of this database."""
    begin, until = (_moment(numbers.get(name)) for name in _edges(whose))
    return Span(begin, until, _gaps(numbers, whose))


def owners(names: Iterable[str]) -> set[Whose]:
    """Return the databases of whose rows these marks tell from when on, or up to when, the table has all."""
    parts = [name.split(":", 3) for name in names if name.startswith("durable:")]
    return {Whose(*part[2:]) for part in parts if part[1] in ("begin", "until")}


def has_beside(names: Iterable[str]) -> bool:
    """Tell whether these marks of the history tell of a table of dead letters."""
    return any(name.startswith(_BESIDE) for name in names)


def beside_mark(app_id: str) -> str:
    """The name under which the log of the history keeps that there was a table of dead letters."""
    return f"{_BESIDE}{app_id}"


def commit_mark(app_id: str) -> str:
    """The name under which a table's log keeps the last commit of an archive."""
    return f"durable:commit:{app_id}"


def _edges(whose: Whose) -> tuple[str, str]:
    """The names under which a table's log keeps the span of this database."""
    return _mark("begin", whose), _mark("until", whose)


def _gap_count(whose: Whose) -> str:
    return _mark("gaps", whose)


def _edges_of_gap(whose: Whose, number: int) -> tuple[str, str]:
    return _mark(f"gap-{number}-begin", whose), _mark(f"gap-{number}-end", whose)


def _mark(what: str, whose: Whose) -> str:
    return f"durable:{what}:{whose.service}:{whose.database}"


def _gaps(numbers: Mapping[str, int], whose: Whose) -> tuple[Gap, ...]:
    """The gaps that a table's log knows of."""
    found = []
    for number in range(numbers.get(_gap_count(whose), 0)):
        begin, end = (_moment(numbers.get(name)) for name in _edges_of_gap(whose, number))
        if begin is not None and end is not None:
            found.append(Gap(begin, end))
    return tuple(found)


def _micros(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _moment(micros: int | None) -> datetime | None:
    return None if micros is None else _EPOCH + timedelta(microseconds=micros)
