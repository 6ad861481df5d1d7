"""Dead letters on Postgres: what is kept of their attempts, and that each is resolved once and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from sqlalchemy import Connection, event, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession

from durable import Bus, Retry, message
from durable.agents.context import AgentContext
from durable.agents.intake import LeftToOthers
from durable.agents.receiving import ReceivingAgent
from durable.dead_letters.bulk import Resolution, Run, resolve
from durable.embedded import Embedded
from durable.envelope import ANY_NODE, LeasedEnvelope, NodeId
from durable.errors import StorageUnavailable
from durable.messages.ordering import OrderingRules
from durable.outcomes import DUPLICATE, STORED
from durable.recovery.maintenance import maintain
from durable.settings import load_settings
from durable.storage import dead_letters, grants, inbox, ordering, outbox
from durable.storage.database import Database
from durable.storage.dead_letters import LetterRange, Resolved, Selection
from durable.storage.inbox import Arrival
from durable.storage.locks import Job, try_lock
from durable.storage.ordering import Claimed
from durable.storage.outbox import Sent
from durable.storage.rows import KEPT_ATTEMPTS, Failure, Letter, Tried
from durable.storage.sql import dead_letters as letter_statements
from durable.storage.sql.statement import Statement
from durable.testing import ManualClock, eventually
from tests.failure import leftovers
from tests.failure.books import waits_for_a_lock
from tests.support import letters
from tests.support.letters import ENDPOINT, NODE, PEER, SCHEMA, envelope
from tests.support.tables import Tables, shared_tables

ALL = Selection()
WHOLE = LetterRange(0, 2**40, 1_000)
OTHER = NodeId(8)
QUICK: dict[str, Any] = {
    "poll_interval": timedelta(milliseconds=30),
    "heartbeat_interval": timedelta(milliseconds=100),
    "drain_timeout": timedelta(seconds=5),
}

replay_by_ada: Resolution = partial(dead_letters.replay, actor="ada", reason="mended")


@message("letters.placed")
class Placed(msgspec.Struct):
    number: int


@pytest.fixture(scope="module")
def shared(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        tables.execute("CREATE TABLE effects (effect serial, number integer)")
        yield tables


@pytest.fixture
def tables(shared: Tables) -> Tables:
    shared.clear()
    shared.execute("TRUNCATE effects")
    return shared


@pytest.fixture(params=["asyncpg", "psycopg"])
async def database(request: pytest.FixtureRequest, tables: Tables) -> AsyncIterator[Database]:
    """The same statements, with one driver and the other."""
    url = make_url(tables.url).set(drivername=f"postgresql+{request.param}").render_as_string(hide_password=False)
    database = Database(load_settings(database_url=url))
    yield database
    await database.close()


def given(tables: Tables, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In a transaction of its own."""
    with leftovers.transaction(tables.url) as conn:
        return function(conn, *args, **kwargs)


