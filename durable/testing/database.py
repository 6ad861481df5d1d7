"""The storage functions that a bus in memory can do, and what does each of them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from sqlalchemy import Connection

from durable.agents.settling import pause_and_release
from durable.errors import WiringError
from durable.settings import Settings
from durable.storage import answers, circuits, delayed, expiry, inbox, leases, parked, receipts, schedules, status
from durable.storage.database import Database, answer
from durable.testing.mailbox import Mailbox
from durable.testing.operators import MemoryOperators
from durable.testing.schedules import MemorySchedules

P = ParamSpec("P")
T = TypeVar("T")


class MemoryDatabase(Database):
    """Runs a method of the mailbox, of its parts, or of the schedules in place of each storage function."""

    def __init__(self, settings: Settings, mailbox: Mailbox, recurring: MemorySchedules) -> None:
        self.schema = settings.db_schema
        self._stand_ins: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._for(answer)(lambda: None)  # the rows are in memory, whatever the sessions are of
        self._for(status.clock)(mailbox.clock.now)
        self._for(inbox.retry_later)(mailbox.retry_later)
        self._for(inbox.put_back)(mailbox.put_back)
        self._for(inbox.dead_letter)(mailbox.dead_letter)
        self._for(inbox.expire)(mailbox.expire)
        self._for(expiry.bury_incoming)(mailbox.bury_incoming)
        self._for(parked.park)(mailbox.park)
        self._for(leases.release)(mailbox.release)
        self._for(pause_and_release)(mailbox.pause_and_release)
        operators = MemoryOperators(mailbox)
        self._for(delayed.cancel_message)(operators.cancel_message)
        self._for(delayed.run_message_now)(operators.run_message_now)
        self._for(delayed.reschedule_message)(operators.reschedule_message)
        self._for(receipts.look)(mailbox.look)
        self._for(receipts.look_again)(mailbox.look_again)
        self._for(answers.read)(mailbox.history.read_answers)
        self._for(answers.forget)(mailbox.history.forget_answer)
        self._for(answers.forget_former)(mailbox.forget_former_answer)
        self._for(circuits.pause_each)(recurring.pause_each)
        self._for(circuits.resume_each)(recurring.resume_each)
        self._for(circuits.pause_at_least)(mailbox.circuits.pause_at_least)
        self._for(circuits.open_circuit)(mailbox.circuits.open_circuit)
        self._for(circuits.close_circuit)(mailbox.circuits.close_circuit)
        self._for(circuits.put_off_probe)(mailbox.circuits.put_off_probe)
        self._for(circuits.try_again)(mailbox.circuits.try_again)
        self._for(schedules.names)(recurring.names)
        self._for(schedules.ask)(recurring.ask)
        self._for(schedules.reschedule)(recurring.reschedule)

    def _for(self, work: Callable[Concatenate[Connection, str, P], T]) -> Callable[[Callable[P, T]], None]:
        """Register the stand-in for this function: in two calls, so that a type checker compares their signatures."""

        def put(stand_in: Callable[P, T]) -> None:
            self._stand_ins[work] = stand_in

        return put

    async def transaction(
        self, work: Callable[Concatenate[Connection, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        stand_in = self._stand_ins.get(work)
        if stand_in is None:
            raise WiringError(f"the bus is in memory: no database for {work.__qualname__}()")
        return cast(T, stand_in(*args, **kwargs))

    async def statement(
        self, work: Callable[Concatenate[Connection, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self.transaction(work, *args, **kwargs)
