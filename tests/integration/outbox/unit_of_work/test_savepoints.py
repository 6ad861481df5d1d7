"""A savepoint that is rolled back takes its messages along, in every shape that a transaction can have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from durable import WiringError
from durable.outbox.outbox import Outbox
from durable.outbox.transactions import forget
from tests.integration.outbox.unit_of_work.sessions import COMMITS, Flavour, Placed, insert, sent_numbers
from tests.support.tables import Tables


class TestSavepoints:
    async def test_a_savepoint_rolled_back_forgets_its_messages_and_no_others(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.send(Placed(1))
            savepoint = session.begin_nested()
            outbox.send(Placed(2))
            savepoint.rollback()
            outbox.send(Placed(3))
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1, 3]

    async def test_a_savepoint_released_keeps_its_messages(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            with session.begin_nested():
                outbox.send(Placed(1))
            outbox.send(Placed(2))
            assert flavour.inserts == []  # it is no commit
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1, 2]

    async def test_outer_savepoint_rolled_back_discards_messages_of_released_inner_ones(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.send(Placed(1))
            outer = session.begin_nested()
            outbox.send(Placed(2))
            with session.begin_nested():
                outbox.send(Placed(3))
            inner = session.begin_nested()
            outbox.send(Placed(4))
            outer.rollback()
            assert not inner.is_active
            outbox.send(Placed(5))
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1, 5]

    async def test_statement_failing_in_a_savepoint_discards_its_messages(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            outbox.send(Placed(1))
            with suppress(DBAPIError), session.begin_nested():
                outbox.send(Placed(2))
                insert(session, 1)
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1]

    async def test_commit_with_an_open_savepoint_stores_everything(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.send(Placed(1))
            session.begin_nested()
            outbox.send(Placed(2))
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [1, 2]
        assert len(flavour.inserts) == 1

    async def test_closed_savepoint_was_rolled_back(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            outbox.send(Placed(1))
            savepoint = session.begin_nested()
            insert(session, 2)
            outbox.send(Placed(2))
            savepoint.close()
            session.commit()

        await flavour.run(work)
        assert (tables.rows("SELECT number FROM orders"), sent_numbers(tables)) == ([1], [1])

    async def test_a_session_may_be_enlisted_inside_a_savepoint(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            forget(session)  # as if it had not been enlisted yet
            savepoint = session.begin_nested()
            late = flavour.enlist(session)
            late.send(Placed(1))
            savepoint.rollback()
            late.send(Placed(2))
            with session.begin_nested():
                late.send(Placed(3))
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == [2, 3]


class TestShapes:
    """Whoever commits, and whatever is open then: tests/integration/outbox/test_transaction_shapes.py mixes them."""

    @pytest.mark.parametrize("commit", COMMITS, ids=lambda commit: commit.__name__)
    @pytest.mark.parametrize("has_data", [True, False], ids=["with data", "messages alone"])
    async def test_a_commit_with_a_savepoint_open_stores_everything(
        self, flavour: Flavour, tables: Tables, commit: Callable[[Session], None], has_data: bool
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            session.begin()
            if has_data:
                insert(session, 1)
            outbox.send(Placed(1))
            session.begin_nested()
            outbox.send(Placed(2))
            commit(session)
            session.close()

        await flavour.run(work)
        assert sent_numbers(tables) == [1, 2]
        assert tables.rows("SELECT number FROM orders") == [1] * has_data
        assert len(flavour.inserts) == 1

    @pytest.mark.parametrize("commit", COMMITS, ids=lambda commit: commit.__name__)
    @pytest.mark.parametrize("has_data", [True, False], ids=["with data", "without"])
    @pytest.mark.parametrize("is_nested", [True, False], ids=["in a savepoint", "in none"])
    async def test_a_handlers_commit_is_refused_in_any_shape(
        self, flavour: Flavour, tables: Tables, commit: Callable[[Session], None], has_data: bool, is_nested: bool
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.commit_allowed = False
            session.begin()
            if has_data:
                insert(session, 1)
                outbox.send(Placed(1))
            if is_nested:
                session.begin_nested()
            with pytest.raises(WiringError, match="a handler must not commit"):
                commit(session)
            session.close()

        await flavour.run(work)
        assert (tables.rows("SELECT number FROM orders"), sent_numbers(tables)) == ([], [])
        assert flavour.agents.room == 1_000

    async def test_connection_with_a_refused_commit_returns_to_the_pool_without_a_transaction(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            insert(session, 1)
            outbox.commit_allowed = False
            with pytest.raises(WiringError):
                session.connection().commit()
            session.close()

        def others(session: Session, outbox: Outbox) -> None:
            insert(session, 2)
            session.commit()

        await flavour.run(work)
        await flavour.run(others)
        assert tables.rows("SELECT number FROM orders") == [2]

    async def test_a_savepoint_of_the_connection_rolled_back_forgets_its_messages(
        self, flavour: Flavour, tables: Tables
    ) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            outbox.send(Placed(1))
            insert(session, 1)
            savepoint = session.connection().begin_nested()
            outbox.send(Placed(2))
            insert(session, 2)
            with session.connection().begin_nested():
                outbox.send(Placed(3))
                insert(session, 3)
            savepoint.rollback()
            outbox.send(Placed(4))
            insert(session, 4)
            session.commit()

        await flavour.run(work)
        assert sent_numbers(tables) == tables.rows("SELECT number FROM orders ORDER BY 1") == [1, 4]

    async def test_session_enlisted_within_a_transaction_is_followed(self, flavour: Flavour, tables: Tables) -> None:
        def work(session: Session, outbox: Outbox) -> None:
            forget(session)  # as if it had not been enlisted yet
            insert(session, 1)
            savepoint = session.begin_nested()
            insert(session, 2)
            late = flavour.enlist(session)
            late.send(Placed(2))
            savepoint.rollback()
            late.send(Placed(1))
            session.connection().commit()

        await flavour.run(work)
        assert sent_numbers(tables) == tables.rows("SELECT number FROM orders") == [1]


async def test_messages_follow_savepoints_as_sql_text(flavour: Flavour, tables: Tables) -> None:
    def work(session: Session, outbox: Outbox) -> None:
        def place(number: int) -> None:
            insert(session, number)
            outbox.send(Placed(number))

        place(1)
        session.execute(text("SAVEPOINT a"))
        place(2)
        session.execute(text("savepoint a"))
        place(3)
        session.execute(text("ROLLBACK TO a"))
        place(4)
        session.execute(text("RELEASE SAVEPOINT a"))
        assert [each.body for each in outbox.pending] == [b'{"number":%d}' % number for number in (1, 2, 4)]
        session.execute(text("rollback to savepoint A"))
        place(5)
        session.commit()

    await flavour.run(work)
    assert tables.rows("SELECT number FROM orders ORDER BY number") == sent_numbers(tables) == [1, 5]


async def test_savepoint_begun_before_any_message_takes_all_of_them_along(flavour: Flavour, tables: Tables) -> None:
    def work(session: Session, outbox: Outbox) -> None:
        session.execute(text("SAVEPOINT a"))
        insert(session, 1)
        outbox.send(Placed(1))
        session.execute(text("ROLLBACK TO a"))
        session.commit()

    await flavour.run(work)
    assert tables.rows("SELECT number FROM orders") == sent_numbers(tables) == []


@pytest.mark.parametrize("within", ["commit", "rollback"])
async def test_savepoint_as_sql_text_ends_with_the_outer_savepoint(
    flavour: Flavour, tables: Tables, within: str
) -> None:
    """The outer one of two by one name is meant after it."""

    def work(session: Session, outbox: Outbox) -> None:
        session.execute(text("SAVEPOINT a"))
        insert(session, 1)
        outbox.send(Placed(1))
        nested = session.begin_nested()
        session.execute(text("SAVEPOINT a"))
        getattr(nested, within)()
        session.execute(text("ROLLBACK TO a"))
        insert(session, 2)
        outbox.send(Placed(2))
        session.commit()

    await flavour.run(work)
    assert tables.rows("SELECT number FROM orders") == sent_numbers(tables) == [2]


async def test_names_of_savepoints_in_quotes_keep_their_case(flavour: Flavour, tables: Tables) -> None:
    def work(session: Session, outbox: Outbox) -> None:
        for number, begin in enumerate(['SAVEPOINT "A"', "SAVEPOINT A", 'ROLLBACK TO "A"'], start=1):
            session.execute(text(begin))
            insert(session, number)
            outbox.send(Placed(number))
        session.commit()

    await flavour.run(work)
    assert tables.rows("SELECT number FROM orders") == sent_numbers(tables) == [3]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 'x; ROLLBACK TO a'",
        r"SELECT E'it\'; ROLLBACK TO a; '",
        "SELECT 1 -- ; ROLLBACK TO a",
        "SELECT 1 /* ; COMMIT */",
        "SELECT $x$; ROLLBACK TO a; COMMIT$x$",
        'SELECT 1 AS "; ROLLBACK TO a"',
    ],
)
async def test_text_like_a_savepoint_takes_no_message_along(flavour: Flavour, tables: Tables, sql: str) -> None:
    def work(session: Session, outbox: Outbox) -> None:
        outbox.send(Placed(1))
        session.connection().exec_driver_sql(sql)
        session.commit()

    await flavour.run(work)
    assert sent_numbers(tables) == [1]


REFUSED = ["ROLLBACK TO gone", "RELEASE gone", "SAVEPOINT a; ROLLBACK TO gone", "SELECT 1 / 0; SAVEPOINT a"]


@pytest.mark.parametrize("refused", REFUSED)
async def test_refused_statement_about_a_savepoint_takes_no_message_along(
    flavour: Flavour, tables: Tables, refused: str
) -> None:
    def work(session: Session, outbox: Outbox) -> None:
        def place(number: int) -> None:
            insert(session, number)
            outbox.send(Placed(number))

        place(1)
        session.execute(text("SAVEPOINT a"))
        place(2)
        with pytest.raises(DBAPIError), session.begin_nested():
            session.execute(text(refused))
        place(3)
        session.execute(text("ROLLBACK TO a"))
        place(4)
        session.commit()

    await flavour.run(work)
    assert tables.rows("SELECT number FROM orders ORDER BY number") == sent_numbers(tables) == [1, 4]


async def test_commit_is_refused_after_a_rollback_to_a_doubtful_savepoint(flavour: Flavour, tables: Tables) -> None:
    """Of several statements in one text some may have been carried out; asyncpg takes one alone."""

    def work(session: Session, outbox: Outbox) -> None:
        insert(session, 1)
        outbox.send(Placed(1))
        session.execute(text("SAVEPOINT a"))
        with pytest.raises(DBAPIError):
            session.execute(text("SAVEPOINT b; SAVEPOINT a; SELECT 1 / 0"))
        outbox.send(Placed(2))
        session.execute(text("ROLLBACK TO a"))
        with pytest.raises(WiringError, match="nobody can say which messages were sent within it"):
            session.commit()
        session.rollback()
        insert(session, 3)
        outbox.send(Placed(3))
        session.commit()

    await flavour.run(work)
    assert tables.rows("SELECT number FROM orders") == sent_numbers(tables) == [3]


async def test_savepoint_of_sqlalchemy_is_rolled_back_by_its_name(flavour: Flavour, tables: Tables) -> None:
    def work(session: Session, outbox: Outbox) -> None:
        insert(session, 1)
        outbox.send(Placed(1))
        nested = session.connection().begin_nested()
        insert(session, 2)
        outbox.send(Placed(2))
        session.execute(text(f"ROLLBACK TO {nested._savepoint}"))
        insert(session, 3)
        outbox.send(Placed(3))
        session.commit()

    await flavour.run(work)
    assert tables.rows("SELECT number FROM orders ORDER BY number") == sent_numbers(tables) == [1, 3]


def works(session: Session, outbox: Outbox, number: int) -> None:
    insert(session, number)
    outbox.send(Placed(number))


@pytest.mark.parametrize("name", ["U&\"d!0061t\" UESCAPE E'!'", '"100 %"'])
async def test_commit_is_refused_after_a_rollback_to_an_unknown_savepoint(
    flavour: Flavour, tables: Tables, name: str
) -> None:
    def work(session: Session, outbox: Outbox) -> None:
        works(session, outbox, 1)
        session.execute(text(f"SAVEPOINT {name}"))
        works(session, outbox, 2)
        session.execute(text(f"ROLLBACK TO {name}"))
        with pytest.raises(WiringError, match="its name cannot be read"):
            session.commit()
        session.rollback()
        session.execute(text("SAVEPOINT a"))
        works(session, outbox, 3)
        session.execute(text(f"SAVEPOINT {name}"))
        session.execute(text(f"RELEASE {name}"))
        session.commit()

    await flavour.run(work)
    assert tables.rows("SELECT number FROM orders") == sent_numbers(tables) == [3]


async def test_savepoint_begun_before_the_session_was_enlisted_takes_all_messages_along(
    flavour: Flavour, tables: Tables
) -> None:
    def work(_: Session, outbox: Outbox) -> None:
        with Session(outbox.session.connection(), join_transaction_mode="control_fully") as session:
            session.execute(text("SAVEPOINT a"))
            late = flavour.enlist(session)
            works(session, late, 1)
            session.execute(text("ROLLBACK TO a"))
            works(session, late, 2)
            session.commit()

    await flavour.run(work)
    assert tables.rows("SELECT number FROM orders") == sent_numbers(tables) == [2]


async def test_failed_rollback_of_a_savepoint_takes_no_message_along(flavour: Flavour, tables: Tables) -> None:
    """Its savepoint has ended with one around it."""

    def work(session: Session, outbox: Outbox) -> None:
        session.execute(text("SAVEPOINT a"))
        nested = session.begin_nested()
        works(session, outbox, 1)
        session.execute(text("RELEASE a"))
        session.execute(text("SAVEPOINT b"))
        with pytest.raises(DBAPIError):
            nested.rollback()
        session.execute(text("ROLLBACK TO b"))
        works(session, outbox, 2)
        session.commit()

    await flavour.run(work)
    assert tables.rows("SELECT number FROM orders ORDER BY number") == sent_numbers(tables) == [1, 2]


async def test_savepoints_begun_many_times_by_one_statement_are_counted(flavour: Flavour, tables: Tables) -> None:
    def work(session: Session, outbox: Outbox) -> None:
        works(session, outbox, 1)
        session.execute(text("SAVEPOINT a"), [{}, {}])
        works(session, outbox, 2)
        session.execute(text("RELEASE a"))
        session.execute(text("ROLLBACK TO a"))
        works(session, outbox, 3)
        session.commit()

    await flavour.run(work)
    assert tables.rows("SELECT number FROM orders ORDER BY number") == sent_numbers(tables) == [1, 3]


async def test_savepoint_refused_in_a_failed_transaction_is_not_followed(flavour: Flavour, tables: Tables) -> None:
    def work(session: Session, outbox: Outbox) -> None:
        works(session, outbox, 1)
        session.execute(text("SAVEPOINT a"))
        works(session, outbox, 2)
        for refused in ("SELECT 1 / 0", "SAVEPOINT a"):
            with pytest.raises(DBAPIError):
                session.execute(text(refused))
        session.execute(text("ROLLBACK TO a"))
        works(session, outbox, 3)
        session.commit()

    await flavour.run(work)
    assert tables.rows("SELECT number FROM orders ORDER BY number") == sent_numbers(tables) == [1, 3]
