"""The sending agent on Postgres, with a peer that does as it is told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self

import pytest
from sqlalchemy import event

from durable.agents.context import AgentContext
from durable.agents.sending import SendingAgent
from durable.clock import Clock, SystemClock
from durable.embedded import Embedded
from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, NodeId, new_id
from durable.errors import ConnectionFailed, TransportError
from durable.messages.ordering import QueueKeys
from durable.outcomes import BUSY, DUPLICATE, STORED, Failed, Outcome, Rejected
from durable.recovery.floors import Floors
from durable.recovery.ordered_claims import OrderedClaims
from durable.recovery.outgoing_claims import DESTINATIONS, OutgoingClaims
from durable.settings import Settings, load_settings
from durable.storage import agenda, outbox
from durable.storage.database import Database
from durable.storage.outbox import Sent
from durable.storage.sql.recovery import REFUSED_OWNER
from durable.telemetry import Counters, Event
from durable.testing import ManualClock, eventually
from tests.support.tables import Tables, shared_tables

NODE = NodeId(7)
BILLING = "tcp://billing:1"
MAIL = "tcp://mail:1"

Answer = Callable[[Sequence[Envelope]], list[Outcome]]


def stored(batch: Sequence[Envelope]) -> list[Outcome]:
    return [STORED] * len(batch)


def busy(batch: Sequence[Envelope]) -> list[Outcome]:
    return [BUSY] * len(batch)


def down(_: Sequence[Envelope]) -> list[Outcome]:
    raise ConnectionFailed("nobody listens here")


class Peer:
    """A destination. It answers as the next of `script` says, and as `answer` says when there is none."""

    def __init__(self) -> None:
        self.answer: Answer = stored
        self.script: list[Answer] = []
        self.batches: list[list[Envelope]] = []
        self.times: list[float] = []
        self.pings = 0
        self.answers_pings = False
        self.ping_error: Exception = TransportError("no answer")
        self.under_way = 0
        self.most_under_way = 0
        self._open = asyncio.Event()
        self._open.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def send(self, batch: Sequence[Envelope]) -> list[Outcome]:
        self.batches.append(list(batch))
        self.times.append(asyncio.get_running_loop().time())
        answer = self.script.pop(0) if self.script else self.answer
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self._open.wait()
        finally:
            self.under_way -= 1
        return answer(batch)

    async def ping(self) -> None:
        self.pings += 1
        if not self.answers_pings:
            raise self.ping_error

    def hold(self) -> None:
        """Answer nothing until release()."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]


class Office:
    """A node's side of sending: its database, and agents that a test has started."""

    def __init__(self, tables: Tables, settings: Settings) -> None:
        self.tables = tables
        self.settings = settings
        self.database = Database(settings)
        self.counters = Counters()
        self.agents: dict[str, SendingAgent] = {}
        self.peers: dict[str, Peer] = {}
        self.asked_for_work = 0

    def agent(self, destination: str = BILLING, clock: Clock | None = None) -> SendingAgent:
        peer = self.peers[destination] = Peer()
        self.agents[destination] = SendingAgent(
            destination,
            peer,
            self.context(clock),
            on_capacity=self._ask,
        )
        return self.agents[destination]

    def context(self, clock: Clock | None = None) -> AgentContext:
        return AgentContext(self.database, NODE, self.settings, clock or SystemClock(), self.counters)

    def _ask(self) -> None:
        self.asked_for_work += 1

    async def commit(
        self, count: int, destination: str = BILLING, deliver_by: datetime | None = None
    ) -> list[Envelope]:
        """Store so many envelopes, as a unit of work does, and hand them to their agent."""
        agent = self.agents[destination]
        envelopes = [envelope(destination, deliver_by) for _ in range(count)]
        sent = [Sent(e, None, NODE if agent.reserve(e) else ANY_NODE) for e in envelopes]
        await self.database.transaction(outbox.store, sent)
        agent.accept([LeasedEnvelope(e, endpoint=destination) for e, _, owner, _ in sent if owner == NODE])
        return envelopes

    def store_backlog(self, count: int, destination: str = BILLING) -> None:
        """Rows without an owner, as other nodes have left them."""
        self.tables.execute(
            "INSERT INTO durable.outgoing_envelopes (destination, id, message_type, source, correlation_id, "
            "content_type, body, sent_at, owner_id) SELECT %s, gen_random_uuid(), 'sending.backlog', 'shop', "
            "gen_random_uuid(), 'application/json', '{}', now(), 0 FROM generate_series(1, %s)",
            destination,
            count,
        )

    async def claim(self) -> None:
        """As often as there may be more, as a node does it."""
        claims = OutgoingClaims(self.context(), self.agents.get, self.agents, Floors(time.monotonic))
        is_done = False
        while not is_done:
            found = await self.database.transaction(agenda.read, after=claims.after, count=DESTINATIONS)
            is_done = not await claims.claim(found.destinations)

    def waiting(self, destination: str = BILLING) -> int:
        return int(
            self.tables.one("SELECT count(*) FROM durable.outgoing_envelopes WHERE destination = %s", destination)
        )

    def is_empty(self) -> bool:
        return self.tables.count("outgoing_envelopes") == 0


