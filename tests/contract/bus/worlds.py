"""The two worlds that a bus is tested in: on Postgres, and in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Self

from durable import (
    Bus,
)
from durable.envelope import Envelope
from durable.messages.registry import name_of
from durable.storage import dead_letters
from durable.testing import InMemoryBus, eventually
from durable.transports.memory import MemoryTransport
from tests.contract.bus.orders import BILLING, MAIL, ORDERS
from tests.support.receivers import MemoryReceiver
from tests.support.tables import Tables


class Letter(NamedTuple):
    message_type: str | None
    exception_type: str
    reason: str
    traceback: str
    attempts: int


class World(ABC):
    """A bus, where it runs, and what can be seen of it from outside."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        bus.listen(ORDERS)

    async def __aenter__(self) -> Self:
        return self

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...

    def for_sending(self) -> AbstractAsyncContextManager[Any]:
        """Instead of entering it: no agent runs."""
        return self

    @abstractmethod
    async def settle(self) -> None:
        """Return when nothing is to be done now."""

    @abstractmethod
    async def pause(self, cls: type | None = None, **destination: str) -> None:
        """Pause a handler or a destination, and return when its agent obeys."""

    @abstractmethod
    async def advance(self, by: timedelta) -> None:
        """Let time pass, for what waits, and settle."""

    @abstractmethod
    async def outlive_ids(self) -> None:
        """Let time pass until no id is known any more, but those of waiting messages."""

    @abstractmethod
    async def arrive(self, envelope: Envelope) -> None:
        """Let an envelope of another service arrive, and settle."""

    @abstractmethod
    def sent_to(self, destination: str) -> list[tuple[str, bytes]]:
        """Type and body of everything that has reached this destination."""

    @abstractmethod
    def deadlines(self, destination: str) -> list[datetime | None]:
        """The deliver_by of what went there."""

    @abstractmethod
    def dead_letters(self) -> list[Letter]: ...

    @abstractmethod
    async def discard(self) -> None:
        """Give every dead letter up."""

    @abstractmethod
    async def replay(self) -> None:
        """Replay every dead letter that can be, and settle."""

    @abstractmethod
    def expired(self) -> list[str]:
        """The types of the messages that expired."""

    @abstractmethod
    def ended(self) -> list[tuple[str, int]]:
        """The outcome and the failed attempts of each message that has come to an end."""

    @abstractmethod
    def scheduled(self) -> int:
        """How many messages wait for their time."""

    @abstractmethod
    def waiting(self) -> int:
        """How many messages are stored and not yet done with."""


# Behind a message of the same key that waits for its next attempt, or paused.
HELD = """((deliver_by IS NULL OR deliver_by >= now()) AND (
    EXISTS (SELECT FROM durable.incoming_envelopes AS earlier WHERE earlier.ordering_key = row.ordering_key
        AND earlier.seq < row.seq AND earlier.attempts > 0 AND earlier.execution_time > now())
    OR EXISTS (SELECT FROM durable.circuits WHERE (kind, key) IN (('key', row.ordering_key),
        ('handler', row.message_type)) OR ordering_key = row.ordering_key)))"""


