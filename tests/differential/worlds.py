"""The worlds of a workload: two services in memory, or on Postgres over a transport and by a driver."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple, Self
from uuid import UUID

from pydantic import SecretStr
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from durable import Bus
from durable.embedded.ports import free_port
from durable.envelope import Envelope
from durable.messages.registry import name_of
from durable.outbox.outbox import Outbox
from durable.storage import answers, dead_letters, receipts
from durable.storage.receipts import Standing
from durable.testing import DeadLetter, InMemoryBus, ManualClock, eventually
from durable.transports.memory import MemoryTransport
from tests.differential.messages import CLASSES, Aged, Answer
from tests.differential.services import SERVICES, Notes, Service
from tests.differential.workload import Where
from tests.support.tables import Tables

Driver = Literal["asyncpg", "psycopg", "sync"]
Effect = tuple[int, int]
"""Number of a message, and its attempt."""

REASON: Final = "the customer has left"
_KEYS: Final = {"2030-01": SecretStr("bQ0vAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=")}
_EFFECTS: Final = "CREATE TABLE IF NOT EXISTS effects (place bigserial, number integer, attempt integer)"


class Letter(NamedTuple):
    id: UUID | None
    side: str
    message_type: str | None
    exception_type: str
    reason: str
    attempts: int
    has_traceback: bool
    body: bytes


class Waiting(NamedTuple):
    id: UUID
    side: str
    message_type: str
    attempts: int
    is_put_off: bool


class World(ABC):
    """Two services that run, and what can be seen of them from outside."""

    name: str
    notes: Notes
    addresses: dict[Where, str]
    services: dict[Where, Service]

    def bus(self, where: Where) -> Bus:
        return self.services[where].bus

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...

    async def transact(self, work: Callable[[Outbox], None], undone: Callable[[Outbox], None], end: str) -> None:
        """Run a unit of work of the shop; `undone` sends in a savepoint that is rolled back."""
        async with self.bus("here").unit_of_work() as uow:
            work(uow.outbox)
            savepoint = await uow.session.begin_nested()
            undone(uow.outbox)
            await savepoint.rollback()
            if end == "rollback":
                await uow.session.rollback()
            elif end == "raise":
                raise LookupError("the business refuses")

    @abstractmethod
    async def settle(self) -> None:
        """Return when nothing is to be done now, in both services."""

    @abstractmethod
    async def advance(self, by: timedelta) -> None: ...

    @abstractmethod
    def now(self) -> datetime: ...

    @abstractmethod
    async def arrive(self, envelope: Envelope) -> None:
        """Let an envelope of a stranger come to the peer."""

    async def pause(self, where: Where, **target: Any) -> None:
        """Pause a target, and return when agents obey."""
        await self.bus(where).pause(target.pop("cls", None), **target)

    @abstractmethod
    async def resolve(self, where: Where, verb: str, ids: Sequence[UUID] | None) -> None:
        """Replay or discard the dead letters with these ids, or all."""

    # ------------------------------------------------------------------ what can be seen

    @abstractmethod
    def effects(self, where: Where) -> list[Effect]:
        """Committed effects, in their order."""

    @abstractmethod
    def letters(self, where: Where) -> list[Letter]: ...

    @abstractmethod
    def waiting(self, where: Where) -> list[Waiting]: ...

    async def standings(self, where: Where, ids: Sequence[UUID]) -> list[Standing]:
        """Places of these messages."""
        found = await self.bus(where).runtime.database.transaction(receipts.look, list(ids), ended_after=None)
        return found.standings

    async def answered(self, where: Where, requests: Sequence[UUID]) -> list[UUID]:
        """Requests whose answers are kept."""
        found = await self.bus(where).runtime.database.transaction(answers.read, list(requests))
        return [each.request_id for each in found if each.envelope is not None]


# ---------------------------------------------------------------- in memory


class Effects:
    """Stand-in for the data of a session: effects of the transaction, kept by its commit."""

    def __init__(self, kept: list[Effect]) -> None:
        self._kept = kept
        self._new: list[Effect] = []

    def execute(self, _statement: object, row: dict[str, int]) -> None:
        self._new.append((row["number"], row["attempt"]))

    def commit(self) -> None:
        self._kept += self._new
        self._new.clear()

    def rollback(self) -> None:
        self._new.clear()

    def close(self) -> None:
        self._new.clear()


class AsyncEffects(Effects):
    """The same for an AsyncSession."""

    async def execute(self, statement: object, row: dict[str, int]) -> None:  # type: ignore[override]
        super().execute(statement, row)


class InMemory(World):
    """Both services in memory, with one clock."""

    name = "memory"

    def __init__(self) -> None:
        self.notes = Notes()
        self.addresses = {where: f"memory://{service}" for where, service in SERVICES.items()}
        self._clock = ManualClock()
        self._effects: dict[Where, list[Effect]] = {"here": [], "there": []}
        self._memory: dict[Where, InMemoryBus] = {}
        self._stack = AsyncExitStack()
        self.services = {where: self._service(where) for where in self.addresses}

    def _service(self, where: Where) -> Service:
        bus = Bus(SERVICES[where], encryption_keys=_KEYS)
        bus.application.transports.append(MemoryTransport(bus.settings))
        kept = self._effects[where]
        self._memory[where] = InMemoryBus(
            bus, lambda: AsyncEffects(kept), sync_session_factory=lambda: Effects(kept), clock=self._clock
        )
        return Service(bus, self.notes, own=self.addresses[where], peer=self.addresses[_other(where)])

    async def __aenter__(self) -> Self:
        for memory in self._memory.values():
            await self._stack.enter_async_context(memory)
        for where, memory in self._memory.items():
            memory.connect(self.addresses[_other(where)], self._memory[_other(where)])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def settle(self) -> None:
        await self._memory["here"].drain()

    async def advance(self, by: timedelta) -> None:
        self._clock.advance(by)

    def now(self) -> datetime:
        return self._clock.now()

    async def arrive(self, envelope: Envelope) -> None:
        self._memory["there"].deliver(envelope)

    async def resolve(self, where: Where, verb: str, ids: Sequence[UUID] | None) -> None:
        memory = self._memory[where]
        for letter in [each for each in memory.dead_letters if ids is None or each.envelope.id in ids]:
            with suppress(ValueError):  # on Postgres such a letter is left as it is
                memory.replay(letter) if verb == "replay" else memory.discard(letter, reason=REASON)

    def effects(self, where: Where) -> list[Effect]:
        return list(self._effects[where])

    def letters(self, where: Where) -> list[Letter]:
        return [_letter(each) for each in self._memory[where].dead_letters]

    def waiting(self, where: Where) -> list[Waiting]:
        mailbox, now = self._memory[where]._mailbox, self._clock.now()
        return [
            Waiting(row.envelope.id, side, row.type, row.attempts, not row.is_due(now))
            for side, rows in (("incoming", mailbox.incoming), ("outgoing", mailbox.outgoing))
            for row in rows.values()
        ]


def _letter(letter: DeadLetter) -> Letter:
    envelope = letter.envelope
    why = (letter.exception_type, letter.reason, letter.attempts, letter.traceback is not None)
    named = (envelope.id, letter.side, envelope.message_type) if envelope.id.int else (None, letter.side, None)
    return Letter._make([*named, *why, envelope.body])


def _other(where: Where) -> Where:
    return "there" if where == "here" else "here"


# ---------------------------------------------------------------- on Postgres

# Why a due row waits: its own circuit, or that of an earlier row of its key, or the next attempt of that one.
_STOPPED: Final = """EXISTS (SELECT FROM durable.circuits WHERE (until IS NULL OR until > now()) AND (kind, key) IN (
    ('key', {row}.partition_key), ('handler', {row}.message_type),
    ('handler', CASE {row}.message_type WHEN 'differential.aged' THEN 'differential.aged.v2' END)))"""
_HELD: Final = f"""({_STOPPED.format(row="row")} OR EXISTS (
    SELECT FROM durable.incoming_envelopes AS earlier WHERE earlier.ordering_key = row.ordering_key
    AND earlier.seq < row.seq
    AND ({_STOPPED.format(row="earlier")} OR (earlier.attempts > 0 AND earlier.execution_time > now()))))"""
_IS_QUIET: Final = f"""SELECT
    NOT EXISTS (SELECT FROM durable.outgoing_envelopes WHERE (
        (execution_time IS NULL OR execution_time <= now()) AND NOT EXISTS (
            SELECT FROM durable.circuits WHERE kind = 'destination' AND key = destination
            AND (until IS NULL OR until > now()))) OR deliver_by < now())
    AND NOT EXISTS (SELECT FROM durable.incoming_envelopes AS row WHERE owner_id <> 0 OR deliver_by < now() OR (
        (execution_time IS NULL OR execution_time <= now()) AND NOT {_HELD}))
    AND NOT EXISTS (SELECT FROM durable.schedules WHERE asked_at IS NOT NULL),
    (SELECT count(*) FROM durable.incoming_envelopes), (SELECT count(*) FROM durable.outgoing_envelopes),
    (SELECT count(*) FROM durable.envelope_history), (SELECT count(*) FROM durable.dead_letters),
    (SELECT COALESCE(sum(attempts), 0) FROM durable.incoming_envelopes)"""
_SENT: Final = "SELECT id, address FROM durable.envelope_history WHERE side = 'outgoing' AND outcome = 'sent'"
_ARRIVED: Final = """SELECT id FROM durable.received_ids UNION SELECT id FROM durable.undated_ids
UNION SELECT id FROM durable.dead_letters UNION SELECT id FROM durable.envelope_history WHERE side = 'incoming'"""
_NAMELESS: Final = "SELECT count(*) FROM durable.dead_letters WHERE id IS NULL"
_LETTERS: Final = """SELECT id, side, message_type, exception_type, reason, attempts, traceback IS NOT NULL, body
FROM durable.dead_letters WHERE resolved_at IS NULL ORDER BY letter_id"""
_WAITING: Final = """SELECT id, 'incoming', message_type, attempts, COALESCE(execution_time > now(), false)
FROM durable.incoming_envelopes UNION ALL
SELECT id, 'outgoing', message_type, attempts, COALESCE(execution_time > now(), false)
FROM durable.outgoing_envelopes"""


@dataclass(frozen=True)
class Way:
    """How messages travel, and the driver of units of work and handlers."""

    transport: Literal["memory", "tcp", "http", "rabbitmq"] = "memory"
    driver: Driver = "asyncpg"
    amqp_url: str | None = None

    def addresses(self) -> dict[Where, str]:
        """Choose an address for each service."""
        if self.transport == "memory":
            return {where: f"memory://{service}" for where, service in SERVICES.items()}
        if self.transport == "rabbitmq":
            run = free_port()
            return {
                where: f"rabbitmq://default/queue/{service}-{run}-{id(self)}" for where, service in SERVICES.items()
            }
        path = "/durable" if self.transport == "http" else ""
        return {where: f"{self.transport}://127.0.0.1:{free_port()}{path}" for where in SERVICES}


class OnPostgres(World):
    """Both services on databases of their own, which are emptied before."""

    def __init__(self, name: str, tables: dict[Where, Tables], way: Way) -> None:
        self.name = name
        self.notes = Notes()
        self._tables = tables
        self._way = way
        self.addresses = way.addresses()
        self._links: MemoryTransport | None = None
        self._stack = AsyncExitStack()
        self._sync_engine: Engine | None = None
        self._strangers: set[UUID] = set()
        for each in tables.values():
            each.clear()
            each.execute(_EFFECTS)
            each.execute("TRUNCATE effects RESTART IDENTITY")
        self.services = {where: self._service(where) for where in self.addresses}

    def _service(self, where: Where) -> Service:
        settings: dict[str, Any] = {
            "poll_interval": timedelta(milliseconds=30),
            "delete_linger": timedelta(milliseconds=2),
            "ping_interval": timedelta(milliseconds=50),
            "concurrency": 4,
            "pool_size": 4,
            "encryption_keys": _KEYS,
        }
        if self._way.amqp_url is not None:
            settings["amqp_url"] = self._way.amqp_url
        driver = "asyncpg" if self._way.driver == "asyncpg" else "psycopg"
        bus = Bus(SERVICES[where], self._url(where, driver), **settings)
        if self._way.transport == "memory":
            self._links = self._links or MemoryTransport(bus.settings)
            bus.application.transports.append(self._links.with_settings(bus.settings))
        addresses = {"own": self.addresses[where], "peer": self.addresses[_other(where)]}
        return Service(bus, self.notes, are_sync=self._way.driver == "sync", **addresses)

    def _url(self, where: Where, driver: str) -> str:
        return self._tables[where].url.replace("postgresql://", f"postgresql+{driver}://")

    async def __aenter__(self) -> Self:
        for where in ("there", "here"):
            await self._stack.enter_async_context(self.bus(where))
        for tables in self._tables.values():  # a node declares its schedules soon after its start
            await eventually(lambda tables=tables: tables.count("schedules"), what="the schedule")  # type: ignore[misc]
        if self._way.driver == "sync":
            self._sync_engine = create_engine(self._url("here", "psycopg"))
            self._stack.callback(self._sync_engine.dispose)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def transact(self, work: Callable[[Outbox], None], undone: Callable[[Outbox], None], end: str) -> None:
        if self._sync_engine is None:
            await super().transact(work, undone, end)
            return
        engine = self._sync_engine

        def run() -> None:
            with Session(engine) as session, self.bus("here").enlist(session) as outbox:
                work(outbox)
                savepoint = session.begin_nested()
                undone(outbox)
                savepoint.rollback()
                if end == "rollback":
                    session.rollback()
                elif end == "raise":
                    raise LookupError("the business refuses")
                session.commit()

        await asyncio.to_thread(run)

    # ------------------------------------------------------------------ time

    async def settle(self) -> None:
        before: object = None

        def is_settled() -> bool:
            nonlocal before
            looks = [self._tables[where].one(_IS_QUIET) for where in SERVICES]
            was, before = before, looks
            return was == looks and all(look[0] for look in looks) and self._has_arrived()

        await eventually(is_settled, within=40, what="quiet")

    def _has_arrived(self) -> bool:
        """Tell whether each sent message is known to its receiver: a broker may hold it."""
        if self._way.transport != "rabbitmq":
            return True
        arrived = {where: set(self._tables[where].rows(_ARRIVED)) for where in SERVICES}
        for where in SERVICES:
            for message_id, address in self._tables[where].rows(_SENT):
                receiver = where if address == self.addresses[where] else _other(where)
                if message_id not in arrived[receiver]:
                    return False
        return self._strangers <= arrived["there"]

    async def advance(self, by: timedelta) -> None:
        for tables in self._tables.values():
            await tables.change(_PASS_TIME, *[by] * _PASS_TIME.count("%s"))

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def arrive(self, envelope: Envelope) -> None:
        transport = self.bus("here").runtime.transports.of(self.addresses["there"])
        letters = self._tables["there"].one(_NAMELESS)
        destination = transport.resolve(self.addresses["there"], envelope.message_type)
        async with transport.sender(destination) as sender:
            await sender.send([envelope])
        if envelope.id.int:
            self._strangers.add(envelope.id)
            return
        await eventually(lambda: self._tables["there"].one(_NAMELESS) > letters, what="a letter without an id")

    async def pause(self, where: Where, **target: Any) -> None:
        await super().pause(where, **target)
        bus, cls, destination = self.bus(where), target.get("cls"), target.get("destination")

        def is_obeyed() -> bool:
            found = bus.statistics()
            if cls is not None and name_of(cls) in found.handling:
                return found.handling[name_of(cls)].paused
            return destination is None or destination not in found.sending or found.sending[destination].paused

        await eventually(is_obeyed, what="the pause")

    async def resolve(self, where: Where, verb: str, ids: Sequence[UUID] | None) -> None:
        chosen = dead_letters.Selection(ids=None if ids is None else list(ids))
        whole = dead_letters.LetterRange(0, 2**62, 1_000)
        work: Any = dead_letters.replay if verb == "replay" else dead_letters.discard
        await self.bus(where).runtime.database.transaction(work, chosen, whole, actor="ada", reason=REASON)

    # ------------------------------------------------------------------ what can be seen

    def effects(self, where: Where) -> list[Effect]:
        return [tuple(row) for row in self._tables[where].rows("SELECT number, attempt FROM effects ORDER BY place")]

    def letters(self, where: Where) -> list[Letter]:
        return [Letter._make([*row[:7], bytes(row[7])]) for row in self._tables[where].rows(_LETTERS)]

    def waiting(self, where: Where) -> list[Waiting]:
        return [Waiting(*row) for row in self._tables[where].rows(_WAITING)]


_DUE_HEADER: Final = """headers = CASE WHEN jsonb_exists(headers, 'durable-due') THEN jsonb_set(headers,
    '{durable-due}', to_jsonb(CAST(headers ->> 'durable-due' AS timestamptz) - CAST(%s AS interval)))
    ELSE headers END"""
_PASS_TIME: Final = f"""WITH
outgoing AS (UPDATE durable.outgoing_envelopes SET sent_at = sent_at - CAST(%s AS interval),
    execution_time = execution_time - CAST(%s AS interval), deliver_by = deliver_by - CAST(%s AS interval),
    {_DUE_HEADER} RETURNING 1),
incoming AS (UPDATE durable.incoming_envelopes SET sent_at = sent_at - CAST(%s AS interval),
    execution_time = execution_time - CAST(%s AS interval), deliver_by = deliver_by - CAST(%s AS interval),
    {_DUE_HEADER} RETURNING 1),
letters AS (UPDATE durable.dead_letters SET sent_at = sent_at - CAST(%s AS interval),
    deliver_by = deliver_by - CAST(%s AS interval) RETURNING 1),
dated AS (UPDATE durable.received_ids SET due_at = due_at - CAST(%s AS interval),
    expired = expired - CAST(%s AS interval) RETURNING 1),
undated AS (UPDATE durable.undated_ids SET sent_at = sent_at - CAST(%s AS interval),
    due_at = due_at - CAST(%s AS interval),
    expired = expired - CAST(%s AS interval) RETURNING 1)
UPDATE durable.circuits SET since = since - CAST(%s AS interval), until = until - CAST(%s AS interval)"""
"""Let time pass, for each row that names one."""


def handler_of(lane: str) -> type:
    """Return the class whose handler takes the messages of this lane."""
    return Aged if lane == "old" else CLASSES.get(lane, Answer)