def envelope(destination: str = BILLING, deliver_by: datetime | None = None) -> Envelope:
    return Envelope(
        id=new_id(),
        message_type="sending.placed",
        destination=destination,
        source="shop",
        correlation_id=new_id(),
        body=b"{}",
        sent_at=datetime.now(UTC),
        deliver_by=deliver_by,
    )


@asynccontextmanager
async def running(*agents: SendingAgent) -> AsyncIterator[None]:
    """Run these agents in the block, then stop them as a node does."""
    tasks = [asyncio.create_task(agent.run()) for agent in agents]
    try:
        yield
        for agent in agents:
            agent.stop()
        async with asyncio.timeout(30):
            await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def tables(database: Tables) -> Tables:
    database.clear()
    return database


@pytest.fixture
async def office(tables: Tables) -> AsyncIterator[Office]:
    settings = load_settings(
        database_url=tables.url,
        ping_interval=timedelta(milliseconds=20),
        delete_linger=timedelta(milliseconds=5),
    )
    office = Office(tables, settings)
    yield office
    await office.database.close()


class TestExpiry:
    async def test_envelope_expiring_in_memory_is_not_sent(self, office: Office) -> None:
        agent = office.agent()
        peer = office.peers[BILLING]
        async with running(agent):
            peer.hold()
            [first] = await office.commit(1)
            await eventually(lambda: peer.sizes == [1])
            deadline = datetime.now(UTC) + timedelta(milliseconds=20)
            await office.commit(3, deliver_by=deadline)
            [timely] = await office.commit(1, deliver_by=deadline + timedelta(hours=1))
            await eventually(lambda: office.tables.one("SELECT clock_timestamp() > %s", deadline))
            peer.release()
            await eventually(office.is_empty)
        assert [each.id for batch in peer.batches for each in batch] == [first.id, timely.id]
        ends = "SELECT outcome, count(*) FROM durable.envelope_history GROUP BY outcome ORDER BY outcome"
        assert office.tables.rows(ends) == [("expired", 3), ("sent", 2)]
        assert office.counters[Event.EXPIRED] == 3
        assert agent.buffer.used_count == 0

    async def test_node_with_a_fast_clock_sends_messages_in_time(self, office: Office) -> None:
        agent = office.agent(clock=ManualClock(datetime.now(UTC) + timedelta(hours=2)))
        async with running(agent):
            await office.commit(2, deliver_by=datetime.now(UTC) + timedelta(hours=1))
            await eventually(office.is_empty)
        assert office.peers[BILLING].sizes == [2]
        assert office.counters[Event.EXPIRED] == 0

    async def test_expired_envelope_is_not_sent_when_the_reply_of_its_expiry_was_lost(self, office: Office) -> None:
        agent = office.agent()
        past = datetime.now(UTC) - timedelta(seconds=1)
        [late] = await office.commit(1, deliver_by=past)
        await office.database.transaction(outbox.expire, NODE, [LeasedEnvelope(late, endpoint=BILLING)])
        async with running(agent):
            await eventually(lambda: agent.buffer.used_count == 0)
        assert office.peers[BILLING].sizes == []
        assert office.tables.rows("SELECT outcome FROM durable.envelope_history") == ["expired"]


