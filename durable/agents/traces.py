"""Traces of a message in what it shares with the others of its transaction: whatever the next one could notice.

    statements      SET, a temporary table, a lock that is asked for     durable.outbox.sql_text
    waits           for anything but a statement of the session          durable.agents.driving
    the session     its flags, listeners and info, and the options of its connections

After a message that has left a trace no other follows in the transaction. Objects of the session are no trace: each
message finds none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.orm import Session
from sqlalchemy.orm.events import SessionEvents

from durable.outbox.sql_text import Control

_EVENTS: Final = tuple(
    name for name in vars(SessionEvents) if not name.startswith("_") and hasattr(Session.dispatch, name)
)
_FLAGS: Final = ("autoflush", "expire_on_commit", "bind")


class Traces:
    """Traces of the messages of one session, as far as it is watched."""

    def __init__(self, session: Session) -> None:
        self.first: str | None = None
        """The first trace, in words; None: there is none."""
        self.is_closed = False
        """True from the moment when the attempt is cancelled: waits of its clean-up are no traces."""
        self._session = session
        self._marks: tuple[object, ...] = ()
        self._kept: tuple[object, ...] = ()
        self._options: dict[Connection, object] = {}
        self._in_statement = False

    def mark(self) -> None:
        """Remember how the session is before its first message."""
        self._marks = _marks(self._session)
        self._kept = tuple(self._session.info.values())  # no other object has the identity of one that is alive

    def begin_message(self) -> None:
        self._in_statement = False

    def begin_statement(self, sql: str, control: Control) -> None:
        self._in_statement = True
        if control.lasts:
            self._note(f"it has changed its transaction until the end: {sql.strip()[:40]!r}")

    def end_statement(self) -> None:
        self._in_statement = False

    def when_waiting(self) -> None:
        """Note that a handler begins to wait: for its statement, or for something outside the transaction."""
        if not self._in_statement:
            self._note("it has awaited something besides the statements of its session")

    def join(self, connection: Connection) -> None:
        """Remember the options of a connection that joins the transaction."""
        self._options[connection] = connection.get_execution_options()

    def compare(self) -> None:
        """Note what a message has changed about its session and the connections."""
        options = ((connection.get_execution_options(), before) for connection, before in self._options.items())
        if _marks(self._session) != self._marks or any(now != before for now, before in options):
            self._note("it has changed its session: a flag, a listener, its info, or an option of its connection")

    def _note(self, trace: str) -> None:
        if not self.is_closed:
            self.first = self.first or trace


def _marks(session: Session) -> tuple[object, ...]:
    flags = (getattr(session, name) for name in _FLAGS)
    listeners = (len(getattr(session.dispatch, name)) for name in _EVENTS)
    return *flags, sum(listeners), _identities(session.info.items())


def _identities(items: Iterable[tuple[Any, Any]]) -> dict[Any, int]:
    return {key: id(value) for key, value in items}
