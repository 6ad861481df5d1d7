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
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
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
        kind: Any = type(thing)
        self._attributes: dict[str, object] = getattr(thing, "__dict__", {})
        self._names = [*self._attributes]
        self._compared = _compared(tuple(self._names))
        self._slots = _slots(kind)
        self._containers: list[Any] = []
        self._containers = [value for value in self._state() if isinstance(value, _CONTAINERS)]
        self._before = self._state()

    def has_changed(self) -> bool:
        if [*self._attributes] != self._names and self._has_other_names():
            return True
        now = self._state()
        return len(now) != len(self._before) or not all(map(is_, now, self._before))

    def _state(self) -> list[object]:
        """Return the values, what they contain, and the listeners."""
        state = [*map(self._attributes.get, self._compared)]
        state += [getattr(self.thing, name, None) for name in self._slots]
        for each in self._containers:
            state += each
            if isinstance(each, dict):
                state += each.values()
        for event in _listened(self.thing, self._attributes):
            state += (event, *event)
        return state

    def _has_other_names(self) -> bool:
        """Tell whether an attribute is new, or gone, that the library does not make by itself."""
        kind = type(self.thing)
        return any(_is_compared(name) or not hasattr(kind, name) for name in self._attributes.keys() ^ set(self._names))


@lru_cache
def _compared(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if _is_compared(name)]


def _is_compared(name: str) -> bool:
    return (name[0] != "_" and name != _OF_EACH_MESSAGE) or name in _PRIVATE


@lru_cache
def _slots(kind: type) -> list[str]:
    return [name for name in (*_IN_SLOTS, *_LISTENERS_IN_SLOTS) if hasattr(kind, name)]


def _listened(thing: object, attributes: dict[str, object]) -> Iterable[Any]:
    """Return the events for which this very session or connection has listeners."""
    if isinstance(thing, Session):
        return filter(_own, _of_session(thing.dispatch))
    if "_has_events" in attributes and isinstance(thing, Connection):
        return _of_connection(thing.dispatch)
    return ()


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


def _each_event(of: Any) -> Callable[[object], Iterable[Any]]:
    return attrgetter(*of.dispatch._event_names)


_of_session: Final = _each_event(SessionEvents)
_of_connection: Final = _each_event(ConnectionEvents)
_own: Final = attrgetter("listeners")