class TestBatching:
    async def test_a_quiet_agent_sends_at_once_and_a_busy_one_sends_full_batches(self, office: Office) -> None:
        agent = office.agent()
        peer = office.peers[BILLING]
        async with running(agent):
            peer.hold()
            await office.commit(1)
            await eventually(lambda: peer.sizes == [1])
            await office.commit(30)
            await office.commit(30)
            assert peer.sizes == [1]  # they gather, for the first is not answered yet
            await office.commit(190)
            await eventually(lambda: peer.sizes == [1, 100, 100])
            peer.release()
            await eventually(lambda: peer.sizes == [1, 100, 100, 50])
            await eventually(office.is_empty)

    async def test_batches_under_way_are_bounded(self, office: Office) -> None:
        agent = office.agent()
        peer = office.peers[BILLING]
        async with running(agent):
            peer.hold()
            await office.commit(1_000)
            await eventually(lambda: len(peer.batches) == 4)
            await office.commit(500)
            assert len(peer.batches) == 4
            peer.release()
            await eventually(office.is_empty)
            assert peer.most_under_way == 4

    async def test_envelopes_leave_in_the_order_of_their_commits(self, office: Office) -> None:
        agent = office.agent()
        async with running(agent):
            first = await office.commit(150)
            second = await office.commit(150)
            await eventually(office.is_empty)
        sent = [envelope.id for batch in office.peers[BILLING].batches for envelope in batch]
        assert sent == [envelope.id for envelope in (*first, *second)]

    async def test_sent_envelopes_are_deleted_and_recorded_in_the_history(self, office: Office) -> None:
        agent = office.agent()
        office.peers[BILLING].answer = lambda batch: [STORED, DUPLICATE, *[STORED] * (len(batch) - 2)]
        async with running(agent):
            sent = await office.commit(10)
            await eventually(office.is_empty)
        history = office.tables.rows("SELECT id, side, outcome, address, node_id FROM durable.envelope_history")
        assert sorted(history) == sorted((e.id, "outgoing", "sent", BILLING, NODE) for e in sent)
        assert (office.counters[Event.SENT], agent.buffer.used_count) == (10, 0)

    async def test_deletes_of_many_batches_share_a_commit(self, office: Office) -> None:
        settings = office.settings.model_copy(update={"batch_size": 20, "delete_linger": timedelta(milliseconds=50)})
        office.settings = settings
        agent = office.agent()
        commits: list[Any] = []
        async with running(agent):
            await office.commit(2_000)
            event.listen(office.database.engine.sync_engine, "commit", commits.append)
            await eventually(office.is_empty)
        assert len(office.peers[BILLING].batches) >= 100
        assert len(commits) / 2_000 < 0.1


