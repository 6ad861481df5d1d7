"""Traces of a message in what it shares with the others of its transaction: whatever the next one could notice.

    statements      SET, a temporary table, a lock that is asked for     durable.outbox.sql_text
    waits           for anything but a statement of the session          durable.agents.driving
    marks           on the session, its connections or its transaction   durable.agents.marks

After a message that has left a trace no other follows in the transaction. Objects of the session are no trace: each
message finds none.
"""

from __future__ import annotations

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from durable.agents.marks import Marks, of_connection, of_session
from durable.outbox.sql_text import Control


class Traces:
    """Traces of the messages of one session, as far as it is watched."""

    def __init__(self) -> None:
        self.first: str | None = None
        """The first trace, in words; None: there is none."""
        self.is_closed = False
        """True from the moment when the attempt is cancelled: waits of its clean-up are no traces."""
        self._marks: Marks | None = None
        self._in_statement = False

    def mark(self, session: Session | AsyncSession) -> None:
        """Remember how the session is before its first message, and from then on each connection that joins it."""
        self._marks = Marks(of_session(session))

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
        """Remember how a connection is when it joins the transaction."""
        if self._marks is not None:
            self._marks.add(of_connection(connection))

    def compare(self) -> None:
        """Note what a message has left on its session and the connections."""
        if self._marks is not None and (marked := self._marks.changed()) is not None:
            self._note(
                f"it has left something on its session: an attribute, a listener, its info, an option ({marked})"
            )

    def _note(self, trace: str) -> None:
        if not self.is_closed:
            self.first = self.first or trace
