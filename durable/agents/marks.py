"""Marks of a message on what it shares with the others of its transaction in memory: an attribute, a listener, a flag,
an option.

    AsyncSession --> Session --> SessionTransaction
                        |
                        +------> Connection --> the pool's connection and its record --> adapter --> driver

The names of all attributes are compared, and the values of those that are not the library's own with what they contain,
by identity. It is done after each message: a few microseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.engine.events import ConnectionEvents
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.orm.events import SessionEvents

_OF_EACH_MESSAGE: Final = "identity_map"
_PRIVATE: Final = frozenset(("_execution_options", "_adapters", "_notice_handlers", "_notify_handlers"))
"""Attributes with what an application sets or registers, although their names are private ones."""
_IN_SLOTS: Final = ("isolation_level", "readonly", "deferrable")
_LISTENERS_IN_SLOTS: Final = ("_listeners", "_log_listeners", "_query_loggers", "_termination_listeners")
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, deque)


class Marks:
    """Objects, as they were when they were added."""

    def __init__(self, things: Iterable[object]) -> None:
        self._before: list[_Mark] = []
        self.add(things)

    def add(self, things: Iterable[object]) -> None:
        self._before += map(_Mark, things)

    def changed(self) -> str | None:
        """Return the type of the first that has changed since."""
        return next((type(each.thing).__name__ for each in self._before if each.has_changed()), None)


class _Mark:
    """One object, as it was."""

    def __init__(self, thing: object) -> None:
        self.thing = thing
        self._attributes: dict[str, object] = getattr(thing, "__dict__", {})
        self._names = [*self._attributes]
        self._compared = [name for name in self._names if _is_compared(name)]
        self._slots = [name for name in (*_IN_SLOTS, *_LISTENERS_IN_SLOTS) if hasattr(type(thing), name)]
        self._values = self._read()
        self._containers = [value for value in self._values if isinstance(value, _CONTAINERS)]
        self._contents = self._contained()
        self._listeners = _listeners(thing)

    def has_changed(self) -> bool:
        return (
            ([*self._attributes] != self._names and self._has_other_names())
            or not _are_same(self._read(), self._values)
            or not _are_same(self._contained(), self._contents)
            or not _are_same(_listeners(self.thing), self._listeners)
        )

    def _read(self) -> list[object]:
        return [
            *map(self._attributes.get, self._compared),
            *[getattr(self.thing, name, None) for name in self._slots],
        ]

    def _contained(self) -> list[object]:
        contents: list[object] = []
        for each in self._containers:
            contents += each
            if isinstance(each, dict):
                contents += each.values()
        return contents

    def _has_other_names(self) -> bool:
        """Tell whether an attribute is new, or gone, that the library does not make by itself."""
        kind = type(self.thing)
        return any(_is_compared(name) or not hasattr(kind, name) for name in self._attributes.keys() ^ set(self._names))


def _is_compared(name: str) -> bool:
    return (name[0] != "_" and name != _OF_EACH_MESSAGE) or name in _PRIVATE


def _are_same(now: Sequence[object], before: Sequence[object]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _listeners(thing: object) -> list[object]:
    """Return the listeners of this very session or connection, each behind its event."""
    events: Iterable[Any] = ()
    if isinstance(thing, Session):
        events = [event for event in _of_session(thing.dispatch) if event.listeners]
    elif isinstance(thing, Connection) and "_has_events" in vars(thing):
        events = _of_connection(thing.dispatch)
    return [each for event in events for each in (event, *event)]


def of_session(session: Session | AsyncSession) -> Iterator[object]:
    """Yield what a message is given: the session and its transaction."""
    if isinstance(session, AsyncSession):
        yield session
        session = session.sync_session
    _made_when_asked_for = session.info, session.dispatch
    yield session
    if (transaction := session.get_transaction()) is not None:
        yield transaction


def of_connection(connection: Connection) -> Iterator[object]:
    """Yield the connection as SQLAlchemy, its pool, its dialect and the driver see it."""
    pooled, _made_when_asked_for = connection.connection, connection.info
    yield connection
    yield pooled
    if (record := getattr(pooled, "_connection_record", None)) is not None:
        yield record
    yield pooled.dbapi_connection
    if pooled.driver_connection is not pooled.dbapi_connection:
        yield pooled.driver_connection


def _each_event(of: Any) -> Any:
    return attrgetter(*of.dispatch._event_names)


_of_session: Final = _each_event(SessionEvents)
_of_connection: Final = _each_event(ConnectionEvents)