class TestRefused:
    """The application's rules refuse what an agent has to write down."""

    @pytest.fixture
    def forbid(self, tables: Tables) -> Iterator[Callable[[str], None]]:
        """Refuse such changes for lack of a right, as a trigger that must not write to its own table."""
        tables.execute(
            "CREATE OR REPLACE FUNCTION forbid() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'no right' USING ERRCODE = '42501'; END $$"
        )
        yield lambda what: tables.execute(f"CREATE TRIGGER forbid BEFORE {what} EXECUTE FUNCTION forbid()")
        for table in ("outgoing_envelopes", "circuits"):
            tables.execute(f"DROP TRIGGER IF EXISTS forbid ON durable.{table}")

    async def test_refused_deletions_are_tried_beside_others(
        self, office: Office, forbid: Callable[[str], None], caplog: pytest.LogCaptureFixture
    ) -> None:
        forbid("DELETE ON durable.outgoing_envelopes FOR EACH ROW WHEN (OLD.deliver_by IS NOT NULL)")
        agent = office.agent()
        async with running(agent):
            await office.commit(2, deliver_by=datetime.now(UTC) + timedelta(hours=1))
            await eventually(lambda: "what is done waits to be written down, attempt 1: no right" in caplog.text)
            await office.commit(3)
            await eventually(lambda: agent.buffer.used_count == 0)
        assert office.tables.rows("SELECT owner_id FROM durable.outgoing_envelopes") == [REFUSED_OWNER] * 2
        assert office.counters[Event.SENT] == 3

    async def test_refused_latch_is_written_when_allowed(
        self, office: Office, forbid: Callable[[str], None], caplog: pytest.LogCaptureFixture
    ) -> None:
        forbid("INSERT ON durable.circuits FOR EACH ROW")
        agent = office.agent()
        office.peers[BILLING].answer = down
        async with running(agent):
            await office.commit(1)
            await eventually(lambda: "what is done waits to be written down, attempt 1: no right" in caplog.text)
            office.tables.execute("DROP TRIGGER forbid ON durable.circuits")
            await eventually(lambda: office.tables.count("circuits") == 1)
            office.peers[BILLING].answers_pings = True
            office.peers[BILLING].answer = stored
            await eventually(lambda: not agent.circuit.latched)


