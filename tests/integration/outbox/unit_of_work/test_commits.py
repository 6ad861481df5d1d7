"""Messages are in the database when the business data is, and are not when it is not: for every kind of session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from psycopg.sql import SQL
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from durable import InvalidMessage, NoUnitOfWork, WiringError
from durable.envelope import ANY_NODE
from durable.outbox.outbox import Outbox
from tests.integration.outbox.unit_of_work.sessions import (
    BILLING,
    MAIL,
    NODE,
    Flavour,
    Line,
    Noted,
    Placed,
    insert,
    sent_numbers,
)
from tests.support.tables import Tables


class TestCommits:
    async def test_the_message_is_stored_with_the_business_data(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            sent = outbox.send(Placed(1), headers={"tenant": "blue"}, key="order-1")
            assert tables.count("outgoing_envelopes") == 0
            session.commit()
            assert flavour.agents.committed_ids == [sent]

        await flavour.run(work)
        assert tables.rows("SELECT number FROM orders") == [1]
        row = tables.one(
            "SELECT destination, message_type, source, partition_key, ordering_key, headers, owner_id, epoch "
            "FROM durable.outgoing_envelopes"
        )
        assert row == (BILLING, "uow.placed", "shop", "order-1", "order-1", {"tenant": "blue"}, ANY_NODE, 0)

    async def test_a_rollback_stores_neither(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            outbox.send(Placed(1))
            session.rollback()
            session.commit()

        await flavour.run(work)
        assert (tables.rows("SELECT number FROM orders"), sent_numbers(tables)) == ([], [])
        assert flavour.agents.committed_ids == []

    @pytest.mark.parametrize("end", ["COMMIT", "rollback", "SELECT 1; END"])
    async def test_end_as_sql_text_is_refused_after_a_send(self, flavour: Flavour, tables: Tables, end: str) -> None:
        """No event follows it: the row would be committed without its message, or the message without its row."""

        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            outbox.send(Placed(1))
            with pytest.raises(WiringError, match=r"use commit\(\) or rollback\(\) of the session"):
                session.execute(text(end))
            session.commit()

        await flavour.run(work)
        assert (tables.rows("SELECT number FROM orders"), sent_numbers(tables)) == ([1], [1])

    @pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK", "END"])
    async def test_end_as_sql_text_is_refused_before_a_send(self, flavour: Flavour, tables: Tables, end: str) -> None:
        """For asyncpg's adapter the transaction would go on: each later row would be committed by itself."""

        def work(session: Session, outbox: Outbox) -> None:
            session.execute(text("SELECT 1"))
            with pytest.raises(WiringError, match=r"use commit\(\) or rollback\(\) of the session"):
                session.execute(text(end))
            insert(session, 1)
            outbox.send(Placed(1))
            session.rollback()
            insert(session, 2)
            outbox.send(Placed(2))
            session.commit()

        await flavour.run(work)
        assert (tables.rows("SELECT number FROM orders"), sent_numbers(tables)) == ([2], [2])

    async def test_end_as_sql_text_is_allowed_in_autocommit(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
            insert(session, 1)
            session.execute(text("COMMIT"))
            session.close()

        await flavour.run(work)
        assert tables.rows("SELECT number FROM orders") == [1]

    @pytest.mark.parametrize("kind", [str.encode, lambda sql: SQL(sql), lambda sql: SQL("{}").format(SQL(sql))])
    async def test_statement_of_the_driver_is_read(
        self, flavour: Flavour, tables: Tables, kind: Callable[[str], Any]
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.send(Placed(1))
            connection = session.connection()
            if connection.dialect.driver == "psycopg":
                connection.exec_driver_sql(kind("SELECT 1"))
                with pytest.raises(WiringError, match="SQL text must not end"):
                    connection.exec_driver_sql(kind("ROLLBACK"))
            with pytest.raises(WiringError, match="a statement of type object cannot be read"):
                connection.exec_driver_sql(object())  # type: ignore[arg-type]
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1]

    async def test_session_closed_without_a_commit_stores_neither_rows_nor_messages(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            outbox.send(Placed(1))
            session.close()
            session.commit()

        await flavour.run(work)
        assert (tables.rows("SELECT number FROM orders"), sent_numbers(tables)) == ([], [])

    async def test_a_message_without_any_other_data_is_rolled_back_and_committed_too(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.send(Placed(1))
            session.rollback()
            outbox.send(Placed(2))
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [2]

    async def test_each_commit_stores_the_messages_sent_since_the_last(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            for number in range(4):
                stored = len(flavour.inserts)
                outbox.send(Placed(number))
                assert len(flavour.inserts) == stored
                if number == 2:
                    session.rollback()
                else:
                    session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [0, 1, 3]
        assert len(flavour.agents.committed_ids) == 3

    async def test_commit_stores_any_number_of_messages_by_one_statement(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            for number in range(50):
                outbox.send(Placed(number))
                outbox.publish(Noted(number))
            session.commit()
            assert len(flavour.inserts) == 1
            session.commit()
            insert(session, 1)
            session.commit()
            assert len(flavour.inserts) == 1

        await flavour.run(work)
        assert (tables.count("outgoing_envelopes"), tables.count("incoming_envelopes")) == (150, 50)

    async def test_sending_takes_no_connection_and_flushes_nothing(self, flavour: Flavour) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.send(Placed(1))
            outbox.publish(Noted(1))
            assert (flavour.connections, flavour.inserts) == (0, [])

        await flavour.run(work)

    async def test_message_sent_by_a_commit_listener_is_stored_by_this_commit(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            @event.listens_for(session, "before_commit", once=True)
            def before_commit(_: Session) -> None:
                outbox.send(Placed(2))

            outbox.send(Placed(1))
            session.commit()
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1, 2]
        assert len(flavour.agents.committed_ids) == 2

    async def test_message_sent_during_the_flush_of_a_commit_is_stored_by_this_commit(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            @event.listens_for(session, "after_flush", once=True)
            def after_flush(*_: object) -> None:
                outbox.send(Placed(2))

            outbox.send(Placed(1))
            session.add(Line(number=None))
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1, 2]
        assert len(flavour.inserts) == 1

    async def test_a_message_sent_after_the_commit_is_refused_and_not_lost(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        refused: list[BaseException] = []

        def work(session: Session, outbox: Outbox) -> None:
            @event.listens_for(session, "after_commit", once=True)
            def after_commit(_: Session) -> None:
                with pytest.raises(NoUnitOfWork, match="COMMIT is under way") as error:
                    outbox.send(Placed(2))
                refused.append(error.value)

            outbox.send(Placed(1))
            session.commit()
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1]
        assert len(refused) == 1

    @pytest.mark.parametrize("is_nested", [True, False], ids=["savepoint", "transaction"])
    async def test_message_sent_by_a_rollback_listener_is_refused_and_later_ones_are_stored(
        self, flavour: Flavour, tables: Tables, is_nested: bool
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            @event.listens_for(session, "after_rollback", once=True)
            def after_rollback(_: Session) -> None:
                with pytest.raises(NoUnitOfWork, match="was rolled back"):
                    outbox.send(Placed(1))
                refused.append(1)

            insert(session, 1)
            if is_nested:
                session.begin_nested().rollback()
            else:
                session.rollback()
            outbox.send(Placed(2))
            session.commit()

        refused: list[int] = []
        await flavour.run(work)
        assert sent_numbers(tables) == [2]
        assert refused == [1]

    async def test_a_local_message_goes_into_the_inbox_and_its_id_is_remembered(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.publish(Noted(1))
            session.commit()

        await flavour.run(work)
        assert tables.rows("SELECT destination FROM durable.outgoing_envelopes ORDER BY 1") == [BILLING, MAIL]
        assert tables.one("SELECT endpoint, owner_id FROM durable.incoming_envelopes") == ("local", NODE)

    async def test_a_unit_of_work_of_the_same_session_is_the_same_outbox(self, flavour: Flavour) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            assert flavour.enlist(session) is outbox

        await flavour.run(work)


class TestFailures:
    async def test_commit_refused_by_the_database_stores_neither_and_returns_the_room(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            session.execute(text("INSERT INTO lines (number) VALUES (1)"))  # refused by its COMMIT
            sent = outbox.send(Placed(1))
            with pytest.raises(DBAPIError):
                session.commit()
            session.rollback()
            assert (flavour.agents.committed_ids, flavour.agents.abandoned_ids) == ([], [sent])
            outbox.send(Placed(2))
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [2]
        assert flavour.agents.room == 999

    async def test_failed_flush_stores_nothing(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            outbox.send(Placed(1))
            with pytest.raises(DBAPIError):
                insert(session, 1)
            session.rollback()
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == []

    async def test_refused_message_leaves_the_session_unchanged(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            with pytest.raises(InvalidMessage):
                outbox.send(Placed(1), key="\0")
            session.commit()

        await flavour.run(work)
        assert (tables.rows("SELECT number FROM orders"), sent_numbers(tables)) == ([1], [])


class TestRoom:
    async def test_a_row_is_owned_when_there_is_room_and_left_to_any_node_when_there_is_none(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        flavour.agents.room = 2

        def work(session: Session, outbox: Outbox) -> None:
            for number in range(5):
                outbox.send(Placed(number))
            session.commit()

        await flavour.run(work)
        assert tables.rows("SELECT owner_id FROM durable.outgoing_envelopes ORDER BY seq") == [7, 7, 0, 0, 0]

    async def test_room_is_reserved_by_the_commit_and_not_before(self, flavour: Flavour) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.send(Placed(1))
            assert flavour.agents.room == 1_000
            session.rollback()
            assert (flavour.agents.room, flavour.agents.abandoned_ids) == (1_000, [])

        await flavour.run(work)
