"""The real handling agent over a mailbox: it runs when it is called, one group of messages at a time."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from durable.agents.attempts import Attempts, Group, Task, arrived, tell_left_out
from durable.agents.context import AgentContext
from durable.agents.handling import HandlingAgent
from durable.agents.runner import nothing
from durable.application.handlers import Handler
from durable.application.middleware import MiddlewareStack
from durable.application.retry import Policy
from durable.envelope import LeasedEnvelope
from durable.errors import LeaseLost
from durable.outbox.outbox import Outbox
from durable.outbox.sessions import Sessions
from durable.storage.circuits import CircuitKind
from durable.testing.faults import Fault, Faults
from durable.testing.mailbox import Mailbox
from durable.testing.rows import Handled
from durable.testing.sessions import MemoryOutbox, own_flushes


class MemoryAttempts(Attempts):
    """Attempts with the test's faults, that are completed in the mailbox."""

    def __init__(
        self,
        handler: Handler,
        context: AgentContext,
        sessions: Sessions,
        *,
        onion: MiddlewareStack,
        mailbox: Mailbox,
        faults: Faults,
    ) -> None:
        super().__init__(handler, context, sessions, onion=onion)
        self._prepare = self._connect = nothing  # a bus in memory may have no database
        self._mailbox = mailbox
        self._faults = faults
        self._fault: Fault | None = None

    async def run(self, group: Group) -> None:
        self._fault = self._faults.next(self.handler.message_type)
        if self._fault is not None:
            if len(group.tasks) == 1:  # a group that fails is run again, each message alone: the fault is that of one
                self._fault.use()
            if not self._fault.after_handling:
                self._fault.happen()
        await super().run(group)

    def _complete(self, tasks: Sequence[Task], session: Session, outbox: Outbox) -> None:
        with own_flushes(session):
            session.flush()
        if self._fault is not None:
            self._fault.happen()
        leases = [task.lease for task in tasks]
        if not all(map(self._mailbox.owns, leases)):
            raise LeaseLost
        assert isinstance(outbox, MemoryOutbox)
        handled = [Handled(task.message, task.lease.envelope, task.attempt) for task in tasks]
        outbox.when_committed = lambda: self._finish(handled, leases)
        outbox.allow_last_commit()

    def _finish(self, handled: Sequence[Handled], leases: Sequence[LeasedEnvelope]) -> None:
        if self.handler.keeps_answers:
            tell_left_out(leases, self._mailbox.history.keep(arrived(leases)))
        self._mailbox.finish(handled, leases)


class MemoryHandling(HandlingAgent):
    """Runs one handler, with the test's faults. Retries are due exactly after their delays, without jitter."""

    def __init__(
        self, handler: Handler, attempts: MemoryAttempts, context: AgentContext, mailbox: Mailbox, policy: Policy
    ) -> None:
        super().__init__(handler, attempts, context, policy=policy.steady(), on_capacity=lambda: None)
        self._mailbox = mailbox

    async def settle(self, taken: Sequence[LeasedEnvelope]) -> None:
        """Handle these, in one transaction if possible; raises AssertionError when one of them has come to no end."""
        circuit = self._mailbox.circuits.of(CircuitKind.HANDLER, self.handler.message_type)
        self.observe_circuit(circuit is not None, probing=circuit is not None and circuit.probing)
        self.buffer.reserve_unchecked(taken)
        if circuit is None:
            await self.handle(taken)
        else:
            await self._try(*taken)
        left = [lease.envelope for lease in taken if self._mailbox.owns(lease)]
        if left:
            raise AssertionError(f"{self.handler.name} has not settled {left}: see the log of 'durable'")

    def close(self) -> None:
        self._attempts.close()