def stored(tables: Tables, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same, for a function of storage."""
    return given(tables, function, SCHEMA, *args, **kwargs)


def failure(number: int) -> Failure:
    return Failure(number, datetime.now(UTC), "ValueError", f"reason {number}", f"traceback {number}")


def claim(tables: Tables, node: NodeId = NODE) -> list[LeasedEnvelope]:
    claimed: list[LeasedEnvelope] = stored(
        tables, inbox.claim, message_type="letters.placed", batch_size=1_000, node=node
    )
    return claimed


def claim_key(tables: Tables, key: str) -> list[LeasedEnvelope]:
    types, size = ["letters.placed"], 1_000
    found: Claimed = stored(
        tables, ordering.claim, ordering.Turns([key], handlers={t: t for t in types}), batch_size=size, node=NODE
    )
    return found.leases


def remove(monkeypatch: pytest.MonkeyPatch, name: str, guard: str, instead: str = "") -> None:
    """Take a guard out of a statement."""
    statement: Statement = getattr(letter_statements, name)
    assert guard in statement._sql, f"{name} has no {guard!r}: name its guard anew"
    monkeypatch.setattr(letter_statements, name, Statement(statement._sql.replace(guard, instead)))


both_ways = pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])


# ---------------------------------------------------------------- attempts


class TestAttempts:
    async def test_a_letter_has_every_attempt_with_its_traceback(self, tables: Tables) -> None:
        bus = Bus(ENDPOINT, tables.url, **QUICK)
        errors = iter([KeyError("first"), LookupError("second"), ValueError("third")])

        @bus.handles(Placed, retry=Retry(immediate=1, delays=[0.01]))
        async def handle(placed: Placed) -> None:
            raise next(errors)

        async with bus:
            async with bus.unit_of_work():
                bus.send(Placed(1))
            await eventually(lambda: tables.count("dead_letters"), within=30)
        letter, node_id = tables.one("SELECT letter_id, node_id FROM durable.dead_letters")
        attempts = stored(tables, dead_letters.attempts, letter)

        assert [(each.number, each.exception_type, each.reason, each.node_id) for each in attempts] == [
            (1, "KeyError", "'first'", node_id),
            (2, "LookupError", "second", node_id),
            (3, "ValueError", "third", node_id),
        ]
        assert [each.failed_at for each in attempts] == sorted(each.failed_at for each in attempts)
        assert all("raise next(errors)" in each.traceback for each in attempts)

    async def test_undecodable_body_and_textless_error_are_recorded_as_attempts(self, tables: Tables) -> None:
        bus = Bus(ENDPOINT, tables.url, check_pending=0, **QUICK)

        class Speechless(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        @bus.handles(Placed, retry=Retry.never())
        async def handle(placed: Placed) -> None:
            raise Speechless

        undecodable = msgspec.structs.replace(envelope(1), body=b'{"number": "many"}')
        stored(tables, inbox.store, [Arrival(ENDPOINT, each, ANY_NODE) for each in (undecodable, envelope(2))])
        async with bus:
            await eventually(lambda: tables.count("dead_letters") == 2, within=30)

        rows = tables.rows(
            "SELECT a.exception_type, a.reason LIKE '%%no Placed%%', a.reason LIKE '%%text cannot be made' "
            "FROM durable.failed_attempts a JOIN durable.dead_letters l USING (letter_id) WHERE number = l.attempts"
        )
        assert sorted(row[1:] for row in rows) == [(False, True), (True, False)]

    def test_attempts_are_written_in_the_transaction_of_their_settlement(self, tables: Tables) -> None:
        given(tables, _store, [envelope(1)])
        (lease,) = claim(tables)
        retry = partial(stored, tables, inbox.retry_later, NODE, lease, delay=timedelta(0))
        assert retry(Tried(2, [failure(1), failure(2)]))
        together = "SELECT DISTINCT a.xmin = e.xmin FROM durable.failed_attempts a JOIN durable.{} e USING ({})"
        assert tables.rows(together.format("incoming_envelopes", "id")) == [True]

        tables.execute("UPDATE durable.incoming_envelopes SET execution_time = NULL")
        (lease,) = claim(tables)
        assert stored(tables, inbox.dead_letter, NODE, lease, letters.LETTER, Tried(1, [failure(3)]))

        assert tables.rows(together.format("dead_letters", "letter_id")) == [True]
        assert tables.rows("SELECT number FROM durable.failed_attempts ORDER BY attempt_id") == [1, 2, 3]

    def test_node_without_the_lease_writes_no_attempts(self, tables: Tables) -> None:
        given(tables, _store, [envelope(1)])
        (late,) = claim(tables)
        tables.execute("UPDATE durable.incoming_envelopes SET epoch = epoch + 1")

        assert not stored(tables, inbox.retry_later, NODE, late, Tried(1, [failure(1)]), delay=timedelta(0))
        assert not stored(tables, inbox.dead_letter, NODE, late, letters.LETTER, Tried(1, [failure(1)]))
        assert (tables.count("failed_attempts"), tables.count("dead_letters")) == (0, 0)

    def test_newest_attempts_alone_are_kept(self, tables: Tables) -> None:
        given(tables, _store, [envelope(1), envelope(2)])
        first, neighbour = claim(tables)
        stored(tables, inbox.retry_later, NODE, neighbour, Tried(1, [failure(1)]), delay=timedelta(0))
        for number in range(1, 51):
            tables.execute("UPDATE durable.incoming_envelopes SET owner_id = 7, epoch = 0, execution_time = NULL")
            lease = msgspec.structs.replace(first, epoch=0)
            failures = [failure(2 * number - 1), failure(2 * number)]
            assert stored(tables, inbox.retry_later, NODE, lease, Tried(1, failures), delay=timedelta(0))

        kept = tables.rows("SELECT number FROM durable.failed_attempts WHERE id = %s ORDER BY 1", first.envelope.id)
        assert kept == list(range(101 - KEPT_ATTEMPTS, 101))
        assert tables.count("failed_attempts") == KEPT_ATTEMPTS + 1

    def test_setting_bounds_the_attempts_kept(self, tables: Tables) -> None:
        given(tables, _store, [envelope(1)])
        (lease,) = claim(tables)
        failures = [failure(number) for number in range(1, 6)]
        assert stored(tables, inbox.retry_later, NODE, lease, Tried(1, failures[:4], kept=2), delay=timedelta(0))
        assert tables.rows("SELECT number FROM durable.failed_attempts ORDER BY 1") == [3, 4]

        tables.execute("UPDATE durable.incoming_envelopes SET execution_time = NULL")
        (lease,) = claim(tables)
        assert stored(tables, inbox.dead_letter, NODE, lease, letters.LETTER, Tried(1, failures[2:], kept=2))
        assert tables.rows("SELECT number FROM durable.failed_attempts ORDER BY attempt_id DESC LIMIT 2") == [5, 4]

    def test_attempts_of_a_handled_message_are_purged_with_the_history(self, tables: Tables) -> None:
        given(tables, _store, [envelope(1)])
        (lease,) = claim(tables)
        stored(tables, inbox.retry_later, NODE, lease, Tried(1, [failure(1)]), delay=timedelta(0))
        tables.execute("UPDATE durable.incoming_envelopes SET execution_time = NULL")
        assert stored(tables, inbox.finish_handled, NODE, claim(tables)) == 1

        purge = partial(stored, tables, dead_letters.purge_attempts)
        assert (purge(keep=timedelta(hours=1)), tables.count("failed_attempts")) == (0, 1)
        assert (purge(keep=timedelta(0)), tables.count("failed_attempts")) == (1, 0)


def _store(conn: Connection, envelopes: list[Any]) -> None:
    inbox.store(conn, SCHEMA, [Arrival(ENDPOINT, each, ANY_NODE) for each in envelopes])


# ---------------------------------------------------------------- reading


class TestReading:
    def test_letters_are_grouped_by_cause(self, tables: Tables) -> None:
        late, early = Letter.because("no stock", "OutOfStock"), Letter.because("no such customer", "LookupError")
        given(tables, letters.incoming, [envelope(1), envelope(2)], early)
        given(tables, letters.incoming, [envelope(3)], Letter.because("no such order", "LookupError"))
        given(tables, letters.outgoing, [envelope(4, destination=PEER)], late)

        found = stored(tables, dead_letters.groups, ALL)

        assert [(g.exception_type, g.side, g.message_type, g.count, g.example) for g in found] == [
            ("LookupError", "incoming", "letters.placed", 3, "no such order"),
            ("OutOfStock", "outgoing", "letters.placed", 1, "no stock"),
        ]
        assert found[0].first < found[0].last
        assert found[0].fingerprint == early.fingerprint

    def test_pages_follow_each_other_the_newest_first(self, tables: Tables) -> None:
        given(tables, letters.incoming, [envelope(number) for number in range(5)])
        numbers = tables.rows("SELECT letter_id FROM durable.dead_letters ORDER BY letter_id DESC")
        seen: list[int] = []
        while page := stored(tables, dead_letters.page, ALL, limit=2, before=seen[-1] if seen else None):
            assert len(page) <= 2
            seen += [letter.letter_id for letter in page]
            given(tables, letters.incoming, [envelope(99)])  # what comes meanwhile is on no later page
        assert seen == numbers

    @pytest.mark.parametrize(
        ("narrowed", "numbers"),
        [
            ({"side": "incoming"}, [1, 2, 3]),
            ({"side": "outgoing"}, [4]),
            ({"message_type": "letters.other"}, [3]),
            ({"exception_type": "LookupError"}, [2]),
            ({"fingerprint": Letter.because("", "LookupError").fingerprint}, [2]),
            ({"source": "abroad"}, [3]),
            ({"address": PEER}, [4]),
            ({"since": datetime(2020, 1, 2, tzinfo=UTC)}, [2, 3, 4]),
            ({"until": datetime(2020, 1, 2, tzinfo=UTC)}, [1]),
            ({"side": "incoming", "message_type": "letters.placed", "exception_type": "test"}, [1]),
            ({"letters": [-1]}, []),
            ({"ids": []}, []),
            ({"resolved": True}, [5]),
            ({"resolved": None}, [1, 2, 3, 4, 5]),
            ({}, [1, 2, 3, 4]),
        ],
        ids=str,
    )
    async def test_each_filter_narrows_the_letters(
        self, tables: Tables, database: Database, narrowed: dict[str, Any], numbers: list[int]
    ) -> None:
        other = msgspec.structs.replace(envelope(3), message_type="letters.other", source="abroad")
        given(tables, letters.incoming, [envelope(1)])
        await tables.change("UPDATE durable.dead_letters SET failed_at = '2020-01-01Z'")
        given(tables, letters.incoming, [envelope(2)], Letter.because("", "LookupError"))
        given(tables, letters.incoming, [other])
        given(tables, letters.outgoing, [envelope(4, destination=PEER)])
        (last,) = given(tables, letters.incoming, [envelope(5)])
        await tables.change(
            "UPDATE durable.dead_letters SET resolution = 'discarded', resolved_at = now() WHERE id = %s", last.id
        )

        found = await database.transaction(dead_letters.read, Selection(**narrowed), WHOLE)

        assert [msgspec.json.decode(letter.body)["number"] for letter in found] == numbers
        assert (await database.transaction(dead_letters.survey, Selection(**narrowed))).total == len(numbers)

    def test_a_letter_is_found_by_its_number_or_by_the_id_of_its_message(self, tables: Tables) -> None:
        first, second, _ = given(tables, letters.incoming, [envelope(number) for number in range(3)])
        (number,) = tables.rows("SELECT letter_id FROM durable.dead_letters WHERE id = %s", first.id)

        found = stored(tables, dead_letters.read, Selection(letters=[number], ids=[second.id]), WHOLE)

        assert [letter.summary.id for letter in found] == [first.id, second.id]
        assert found[0].lease() == LeasedEnvelope(msgspec.structs.replace(first, destination=ENDPOINT), 0, ENDPOINT)

    def test_the_relatives_of_a_letter_are_of_its_conversation(self, tables: Tables) -> None:
        cause = envelope(1)
        effect = msgspec.structs.replace(envelope(2), correlation_id=cause.id, causation_id=cause.id)
        given(tables, letters.incoming, [effect, cause, envelope(3)])
        waiting = msgspec.structs.replace(envelope(4), id=cause.id)
        stored(tables, outbox.store, [Sent(waiting, None, ANY_NODE)])
        letter = stored(tables, dead_letters.read, Selection(ids=[effect.id]), WHOLE)[0]

        found = stored(tables, dead_letters.relatives, letter)

        assert [(each.place, each.id) for each in found] == [("dead letter", cause.id), ("outbox", cause.id)]


# ---------------------------------------------------------------- replaying


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

        (lease,) = stored(tables, outbox.claim, destination=PEER, batch_size=10, node=NODE)
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

    async def test_replay_is_one_statement(self, tables: Tables, database: Database) -> None:
        given(tables, letters.incoming, [envelope(1)])
        given(tables, letters.outgoing, [envelope(2, destination=PEER)])
        seen: list[str] = []

        @event.listens_for(database.engine.sync_engine, "before_cursor_execute")
        def _executed(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if "SAVEPOINT" not in statement:
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
        given(tables, _store, [envelope(1)])
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


class TestQuarantined:
    @pytest.fixture
    async def agent(self, database: Database) -> AsyncIterator[ReceivingAgent]:
        agent = receiving_agent(database, ManualClock(datetime.now(UTC) + timedelta(days=8)))
        running = asyncio.create_task(agent.run())
        yield agent
        agent.stop()
        await running

    async def test_late_or_too_large_envelope_can_be_replayed_whole(
        self, agent: ReceivingAgent, tables: Tables, database: Database
    ) -> None:
        old = msgspec.structs.replace(
            envelope(1),
            headers={"a": "b"},
            partition_key="k",
            causation_id=envelope(0).id,
            deliver_by=datetime(9_000, 1, 1, tzinfo=UTC),
        )
        large = msgspec.structs.replace(old, id=envelope(2).id, body=b"x" * (agent._settings.max_message_bytes + 1))
        assert await agent.receive(ENDPOINT, [old, large]) == [STORED, STORED]
        assert (tables.count("incoming_envelopes"), tables.count("dead_letters")) == (0, 2)

        assert len((await database.transaction(replay_by_ada, ALL, WHOLE)).done) == 2

        claimed = claim_key(tables, "k")
        replayed = {lease.envelope.id: lease.envelope for lease in claimed}
        assert replayed == {each.id: msgspec.structs.replace(each, destination=ENDPOINT) for each in (old, large)}

    async def test_letters_of_an_ordered_handler_are_replayed_one_behind_the_other(
        self, tables: Tables, database: Database
    ) -> None:
        """And those of a fair one to the shares of their tenants: as if they had come in time."""
        late = ManualClock(datetime.now(UTC) + timedelta(days=8))
        ordered = Bus(ENDPOINT, tables.url, **QUICK)
        begun: list[int] = []
        inside: set[int] = set()
        together: list[set[int]] = []

        @ordered.handles(Placed, ordered=True, concurrency=4)
        async def handle(placed: Placed) -> None:
            inside.add(placed.number)
            begun.append(placed.number)
            together.append(set(inside))
            await asyncio.sleep(0.02)
            inside.discard(placed.number)

        agent = receiving_agent(database, late, ordered.application.routes.places)
        running = asyncio.create_task(agent.run())
        assert await agent.receive(ENDPOINT, [envelope(number) for number in range(4)]) == [STORED] * 4
        agent.stop()
        await running
        assert len((await database.transaction(replay_by_ada, ALL, WHOLE)).done) == 4
        async with ordered:
            await eventually(lambda: begun == [0, 1, 2, 3], within=20)
        assert all(len(group) == 1 for group in together)

    async def test_incomplete_envelope_cannot_be_replayed(
        self, agent: ReceivingAgent, tables: Tables, database: Database
    ) -> None:
        unheaded = msgspec.structs.replace(envelope(1), headers={"a": "\0"})
        nameless = msgspec.structs.replace(envelope(2), message_type="")
        assert await agent.receive(ENDPOINT, [unheaded, nameless]) == [STORED, STORED]
        await agent.reject(ENDPOINT, b"\xff\xff", "no envelope at all")

        survey = await database.transaction(dead_letters.survey, ALL)
        assert (survey.total, survey.replayable) == (3, 0)
        assert await database.transaction(replay_by_ada, ALL, WHOLE) == Resolved([], [])
        assert tables.one("SELECT count(*) FROM durable.dead_letters WHERE resolved_at IS NULL") == 3

    async def test_another_message_under_a_known_id_cannot_be_replayed(
        self, tables: Tables, database: Database
    ) -> None:
        """What its handler sends would have the ids of what the first message's handler has sent."""
        agent = receiving_agent(database)
        running = asyncio.create_task(agent.run())
        first = envelope(1)
        await agent.receive(ENDPOINT, [first])
        await agent.receive(ENDPOINT, [msgspec.structs.replace(first, body=b'{"number": 2}')])
        agent.stop()
        await running

        assert await database.transaction(replay_by_ada, ALL, WHOLE) == Resolved([], [])
        assert tables.rows("SELECT id, replayable FROM durable.dead_letters") == [(first.id, False)]


def receiving_agent(
    database: Database, clock: ManualClock | None = None, places: OrderingRules | None = None
) -> ReceivingAgent:
    context = AgentContext(database, ANY_NODE, load_settings(), clock or ManualClock())
    return ReceivingAgent(context, LeftToOthers(), places=places)


# ---------------------------------------------------------------- discarding and forgetting


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
        given(tables, _store, [envelope(number) for number in range(4)])
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
        given(tables, _store, [envelope(number) for number in range(3)])
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


# ---------------------------------------------------------------- runs


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
    async def test_letter_is_replayed_by_one_of_two_concurrent_operators(
        self, tables: Tables, database: Database, monkeypatch: pytest.MonkeyPatch, guarded: bool
    ) -> None:
        if not guarded:
            remove(monkeypatch, "REPLAY_LETTERS", "FOR UPDATE SKIP LOCKED")
        given(tables, letters.incoming, [envelope(1), envelope(2)])
        one = LetterRange(0, 2**40, 1)
        with leftovers.transaction(tables.url) as ada:
            first = replay_by_ada(ada, SCHEMA, ALL, one)
            late = asyncio.create_task(database.transaction(replay_by_ada, ALL, one))
            if guarded:  # it does not wait for her, and takes the next
                second = await late
            else:
                await eventually(lambda: waits_for_a_lock(tables.url), within=30)
                ada.commit()
                second = await late

        assert (len(first.done), len(second.done), second.left == first.done) == (1, int(guarded), not guarded)
        assert tables.count("incoming_envelopes") == (2 if guarded else 1)

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
