"""A dead letter is replayed once, with its attempts, and nothing is lost."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from sqlalchemy import event

from durable.dead_letters.bulk import Run, resolve
from durable.envelope import ANY_NODE
from durable.outcomes import DUPLICATE
from durable.storage import dead_letters, inbox, outbox
from durable.storage.database import Database
from durable.storage.dead_letters import Resolved, Selection
from durable.storage.inbox import Arrival
from durable.storage.outbox import Sent
from durable.storage.rows import Tried
from tests.failure import leftovers
from tests.integration.dead_letters.on_postgres.storing import (
    ALL,
    WHOLE,
    both_ways,
    claim,
    failure,
    given,
    receiving_agent,
    remove,
    replay_by_ada,
    store,
    stored,
)
from tests.support import letters
from tests.support.letters import ENDPOINT, NODE, PEER, envelope
from tests.support.tables import Tables


class TestReplaying:
    async def test_an_incoming_letter_is_a_new_message_again(self, tables: Tables, database: Database) -> None:
        original = msgspec.structs.replace(
            envelope(1), headers={"a": "b"}, partition_key="order-1", causation_id=envelope(0).id
        )
        given(tables, letters.incoming, [original])

        resolved = await database.transaction(replay_by_ada, ALL, WHOLE)

        number = tables.one("SELECT letter_id FROM durable.dead_letters")
        assert resolved == Resolved([number], [])
        row = tables.one("SELECT attempts, interruptions, owner_id, epoch FROM durable.incoming_envelopes")
        assert row == (0, 0, ANY_NODE, 1)
        (lease,) = claim(tables)
        assert lease.envelope == msgspec.structs.replace(original, destination=ENDPOINT)
        resolution = tables.one(
            "SELECT resolution, resolved_at > failed_at, resolved_by, resolution_reason, replay_count, edited_body "
            "FROM durable.dead_letters"
        )
        assert resolution == ("replayed", True, "ada", "mended", 1, None)

    async def test_an_outgoing_letter_waits_to_be_sent_again(self, tables: Tables, database: Database) -> None:
        (original,) = given(tables, letters.outgoing, [envelope(1, destination=PEER)])

        assert len((await database.transaction(replay_by_ada, ALL, WHOLE)).done) == 1

        (lease,) = stored(tables, outbox.claim, {PEER: 10}, node=NODE)
        assert (lease.envelope, lease.attempts, lease.epoch) == (original, 0, 2)
        assert tables.count("incoming_envelopes") == 0

    async def test_replay_wakes_the_nodes(self, tables: Tables, database: Database) -> None:
        given(tables, letters.incoming, [envelope(1)])
        with leftovers.transaction(tables.url) as conn:
            conn.exec_driver_sql("LISTEN durable_durable")
            conn.commit()
            await database.transaction(replay_by_ada, ALL, WHOLE)
            driver: Any = conn.connection.driver_connection
            assert len(list(driver.notifies(timeout=30, stop_after=1))) == 1

    async def test_a_letter_is_replayed_once(self, tables: Tables, database: Database) -> None:
        given(tables, letters.incoming, [envelope(1)])
        await database.transaction(replay_by_ada, ALL, WHOLE)
        assert stored(tables, inbox.finish_handled, NODE, claim(tables)) == 1

        assert await database.transaction(replay_by_ada, Selection(resolved=None), WHOLE) == Resolved([], [])
        assert tables.count("incoming_envelopes") == 0

    async def test_replay_is_one_statement_behind_its_lock(self, tables: Tables, database: Database) -> None:
        given(tables, letters.incoming, [envelope(1)])
        given(tables, letters.outgoing, [envelope(2, destination=PEER)])
        seen: list[str] = []

        @event.listens_for(database.engine.sync_engine, "before_cursor_execute")
        def _executed(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if "SAVEPOINT" not in statement and "advisory" not in statement:
                seen.append(statement)

        assert len((await database.transaction(replay_by_ada, ALL, WHOLE)).done) == 2
        assert len(seen) == 1

    async def test_failed_replay_is_another_letter_with_a_higher_count(
        self, tables: Tables, database: Database
    ) -> None:
        (original,) = given(tables, letters.incoming, [envelope(1)])
        for _ in range(2):
            await database.transaction(replay_by_ada, ALL, WHOLE)
            (lease,) = claim(tables)
            assert stored(tables, inbox.dead_letter, NODE, lease, letters.LETTER, Tried(1, [failure(1)]))

        rows = tables.rows("SELECT id, resolution, replay_count, epoch FROM durable.dead_letters ORDER BY letter_id")
        assert rows == [
            (original.id, "replayed", 1, 0),
            (original.id, "replayed", 2, 2),
            (original.id, None, 2, 4),
        ]
        per_letter = "SELECT count(*) FROM durable.failed_attempts GROUP BY letter_id ORDER BY letter_id"
        assert tables.rows(per_letter) == [1, 1]

    @both_ways
    async def test_stale_worker_of_a_replayed_message_finishes_nothing(
        self, tables: Tables, database: Database, monkeypatch: pytest.MonkeyPatch, guarded: bool
    ) -> None:
        """Such as a thread whose attempt took too long: the same node claims the message when it was replayed."""
        if not guarded:
            remove(monkeypatch, "REPLAY_LETTERS", "0, epoch + 1, ordering_key, fair_key FROM", "0, 0, NULL, NULL FROM")
        given(tables, store, [envelope(1)])
        (late,) = claim(tables)
        assert stored(tables, inbox.dead_letter, NODE, late, letters.LETTER)
        await database.transaction(replay_by_ada, ALL, WHOLE)
        assert len(claim(tables)) == 1

        assert stored(tables, inbox.finish_handled, NODE, [late]) == (0 if guarded else 1)

    async def test_replay_lifts_a_past_deadline_and_keeps_a_future_one(
        self, tables: Tables, database: Database
    ) -> None:
        now = datetime.now(UTC)
        past, future = now - timedelta(seconds=1), now + timedelta(hours=1)
        given(
            tables,
            letters.incoming,
            [
                msgspec.structs.replace(envelope(1), deliver_by=past),
                msgspec.structs.replace(envelope(2), deliver_by=future),
            ],
        )
        await database.transaction(replay_by_ada, ALL, WHOLE)

        assert tables.rows("SELECT deliver_by FROM durable.incoming_envelopes ORDER BY id") == [None, future]

    @both_ways
    async def test_replay_remembers_a_forgotten_id_again(
        self, tables: Tables, database: Database, monkeypatch: pytest.MonkeyPatch, guarded: bool
    ) -> None:
        if not guarded:
            remove(monkeypatch, "REPLAY_LETTERS", "FROM each WHERE side = 'incoming' AND message_digest IS NOT NULL",
                   "FROM each WHERE false")  # fmt: skip
            remove(
                monkeypatch,
                "REPLAY_LETTERS",
                "WHERE side = 'outgoing' OR message_digest",
                "WHERE true OR message_digest",
            )
        (original,) = given(tables, letters.incoming, [envelope(1)])
        await tables.change("DELETE FROM durable.received_ids")
        await database.transaction(replay_by_ada, ALL, WHOLE)
        assert stored(tables, inbox.finish_handled, NODE, claim(tables)) == 1
        agent = receiving_agent(database)
        running = asyncio.create_task(agent.run())

        (outcome,) = await agent.receive(ENDPOINT, [original])

        assert (outcome == DUPLICATE) == guarded  # without it, the message is handled twice
        agent.stop()
        await running

    async def test_letter_with_a_reused_id_is_left_and_reported(self, tables: Tables, database: Database) -> None:
        first = msgspec.structs.replace(envelope(1), id=uuid4())
        second = msgspec.structs.replace(first, body=b'{"number": 2}', sent_at=datetime.now(UTC))
        unfit = inbox.Unfit(ENDPOINT, first.body, "too large", first, replayable=True)
        stored(tables, inbox.quarantine, NODE, unfit)
        stored(tables, inbox.store, [Arrival(ENDPOINT, second, ANY_NODE)])
        assert stored(tables, inbox.finish_handled, NODE, claim(tables)) == 1
        (letter,) = tables.rows("SELECT letter_id FROM durable.dead_letters")

        assert await database.transaction(replay_by_ada, ALL, WHOLE) == Resolved([], [letter], (letter,))
        assert await resolve(database, replay_by_ada, ALL, replayable=True) == Run(1, taken=1)
        assert not await database.transaction(dead_letters.handle, letter, actor="ada")
        assert tables.count("incoming_envelopes") == 0

    @pytest.mark.parametrize("version", [4, 7])
    async def test_edited_letter_failing_again_can_be_replayed_again(
        self, tables: Tables, database: Database, version: int
    ) -> None:
        original = envelope(1) if version == 7 else msgspec.structs.replace(envelope(1), id=uuid4())
        given(tables, letters.incoming, [original])
        for number in (2, 3):
            body = b'{"number": %d}' % number
            assert (
                len((await database.transaction(partial(dead_letters.replay, actor="ada", body=body), ALL, WHOLE)).done)
                == 1
            )
            (lease,) = claim(tables)
            assert lease.envelope.body == body
            assert stored(tables, inbox.dead_letter, NODE, lease, letters.LETTER)
        assert stored(tables, inbox.store, [Arrival(ENDPOINT, original, ANY_NODE)]) == set()

    async def test_letter_of_a_waiting_message_is_left(self, tables: Tables, database: Database) -> None:
        (back,) = given(tables, letters.outgoing, [envelope(1, destination=PEER)])
        given(tables, letters.outgoing, [envelope(2, destination=PEER)])
        stored(tables, outbox.store, [Sent(back, None, ANY_NODE)])  # its handler was run again
        first, second = tables.rows("SELECT letter_id FROM durable.dead_letters ORDER BY 1")

        assert await database.transaction(replay_by_ada, ALL, WHOLE) == Resolved([second], [first])
        assert tables.count("outgoing_envelopes") == 2
        assert tables.rows("SELECT letter_id FROM durable.dead_letters WHERE resolved_at IS NULL") == [first]

    async def test_second_of_two_letters_of_one_message_is_left(self, tables: Tables, database: Database) -> None:
        twice = envelope(1, destination=PEER)
        given(tables, letters.outgoing, [twice])
        given(tables, letters.outgoing, [twice])
        first, second = tables.rows("SELECT letter_id FROM durable.dead_letters ORDER BY 1")

        assert await database.transaction(replay_by_ada, ALL, WHOLE) == Resolved([first], [second])
        assert tables.count("outgoing_envelopes") == 1

    async def test_another_body_may_be_replayed_and_the_old_one_is_kept(
        self, tables: Tables, database: Database
    ) -> None:
        (original,) = given(tables, letters.incoming, [envelope(1)])

        await database.transaction(partial(dead_letters.replay, actor="ada", body=b'{"number": 2}'), ALL, WHOLE)

        assert tables.one("SELECT body, edited_body FROM durable.dead_letters") == (original.body, b'{"number": 2}')
        assert claim(tables)[0].envelope.body == b'{"number": 2}'
        agent = receiving_agent(database)
        running = asyncio.create_task(agent.run())
        assert await agent.receive(ENDPOINT, [original]) == [DUPLICATE], "its sender knows nothing of another body"
        agent.stop()
        await running
