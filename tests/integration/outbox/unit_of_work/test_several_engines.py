"""Sessions of several engines of one database: their messages are in the transaction of their rows, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from durable import WiringError
from tests.integration.outbox.unit_of_work.sessions import Flavour, Line, Placed, sent_numbers
from tests.support.tables import Tables


@pytest.fixture
def engines(tables: Tables) -> Iterator[list[Engine]]:
    made = [create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://")) for _ in range(2)]
    yield made
    for engine in made:
        engine.dispose()


def routing(engines: list[Engine]) -> type[Session]:
    """A session that reads from the first engine and writes to the second one."""

    class Routing(Session):
        def get_bind(self, *_: Any, **__: Any) -> Any:
            return engines[self._flushing]

    return Routing


def line(session: Session, line: int, number: int | None = None) -> None:
    session.add(Line(line=line, number=number))


def test_session_with_an_engine_for_each_statement_stores_messages_with_its_rows(
    tables: Tables, engines: list[Engine]
) -> None:
    flavour = Flavour(engines[1])
    with routing(engines)() as session:
        outbox = flavour.enlist(session)
        for number in (1, 2):
            line(session, number)
            outbox.send(Placed(number))
            session.commit()
        line(session, 3)
        outbox.send(Placed(3))
        session.flush()
        session.rollback()
    assert tables.rows("SELECT line FROM lines ORDER BY line") == sent_numbers(tables) == [1, 2]


@pytest.mark.parametrize("within", ["the session", "a savepoint"])
@pytest.mark.parametrize("first", ["read", "write"])
def test_commit_on_two_connections_is_refused_with_messages(
    tables: Tables, engines: list[Engine], first: str, within: str
) -> None:
    flavour = Flavour(engines[1])

    def read(session: Session) -> None:
        session.execute(text("SELECT 1"))

    def write(session: Session) -> None:
        line(session, 1)
        session.flush()

    with routing(engines)() as session:
        outbox = flavour.enlist(session)
        for step in (read, write) if first == "read" else (write, read):
            step(session)
        outbox.send(Placed(1))
        if within == "a savepoint":
            session.begin_nested()
        transaction = session.get_transaction()
        assert transaction is not None
        with pytest.raises(WiringError, match="whose commits are not one"):
            transaction.commit()
        session.rollback()
        read(session)
        write(session)
        session.commit()
    assert tables.rows("SELECT line FROM lines") == [1]
    assert sent_numbers(tables) == []


def test_messages_are_not_sent_when_another_engine_refuses_its_commit(tables: Tables, engines: list[Engine]) -> None:
    flavour = Flavour(engines[0])
    with Session(engines[0], binds={Line: engines[1]}) as session:
        outbox = flavour.enlist(session)
        line(session, 1, number=99)  # refused at its commit: there is no such order
        outbox.send(Placed(1))
        with pytest.raises(WiringError, match="give it one engine"):
            session.commit()
    assert sent_numbers(tables) == []
