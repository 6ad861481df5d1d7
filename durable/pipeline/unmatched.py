"""Names among the filters of a replay that no message has: a misspelt one would leave its messages out in silence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final
from uuid import UUID

from durable.errors import InvalidSetting
from durable.grammar import suggestion
from durable.pipeline.session import spark_errors
from durable.transports.addresses import spellings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from durable.pipeline.choosing import Choice, Group

_MOST_SHOWN: Final = 10


def refuse_unmatched(every: Callable[[], DataFrame], choice: Choice, groups: Sequence[Group]) -> None:
    """Raise InvalidSetting for the first name or id among the filters that no row has, with the nearest name that is;
    never where there is no row at all, of which none is left out.

    `every` returns the rows without any filter; it is called for ids, and for names that none of the `groups` has.
    """
    if not groups and _is_empty(every()):
        return
    named = (
        ("--service", "service", {choice.service: [choice.service]} if choice.service else {}),
        ("--type", "message_type", {name: [name] for name in choice.types}),
        ("--address", "address", {name: spellings(name) for name in choice.addresses}),
    )
    for option, column, given in named:
        chosen = {getattr(group, column) for group in groups}
        missing = [name for name, written in given.items() if chosen.isdisjoint(written)]
        known = _names(every(), column) if missing else set[str]()
        for name in missing:
            if known.isdisjoint(given[name]):
                raise InvalidSetting(f"{option}: no message has {name!r}{suggestion(name, known) or _some(known)}")
    known_ids = _ids(every(), choice.ids) if choice.ids else set[bytes]()
    for each in choice.ids:
        if each.bytes not in known_ids:
            raise InvalidSetting(f"--id: no message has {each}; leave it out, or archive first what is not there yet")


def _is_empty(rows: DataFrame) -> bool:
    with spark_errors():
        return rows.isEmpty()


def _ids(rows: DataFrame, wanted: Sequence[UUID]) -> set[bytes]:
    from pyspark.sql import functions as F

    named = rows.where(F.col("id").isin(*(F.lit(bytearray(each.bytes)) for each in wanted)))
    with spark_errors():
        return {bytes(row[0]) for row in named.select("id").distinct().collect()}


def _names(rows: DataFrame, column: str) -> set[str]:
    from pyspark.sql import functions as F

    with spark_errors():
        return {row[0] for row in rows.select(column).where(F.is_valid_utf8(column)).distinct().collect()}


def _some(known: Collection[str]) -> str:
    shown = ", ".join(sorted(known)[:_MOST_SHOWN])
    return f"; known: {shown}" if known else "; the messages have none"
