"""Actions of operators: who did what, when, to how many, and why.

    recorded(change, action)    a change of many rows in batches: one row, which grows with each batch
    pause(), resume(), ...      a change of a few things by their names, with its row

Each is recorded in the transaction of its change: there is no change without its record, and no record of a change that
was rolled back. What code does, such as `bus.pause()`, is not recorded here; a circuit names its own actor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timedelta
from itertools import chain
from typing import Any, Concatenate, NamedTuple, ParamSpec
from uuid import UUID, uuid4

import msgspec
from sqlalchemy import Connection

from durable.storage import circuits, delayed, maintenance, schedules
from durable.storage.circuits import CircuitKind, OpenCircuit, Resumed
from durable.storage.dead_letters import Resolved
from durable.storage.sql import actions as statements

P = ParamSpec("P")
_MOST_NAMED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A change that an operator makes. `before` and `after` are values of JSON, without contents of messages."""

    actor: str
    verb: str
    target: str
    reason: str | None = None
    before: Any = None
    after: Any = None
    id: UUID = field(default_factory=uuid4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Filters for recorded actions; None matches all. `target` is a part of the target's text."""

    actor: str | None = None
    verb: str | None = None
    target: str | None = None
    since: datetime | None = None
    until: datetime | None = None


class Recorded(NamedTuple):
    """An action in the record. `changed`: how many letters, messages, circuits or schedules were changed by it."""

    number: int
    id: UUID
    began_at: datetime
    ended_at: datetime
    actor: str
    verb: str
    target: str
    reason: str | None
    changed: int
    before: Any
    after: Any


def record(conn: Connection, schema: str, action: Action, changed: int = 1) -> None:
    """Record an action; another record of the same action adds to its number."""
    params = asdict(action) | {"changed": changed, "before": _json(action.before), "after": _json(action.after)}
    conn.execute(statements.RECORD_ACTION.within(schema), params)


def recorded(
    change: Callable[Concatenate[Connection, str, P], Resolved], action: Action
) -> Callable[Concatenate[Connection, str, P], Resolved]:
    """Return the change of a batch with its record: what was changed counts."""

    def change_and_record(conn: Connection, schema: str, /, *args: P.args, **options: P.kwargs) -> Resolved:
        resolved = change(conn, schema, *args, **options)
        if resolved.done:
            record(conn, schema, action, len(resolved.done))
        return resolved

    return change_and_record


def page(
    conn: Connection, schema: str, selection: Selection, *, limit: int, before: int | None = None
) -> list[Recorded]:
    """Return the recorded actions, the newest first; `before` is the number of the last one on the page before."""
    params = asdict(selection) | {"limit": limit, "before_number": before}
    return [Recorded(*row) for row in conn.execute(statements.READ_ACTIONS.within(schema), params)]


def purge(conn: Connection, schema: str, *, keep: timedelta, batch_size: int = 1_000) -> int:
    """Delete a bounded number of actions that were begun longer ago than this. Returns how many."""
    return maintenance.purge(conn, schema, statements.PURGE_ACTIONS, keep=keep, batch_size=batch_size)


def told(noun: str, selection: Any) -> str:
    """Describe what was selected: "dead letters: fingerprint=3f2a, address=tcp://stock:2302".

    A text that was searched for is left out: it may quote messages.
    """
    given = {each.name: getattr(selection, each.name) for each in fields(selection) if each.name != "resolved"}
    chosen = [
        f"{name}={'...' if name == 'text' else _shown(value)}" for name, value in given.items() if value is not None
    ]
    return f"{noun}: {', '.join(chosen) or 'all'}"


# ---------------------------------------------------------------- changes with their records


def pause(
    conn: Connection,
    schema: str,
    named: Sequence[tuple[CircuitKind, str]],
    *,
    reason: str,
    actor: str,
    duration: timedelta | None,
    replaces: bool = True,
) -> bool:
    """Pause all of these, or none. False when one is paused by somebody already, unless this pause replaces theirs."""
    before = _open(conn, schema, named)
    if not replaces and not all(each.probing or each.parked for each in before):
        return False
    circuits.pause_each(conn, schema, named, reason=reason, actor=actor, duration=duration)
    after = _kept(_open(conn, schema, named))
    action = Action(actor=actor, verb="pause", target=_names(named), reason=reason, before=_kept(before), after=after)
    record(conn, schema, action, len(named))
    return True


def resume(
    conn: Connection,
    schema: str,
    named: Sequence[tuple[CircuitKind, str]],
    *,
    actor: str,
    seen: datetime | None = None,
) -> Resumed:
    """Resume all of these, or none. There is no record when none was open.

    `seen`: only what has been stopped since then; nothing when it was stopped anew, or is paused besides.
    """
    before = _open_of_each(conn, schema, named)
    ends = [[row for row in rows if row.parked == rows[0].parked] for rows in before if rows]
    resumed = circuits.together([circuits.resume(conn, schema, kind, key, seen=seen) for kind, key in sorted(named)])
    if resumed.was_open:
        after = _kept(_open(conn, schema, named))
        was = _kept(list(chain.from_iterable(before)))
        action = Action(actor=actor, verb="resume", target=_names(named), before=was, after=after or None)
        record(conn, schema, action, max(1, len(ends)))
    return resumed


def cancel_message(
    conn: Connection, schema: str, message: UUID, *, actor: str, reason: str | None, keep_body: bool
) -> bool:
    """Cancel a message that waits for its time. False when it does not."""
    done = delayed.cancel_message(conn, schema, message, actor=actor, reason=reason, keep_body=keep_body)
    return _noted(conn, schema, Action(actor=actor, verb="cancel", target=_message(message), reason=reason), done=done)


def run_message_now(conn: Connection, schema: str, message: UUID, *, actor: str) -> bool:
    """Make a message due that waits for its time. False when it does not."""
    done = delayed.run_message_now(conn, schema, message)
    return _noted(conn, schema, Action(actor=actor, verb="run-now", target=_message(message)), done=done)


def reschedule_message(
    conn: Connection, schema: str, message: UUID, *, at: datetime, dedupe_window: timedelta, actor: str
) -> Resolved:
    """Give a message another time. Returns the rows done, and those that would expire or be too old by then."""
    resolved = delayed.reschedule_message(conn, schema, message, at=at, dedupe_window=dedupe_window)
    action = Action(actor=actor, verb="reschedule", target=_message(message), after={"due_at": at})
    _noted(conn, schema, action, done=bool(resolved.done))
    return resolved


def run_schedule(conn: Connection, schema: str, name: str, *, actor: str) -> bool:
    """Ask for an occurrence of a schedule now. False when no running node declares it."""
    done = schedules.ask(conn, schema, name, actor=actor)
    return _noted(conn, schema, Action(actor=actor, verb="run-now", target=_schedule(name)), done=done)


def reschedule(conn: Connection, schema: str, name: str, *, at: datetime, actor: str) -> bool:
    """Give the next occurrence of a schedule another time. False when it has none yet."""
    before = {row.name: row.due_at for row in schedules.read(conn, schema, [name])}
    done = schedules.reschedule(conn, schema, name, at=at, actor=actor)
    was, is_now = {"due_at": before.get(name)}, {"due_at": at}
    action = Action(actor=actor, verb="reschedule", target=_schedule(name), before=was, after=is_now)
    return _noted(conn, schema, action, done=done)


def remove_schedule(conn: Connection, schema: str, name: str, *, actor: str) -> bool:
    """Remove a schedule that no running node declares. False for one that is declared."""
    done = schedules.remove_orphan(conn, schema, name)
    return _noted(conn, schema, Action(actor=actor, verb="cancel", target=_schedule(name)), done=done)


def _noted(conn: Connection, schema: str, action: Action, *, done: bool) -> bool:
    if done:
        record(conn, schema, action)
    return done


def _open(conn: Connection, schema: str, named: Sequence[tuple[CircuitKind, str]]) -> list[OpenCircuit]:
    """Return the open circuits among these."""
    return list(chain.from_iterable(_open_of_each(conn, schema, named)))


def _open_of_each(
    conn: Connection, schema: str, named: Sequence[tuple[CircuitKind, str]]
) -> list[Sequence[OpenCircuit]]:
    found = circuits.read(conn, schema)
    return [circuits.of_name(conn, schema, found, kind, key) for kind, key in named]


def _kept(stopped: Sequence[OpenCircuit]) -> Mapping[str, Any]:
    """Return circuits as the record keeps them; the reasons that code gave may quote messages."""
    return {
        f"{'parked ' if each.parked else ''}{each.kind} {each.key}": {
            "since": each.since,
            "until": each.until,
            "actor": each.actor,
            "by_failures": each.probing,
        }
        for each in stopped
    }


def _names(named: Sequence[tuple[CircuitKind, str]]) -> str:
    return _joined([f"{kind.value} {key}" for kind, key in named])


def _message(message: UUID) -> str:
    return f"message {message}"


def _schedule(name: str) -> str:
    return f"{CircuitKind.SCHEDULE.value} {name}"


def _shown(value: object) -> str:
    return _joined([str(each) for each in value]) if isinstance(value, list | tuple) else str(value)


def _joined(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _json(value: object) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()
