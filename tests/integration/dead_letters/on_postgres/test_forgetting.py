"""Dead letters are discarded, and forgotten when they are old."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection

from durable.dead_letters.bulk import Resolution
from durable.recovery.maintenance import maintain
from durable.settings import load_settings
from durable.storage import dead_letters, grants, inbox
from durable.storage.database import Database
from durable.storage.dead_letters import LetterRange, Resolved, Selection
from durable.storage.locks import Job, try_lock
from durable.storage.rows import Tried
from tests.failure import leftovers
from tests.integration.dead_letters.on_postgres.storing import (
    ALL,
    WHOLE,
    claim,
    failure,
    given,
    replay_by_ada,
    store,
    stored,
)
from tests.support import letters
from tests.support.letters import NODE, SCHEMA, envelope
from tests.support.tables import Tables


class TestDiscarding:
    async def test_discarded_letter_keeps_its_reason_and_cannot_be_replayed(
        self, tables: Tables, database: Database
    ) -> None:
        (original,) = given(tables, letters.incoming, [envelope(1)])
        discard: Resolution = partial(dead_letters.discard, actor="ada", reason="a test order")

        assert len((await database.transaction(discard, ALL, WHOLE)).done) == 1
        assert await database.transaction(discard, ALL, WHOLE) == Resolved([], [])
        assert await database.transaction(replay_by_ada, Selection(resolved=None), WHOLE) == Resolved([], [])

        (letter,) = await database.transaction(dead_letters.read, Selection(resolved=True), WHOLE)
        assert (letter.summary.resolution, letter.summary.resolved_by, letter.summary.resolution_reason) == (
            "discarded", "ada", "a test order"
        )  # fmt: skip
        assert (letter.body, tables.count("incoming_envelopes")) == (original.body, 0)


class TestForgetting:
    def resolve(self, tables: Tables, number: int, days: int) -> None:
        tables.execute(
            "UPDATE durable.dead_letters SET resolution = 'discarded', resolved_at = now() - %s * interval '1 day' "
            "WHERE convert_from(body, 'UTF8')::json ->> 'number' = %s",
            days,
            str(number),
        )

    def left(self, tables: Tables) -> list[int]:
        return tables.rows(
            "SELECT (convert_from(body, 'UTF8')::json ->> 'number')::integer FROM durable.dead_letters ORDER BY 1"
        )

    async def test_letters_resolved_before_the_retention_are_purged_with_their_attempts(
        self, tables: Tables, database: Database
    ) -> None:
        given(tables, store, [envelope(number) for number in range(4)])
        for lease in claim(tables):
            assert stored(tables, inbox.dead_letter, NODE, lease, letters.LETTER, Tried(1, [failure(1)]))
        await tables.change("UPDATE durable.dead_letters SET failed_at = now() - interval '10 years'")
        await tables.change("UPDATE durable.failed_attempts SET failed_at = now() - interval '10 years'")
        for number, days in ((0, 89), (1, 91), (2, 1_000)):
            self.resolve(tables, number, days)

        await maintain(database, load_settings())

        assert self.left(tables) == [0, 3]
        assert tables.count("failed_attempts") == 2, "they go with their letter, and not before"

    async def test_letter_of_an_archiving_service_is_deleted_by_no_node(
        self, tables: Tables, database: Database
    ) -> None:
        given(tables, letters.incoming, [envelope(0)])
        stored(tables, dead_letters.discard, ALL, WHOLE, actor="ada", reason="no")
        self.resolve(tables, 0, 100)

        archive = "INSERT INTO durable.archives VALUES ('dead_letters', 'shop', 'app', 'lake', 'id', %s, %s, NULL)"
        await tables.change(archive, 2**40, 2**40)
        await maintain(database, load_settings())
        assert self.left(tables) == [0]
        await tables.change("DELETE FROM durable.archives")
        await maintain(database, load_settings())
        assert self.left(tables) == []

    def test_runtime_role_may_replay_discard_and_purge(self, tables: Tables) -> None:
        role = f"runner_{uuid4().hex[:8]}"
        tables.execute(f"CREATE ROLE {role}")
        stored(tables, grants.grant_runtime, role)
        given(tables, store, [envelope(number) for number in range(3)])
        first, second, third = claim(tables)

        def as_the_role(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with leftovers.transaction(tables.url) as conn:
                conn.exec_driver_sql(f"SET LOCAL ROLE {role}")
                return function(conn, SCHEMA, *args, **kwargs)

        try:
            for lease in (first, second, third):
                assert as_the_role(inbox.dead_letter, NODE, lease, letters.LETTER, Tried(1, [failure(1)]))
            number = as_the_role(dead_letters.groups, ALL)[0].count
            assert len(as_the_role(replay_by_ada, ALL, LetterRange(0, 2**40, 1)).done) == 1
            assert len(as_the_role(dead_letters.discard, ALL, WHOLE, actor="ada", reason="no").done) == number - 1
            assert as_the_role(dead_letters.purge, keep=timedelta(0)) == 3
            assert as_the_role(dead_letters.purge_attempts, keep=timedelta(0)) == 0
            assert tables.count("failed_attempts") == 0
        finally:
            tables.execute(f"DROP OWNED BY {role}")
            tables.execute(f"DROP ROLE {role}")

    async def test_purge_is_bounded_and_done_by_one_node_at_a_time(self, tables: Tables, database: Database) -> None:
        given(tables, letters.incoming, [envelope(number) for number in range(5)])
        for number in range(5):
            self.resolve(tables, number, 100)

        def purge_some(conn: Connection, schema: str) -> int:
            return dead_letters.purge(conn, schema, keep=timedelta(days=90), batch_size=2)

        with leftovers.transaction(tables.url) as conn:
            assert try_lock(conn, SCHEMA, Job.PARTITIONS)
            assert await database.transaction(purge_some) == 0

        assert [await database.transaction(purge_some) for _ in range(4)] == [2, 2, 1, 0]
