"""The storage functions that a bus in memory can do, and what does each of them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from sqlalchemy import Connection

from durable.agents.settling import pause_and_release
from durable.errors import WiringError
from durable.settings import Settings
from durable.storage import circuits, delayed, expiry, inbox, leases, schedules
from durable.storage.database import Database, answer
from durable.testing.mailbox import Mailbox
from durable.testing.schedules import MemorySchedules

P = ParamSpec("P")
T = TypeVar("T")


class MemoryDatabase(Database):
    """Runs a method of the mailbox, its circuits or its schedules in place of each storage function."""

    def __init__(self, settings: Settings, mailbox: Mailbox, recurring: MemorySchedules) -> None:
        self.schema = settings.db_schema
        self._stand_ins: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._replace(answer, lambda: None)  # the rows are in memory, whatever the sessions are of
        self._replace(inbox.retry_later, mailbox.retry_later)
        self._replace(inbox.put_back, mailbox.put_back)
        self._replace(inbox.dead_letter, mailbox.dead_letter)
        self._replace(inbox.expire, mailbox.expire)
        self._replace(expiry.bury_incoming, mailbox.bury_incoming)
        self._replace(leases.release, mailbox.release)
        self._replace(pause_and_release, mailbox.pause_and_release)
        self._replace(delayed.cancel_message, mailbox.cancel_message)
        self._replace(delayed.run_message_now, mailbox.run_message_now)
        self._replace(delayed.reschedule_message, mailbox.reschedule_message)
        self._replace(circuits.pause, recurring.pause)
        self._replace(circuits.resume, recurring.resume)
        self._replace(circuits.pause_at_least, mailbox.circuits.pause_at_least)
        self._replace(circuits.open_circuit, mailbox.circuits.open_circuit)
        self._replace(circuits.close_circuit, mailbox.circuits.close_circuit)
        self._replace(circuits.put_off_probe, mailbox.circuits.put_off_probe)
        self._replace(circuits.try_again, mailbox.circuits.try_again)
        self._replace(schedules.ask, recurring.ask)
        self._replace(schedules.reschedule, recurring.reschedule)

    def _replace(self, work: Callable[Concatenate[Connection, str, P], T], stand_in: Callable[P, T]) -> None:
        """The type checker compares their parameters and results."""
        self._stand_ins[work] = stand_in

    async def transaction(
        self, work: Callable[Concatenate[Connection, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        stand_in = self._stand_ins.get(work)
        if stand_in is None:
            raise WiringError(f"this bus is in memory: it has no database for {work.__qualname__}()")
        return cast(T, stand_in(*args, **kwargs))