class TestLatching:
    async def test_only_failures_in_a_row_latch(self, office: Office) -> None:
        agent = office.agent()
        peer = office.peers[BILLING]
        peer.script = [down, down, stored, down, down, stored]
        async with running(agent):
            for _ in range(2):
                await office.commit(1)
                await eventually(office.is_empty)
        assert (len(peer.batches), peer.pings) == (6, 0)
        assert office.counters[Event.LATCHED] == 0
        assert office.tables.rows("SELECT attempts FROM durable.envelope_history") == [2, 2]

    async def test_latched_agent_releases_its_rows_and_sends_only_pings(self, office: Office) -> None:
        agent = office.agent()
        peer = office.peers[BILLING]
        peer.answer = down
        async with running(agent):
            await office.commit(250)
            await eventually(lambda: agent.circuit.latched and agent.buffer.used_count == 0, what="an empty agent")
            tried = len(peer.batches)
            assert 3 <= tried <= 6  # those under way when it latched have failed too
            assert office.tables.one("SELECT kind, key, reason, actor FROM durable.circuits") == (
                "destination", BILLING, "nobody listens here", "node 7",
            )  # fmt: skip
            assert office.tables.rows("SELECT DISTINCT owner_id FROM durable.outgoing_envelopes") == [0]
            await office.commit(10)
            await office.claim()
            pinged = peer.pings
            await eventually(lambda: peer.pings >= pinged + 3)
            assert len(peer.batches) == tried
            assert office.tables.rows("SELECT DISTINCT owner_id FROM durable.outgoing_envelopes") == [0]
            assert (office.waiting(), agent.held()) == (260, set())

    @pytest.mark.parametrize("is_expected", [True, False], ids=["no answer", "a fault"])
    async def test_ping_without_an_answer_is_no_error_in_the_log(
        self, office: Office, caplog: pytest.LogCaptureFixture, is_expected: bool
    ) -> None:
        agent = office.agent()
        peer = office.peers[BILLING]
        if not is_expected:
            peer.ping_error = RuntimeError("a fault")
        agent.observe_circuit(True, agent.generation.number)
        async with running(agent):
            await eventually(lambda: peer.pings >= 2)
        errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert bool(errors) != is_expected

    async def test_first_answered_ping_unlatches_the_destination(self, office: Office) -> None:
        agent = office.agent()
        peer = office.peers[BILLING]
        peer.answer = down
        async with running(agent):
            await office.commit(50)
            await eventually(lambda: agent.circuit.latched and agent.buffer.used_count == 0)
            office.store_backlog(150)
            peer.answer, peer.answers_pings, before = stored, True, office.asked_for_work
            await eventually(lambda: not agent.circuit.latched)
            await eventually(lambda: office.asked_for_work > before)
            assert office.tables.count("circuits") == 0
            await office.claim()
            await eventually(office.is_empty)
        assert office.counters[Event.UNLATCHED] == 1
        assert office.counters[Event.SENT] == 200

    async def test_latch_is_logged_as_an_error_and_its_end_as_news(
        self, office: Office, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        agent = office.agent()
        peer = office.peers[BILLING]
        peer.script = [down, down, down]
        async with running(agent):
            await office.commit(1)
            await eventually(lambda: agent.circuit.latched)
            peer.answers_pings = True
            await eventually(lambda: office.counters[Event.UNLATCHED] == 1)
        levels = {record.levelno for record in caplog.records if record.getMessage() == f"unlatched {BILLING}"}
        assert levels == {logging.INFO}

    async def test_count_of_failures_restarts_after_a_latch(self, office: Office) -> None:
        agent = office.agent()
        peer = office.peers[BILLING]
        peer.script = [down, down, down]
        async with running(agent):
            await office.commit(1)
            await eventually(lambda: agent.circuit.latched)
            peer.script, peer.answers_pings = [down, down], True
            await eventually(lambda: not agent.circuit.latched)
            await office.claim()
            await eventually(office.is_empty)
        assert office.counters[Event.LATCHED] == 1

    async def test_latch_of_another_node_is_obeyed_unless_read_before_the_local_change(self, office: Office) -> None:
        agent = office.agent()
        async with running(agent):
            await office.commit(1)
            await eventually(office.is_empty)
            generation = agent.generation.number
            agent.observe_circuit(True, generation)
            assert agent.circuit.latched
            assert not agent.reserve(envelope())
            office.peers[BILLING].answers_pings = True
            await eventually(lambda: not agent.circuit.latched)
            agent.observe_circuit(True, generation)  # was read before this node unlatched
            assert not agent.circuit.latched

    async def test_paused_agent_holds_no_rows_and_sends_neither_batches_nor_pings(self, office: Office) -> None:
        agent = office.agent()
        peer = office.peers[BILLING]
        async with running(agent):
            agent.observe_pause(True)
            assert not agent.reserve(envelope())
            agent.observe_circuit(True, agent.generation.number)  # latched as well, as some node has seen it
            office.store_backlog(3)
            claimed = await office.database.transaction(outbox.claim, {BILLING: 3}, node=NODE)
            agent.buffer.reserve_unchecked(claimed)  # claimed before the pause was heard of
            agent.accept(claimed)
            await eventually(lambda: agent.buffer.used_count == 0)
            await asyncio.sleep(0.1)  # several pings of one that is latched
            assert (peer.pings, peer.batches) == (0, [])
            agent.observe_circuit(False, agent.generation.number)
            agent.observe_pause(False)
            await office.claim()
            await eventually(office.is_empty)

    async def test_batch_failing_under_a_latch_is_released(self, office: Office) -> None:
        agent = office.agent()
        peer = office.peers[BILLING]
        peer.answer = down
        async with running(agent):
            peer.hold()
            await office.commit(100)
            await eventually(lambda: peer.under_way == 1)
            agent.observe_circuit(True, agent.generation.number)
            peer.release()
            await eventually(lambda: agent.buffer.used_count == 0)
            assert office.tables.rows("SELECT DISTINCT owner_id FROM durable.outgoing_envelopes") == [0]

    async def test_unresponsive_destination_does_not_slow_another(self, office: Office) -> None:
        billing, mail = office.agent(BILLING), office.agent(MAIL)
        office.peers[BILLING].hold()
        async with running(billing, mail):
            await office.commit(500, BILLING)
            await office.commit(500, MAIL)
            await eventually(lambda: office.waiting(MAIL) == 0)
            assert office.waiting(BILLING) == 500
            office.peers[BILLING].release()
            await eventually(office.is_empty)


class Staff:
    """The agents of a node, as far as claims of ordered rows see them."""

    def __init__(self, senders: Mapping[str, SendingAgent]) -> None:
        self.by_type: dict[str, Any] = {}
        self.agent_for = senders.get


@pytest.mark.parametrize(("state", "claimed"), [("running", 1), ("latched", 0), ("paused", 0), ("unknown", 0)])
async def test_ordered_rows_are_claimed_for_a_running_destination_alone(
    office: Office, state: str, claimed: int
) -> None:
    agent = office.agent()
    row = Sent(envelope(BILLING, None), None, ANY_NODE, QueueKeys("k"))
    await office.database.transaction(outbox.store, [row])
    if state == "latched":
        agent.circuit.latch()
    agent.observe_pause(state == "paused")
    staff: Any = Staff({} if state == "unknown" else office.agents)
    claims = OrderedClaims(office.context(), staff)
    claims.hint(BILLING, "k")
    await claims.claim_hinted()
    assert office.counters[Event.CLAIMED] == claimed


async def test_destination_without_room_asks_for_ordered_rows_later(office: Office) -> None:
    agent = office.agent()
    agent.buffer.reserve_unchecked([envelope() for _ in range(agent.buffer.room)])
    staff: Any = Staff(office.agents)
    claims = OrderedClaims(office.context(), staff)
    claims.hint(BILLING, "k")
    await claims.claim_hinted()
    assert agent.claim_pending


class TestMemory:
    async def test_a_backlog_for_a_dead_destination_stays_in_the_database(self, office: Office) -> None:
        office.store_backlog(20_000)
        agent = office.agent()
        peer = office.peers[BILLING]
        peer.answer = down
        async with running(agent):
            peer.hold()
            await office.claim()
            await office.claim()
            most = office.settings.buffer_size
            assert agent.buffer.used_count == most == len(agent.held())
            assert agent.claim_pending
            assert agent.buffer.used_bytes <= office.settings.buffer_bytes
            peer.release()
            await eventually(lambda: agent.circuit.latched and agent.buffer.used_count == 0)
            for _ in range(3):
                await office.claim()
            assert (agent.buffer.used_count, office.waiting()) == (0, 20_000)

    async def test_full_agent_asks_for_work_when_room_is_free(self, office: Office) -> None:
        office.store_backlog(5_000)
        agent = office.agent()
        async with running(agent):
            while not office.is_empty():
                asked = office.asked_for_work
                await office.claim()
                assert agent.buffer.used_count <= office.settings.buffer_size
                if agent.claim_pending:
                    await eventually(lambda seen=asked: office.asked_for_work > seen)  # type: ignore[misc]
                else:
                    await eventually(office.is_empty)
        assert office.counters[Event.SENT] == 5_000

    async def test_envelope_is_left_to_any_node_without_room(self, office: Office) -> None:
        agent = office.agent()
        office.peers[BILLING].hold()
        async with running(agent):
            await office.commit(2_500)
            owners = office.tables.rows(
                "SELECT owner_id, count(*) FROM durable.outgoing_envelopes GROUP BY 1 ORDER BY 1"
            )
            assert owners == [(0, 500), (NODE, 2_000)]
            office.peers[BILLING].release()
            await eventually(lambda: office.waiting() == 500)


class TestOutcomes:
    async def test_a_peer_without_room_slows_the_agent_and_is_no_failure(self, office: Office) -> None:
        agent = office.agent()
        peer = office.peers[BILLING]
        peer.script = [busy] * 5
        async with running(agent):
            await office.commit(10)
            await eventually(office.is_empty)
        assert peer.sizes == [10] * 6
        pauses = [later - earlier for earlier, later in zip(peer.times, peer.times[1:], strict=False)]
        assert all(pause >= 0.02 * 2**number * 0.95 for number, pause in enumerate(pauses))
        assert (agent.circuit.failures_in_a_row, peer.pings, office.counters[Event.BUSY]) == (0, 0, 50)
        assert office.tables.rows("SELECT DISTINCT attempts FROM durable.envelope_history") == [0]

    async def test_envelopes_stored_by_the_peer_are_not_sent_again(self, office: Office) -> None:
        agent = office.agent()
        peer = office.peers[BILLING]
        peer.script = [lambda batch: [*[STORED] * 4, *[BUSY] * 6]]
        async with running(agent):
            sent = await office.commit(10)
            await eventually(office.is_empty)
        assert [[e.id for e in batch] for batch in peer.batches] == [[e.id for e in sent], [e.id for e in sent[4:]]]

    async def test_a_rejected_envelope_is_a_dead_letter_with_the_reason_and_its_neighbours_are_sent(
        self, office: Office
    ) -> None:
        agent = office.agent()
        office.peers[BILLING].answer = lambda batch: [STORED, Rejected("we do not know\0 this type"), STORED]
        async with running(agent):
            sent = await office.commit(3)
            await eventually(office.is_empty)
        (letter,) = office.tables.rows(
            "SELECT id, side, address, exception_type, reason, body FROM durable.dead_letters"
        )
        assert letter[:4] == (sent[1].id, "outgoing", BILLING, "rejected by the peer")
        assert letter[4:] == ("we do not know\N{REPLACEMENT CHARACTER} this type", b"{}")
        outcomes = office.tables.rows("SELECT outcome FROM durable.envelope_history ORDER BY 1")
        assert outcomes == ["dead-lettered", "sent", "sent"]
        assert (agent.circuit.failures_in_a_row, agent.buffer.used_count) == (0, 0)

    async def test_batch_with_too_few_outcomes_is_sent_again(self, office: Office) -> None:
        """Which of them have arrived nobody knows: those that have are duplicates then."""
        agent = office.agent()
        office.peers[BILLING].script = [lambda batch: stored(batch)[1:], lambda batch: [*stored(batch), STORED]]
        async with running(agent):
            sent = await office.commit(3)
            await eventually(office.is_empty)
        assert [[each.id for each in batch] for batch in office.peers[BILLING].batches] == [[e.id for e in sent]] * 3
        assert agent.buffer.used_count == 0

    async def test_envelope_failed_at_the_peer_is_sent_again_and_counted(self, office: Office) -> None:
        agent = office.agent()
        peer = office.peers[BILLING]
        peer.script = [lambda batch: [STORED, Failed("the disk is full"), STORED]]
        async with running(agent):
            sent = await office.commit(3)
            await eventually(office.is_empty)
        assert [e.id for e in peer.batches[1]] == [sent[1].id]
        attempts = office.tables.rows("SELECT attempts FROM durable.envelope_history ORDER BY id")
        assert attempts == [0, 1, 0]

    async def test_peer_failing_to_store_anything_is_latched_with_its_reason(self, office: Office) -> None:
        agent = office.agent()
        office.peers[BILLING].answer = lambda batch: [Failed("the disk is full")] * len(batch)
        async with running(agent):
            await office.commit(3)
            await eventually(lambda: agent.circuit.latched and agent.buffer.used_count == 0)
        (reason,) = office.tables.rows("SELECT reason FROM durable.circuits")
        assert reason == "the peer could not store it: the disk is full"

    async def test_rows_taken_by_another_node_are_left_unchanged(self, office: Office) -> None:
        agent = office.agent()
        peer = office.peers[BILLING]
        async with running(agent):
            peer.hold()
            await office.commit(2)
            await eventually(lambda: peer.under_way == 1)
            await office.tables.change(
                "UPDATE durable.outgoing_envelopes SET owner_id = 8, epoch = epoch + 1 "
                "WHERE id = (SELECT min(id::text)::uuid FROM durable.outgoing_envelopes)"
            )
            peer.release()
            await eventually(lambda: office.waiting() == 1)
        assert office.tables.rows("SELECT owner_id FROM durable.outgoing_envelopes") == [8]
        assert (office.counters[Event.SENT], office.counters[Event.LEASE_LOST]) == (1, 1)


class TestStopping:
    async def test_agent_sends_and_deletes_its_buffer_before_ending(self, office: Office) -> None:
        agent = office.agent()
        async with running(agent):
            await office.commit(1_000)
        assert office.is_empty()
        assert not agent.reserve(envelope())

    async def test_a_latched_agent_ends_without_waiting_for_its_peer(self, office: Office) -> None:
        agent = office.agent()
        office.peers[BILLING].answer = down
        async with running(agent):
            await office.commit(100)
            await eventually(lambda: agent.circuit.latched)
        assert office.waiting() == 100
