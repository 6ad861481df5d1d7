"""The page of the database: its tables, what holds vacuum up, its connections, and its statements."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from durable.bus import Bus
from durable.console.access import Person, Role
from durable.console.pages import Pages
from durable.console.shown import age
from durable.console.viewers import HIDDEN
from durable.grammar import several
from durable.settings import Settings
from durable.storage import maintenance, upkeep
from durable.storage.upkeep import Statements, TableSize, Upkeep, VacuumHolder

_LONG: Final = timedelta(minutes=5)
_MANY_TRANSACTIONS: Final = 1_000_000
"""For holders without a known age."""
_MANY_DEAD: Final = 10_000
_FULL: Final = 0.8
_SLACK: Final = timedelta(days=2)
"""A day is dropped when all of it is past its retention, at the next run of maintenance."""


class DatabasePage:
    """The page, read in one transaction."""

    def __init__(self, pages: Pages, bus: Bus) -> None:
        self._pages = pages
        self._bus = bus

    async def __call__(self, request: Request, person: Person) -> Response:
        found = await self._bus.runtime.database.transaction(upkeep.read)
        if person.role < Role.OPERATOR:
            found = found._replace(statements=_without_texts(found.statements))
        settings = self._bus.settings
        return self._pages.render(
            request,
            "database.html",
            person,
            found=found,
            needs=list(needs(found, settings)),
            kept=_kept(settings),
            size=size,
            hint=hint,
            is_long=is_long,
            is_bloated=is_bloated,
        )


def size(number: int | None) -> str:
    """Return bytes as pg_size_pretty() shows them: in the largest unit of which there are ten or more."""
    if number is None:
        return ""
    value, unit = float(number), "bytes"
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if value < (10_240 if unit == "bytes" else 10_239.5) or unit == "TB":
            break
        value /= 1_024
    return f"{int(value + 0.5)} {unit}"


def needs(found: Upkeep, settings: Settings) -> Iterator[str]:
    """Work for somebody."""
    for holder in found.holders.found or ():
        if is_long(holder):
            yield f"{who(holder)} holds vacuum up{_since(holder)}"
    for table in found.tables.found or ():
        if is_bloated(table):
            dead, live = several(table.dead, "dead rows"), several(table.rows, "live ones")
            yield f"{table.name} has {dead} beside {live}: vacuum does not keep up"
    for days in found.days.found or ():
        keep = _kept(settings)[days.name]
        if days.oldest is not None and days.oldest + keep + _SLACK < days.today:
            yield f"{days.name} goes back to {days.oldest}, and {age(keep)} are to be kept: {_DROPPED_BY[days.name]}"
        if days.newest is not None and days.newest <= days.today:
            yield f"{days.name} has no partition for tomorrow: nodes make them, so look whether one runs"
    connections = found.connections.found
    if connections is not None and connections.in_use >= _FULL * connections.most:
        yield f"{connections.in_use} of {connections.most} connections are in use"


_DROPPED_BY: Final = {
    maintenance.IDS: "nodes drop them, so look whether one runs",
    maintenance.HISTORY: "nodes drop them, and durable-agent pipeline purge where history is archived",
}


def who(holder: VacuumHolder) -> str:
    """The holder in a few words."""
    match holder.kind:
        case "prepared":
            return f"the prepared transaction {holder.name}"
        case "slot":
            return f"the replication slot {holder.name}"
        case "session":
            return f"process {holder.pid} ({holder.application or 'unnamed'})"


def is_long(holder: VacuumHolder) -> bool:
    """Tell whether the holder is older than any transaction of a service should be."""
    if holder.age is not None:
        return holder.age >= _LONG
    return holder.transactions >= _MANY_TRANSACTIONS


def is_bloated(table: TableSize) -> bool:
    """Tell whether a table has so many dead rows that vacuum cannot have been there for long."""
    return table.dead >= _MANY_DEAD and 2 * table.dead >= table.rows


def hint(holder: VacuumHolder) -> str:
    """Say what to do about a holder."""
    match holder:
        case VacuumHolder(kind="prepared"):
            name = _literal(holder.name)
            return f"Its coordinator has to end it. By hand: COMMIT PREPARED {name}, or ROLLBACK PREPARED {name}."
        case VacuumHolder(kind="slot", state="active"):
            return "Its consumer is behind, or a query runs on the standby: look there."
        case VacuumHolder(kind="slot"):
            drop = f"SELECT pg_drop_replication_slot({_literal(holder.name)})"
            return f"No consumer reads it, and the server keeps the WAL for it, too. Start the consumer, or {drop}."
        case VacuumHolder(is_standby=True):
            return "A standby with hot_standby_feedback: look for the longest query there."
        case VacuumHolder(application="durable-pipeline"):
            return f"A run of the pipeline reads in one snapshot, and ends it. Where that run is dead: {_end(holder)}."
        case VacuumHolder(state=None):
            return "This role may not see what it does: GRANT pg_read_all_stats, or ask a role that has it."
        case VacuumHolder(state="idle in transaction" | "idle in transaction (aborted)"):
            return (
                "Its client has left a transaction open: end it there, "
                f"or {_end(holder)}. idle_in_transaction_session_timeout prevents it."
            )
        case _:
            return f"A statement runs: wait for it, or SELECT pg_cancel_backend({holder.pid})."


def _end(holder: VacuumHolder) -> str:
    return f"SELECT pg_terminate_backend({holder.pid})"


def _literal(text: str | None) -> str:
    return "'" + (text or "").replace("'", "''") + "'"


def _since(holder: VacuumHolder) -> str:
    return "" if holder.age is None else f", for {age(holder.age)}"


def _kept(settings: Settings) -> dict[str, timedelta]:
    return {maintenance.IDS: settings.dedupe_window, maintenance.HISTORY: settings.history_retention}


def _without_texts(found: Statements) -> Statements:
    """Hide the texts of statements, which may quote values."""
    slowest, running = found.slowest, found.running
    if slowest.found is not None:
        slowest = slowest._replace(found=[each._replace(query=HIDDEN) for each in slowest.found])
    if running.found is not None:
        running = running._replace(found=[each._replace(query=HIDDEN) for each in running.found])
    return found._replace(slowest=slowest, running=running)