class OnPostgres(World):
    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        settings: dict[str, Any] = {
            "poll_interval": timedelta(milliseconds=30),
            "delete_linger": timedelta(milliseconds=2),
            "concurrency": 2,
            "pool_size": 3,
        }
        bus = Bus("orders", tables.url, **settings)
        self._transport = MemoryTransport(bus.settings)
        bus.application.transports.append(self._transport)
        self._receivers = {uri: MemoryReceiver() for uri in (BILLING, MAIL)}
        super().__init__(bus)

    async def __aenter__(self) -> Self:
        for uri, receiver in self._receivers.items():
            await self._transport.listener(uri, uri).serve(receiver)
        await self.bus.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.bus.__aexit__(None, None, None)

    @asynccontextmanager
    async def for_sending(self) -> AsyncIterator[Any]:
        yield self
        await self.bus.runtime.sessions.close()

    async def settle(self) -> None:
        await eventually(self._is_quiet, within=30, what="quiet")

    def _is_quiet(self) -> bool:
        due = "(execution_time IS NULL OR execution_time <= now() OR deliver_by < now())"
        nothing = (
            f"NOT EXISTS (SELECT FROM durable.outgoing_envelopes WHERE {due} AND NOT EXISTS ("
            "SELECT FROM durable.circuits WHERE kind = 'destination' AND key = destination))",
            f"NOT EXISTS (SELECT FROM durable.incoming_envelopes AS row WHERE {due} AND (owner_id <> 0 OR NOT {HELD}))",
        )
        return bool(self._tables.one(f"SELECT {' AND '.join(nothing)}"))  # one look: a reply goes from one to the other

    async def pause(self, cls: type | None = None, **destination: str) -> None:
        await self.bus.pause(cls, **destination)

        def is_obeyed() -> bool:
            found = self.bus.statistics()
            handlers = all(found.handling[name_of(each)].paused for each in (cls,) if each)
            return handlers and all(found.sending[uri].paused for uri in destination.values())

        await eventually(is_obeyed, what="the pause")

    async def advance(self, by: timedelta) -> None:
        await self._tables.pass_time(by)
        await self.settle()

    async def outlive_ids(self) -> None:
        waits = (
            "SELECT FROM durable.incoming_envelopes AS row WHERE row.id = known.id AND row.endpoint = known.endpoint"
        )
        await self._tables.change(f"DELETE FROM durable.undated_ids AS known WHERE NOT EXISTS ({waits})")

    async def arrive(self, envelope: Envelope) -> None:
        await self._transport.sender(ORDERS).send([envelope])
        await self.settle()

    def sent_to(self, destination: str) -> list[tuple[str, bytes]]:
        return [(e.message_type, e.body) for e in self._receivers[destination].stored.values()]

    def deadlines(self, destination: str) -> list[datetime | None]:
        return [e.deliver_by for e in self._receivers[destination].stored.values()]

    def dead_letters(self) -> list[Letter]:
        rows = self._tables.rows(
            "SELECT message_type, exception_type, reason, COALESCE(traceback, ''), attempts "
            "FROM durable.dead_letters WHERE resolved_at IS NULL ORDER BY letter_id"
        )
        return [Letter(*row) for row in rows]

    async def discard(self) -> None:
        every, whole = dead_letters.Selection(), dead_letters.LetterRange(0, 2**62, 100)
        await self.bus.runtime.database.transaction(dead_letters.discard, every, whole, actor="ada", reason="a test")

    async def replay(self) -> None:
        every, whole = dead_letters.Selection(), dead_letters.LetterRange(0, 2**62, 100)
        await self.bus.runtime.database.transaction(dead_letters.replay, every, whole, actor="ada")
        await self.settle()

    def expired(self) -> list[str]:
        return self._tables.rows("SELECT message_type FROM durable.envelope_history WHERE outcome = 'expired'")

    def ended(self) -> list[tuple[str, int]]:
        return self._tables.rows("SELECT outcome, attempts FROM durable.envelope_history ORDER BY finished_at")

    def scheduled(self) -> int:
        waiting = "SELECT count(*) FROM durable.{} WHERE execution_time > now()"
        return sum(self._tables.one(waiting.format(table)) for table in ("outgoing_envelopes", "incoming_envelopes"))

    def waiting(self) -> int:
        return self._tables.count("outgoing_envelopes") + self._tables.count("incoming_envelopes")


class InMemory(World):
    def __init__(self, **factories: Any) -> None:
        bus = Bus("orders")
        bus.application.transports.append(MemoryTransport(bus.settings))
        self._memory = InMemoryBus(bus, **factories)
        self._others = {uri: InMemoryBus(Bus(uri.removeprefix("memory://"))) for uri in (BILLING, MAIL)}
        self._stack = AsyncExitStack()
        super().__init__(bus)

    async def __aenter__(self) -> Self:
        memory = await self._stack.enter_async_context(self._memory)
        for uri, other in self._others.items():
            memory.connect(uri, await self._stack.enter_async_context(other))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def settle(self) -> None:
        await self._memory.drain()

    async def pause(self, cls: type | None = None, **destination: str) -> None:
        await self.bus.pause(cls, **destination)

    async def advance(self, by: timedelta) -> None:
        self._memory.clock.advance(by)
        await self._memory.drain()

    async def outlive_ids(self) -> None:
        await self.advance(self.bus.settings.keep_ids + timedelta(hours=1))

    async def arrive(self, envelope: Envelope) -> None:
        self._memory.deliver(envelope)
        await self._memory.drain()

    def sent_to(self, destination: str) -> list[tuple[str, bytes]]:
        # The others handle nothing, so what arrived there are dead letters.
        letters = self._others[destination].dead_letters
        return [(letter.envelope.message_type, letter.envelope.body) for letter in letters]

    def deadlines(self, destination: str) -> list[datetime | None]:
        return [e.deliver_by for e in self._memory.envelopes() if e.destination == destination]

    def dead_letters(self) -> list[Letter]:
        return [
            Letter(d.envelope.message_type, d.exception_type, d.reason, d.traceback or "", d.attempts)
            for d in self._memory.dead_letters
        ]

    async def discard(self) -> None:
        self._memory.discard(reason="a test")

    async def replay(self) -> None:
        for letter in self._memory.dead_letters:
            with suppress(ValueError):
                self._memory.replay(letter)
        await self._memory.drain()

    def expired(self) -> list[str]:
        return [expired.envelope.message_type for expired in self._memory.expired]

    def ended(self) -> list[tuple[str, int]]:
        return [(each.outcome, each.attempts) for each in self._memory._mailbox.history.ended]

    def scheduled(self) -> int:
        return len(self._memory.scheduled)

    def waiting(self) -> int:
        return len(self._memory.envelopes()) - len(self._memory.handled)
