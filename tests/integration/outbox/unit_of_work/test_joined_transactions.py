"""Sessions that join a transaction of somebody else: their messages are handed over when that one is committed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from durable import Bus
from durable.outbox.outbox import Outbox
from durable.storage import migrator
from tests.integration.outbox.unit_of_work.sessions import BILLING, Flavour, Placed, insert, sent_numbers
from tests.support.tables import Tables


class TestJoinedTransactions:
    """A session that has joined the transaction of its connection commits nothing."""

    @pytest.fixture
    def outer(self, tables: Tables) -> Iterator[Connection]:
        engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))
        with engine.connect() as connection:
            yield connection
        engine.dispose()

    @pytest.mark.parametrize("mode", ["conditional_savepoint", "create_savepoint", "rollback_only"])
    @pytest.mark.parametrize("commits", [True, False], ids=["committed", "rolled back"])
    async def test_messages_are_handed_over_by_the_outer_commit_alone(
        self, tables: Tables, outer: Connection, mode: Any, commits: bool
    ) -> None:
        flavour = Flavour(outer.engine)
        transaction = outer.begin()
        with Session(outer, join_transaction_mode=mode) as session:
            insert(session, 1)
            sent = flavour.enlist(session).send(Placed(1))
            session.commit()
        stored = "SELECT count(*) FROM durable.outgoing_envelopes WHERE owner_id = 0"
        assert outer.execute(text(stored)).scalar_one() == 1  # by the session's commit, for those who look from inside
        assert flavour.agents.committed_ids == []
        if commits:
            transaction.commit()
        else:
            transaction.rollback()
        assert flavour.agents.told() == ([sent] if commits else [])
        assert sent_numbers(tables) == tables.rows("SELECT number FROM orders") == [1] * commits

    async def test_outer_commit_refused_by_the_database_hands_over_nothing(
        self, tables: Tables, outer: Connection
    ) -> None:
        flavour = Flavour(outer.engine)
        transaction = outer.begin()
        with Session(outer) as session:
            session.execute(text("INSERT INTO lines (number) VALUES (1)"))  # refused by its COMMIT
            flavour.enlist(session).send(Placed(1))
            session.commit()
        with pytest.raises(DBAPIError):
            transaction.commit()
        assert flavour.agents.told() == []
        assert sent_numbers(tables) == []

    async def test_outer_savepoint_rolled_back_discards_messages_stored_by_the_session(
        self, tables: Tables, outer: Connection
    ) -> None:
        flavour = Flavour(outer.engine)
        with outer.begin():
            with Session(outer) as session:
                flavour.enlist(session).send(Placed(1))
                insert(session, 1)
                session.commit()
            savepoint = outer.begin_nested()
            with Session(outer) as session:
                flavour.enlist(session).send(Placed(2))
                insert(session, 2)
                session.commit()
            savepoint.rollback()
        assert sent_numbers(tables) == tables.rows("SELECT number FROM orders") == [1]
        assert len(flavour.agents.told()) == 1

    @pytest.mark.parametrize("mode", ["create_savepoint", "rollback_only"])
    async def test_rollback_of_the_session_keeps_the_messages_of_its_earlier_commit(
        self, tables: Tables, outer: Connection, mode: Any
    ) -> None:
        flavour = Flavour(outer.engine)
        with outer.begin(), Session(outer, join_transaction_mode=mode) as session:
            outbox, late = flavour.enlist(session), [Placed(2)]
            event.listen(session, "before_commit", lambda _: outbox.send(late.pop()) if late else None)
            outbox.send(Placed(1))
            for number in (1, 2):
                insert(session, number)
            session.commit()  # stores the first; the listener has sent the second after that
            savepoint = outer.begin_nested()
            outbox.send(Placed(3))
            insert(session, 3)
            session.rollback()
            savepoint.close()
        assert sorted(sent_numbers(tables)) == tables.rows("SELECT number FROM orders") == [1, 2]
        assert len(flavour.agents.told()) == 2

    async def test_savepoint_rolled_back_keeps_the_messages_of_a_closed_session(
        self, tables: Tables, outer: Connection
    ) -> None:
        flavour = Flavour(outer.engine)
        with outer.begin(), Session(outer, join_transaction_mode="rollback_only") as session:
            outbox = flavour.enlist(session)
            insert(session, 1)
            outbox.send(Placed(1))
            session.close()  # the transaction goes on, with the row
            savepoint = outer.begin_nested()
            insert(session, 2)
            outbox.send(Placed(2))
            session.close()
            savepoint.rollback()
        assert sent_numbers(tables) == tables.rows("SELECT number FROM orders") == [1]

    async def test_savepoint_rolled_back_keeps_messages_sent_before_the_session_joined(
        self, tables: Tables, outer: Connection
    ) -> None:
        flavour = Flavour(outer.engine)
        with outer.begin(), Session(outer, join_transaction_mode="create_savepoint") as session:
            outbox = flavour.enlist(session)
            insert(session, 1)
            outbox.send(Placed(1))
            session.commit()
            savepoint = outer.begin_nested()
            outbox.send(Placed(2))
            savepoint.rollback()  # the session has no part in it yet
            insert(session, 2)
            session.commit()
        assert sent_numbers(tables) == tables.rows("SELECT number FROM orders") == [1, 2]

    @pytest.mark.filterwarnings("ignore:transaction already deassociated:sqlalchemy.exc.SAWarning")
    @pytest.mark.parametrize("ends_by", ["commit", "rollback"])
    @pytest.mark.parametrize("leaves_by", ["rollback", "close"])
    async def test_kept_rows_keep_their_messages_when_the_session_has_ended_the_joined_transaction(
        self, tables: Tables, outer: Connection, ends_by: str, leaves_by: str
    ) -> None:
        flavour = Flavour(outer.engine)
        outer.begin()
        with Session(outer) as session:
            outbox = flavour.enlist(session)
            insert(session, 1)
            outbox.send(Placed(1))
            getattr(session.connection(), ends_by)()
            insert(session, 2)  # begins another transaction of the connection, which the session cannot end
            outbox.send(Placed(2))
            getattr(session, leaves_by)()
        outer.commit()
        expected = [1, 2] if ends_by == "commit" else [2]
        assert sent_numbers(tables) == tables.rows("SELECT number FROM orders") == expected
        assert len(flavour.agents.told()) == len(expected)

    async def test_refused_commit_returns_the_room_when_the_session_is_closed(
        self, tables: Tables, outer: Connection
    ) -> None:
        flavour = Flavour(outer.engine)
        session = Session(outer)  # begins the transaction itself
        outbox, late = flavour.enlist(session), [Placed(2)]
        event.listen(session, "before_commit", lambda _: outbox.send(late.pop()) if late else None)
        session.execute(text("INSERT INTO lines (number) VALUES (1)"))  # refused by its COMMIT
        outbox.send(Placed(1))
        with pytest.raises(DBAPIError):
            session.commit()
        session.close()
        assert flavour.agents.room == 1_000
        assert flavour.agents.told() == []
        assert sent_numbers(tables) == []


class TestTwoBuses:
    async def test_each_bus_stores_its_messages_in_its_own_schema(self, flavour: Flavour, tables: Tables) -> None:
        url = tables.url.replace("postgresql://", "postgresql+psycopg://")
        await asyncio.to_thread(migrator.upgrade, url, "audit")
        buses = [Bus("shop", tables.url), Bus("audit", tables.url, db_schema="audit")]
        for bus in buses:
            bus.route(Placed, to=BILLING)

        def work(session: Session, _: Outbox) -> None:
            insert(session, 1)
            for bus in buses:
                with bus.enlist(session):
                    bus.send(Placed(1))
            session.commit()

        await flavour.run(work)
        for bus in buses:
            await bus.runtime.stop()
        assert tables.rows("SELECT source FROM durable.outgoing_envelopes") == ["shop"]
        assert tables.rows("SELECT source FROM audit.outgoing_envelopes") == ["audit"]
        tables.execute("DROP SCHEMA audit CASCADE")
