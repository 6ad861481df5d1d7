"""The statement of durable.storage.sql.agenda."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from durable.storage.sql import agenda as sql
from tests.simulation.rows import Work
from tests.simulation.sql.parts import IN, OUT, Side, is_free, is_ordered, is_shared, next_names
from tests.simulation.sql.registry import Params, Rows, does
from tests.simulation.tables import Transaction


@does(
    sql.READ_AGENDA,
    "destinations message_types shared_destinations shared_types is_ordered is_due is_late next_due_in took",
)
def read_agenda(tx: Transaction, p: Params) -> Rows:
    rows = tx.all(OUT.table) + tx.all(IN.table)
    unowned = [row for row in rows if row.owner_id == 0]
    coming = [row.execution_time for row in rows if row.execution_time is not None and row.execution_time > tx.now]
    return [
        (
            _known(tx, OUT, p["known_destinations"], p["destination_floors"])
            if p["is_short"]
            else [name for (name,) in next_names(tx, p, is_free)],
            _known(tx, IN, p["known_types"], p["type_floors"]) if p["is_short"] else _lanes(tx, IN, is_free),
            _lanes(tx, OUT, is_shared),
            _lanes(tx, IN, is_shared),
            any(map(is_ordered, rows)),
            any(row.execution_time is not None and row.execution_time <= tx.now for row in unowned),
            any(row.deliver_by is not None and row.deliver_by < tx.now for row in unowned),
            min(coming) - tx.clock if coming else None,
            timedelta(milliseconds=4),
        )
    ]


def _known(tx: Transaction, side: Side, names: list[str], floors: list[int]) -> list[str]:
    waiting = [row for row in tx.all(side.table) if is_free(row)]
    return [
        name
        for name, floor in zip(names, floors, strict=True)
        if any(getattr(row, side.lane) == name and row.seq >= floor for row in waiting)
    ]


def _lanes(tx: Transaction, side: Side, fits: Callable[[Work], bool]) -> list[str]:
    return sorted({getattr(row, side.lane) for row in tx.all(side.table) if fits(row)})
