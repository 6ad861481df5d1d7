"""The bus in memory, as a test uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast
from uuid import UUID

import msgspec

from durable.agents.context import AgentContext
from durable.arguments import checked_class
from durable.bus import Bus
from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, unix_ms
from durable.errors import WiringError
from durable.grammar import several
from durable.messages import validation as screening
from durable.messages.registry import name_of
from durable.messages.routing import LOCAL
from durable.outbox.envelope_factory import EnvelopeFactory, SendOptions, check_options
from durable.outcomes import STORED, Duplicate, Outcome
from durable.storage.leases import Burials
from durable.storage.rows import UNCOUNTED, Letter
from durable.telemetry import Event
from durable.testing.clock import ManualClock
from durable.testing.dispatching import MemoryDispatcher
from durable.testing.faults import Fault, Faults
from durable.testing.handling import MemoryAttempts, MemoryHandling
from durable.testing.mailbox import Mailbox
from durable.testing.operators import MemoryOperators
from durable.testing.rows import DeadLetter, Expired, Handled, Scheduled, decoded
from durable.testing.runtime import MemoryRuntime
from durable.testing.schedules import MemorySchedules
from durable.testing.sessions import SessionFactory

T = TypeVar("T")


@checked_class
class InMemoryBus:
    """Puts a bus into memory for a block: `async with InMemoryBus(bus) as memory`.

    Meanwhile `bus.unit_of_work()`, `bus.enlist()`, `bus.send()` and `bus.publish()` work without any database, and
    what was committed, or posted to `bus.asgi()`, waits for `drain()`. `session_factory` makes the AsyncSession of
    each unit of work and async handler, `sync_session_factory` the Session of each sync handler: a sessionmaker, or a
    Mock. Without one they get sessions that commit and roll back, and raise WiringError at the first statement.

    Messages are handled one after another, in the order in which they were sent, and those of one `key=` through their
    retries too; fair handlers know no turns here. `bus.pause()` and `bus.resume()` work for all but listeners. Each
    message is encoded and decoded as on the wire. `clock` stands still until it is advanced; two buses that are
    connected should share one.
    """

    def __init__(
        self,
        bus: Bus,
        session_factory: SessionFactory | None = None,
        *,
        sync_session_factory: SessionFactory | None = None,
        clock: ManualClock | None = None,
    ) -> None:
        self.bus = bus
        self.clock = clock or ManualClock()
        self._factories = {"session_factory": session_factory, "sync_session_factory": sync_session_factory}
        self._mailbox = Mailbox(self.clock, bus.application.routes.places, bus.application.ring, bus.settings)
        self._faults = Faults()
        self._sent: list[Envelope] = []
        self._peers: dict[str, InMemoryBus] = {}
        self._called: dict[str, Bus] = {}
        self._agents: dict[str, MemoryHandling] = {}
        self._schedules: MemorySchedules
        self._dispatcher: MemoryDispatcher
        self._runtime: MemoryRuntime
        self._entered = ExitStack()
        self._draining = False

    async def __aenter__(self) -> Self:
        if self.bus.runtime.node is not None:
            raise WiringError("the bus runs on a database already: put it into memory before it starts")
        self._schedules = MemorySchedules(self.bus.application.schedules, self.clock, self._mailbox.circuits)
        self._dispatcher = MemoryDispatcher(self._committed)
        self._runtime = MemoryRuntime(
            self.bus,
            self._mailbox,
            self._schedules,
            self._dispatcher,
            receive=self._receive_at,
            **self._factories,
        )
        await self._runtime.start()
        self._entered.enter_context(self.bus.running_on(self._runtime))
        self._entered.callback(self._runtime.offer_no_longer)
        for uri, other in self._called.items():
            self._runtime.connect(uri, other)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self._agents.values():
            agent.close()
        self._agents.clear()
        self._entered.close()

    # ------------------------------------------------------------------ what happened

    def sent(self, cls: type[T]) -> list[T]:
        """The messages of this class that were committed, in order; an event once, however many subscribers it has."""
        return [decoded(envelope, self.bus.application.ring) for envelope in self.envelopes(cls)]

    def sent_to(self, destination: str) -> list[Any]:
        """The messages that were committed for this destination."""
        self._dispatcher.settle_commits()
        destinations = self.bus.runtime.envelope_factory.destinations_of(destination)
        ring = self.bus.application.ring
        return [decoded(envelope, ring) for envelope in self._sent if envelope.destination in destinations]

    def envelopes(self, cls: type | None = None) -> list[Envelope]:
        """Return the committed envelopes: ids, headers, times. One for each message, as in sent()."""
        self._dispatcher.settle_commits()
        wanted = None if cls is None else name_of(cls)
        first = {e.id: e for e in reversed(self._sent) if wanted is None or e.message_type == wanted}
        return list(reversed(first.values()))

    @property
    def handled(self) -> list[Handled]:
        """Handled messages, in the order of their commits."""
        return list(self._mailbox.history.handled)

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """Dead letters that were neither replayed nor discarded, the oldest first."""
        return list(self._mailbox.history.dead_letters)

    @property
    def expired(self) -> list[Expired]:
        """Messages whose deliver_by passed before they came to their end, the oldest first."""
        return list(self._mailbox.history.expired)

    @property
    def scheduled(self) -> list[Scheduled]:
        """Scheduled messages, the next first: delayed messages, and attempts that were put off."""
        self._dispatcher.settle_commits()
        return self._mailbox.scheduled()

    @property
    def duplicates(self) -> int:
        """Number of messages that arrived again."""
        return self._runtime.counters[Event.DUPLICATE]

    def assert_no_dead_letters(self) -> None:
        """Raise AssertionError, with every reason and traceback, when a message was given up."""
        letters = self._mailbox.history.dead_letters
        if letters:
            told = (f"{letter.envelope.message_type}: {letter.traceback or letter.reason}" for letter in letters)
            raise AssertionError(f"{several(len(letters), 'dead letters')}:\n" + "\n".join(told))

    # ------------------------------------------------------------------ what is to happen

    async def drain(self, *, at_most: int = 10_000) -> None:
        """Handle the due messages, and those that they cause, until none is left: here and on every connected bus.

        Raises AssertionError when messages are left after `at_most` rounds: they cause each other.
        """
        buses = self._connected()
        if any(bus._draining for bus in buses):
            raise WiringError("drain() is under way: a handler must not wait for what is handled after it")
        for bus in buses:
            bus._draining = True
        try:
            while any([await bus._step() for bus in buses]):
                at_most -= 1
                if at_most < 0:
                    raise AssertionError("drain() comes to no end: do the messages cause each other for ever?")
        finally:
            for bus in buses:
                bus._draining = False

    def deliver(self, message: object, *, source: str = "elsewhere", **options: Unpack[SendOptions]) -> UUID:
        """Let a message arrive as if another service had sent it, or an Envelope as it is; drain() handles it."""
        if isinstance(message, Envelope):
            envelope = message
        else:
            check_options("deliver", options)
            application = self.bus.application
            envelope_factory = EnvelopeFactory(
                source, application.routes, self.bus.settings, self.clock, ring=application.ring
            )
            envelope = envelope_factory.command(message, to=self.bus.service, **options)
        self._receive(envelope)
        return envelope.id

    def replay(self, *chosen: DeadLetter) -> None:
        """Let these dead letters, or all of them, wait again for their handlers, as new; drain() handles them.

        Raises ValueError for one that cannot be handled, that was replayed or discarded before, or whose id was used
        meanwhile.
        """
        for letter in chosen or self.dead_letters:
            MemoryOperators(self._mailbox).replay(letter)

    def discard(self, *chosen: DeadLetter, reason: str | None = None) -> None:
        """Give these dead letters, or all of them, up: messages may be sent again under their business keys.

        `reason` is told by receipts (default: the reason of the letter). Raises ValueError for one that was replayed or
        discarded before.
        """
        for letter in chosen or self.dead_letters:
            MemoryOperators(self._mailbox).discard(letter, letter.reason if reason is None else reason)

    def fail(
        self,
        target: type | Callable[..., Any],
        error: Exception | type[Exception],
        *,
        times: int = 1,
        after_handling: bool = False,
    ) -> None:
        """Make the next attempts to handle a message class, given as itself or as its handler, fail with this error.

        With `after_handling` the handler runs first and its commit fails: effects outside of the database have
        happened.
        """
        self._faults.fail(self._type_of(target), Fault(error, times, after_handling))

    def deliver_twice(self, cls: type, *, times: int = 1) -> None:
        """Let the next messages of this class arrive twice, as they do when an acknowledgement is lost."""
        self._faults.duplicate(name_of(cls), times)

    def connect(self, uri: str, other: InMemoryBus) -> None:
        """Deliver messages for this destination to another bus in memory, also those that wait for it already, and call
        the services that it offers.
        """
        self._called[uri] = other.bus
        if isinstance(runtime := self.bus.runtime, MemoryRuntime):
            runtime.connect(uri, other.bus)
        self._peers |= dict.fromkeys(self.bus.runtime.envelope_factory.destinations_of(uri), other)

    def disconnect(self, uri: str) -> None:
        """Make messages for this destination wait, as when it is down; its services cannot be called."""
        self._called.pop(uri, None)
        if isinstance(runtime := self.bus.runtime, MemoryRuntime):
            runtime.disconnect(uri)
        for destination in self.bus.runtime.envelope_factory.destinations_of(uri):
            self._peers.pop(destination, None)

    # ------------------------------------------------------------------ how

    def _committed(self, envelopes: Sequence[Envelope]) -> None:
        for envelope in envelopes:
            if not self._mailbox.send(envelope):
                continue
            self._sent.append(envelope)
            if envelope.destination == LOCAL:
                for _ in range(1, self._faults.arrivals(envelope.message_type)):
                    self._store(LOCAL, envelope)

    async def _step(self) -> bool:
        """Send due messages and handle the first. False when none was due."""
        self._dispatcher.settle_commits()
        for envelopes in self._schedules.due(self._runtime.envelope_factory):
            self._committed(envelopes)
        self._runtime.counters.add(Event.EXPIRED, self._mailbox.expire_late(self._burials()))
        departing = self._mailbox.departing(self._reachable().keys())
        for row in departing:
            self._reachable()[row.endpoint]._receive(row.envelope, self.clock.now())
        self._mailbox.release_parked()
        taken = self._mailbox.take(self.bus.application.by_type())
        if taken:
            await self._handle(taken)
        return bool(departing or taken)

    async def _handle(self, taken: Sequence[LeasedEnvelope]) -> None:
        message_type = taken[0].envelope.message_type
        agent = self._agent(message_type)
        if agent is not None:
            await agent.settle(taken)
            return
        letter = Letter.because(f"no node has a handler for {message_type}", "unknown message type", message_type)
        for lease in taken:
            self._mailbox.dead_letter(ANY_NODE, lease, letter, UNCOUNTED)

    def _agent(self, message_type: str) -> MemoryHandling | None:
        handler = self.bus.application.by_type().get(message_type)
        if handler is None:
            return None
        if handler.message_type not in self._agents:
            runtime, application = self._runtime, self.bus.application
            context = AgentContext(
                runtime.database, ANY_NODE, runtime.settings, self.clock, runtime.counters, application.ring
            )
            attempts = MemoryAttempts(
                handler,
                context,
                runtime.sessions,
                onion=application.stack,
                mailbox=self._mailbox,
                faults=self._faults,
            )
            policy = application.policy(handler)
            self._agents[handler.message_type] = MemoryHandling(handler, attempts, context, self._mailbox, policy)
        return self._agents[handler.message_type]

    def _burials(self) -> Burials:
        return self.bus.application.burials(self.bus.settings.on_expiry)

    def _receive(self, envelope: Envelope, sent_at: datetime | None = None) -> None:
        endpoints = dict(self.bus.application.listeners)
        self._receive_at(endpoints.get(envelope.destination, self.bus.service), envelope, sent_at)

    def _receive_at(self, endpoint: str, envelope: Envelope, sent_at: datetime | None = None) -> Outcome:
        """Receive an envelope as the receiving agent does, after the way over the wire. `sent_at` is the time at the
        bus that sends it: a test may have advanced one clock and not the other.
        """
        arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(envelope), type=Envelope)
        reason = screening.find_error(arrived, **self.bus.settings.limits) or screening.find_misplaced(arrived)
        reason = reason or self._find_misdating(arrived, max(self.clock.now(), sent_at or self.clock.now()))
        if reason is not None:
            whole = screening.is_whole(arrived, **self.bus.settings.limits)
            self._mailbox.history.quarantine(endpoint, arrived, reason, replayable=whole)
            return STORED
        arrived = self.bus.application.ring.arrived(arrived)
        arrivals = self._faults.arrivals(arrived.message_type)
        outcomes = [self._store(endpoint, arrived) for _ in range(arrivals)]
        return outcomes[0]

    def _find_misdating(self, arrived: Envelope, now: datetime) -> str | None:
        """Return the reason why duplicates could not be told. Ids are made by the system's clock, whatever the time is
        in the test.
        """
        dated = msgspec.structs.replace(arrived, id=_moved(arrived.id, now - datetime.now(UTC)))
        return screening.find_misdating(dated, now, **self.bus.settings.window)

    def _store(self, endpoint: str, envelope: Envelope) -> Outcome:
        outcome = self._mailbox.receive(endpoint, envelope)
        self._runtime.counters.add(Event.DUPLICATE if isinstance(outcome, Duplicate) else Event.RECEIVED)
        return outcome

    def _reachable(self) -> dict[str, InMemoryBus]:
        """The buses by destination: this one at the addresses that it listens on, and those that are connected."""
        return {listening.uri: self for listening in self.bus.application.listeners} | self._peers

    def _connected(self) -> list[InMemoryBus]:
        """Return this bus, the buses it is connected to, the buses they are connected to, and so on."""
        found: list[InMemoryBus] = [self]
        for bus in found:
            found.extend(peer for peer in bus._peers.values() if peer not in found)
        return found

    def _type_of(self, target: type | Callable[..., Any]) -> str:
        for handler in self.bus.application.handlers.values():
            if handler.function is target:
                return handler.message_type
        return name_of(cast(type, target))


def _moved(envelope_id: UUID, by: timedelta) -> UUID:
    """Return a UUIDv7 with another time; ids of other kinds have none."""
    made_ms = unix_ms(envelope_id)
    if made_ms is None:
        return envelope_id
    moved_ms = min(max(0, made_ms + by // timedelta(milliseconds=1)), (1 << 48) - 1)
    return UUID(int=moved_ms << 80 | envelope_id.int & ((1 << 80) - 1))
