"""Marks on a session and its connection: each is noticed, and what every message does to them is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import pytest
from sqlalchemy import Connection, Table, create_engine, event, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from durable.agents.marks import Marks, of_connection, of_session


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


TABLE = cast(Table, Order.__table__)
ENGINE = create_engine("sqlite://")
OTHER = create_engine("sqlite://")


def first(*_: object) -> None:
    pass


def second(*_: object) -> None:
    pass


@pytest.fixture
def session() -> Iterator[Session]:
    """Return a session with a listener, info and an attribute of its own, as an application may make it."""
    with Session(ENGINE) as made:
        event.listen(made, "before_flush", first)
        made.info["tenants"] = ["one"]
        made.tenant = "one"  # type: ignore[attr-defined]
        event.listen(made.connection(), "before_cursor_execute", first)
        yield made


def replace_listener(target: Session | Connection, name: str) -> None:
    event.remove(target, name, first)
    event.listen(target, name, second)


MARKS: dict[str, Callable[[Session], object]] = {
    "an attribute": lambda session: setattr(session, "actor", "admin"),
    "a private attribute": lambda session: setattr(session, "_actor", "admin"),
    "another value of an attribute": lambda session: setattr(session, "tenant", "two"),
    "no attribute": lambda session: delattr(session, "tenant"),
    "a method": lambda session: setattr(session, "flush", print),
    "no autoflush": lambda session: setattr(session, "autoflush", False),
    "expiry": lambda session: setattr(session, "expire_on_commit", False),
    "two phases": lambda session: setattr(session, "twophase", True),
    "another engine": lambda session: setattr(session, "bind", OTHER),
    "an engine of a class": lambda session: session.bind_mapper(Order, OTHER),
    "an engine of a table": lambda session: session.bind_table(TABLE, OTHER),
    "info": lambda session: session.info.update(actor="admin"),
    "another value of info": lambda session: session.info.update(tenants=["one"]),
    "no info": lambda session: session.info.clear(),
    "a listener": lambda session: event.listen(session, "after_flush", second),
    "another listener": lambda session: replace_listener(session, "before_flush"),
    "no listener": lambda session: event.remove(session, "before_flush", first),
    "an attribute of the transaction": lambda session: setattr(session.get_transaction(), "actor", "admin"),
    "an attribute of the connection": lambda session: setattr(session.connection(), "actor", "admin"),
    "a method of the connection": lambda session: setattr(session.connection(), "execute", print),
    "an option of the connection": lambda session: session.connection().execution_options(yield_per=7),
    "info of the connection": lambda session: session.connection().info.update(actor=object()),
    "a listener of the connection": lambda session: event.listen(session.connection(), "before_execute", second),
    "another listener of the connection": lambda session: replace_listener(
        session.connection(), "before_cursor_execute"
    ),
    "an attribute of the pool's connection": lambda session: setattr(session.connection().connection, "actor", "admin"),
    "an attribute of the pool's record": lambda session: setattr(
        session.connection().connection._connection_record, "actor", object()
    ),
}


@pytest.mark.parametrize("mark", MARKS)
def test_mark_is_noticed(session: Session, mark: str) -> None:
    marks = Marks(of_session(session))
    marks.add(of_connection(session.connection()))
    assert marks.changed() is None
    MARKS[mark](session)
    assert marks.changed() is not None


def nest(session: Session) -> None:
    with session.begin_nested():
        session.execute(text("SELECT 1"))


def roll_back_nested(session: Session) -> None:
    session.begin_nested().rollback()


def write(session: Session) -> None:
    session.execute(text("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY)"))
    session.add(Order())
    session.flush()


def read(session: Session) -> None:
    write(session)
    session.scalars(select(Order)).all()


def forget(session: Session) -> None:
    write(session)
    session.expunge_all()


def mute_for_a_while(session: Session) -> None:
    with session.no_autoflush:
        session.execute(text("SELECT 1"))


def listen_for_a_while(session: Session) -> None:
    for target in (session, session.connection()):
        name = "after_flush" if target is session else "before_execute"
        event.listen(target, name, second)
        event.remove(target, name, second)


WORK: dict[str, Callable[[Session], object]] = {
    "a statement": lambda session: session.execute(text("SELECT 1")),
    "options of a statement": lambda session: session.execute(text("SELECT 1"), execution_options={"yield_per": 7}),
    "a savepoint": nest,
    "a savepoint rolled back": roll_back_nested,
    "an object": write,
    "a query": read,
    "nothing left of it": forget,
    "no autoflush for a while": mute_for_a_while,
    "a listener for a while": listen_for_a_while,
}


@pytest.mark.parametrize("work", WORK)
def test_work_is_no_mark(session: Session, work: str) -> None:
    marks = Marks(of_session(session))
    marks.add(of_connection(session.connection()))
    for _ in range(2):
        WORK[work](session)
        assert marks.changed() is None


ASYNC_MARKS: dict[str, Callable[[AsyncSession], object]] = {
    "an attribute": lambda session: setattr(session, "actor", "admin"),
    "a method": lambda session: setattr(session, "execute", print),
    "no autoflush": lambda session: setattr(session, "autoflush", False),
    "another engine": lambda session: setattr(session, "bind", create_async_engine("postgresql+asyncpg://")),
    "an engine of a class": lambda session: session.bind_mapper(Order, create_async_engine("postgresql+asyncpg://")),
    "info": lambda session: session.info.update(actor="admin"),
}


@pytest.mark.parametrize("mark", ASYNC_MARKS)
def test_mark_on_an_async_session_is_noticed(mark: str) -> None:
    session = AsyncSession(create_async_engine("postgresql+asyncpg://"))
    marks = Marks(of_session(session))
    assert session.get_bind() is not None
    assert marks.changed() is None
    ASYNC_MARKS[mark](session)
    assert marks.changed() is not None
