"""The receiving agent on Postgres: what it answers is what is committed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import event

from durable.agents.arrivals import ArrivalStore
from durable.agents.context import AgentContext
from durable.agents.receiving import ReceivingAgent
from durable.embedded import Embedded
from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, NodeId, new_id
from durable.outcomes import BUSY, DUPLICATE, OTHER_BODY, STORED, Failed, Outcome, Rejected
from durable.settings import Settings, load_settings
from durable.statistics import ReceivingStatistics
from durable.storage import inbox
from durable.storage.database import Database
from durable.telemetry import Counters, Event
from durable.testing import eventually
from tests.support.tables import Tables, refusing_statements, shared_tables

NODE = NodeId(7)
SHOP = "shop"  # an endpoint

# What screening cannot know: a body that this database refuses, as it would refuse what durable has overlooked, and
# whether it refuses the dead letter, too.
REFUSE_POISON = """
CREATE FUNCTION refuse_poison() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'poison' USING ERRCODE = split_part(convert_from(NEW.body, 'UTF8'), ' ', 2); END $$;
CREATE TRIGGER refuse_poison BEFORE INSERT ON durable.incoming_envelopes FOR EACH ROW
    WHEN (starts_with(convert_from(NEW.body, 'UTF8'), 'poison')) EXECUTE FUNCTION refuse_poison();
CREATE TRIGGER refuse_poison BEFORE INSERT ON durable.dead_letters FOR EACH ROW
    WHEN (NEW.body = 'poison 22000 twice') EXECUTE FUNCTION refuse_poison();
CREATE FUNCTION refuse_late_poison() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'poison' USING ERRCODE = split_part(convert_from(NEW.body, 'UTF8'), ' ', 3); END $$;
CREATE CONSTRAINT TRIGGER refuse_late_poison AFTER INSERT ON durable.incoming_envelopes DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (starts_with(convert_from(NEW.body, 'UTF8'), 'late poison'))
    EXECUTE FUNCTION refuse_late_poison();
