"""Sessions of every kind, the messages that are sent in them, and the ways to commit them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from durable import Bus, message
from durable.clock import SystemClock
from durable.envelope import ANY_NODE, Envelope, NodeId
from durable.messages.routing import Routes
from durable.outbox.envelope_factory import EnvelopeFactory
from durable.outbox.outbox import Outbox
from durable.outbox.transactions import Ending
from durable.outbox.unit_of_work import enlist
from durable.settings import load_settings
from durable.storage.outbox import Sent
from tests.support.tables import Tables

NODE = NodeId(7)
BILLING = "tcp://127.0.0.1:2302"
MAIL = "tcp://127.0.0.1:2303"


Work = Callable[[Session, Outbox], None]


@message("uow.placed")
class Placed(msgspec.Struct):
    number: int


@message("uow.noted")
class Noted(msgspec.Struct):
    number: int


class Base(DeclarativeBase):
    pass


class Line(Base):
    __tablename__ = "lines"
    line: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int | None]


class Agents:
    """In place of the agents: room for so many envelopes, and what they were told."""

    def __init__(self) -> None:
        self.endings: list[tuple[Ending, Sequence[Sent]]] = []
        self.room = 1_000
        self.committed_ids: list[UUID] = []
        self.abandoned_ids: list[UUID] = []
        self.threads: set[int] = set()

    def reserve(self, envelopes: Sequence[Envelope]) -> list[NodeId]:
        granted = [NODE if number < self.room else ANY_NODE for number in range(len(envelopes))]
        self.room -= granted.count(NODE)
        return granted

    def committed(self, sent: Sequence[Sent]) -> None:
        self.threads.add(threading.get_ident())
        self.committed_ids += [envelope.id for envelope, _, _, _ in sent]

    def committing(self, ending: Ending, sent: Sequence[Sent]) -> None:
        self.endings.append((ending, sent))

    def told(self) -> list[UUID]:
        """The ids of what they may take for committed."""
        good = [sent for ending, sent in self.endings if ending.is_over and not ending.has_failed]
        return self.committed_ids + [each.envelope.id for sent in good for each in sent]

    def abandoned(self, sent: Sequence[Sent]) -> None:
        self.abandoned_ids += [envelope.id for envelope, _, _, _ in sent]
        self.room += sum(owner == NODE for _, _, owner, _ in sent)


class Flavour:
    """A kind of session: the same work is done by each of them."""

    def __init__(self, engine: AsyncEngine | Engine) -> None:
        self.engine = engine
        self.agents = Agents()
        self.inserts: list[str] = []
        self.connections = 0
        routes = Routes()
        routes.route("uow.placed", BILLING)
        routes.subscribe("uow.noted", BILLING)
        routes.subscribe("uow.noted", MAIL)
        routes.handled_here("uow.noted")
        self._envelope_factory = EnvelopeFactory("shop", routes, load_settings(), SystemClock())
        sync_engine = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        event.listen(sync_engine, "before_cursor_execute", self._watch)
        event.listen(sync_engine, "checkout", self._count)

    async def run(self, work: Work) -> None:
        """Do this work in a session of this kind, which is closed at the end."""
        if isinstance(self.engine, AsyncEngine):
            async with AsyncSession(self.engine) as session:
                await session.run_sync(work, self.enlist(session))
        else:
            with Session(self.engine) as session:
                work(session, self.enlist(session))

    def enlist(self, session: Session | AsyncSession) -> Outbox:
        return enlist(session, "durable", self._envelope_factory, self.agents)

    def _watch(self, _conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "_envelopes" in str(statement):
            self.inserts.append(statement)

    def _count(self, *_: Any) -> None:
        self.connections += 1


def sent_numbers(tables: Tables) -> list[int]:
    bodies = tables.rows(
        "SELECT convert_from(body, 'UTF8')::json->>'number' FROM durable.outgoing_envelopes ORDER BY seq"
    )
    return [int(number) for number in bodies]


def insert(session: Session, number: int) -> None:
    session.execute(text("INSERT INTO orders VALUES (:number)"), {"number": number})


def by_the_session(session: Session) -> None:
    session.commit()


def by_its_transaction(session: Session) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    transaction.commit()


def by_a_context_manager(session: Session) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    with transaction:
        pass


def by_the_connection(session: Session) -> None:
    session.connection().commit()


COMMITS = [by_the_session, by_its_transaction, by_a_context_manager, by_the_connection]


async def in_a_unit_of_work(bus: Bus) -> None:
    async with bus.unit_of_work():
        bus.send(Noted(1))


async def in_a_thread(bus: Bus) -> None:
    def send() -> None:
        with bus.runtime.sessions.open_sync() as session, bus.enlist(session):
            bus.send(Noted(1))
            session.commit()

    await asyncio.to_thread(send)


async def by_an_outer_transaction(bus: Bus) -> None:
    async with bus.runtime.sessions.engine.begin() as connection, AsyncSession(connection) as session:
        with bus.enlist(session):
            bus.send(Noted(1))
            await session.commit()
