"""Many dead letters are resolved by runs of bounded transactions."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus
from durable.dead_letters.bulk import Run, resolve
from durable.errors import StorageUnavailable
from durable.settings import load_settings
from durable.storage import dead_letters, inbox
from durable.storage.database import Database
from durable.storage.dead_letters import LetterRange, Resolved, Selection
from durable.testing import eventually
from tests.failure import leftovers
from tests.failure.books import waits_for_a_lock
from tests.integration.dead_letters.on_postgres.storing import (
    ALL,
    QUICK,
    WHOLE,
    Placed,
    both_ways,
    given,
    replay_by_ada,
)
from tests.support import letters
from tests.support.letters import ENDPOINT, NODE, SCHEMA, envelope
from tests.support.tables import Tables


class TestRuns:
    async def test_run_proceeds_in_batches_from_the_oldest_and_reports_each(
        self, tables: Tables, database: Database
    ) -> None:
        given(tables, letters.many, range(250), message_type="letters.placed", kind="ValueError", reason="no")
        told: list[int] = []

        run = await resolve(database, replay_by_ada, ALL, tell=lambda run: told.append(run.done))

        assert (run, told) == (Run(total=250, done=250), [0, 100, 200, 250])
        batches = tables.rows("SELECT count(*) FROM durable.incoming_envelopes GROUP BY xmin::text ORDER BY 1")
        assert batches == [50, 100, 100], "each in a transaction of its own"

    async def test_stopped_run_loses_nothing_and_the_next_run_continues(
        self, tables: Tables, database: Database
    ) -> None:
        given(tables, letters.many, range(250), message_type="letters.placed", kind="ValueError", reason="no")
        stopping = asyncio.Event()

        def stop(run: Run) -> None:
            if run.done:
                stopping.set()

        stopped = await resolve(database, replay_by_ada, ALL, stopping=stopping, tell=stop)
        assert stopped == Run(total=250, done=100, stopped=True)
        assert tables.count("incoming_envelopes") == 100

        assert await resolve(database, replay_by_ada, ALL) == Run(total=150, done=150)
        assert tables.rows("SELECT DISTINCT replay_count FROM durable.dead_letters") == [1]
        assert tables.count("incoming_envelopes") == 250

    async def test_run_ended_by_an_outage_is_continued_by_the_next(self, tables: Tables, database: Database) -> None:
        given(tables, letters.many, range(250), message_type="letters.placed", kind="ValueError", reason="no")

        def cut(run: Run) -> None:
            if run.done:
                tables.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )

        with pytest.raises(StorageUnavailable):
            await resolve(database, replay_by_ada, ALL, tell=cut)
        assert tables.count("incoming_envelopes") == 100

        assert await resolve(database, replay_by_ada, ALL) == Run(total=150, done=150)
        assert tables.count("incoming_envelopes") == 250

    async def test_a_run_may_be_limited_and_slowed_down(self, tables: Tables, database: Database) -> None:
        given(tables, letters.many, range(40), message_type="letters.placed", kind="ValueError", reason="no")
        began = asyncio.get_running_loop().time()

        run = await resolve(database, replay_by_ada, ALL, limit=20, rate=40)

        assert run == Run(total=20, done=20)
        assert asyncio.get_running_loop().time() - began > 0.2, "batches of ten, a quarter of a second apart"
        oldest = "SELECT max(letter_id) < (SELECT min(letter_id) FROM durable.dead_letters WHERE resolved_at IS NULL)"
        assert tables.one(f"{oldest} FROM durable.dead_letters WHERE resolved_at IS NOT NULL")

    async def test_run_stops_during_its_wait(self, tables: Tables, database: Database) -> None:
        given(tables, letters.incoming, [envelope(1), envelope(2)])
        stopping = asyncio.Event()
        running = asyncio.create_task(resolve(database, replay_by_ada, ALL, rate=0.01, stopping=stopping))
        await eventually(lambda: tables.count("incoming_envelopes"), within=30)
        stopping.set()

        assert await running == Run(total=2, done=1, stopped=True)

    async def test_run_ends_at_the_newest_letter_of_its_start(self, tables: Tables, database: Database) -> None:
        """What it replays may fail again at once, and what it was to replay may be resolved by somebody else."""
        given(tables, letters.incoming, [envelope(number) for number in range(3)])
        *_, last = tables.rows("SELECT letter_id FROM durable.dead_letters ORDER BY 1")

        def replay_in_vain(conn: Connection, schema: str, selection: Selection, stretch: LetterRange) -> Resolved:
            resolved = replay_by_ada(conn, schema, selection, stretch)
            for lease in inbox.claim(conn, schema, message_type="letters.placed", batch_size=10, node=NODE):
                assert inbox.dead_letter(conn, schema, NODE, lease, letters.LETTER)
            dead_letters.discard(conn, schema, Selection(letters=[last]), WHOLE, actor="bob", reason="no")
            return resolved

        run = await resolve(database, replay_in_vain, ALL, rate=4)

        assert run == Run(total=3, done=2)
        assert tables.rows("SELECT resolution FROM durable.dead_letters ORDER BY letter_id") == [
            "replayed", "replayed", "discarded", None, None
        ]  # fmt: skip

    @both_ways
    async def test_letters_are_replayed_in_order_by_two_concurrent_operators(
        self, tables: Tables, database: Database, monkeypatch: pytest.MonkeyPatch, guarded: bool
    ) -> None:
        """The messages of the second are there when those of the first are, and not before."""
        if not guarded:
            monkeypatch.setattr(dead_letters, "lock", lambda *_: None)
        given(tables, letters.incoming, [envelope(1), envelope(2)])
        one = LetterRange(0, 2**40, 1)
        with leftovers.transaction(tables.url) as ada:
            first = replay_by_ada(ada, SCHEMA, ALL, one)
            late = asyncio.create_task(database.transaction(replay_by_ada, ALL, one))
            await eventually(lambda: late.done() or waits_for_a_lock(tables.url), within=30)
            assert tables.count("incoming_envelopes") == (0 if guarded else 1)
            ada.commit()
            second = await late

        assert (len(first.done), len(second.done)) == (1, 1)
        assert tables.count("incoming_envelopes") == 2

    async def test_two_operators_and_two_nodes_leave_one_effect_of_each_message(
        self, tables: Tables, database: Database
    ) -> None:
        given(tables, letters.many, range(600), message_type="letters.placed", kind="ValueError", reason="no")

        def shop() -> Bus:
            bus = Bus(ENDPOINT, tables.url, **QUICK, pool_size=2)

            @bus.handles(Placed, max_batch=50, concurrency=2)
            async def handle(placed: Placed, session: AsyncSession) -> None:
                await session.execute(text("INSERT INTO effects (number) VALUES (:number)"), {"number": placed.number})

            return bus

        async with AsyncExitStack() as nodes:
            for _ in range(2):
                await nodes.enter_async_context(shop())
            other = Database(load_settings(database_url=tables.url))
            runs = await asyncio.gather(
                resolve(database, replay_by_ada, ALL, rate=2_000), resolve(other, replay_by_ada, ALL, rate=2_000)
            )
            await other.close()
            await eventually(lambda: tables.one("SELECT count(*) FROM effects") >= 600, within=60)

        assert sum(run.done for run in runs) == 600
        assert sorted(tables.rows("SELECT number FROM effects")) == list(range(600))
        assert tables.rows("SELECT resolution, replay_count, count(*) FROM durable.dead_letters GROUP BY 1, 2") == [
            ("replayed", 1, 600)
        ]