"""
# Data, constraints, limits of an index, RAISE, a corrupt page, codes of an application, rights, no support.
REFUSALS = ("22000", "23514", "54000", "P0001", "XX001", "45000", "AC001", "42501", "0A000")


class Handlers:
    """In place of the handlers: room for so many envelopes, and what they were given."""

    def __init__(self) -> None:
        self.room = 1_000_000
        self.accepted: list[LeasedEnvelope] = []

    def reserve(self, envelope: Envelope) -> NodeId:
        if self.room <= 0:
            return ANY_NODE
        self.room -= 1
        return NODE

    def accept(self, leases: Sequence[LeasedEnvelope]) -> None:
        self.accepted += leases

    def abandon(self, envelopes: Sequence[Envelope]) -> None:
        self.room += len(envelopes)


class House:
    """A receiving agent that runs, and its handlers."""

    def __init__(self, settings: Settings) -> None:
        self.handlers = Handlers()
        self.counters = Counters()
        self.database = Database(settings)
        self.commits = 0
        self.agent = ReceivingAgent(AgentContext(self.database, NODE, settings, counters=self.counters), self.handlers)
        event.listen(self.database.engine.sync_engine, "commit", self._count)
        self._running = asyncio.create_task(self.agent.run())

    async def receive(self, *batch: Envelope, endpoint: str = SHOP) -> list[Outcome]:
        async with asyncio.timeout(20):
            return await self.agent.receive(endpoint, batch)

    async def receive_at_once(self, *batches: list[Envelope]) -> list[list[Outcome]]:
        return list(await asyncio.gather(*(self.receive(*batch) for batch in batches)))

    async def stop(self) -> None:
        self.agent.stop()
        async with asyncio.timeout(20):
            await self._running

    def cancel(self) -> None:
        self._running.cancel()

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.database.close()

    def _count(self, *_: Any) -> None:
        self.commits += 1


def envelope(body: bytes = b"{}", **changes: Any) -> Envelope:
    made = Envelope(
        id=new_id(),
        message_type="receiving.placed",
        destination="tcp://shop:1",
        source="elsewhere",
        correlation_id=new_id(),
        body=body,
        sent_at=datetime.now(UTC),
        headers={"tenant": "blue"},
    )
    return msgspec.structs.replace(made, **changes)


def envelopes(count: int) -> list[Envelope]:
    return [envelope() for _ in range(count)]


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        tables.execute(REFUSE_POISON)
        yield tables


@pytest.fixture
def tables(database: Tables) -> Tables:
    database.clear()
    return database


@pytest.fixture
async def house(tables: Tables) -> AsyncIterator[House]:
    house = House(load_settings(database_url=tables.url))
    yield house
    await house.close()


def bodies(tables: Tables) -> list[bytes]:
    return tables.rows("SELECT body FROM durable.incoming_envelopes ORDER BY seq")


class TestStoring:
    async def test_envelope_is_stored_unchanged_and_given_to_its_handler(self, house: House, tables: Tables) -> None:
        given = envelope(causation_id=new_id(), deliver_by=datetime(2050, 1, 1, tzinfo=UTC))
        assert await house.receive(given) == [STORED]
        row = tables.one(
            "SELECT id, endpoint, message_type, source, correlation_id, causation_id, partition_key, headers, body, "
            "sent_at, deliver_by, owner_id, epoch, attempts FROM durable.incoming_envelopes"
        )
        assert row == (
            given.id, SHOP, "receiving.placed", "elsewhere", given.correlation_id, given.causation_id, None,
            {"tenant": "blue"}, b"{}", given.sent_at, given.deliver_by, NODE, 0, 0,
        )  # fmt: skip
        assert house.handlers.accepted == [LeasedEnvelope(given, endpoint=SHOP)]

    async def test_keyed_envelope_is_stored_without_an_owner(self, house: House, tables: Tables) -> None:
        given = [envelope(partition_key=key) for key in ("order-1", "order-2", "order-1", "")]
        assert await house.receive(*given) == [STORED] * 4
        assert tables.rows(
            "SELECT partition_key, ordering_key, owner_id FROM durable.incoming_envelopes ORDER BY seq"
        ) == [
            ("order-1", "order-1", 0),
            ("order-2", "order-2", 0),
            ("order-1", "order-1", 0),
            ("", None, NODE),
        ]
        assert house.handlers.accepted == [LeasedEnvelope(given[3], endpoint=SHOP)]

    async def test_batches_arriving_during_a_commit_share_the_next_one(self, house: House, tables: Tables) -> None:
        batches = [envelopes(10) for _ in range(40)]
        assert await house.receive_at_once(*batches) == [[STORED] * 10] * 40
        assert tables.count("incoming_envelopes") == 400
        assert house.commits <= 3

    async def test_statement_is_bounded_in_rows(self, house: House, tables: Tables) -> None:
        assert await house.receive_at_once(*(envelopes(400) for _ in range(5))) == [[STORED] * 400] * 5
        assert house.commits >= 3  # two batches of 400 each

    async def test_row_is_left_to_any_node_when_the_handler_has_no_room(self, house: House, tables: Tables) -> None:
        house.handlers.room = 2
        given = envelopes(5)
        assert await house.receive(*given) == [STORED] * 5
        assert tables.rows("SELECT owner_id FROM durable.incoming_envelopes ORDER BY seq") == [NODE, NODE, 0, 0, 0]
        assert [lease.envelope for lease in house.handlers.accepted] == given[:2]

    async def test_disconnected_sender_does_not_stop_the_storing_of_its_batch(
        self, house: House, tables: Tables
    ) -> None:
        room = house.agent.credit()
        gone = asyncio.create_task(house.receive(*envelopes(10)))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await eventually(lambda: tables.count("incoming_envelopes") == 10)
        await eventually(lambda: house.agent.credit() == room)  # a moment after its COMMIT
        assert await house.receive(envelope()) == [STORED]


class TestDuplicates:
    async def test_known_envelope_is_answered_duplicate_in_its_place(self, house: House, tables: Tables) -> None:
        known, fresh = envelope(b'{"known":1}'), envelope(b'{"fresh":1}')
        assert await house.receive(known) == [STORED]
        assert await house.receive(fresh, known) == [STORED, DUPLICATE]
        assert await house.receive(known, fresh) == [DUPLICATE, DUPLICATE]
        assert bodies(tables) == [known.body, fresh.body]
        assert (house.counters[Event.RECEIVED], house.counters[Event.DUPLICATE]) == (2, 3)

    async def test_the_same_envelope_twice_in_a_batch_is_stored_once(self, house: House, tables: Tables) -> None:
        given = envelope()
        assert await house.receive(given, given, given) == [STORED, DUPLICATE, DUPLICATE]
        assert tables.count("incoming_envelopes") == 1

    async def test_the_same_envelope_over_two_connections_is_stored_once(self, house: House, tables: Tables) -> None:
        given = envelope()
        answers = await house.receive_at_once([given], [given])
        assert sorted(answers, key=repr) == [[DUPLICATE], [STORED]]
        assert tables.count("incoming_envelopes") == 1

    async def test_handled_envelope_is_still_a_duplicate(self, house: House, tables: Tables) -> None:
        given = envelope()
        await house.receive(given)
        await tables.change("DELETE FROM durable.incoming_envelopes")
        assert await house.receive(given) == [DUPLICATE]
        assert tables.count("incoming_envelopes") == 0

    async def test_another_endpoint_is_another_receiver(self, house: House, tables: Tables) -> None:
        given = envelope()
        assert await house.receive(given, endpoint="shop") == [STORED]
        assert await house.receive(given, endpoint="warehouse") == [STORED]
        assert tables.count("incoming_envelopes") == 2

    async def test_a_duplicate_gives_its_room_back(self, house: House) -> None:
        given = envelope()
        await house.receive(given)
        room = house.handlers.room
        await house.receive(given, given)
        assert house.handlers.room == room

    async def test_new_envelope_is_stored_and_handled_when_its_neighbour_has_to_be_sent_again(
        self, house: House, tables: Tables, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known, fresh = envelope(deliver_by=datetime(2050, 1, 1, tzinfo=UTC)), envelope()
        longer = msgspec.structs.replace(known, deliver_by=datetime(2060, 1, 1, tzinfo=UTC))
        await house.receive(known)
        with monkeypatch.context() as patch:
            patch.setattr(inbox, "live_longer", lambda *_: False)
            failed = Failed("the receiver could not store the batch: StorageUnavailable")
            assert await house.receive(longer, fresh) == [failed, failed]
        assert [lease.envelope for lease in house.handlers.accepted] == [known, fresh]
        assert await house.receive(longer, fresh) == [DUPLICATE, DUPLICATE]
        assert tables.rows("SELECT id, deliver_by, owner_id FROM durable.incoming_envelopes ORDER BY seq") == [
            (known.id, longer.deliver_by, NODE),
            (fresh.id, None, NODE),
        ]

    @pytest.mark.parametrize("together", [False, True], ids=["later", "in one batch"])
    async def test_another_body_under_a_known_id_is_quarantined(
        self, house: House, tables: Tables, together: bool
    ) -> None:
        given = envelope(b'{"number":1}')
        other = msgspec.structs.replace(given, body=b'{"number":2}')
        if together:
            assert await house.receive(given, other) == [STORED, OTHER_BODY]
        else:
            assert await house.receive(given) == [STORED]
            assert await house.receive(other) == [OTHER_BODY]
        assert house.counters[Event.QUARANTINED] == 1
        await house.receive(other)  # a sender that had no answer sends it again: that is the same letter
        assert bodies(tables) == [given.body]
        assert tables.dead_letters() == [
            (
                "receiving.placed",
                "quarantined on arrival",
                "another message was received under the same id before",
                other.body,
            )
        ]

    @pytest.mark.parametrize("state", ["22000", "P0001"])
    async def test_quarantine_is_logged_and_counted_once_when_a_neighbour_is_refused(
        self, house: House, tables: Tables, caplog: pytest.LogCaptureFixture, state: str
    ) -> None:
        given = envelope(b'{"number":1}')
        other = msgspec.structs.replace(given, body=b'{"number":2}')
        assert await house.receive(given) == [STORED]
        poison = envelope(b"late poison " + state.encode())
        batch = [other, *envelopes(4), poison, *envelopes(6)]
        assert await house.receive(*batch) == [OTHER_BODY, *[STORED] * 11]
        assert tables.rows("SELECT body FROM durable.dead_letters ORDER BY letter_id") == [other.body, poison.body]
        assert house.counters[Event.QUARANTINED] == 2
        assert [caplog.text.count(f"{each.id}: ") for each in (other, poison)] == [1, 1]

    @pytest.mark.parametrize("body", [b'{"number":1}', b'{"number":2}'], ids=["a duplicate", "another body"])
    async def test_deadline_is_prolonged_by_a_duplicate_and_not_by_another_body(
        self, house: House, tables: Tables, body: bytes
    ) -> None:
        now = datetime.now(UTC)
        given = msgspec.structs.replace(envelope(b'{"number":1}'), deliver_by=now + timedelta(hours=1))
        later = msgspec.structs.replace(given, body=body, deliver_by=now + timedelta(hours=2))
        await house.receive(given)
        await house.receive(later)
        expected = later if body == given.body else given
        assert tables.rows("SELECT deliver_by FROM durable.incoming_envelopes") == [expected.deliver_by]

    async def test_refused_prolongation_keeps_no_other_from_being_stored(self, house: House, tables: Tables) -> None:
        now = datetime.now(UTC)
        given = msgspec.structs.replace(envelope(b'{"number":1}'), deliver_by=now + timedelta(hours=1))
        later = msgspec.structs.replace(given, deliver_by=now + timedelta(hours=2))
        longer = msgspec.structs.replace(envelope(b'{"number":2}'), deliver_by=now + timedelta(hours=1))
        prolonged = msgspec.structs.replace(longer, deliver_by=now + timedelta(hours=2))
        await house.receive(given, longer)
        tables.execute(
            "ALTER TABLE durable.incoming_envelopes ADD CONSTRAINT rule "
            "CHECK (body <> convert_to('{\"number\":1}', 'UTF8')) NOT VALID"
        )
        try:
            assert await house.receive(later, prolonged, *envelopes(3)) == [DUPLICATE, DUPLICATE, *[STORED] * 3]
        finally:
            tables.execute("ALTER TABLE durable.incoming_envelopes DROP CONSTRAINT rule")
        deadlines = tables.rows(
            "SELECT deliver_by FROM durable.incoming_envelopes WHERE deliver_by > now() ORDER BY seq"
        )
        assert deadlines == [given.deliver_by, prolonged.deliver_by]


class TestQuarantine:
    @pytest.mark.parametrize(
        "flaw",
        [{"headers": {"a": "\0"}}, *({"body": f"poison {state}".encode()} for state in REFUSALS)],
        ids=["screened", *REFUSALS],
    )
    @pytest.mark.parametrize("position", [0, 49, 99])
    async def test_one_bad_envelope_of_a_hundred_leaves_its_neighbours_stored(
        self, house: House, tables: Tables, position: int, flaw: dict[str, Any]
    ) -> None:
        batch = envelopes(100)
        batch[position] = msgspec.structs.replace(batch[position], **flaw)
        assert await house.receive(*batch) == [STORED] * 100
        stored = tables.rows("SELECT id FROM durable.incoming_envelopes ORDER BY seq")
        assert stored == [given.id for number, given in enumerate(batch) if number != position]
        letter = tables.one("SELECT id, body, address FROM durable.dead_letters")
        assert letter == (batch[position].id, batch[position].body, SHOP)
        assert [lease.envelope.id for lease in house.handlers.accepted] == stored
        assert house.handlers.room == 1_000_000 - 99

    async def test_a_batch_of_nothing_but_bad_envelopes_is_stored_as_dead_letters(
        self, house: House, tables: Tables
    ) -> None:
        batch = [envelope(b"poison 22000") for _ in range(8)]
        assert await house.receive(*batch) == [STORED] * 8
        assert (tables.count("dead_letters"), tables.count("incoming_envelopes")) == (8, 0)

    @pytest.mark.parametrize("position", [0, 4, 9])
    async def test_envelope_refused_also_as_a_dead_letter_is_rejected_and_its_neighbours_stored(
        self, house: House, tables: Tables, position: int
    ) -> None:
        batch = envelopes(10)
        batch[position] = envelope(b"poison 22000 twice")
        outcomes = await house.receive(*batch)
        rejected = outcomes.pop(position)
        assert isinstance(rejected, Rejected)
        assert "the database refuses the data: poison" in rejected.reason
        assert outcomes == [STORED] * 9
        assert (tables.count("incoming_envelopes"), tables.count("dead_letters")) == (9, 0)

    async def test_faults_of_the_database_make_no_dead_letters(self, house: House, tables: Tables) -> None:
        missing_table = [*envelopes(3), envelope(b"poison 42P01")]
        no_right = [envelope(b"poison 42501") for _ in range(4)]
        for batch in (missing_table, no_right):
            assert all(isinstance(outcome, Failed) for outcome in await house.receive(*batch))
        assert (tables.count("incoming_envelopes"), tables.count("dead_letters")) == (0, 0)

    @pytest.mark.parametrize("count", [1, 3])
    async def test_table_refusing_all_rows_makes_no_dead_letters(
        self, house: House, tables: Tables, count: int
    ) -> None:
        tables.execute(
            "CREATE OR REPLACE FUNCTION forbid() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'no right' USING ERRCODE = '42501'; END $$"
        )
        tables.execute(
            "CREATE TRIGGER forbid BEFORE INSERT ON durable.incoming_envelopes FOR EACH STATEMENT "
            "EXECUTE FUNCTION forbid()"
        )
        try:
            assert all(isinstance(outcome, Failed) for outcome in await house.receive(*envelopes(count)))
        finally:
            tables.execute("DROP TRIGGER forbid ON durable.incoming_envelopes")
        assert tables.count("dead_letters") == 0

    @pytest.mark.parametrize("code", ["42501", "0A000", "3F000"])
    @pytest.mark.parametrize("refused", [range(1, 2 + count) for count in (*range(16), 30)], ids=len)
    async def test_right_coming_back_amid_a_batch_makes_no_dead_letters(
        self, house: House, tables: Tables, refused: range, code: str
    ) -> None:
        batch = envelopes(8)
        with refusing_statements(tables, "INSERT ON durable.incoming_envelopes", refused, code):
            outcomes = await house.receive(*batch)
            assert all(outcome == STORED or isinstance(outcome, Failed) for outcome in outcomes)
            while any(isinstance(outcome, Failed) for outcome in outcomes):
                outcomes = await house.receive(*batch)
        assert (tables.count("incoming_envelopes"), tables.count("dead_letters")) == (8, 0)
        assert {*outcomes} <= {STORED, DUPLICATE}

    @pytest.mark.parametrize("count", [1, 5])
    @pytest.mark.parametrize("code", ["42501", "22000"])
    async def test_refused_whole_envelope_is_replayable(
        self, house: House, tables: Tables, code: str, count: int
    ) -> None:
        poison = envelope(b"poison " + code.encode())
        assert await house.receive(*envelopes(count - 1), poison) == [STORED] * count
        assert tables.one("SELECT id, replayable, headers FROM durable.dead_letters") == (
            poison.id,
            True,
            poison.headers,
        )

    async def test_envelope_older_than_the_dedupe_window_is_quarantined(self, house: House, tables: Tables) -> None:
        week_ago = int((datetime.now(UTC) - timedelta(days=7, minutes=1)).timestamp() * 1000)
        fresh = envelope()
        old = msgspec.structs.replace(fresh, id=type(fresh.id)(int=(week_ago << 80) | fresh.id.int & (1 << 80) - 1))
        assert await house.receive(old, fresh) == [STORED, STORED]
        assert tables.rows("SELECT id FROM durable.incoming_envelopes") == [fresh.id]
        assert "older than duplicates are remembered" in tables.one("SELECT reason FROM durable.dead_letters")

    async def test_bytes_of_no_envelope_are_kept_as_a_dead_letter(self, house: House, tables: Tables) -> None:
        await house.agent.reject(SHOP, b"\x00\xff", "no envelope\0at all")
        assert tables.one("SELECT id, address, body, reason FROM durable.dead_letters") == (
            None, SHOP, b"\x00\xff", "no envelope\N{REPLACEMENT CHARACTER}at all",
        )  # fmt: skip


class TestWithoutADatabase:
    @pytest.fixture
    async def cut_off(self) -> AsyncIterator[House]:
        """A house whose database does not answer."""
        settings = load_settings(database_url="postgresql://nobody@127.0.0.1:1/nowhere")
        house = House(settings)
        yield house
        await house.close()

    async def test_every_envelope_is_answered_failed_without_a_database(self, cut_off: House) -> None:
        answers = await cut_off.receive_at_once(envelopes(3), envelopes(1))
        failed = Failed("the receiver could not store the batch: StorageUnavailable")
        assert answers == [[failed] * 3, [failed]]
        assert cut_off.handlers.accepted == []
        assert (cut_off.handlers.room, cut_off.agent.credit()) == (1_000_000, 2_000)

    async def test_outage_is_logged_once(self, cut_off: House, caplog: pytest.LogCaptureFixture) -> None:
        for _ in range(3):
            await cut_off.receive(envelope())
        assert caplog.text.count("arrivals cannot be stored, and stay with their senders") == 1

    async def test_receiver_is_not_ready_without_a_database(self, cut_off: House) -> None:
        assert not await cut_off.agent.ready()

    async def test_receiver_is_ready_until_stopped_when_the_database_answers(self, house: House) -> None:
        assert await house.agent.ready()
        await house.stop()
        assert not await house.agent.ready()


class TestRoom:
    async def test_envelopes_beyond_the_credit_are_answered_busy(self, tables: Tables) -> None:
        house = House(load_settings(database_url=tables.url, buffer_size=10))
        try:
            assert house.agent.credit() == 10
            answers = await house.receive_at_once(envelopes(8), envelopes(3))
            assert answers == [[STORED] * 8, [BUSY] * 3]
            assert house.agent.credit() == 10
            assert await house.receive(*envelopes(11)) == [BUSY] * 11
            filling = asyncio.create_task(house.receive(*envelopes(10)))
            await asyncio.sleep(0)
            assert house.agent.credit() == 0
            assert await filling == [STORED] * 10
        finally:
            await house.close()

    async def test_room_is_bounded_in_bytes(self, tables: Tables) -> None:
        house = House(load_settings(database_url=tables.url, buffer_bytes=10_000))
        try:
            answers = await house.receive_at_once([envelope(b"x" * 6_000)], [envelope(b"x" * 6_000)])
            assert answers == [[STORED], [BUSY]]
            assert await house.receive(envelope(b"x" * 9_000)) == [STORED]  # the room is there again
        finally:
            await house.close()

    async def test_batch_above_all_the_bytes_is_accepted_while_some_are_free(self, tables: Tables) -> None:
        house = House(load_settings(database_url=tables.url, buffer_bytes=10_000))
        large = [[envelope(b"x" * 6_000) for _ in range(3)] for _ in range(2)]
        try:
            assert await house.receive_at_once(*large, envelopes(1)) == [[STORED] * 3, [BUSY] * 3, [BUSY]]
            assert await house.receive(*large[1]) == [STORED] * 3
        finally:
            await house.close()

    async def test_cancelled_receiver_answers_every_waiting_sender(self, house: House) -> None:
        waiting = [asyncio.create_task(house.receive(*envelopes(3))) for _ in range(2)]
        await asyncio.sleep(0)
        house.cancel()
        late = asyncio.create_task(house.receive(envelope()))
        answers = await asyncio.gather(*waiting)
        stopped = Failed("the receiver stopped before it was known to be stored")
        assert answers == [[stopped] * 3, [stopped] * 3]
        assert (await late)[0] in (stopped, BUSY)
        assert await house.receive(envelope()) == [BUSY]

    async def test_stopping_receiver_answers_accepted_batches_and_refuses_new_ones(
        self, house: House, tables: Tables
    ) -> None:
        taken = [asyncio.create_task(house.receive(*envelopes(10))) for _ in range(5)]
        await asyncio.sleep(0)
        await house.stop()
        assert await asyncio.gather(*taken) == [[STORED] * 10] * 5
        assert await house.receive(envelope()) == [BUSY]
        assert tables.count("incoming_envelopes") == 50


class TestCancelledCallers:
    async def test_batch_being_stored_keeps_its_room_without_its_caller(
        self, house: House, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        let_go, stands = asyncio.Event(), asyncio.Event()

        async def stand(*_: object) -> list[Outcome]:
            stands.set()
            await let_go.wait()
            return [STORED]

        monkeypatch.setattr(ArrivalStore, "store", stand)
        storing = asyncio.create_task(house.agent.receive(SHOP, envelopes(1)))
        await stands.wait()
        queued = asyncio.create_task(house.agent.receive(SHOP, envelopes(1)))
        await asyncio.sleep(0)
        assert house.agent.statistics().waiting == 2
        for caller in (storing, queued):
            caller.cancel()
        await asyncio.wait([storing, queued])
        assert house.agent.statistics().waiting == 1
        let_go.set()
        await eventually(lambda: house.agent.statistics() == ReceivingStatistics(0, 0))
