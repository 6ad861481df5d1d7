"""Order, parking and fair turns as applications see them: two nodes on one database, and services that send."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from sqlalchemy import Connection

from durable import Bus, CircuitBreaker, InvalidMessage, Reject, Retry, message
from durable.agents.handling import HandlingAgent
from durable.agents.sending import SendingAgent
from durable.envelope import Envelope, LeasedEnvelope
from durable.outcomes import BUSY, Failed, Outcome
from durable.recovery import ordered_claims
from durable.settings import load_settings
from durable.storage import dead_letters, ordering
from durable.storage.dead_letters import LetterRange, Selection
from durable.storage.ordering import Lane
from durable.telemetry import Event
from durable.transports.memory import MemorySender, MemoryTransport
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK
from tests.support.command import Agent

PEER = "memory://workshop"
SLOW_TO_LOOK: dict[str, Any] = {**QUICK, "poll_interval": timedelta(minutes=5)}
WAITING_TO_BE_SENT = "SELECT fair_key, owner_id FROM durable.outgoing_envelopes"
OFTEN = Retry(immediate=0, delays=[0.01] * 50)


@message("order.step")
class Step(msgspec.Struct):
    key: str
    number: int
    tenant: str = ""


@message("order.stride")
class Stride(msgspec.Struct):
    key: str
    number: int


@message("order.leap")
class Leap(msgspec.Struct):
    pass


class Log:
    """What handlers have done, by key; two of one key at once is an error."""

    def __init__(self) -> None:
        self.done: dict[str, list[int]] = defaultdict(list)
        self.all: list[tuple[str, int]] = []
        self.begun: dict[str, list[int]] = defaultdict(list)
        self.running: set[str] = set()
        self.overlaps: list[str] = []

    async def handle(self, step: Step | Stride, work: Callable[[], Awaitable[None]] | None = None) -> None:
        if step.key in self.running:
            self.overlaps.append(step.key)
        self.running.add(step.key)
        self.begun[step.key].append(step.number)
        try:
            await (work() if work else asyncio.sleep(0))
        finally:
            self.running.discard(step.key)
        self.done[step.key].append(step.number)
        self.all.append((step.key, step.number))

    def count(self) -> int:
        return len(self.all)


def node(database: str, log: Log, settings: dict[str, Any] | None = None, **options: Any) -> Bus:
    bus = Bus("workshop", database, **(settings or QUICK))

    @bus.handles(Step, **options)
    async def handle(step: Step) -> None:
        await log.handle(step)

    return bus


async def send(bus: Bus, *steps: Step | Stride, **options: Any) -> None:
    async with bus.unit_of_work() as uow:
        for step in steps:
            keyed: dict[str, Any] = {"key": step.key, **options}
            uow.send(step, **keyed)


def rows(database: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(database) as conn:
        return conn.execute(query.encode()).fetchall()


class TestAKey:
    @pytest.mark.parametrize("group", [1, 10])
    async def test_key_is_handled_in_order_over_two_nodes_despite_failures(self, database_url: str, group: int) -> None:
        log, rng = Log(), random.Random(group)
        nodes = [Bus("workshop", database_url, batch_size=7, **QUICK) for _ in range(2)]

        async def stumble() -> None:
            await asyncio.sleep(0)
            if rng.random() < 0.15:
                raise RuntimeError("stumbled")

        for bus in nodes:

            @bus.handles(Step, retry=OFTEN, max_batch=group)
            async def handle(step: Step) -> None:
                await log.handle(step, stumble)

        async with nodes[0], nodes[1]:
            for number in range(15):
                for key in "abcde":
                    await send(nodes[number % 2], Step(key, number))
            await eventually(lambda: all(_committed(log, key) == list(range(15)) for key in "abcde"), within=30)
        assert log.overlaps == []

    async def test_failing_key_waits_for_its_retry_and_other_keys_proceed(self, database_url: str) -> None:
        log, mended = Log(), asyncio.Event()
        bus = Bus("workshop", database_url, **QUICK)

        @bus.handles(Step, retry=Retry(immediate=0, delays=[0.05] * 1_000))
        async def handle(step: Step) -> None:
            if step == Step("bad", 1) and not mended.is_set():
                raise RuntimeError("not yet")
            await log.handle(step)

        async with bus:
            await send(bus, Step("bad", 1), Step("bad", 2), Step("good", 1), Step("good", 2))
            await eventually(lambda: bus.runtime.counters[Event.RETRIED] >= 3 and log.done["good"] == [1, 2])
            await send(bus, Step("bad", 3), Step("good", 3))
            await eventually(lambda: log.done["good"] == [1, 2, 3])
            assert log.done["bad"] == []
            mended.set()
            await eventually(lambda: log.done["bad"] == [1, 2, 3])
        assert (
            rows(database_url, "SELECT attempts FROM durable.envelope_history WHERE partition_key = 'good'")
            == [(0,)] * 3
        ), "those behind a retry were not counted"
        followers = "SELECT attempts FROM durable.envelope_history WHERE partition_key = 'bad' ORDER BY sent_at, id"
        assert [count > 0 for (count,) in rows(database_url, followers)] == [True, False, False]

    async def test_key_is_claimed_again_without_waiting_for_the_next_poll(self, database_url: str) -> None:
        log = Log()
        bus = node(database_url, log, {**SLOW_TO_LOOK, "batch_size": 3, "buffer_size": 3})
        async with bus:
            await send(bus, *(Step("hot", number) for number in range(20)))
            await eventually(lambda: log.done["hot"] == list(range(20)), within=20)
            await send(bus, Step("hot", 20))
            await eventually(lambda: log.count() == 21, within=20)

    async def test_key_spans_types_handled_on_different_nodes(self, database_url: str) -> None:
        """Each node wakes the other when its turn has come."""
        log = Log()
        steps, strides = (Bus("workshop", database_url, **SLOW_TO_LOOK) for _ in range(2))

        @steps.handles(Step)
        async def step(step: Step) -> None:
            await log.handle(step)

        @strides.handles(Stride)
        async def stride(stride: Stride) -> None:
            await log.handle(stride)

        steps.application.routes.handled_here("order.stride")
        async with steps, strides:
            for number in range(6):
                await send(steps, Step("k", number) if number % 2 else Stride("k", number))
            await eventually(lambda: log.done["k"] == list(range(6)), within=20)

    async def test_key_is_hinted_to_capable_nodes_by_a_node_without_the_handler(self, database_url: str) -> None:
        log = Log()
        without = Bus("workshop", database_url, **SLOW_TO_LOOK)
        without.application.routes.handled_here("order.step")
        async with without, node(database_url, log, SLOW_TO_LOOK):
            await send(without, *(Step("k", number) for number in range(3)))
            await eventually(lambda: log.done["k"] == [0, 1, 2])

    async def test_key_is_tried_in_its_turn_when_its_circuit_is_open(self, database_url: str) -> None:
        log, mended = Log(), asyncio.Event()
        bus = Bus("workshop", database_url, **QUICK)
        breaker = CircuitBreaker(failure_rate=0.5, at_least=2, open_for=0.05, longest=0.1)

        @bus.handles(Step, retry=OFTEN, circuit_breaker=breaker)
        async def handle(step: Step) -> None:
            if not mended.is_set():
                raise RuntimeError("the whole service is down")
            await log.handle(step)

        async with bus:
            await send(bus, *(Step(key, number) for number in range(3) for key in "ab"))
            await eventually(lambda: bus.runtime.counters[Event.CIRCUIT_OPENED] == 1)
            mended.set()
            await eventually(lambda: log.done["a"] == log.done["b"] == [0, 1, 2], within=20)
            await eventually(lambda: rows(database_url, "SELECT kind FROM durable.circuits") == [])

    async def test_key_orders_messages_of_a_schedule(self, database_url: str) -> None:
        log = Log()
        bus = node(database_url, log)
        bus.every("0 0 1 1 *", Step("k", 1), name="yearly", key="k")
        async with bus:
            await bus.pause(key="k")
            await eventually(lambda: rows(database_url, "SELECT name FROM durable.schedules") != [])
            assert await bus.run_schedule("yearly")
            waiting = "SELECT ordering_key, owner_id FROM durable.incoming_envelopes"
            await eventually(lambda: rows(database_url, waiting) == [("k", 0)])
            await bus.resume(key="k")
            await eventually(lambda: log.done["k"] == [1])

    async def test_all_keys_have_their_turn_when_more_than_the_room(self, database_url: str) -> None:
        log = Log()
        bus = node(database_url, log, {**QUICK, "batch_size": 5, "buffer_size": 10})
        async with bus:
            await send(bus, *(Step(f"k{number % 50}", number) for number in range(200)))
            await eventually(lambda: log.count() == 200, within=30)
        assert all(done == sorted(done) for done in log.done.values())
        assert log.overlaps == []

    async def test_key_places_a_delayed_message_by_its_due_time(self, database_url: str) -> None:
        log = Log()
        bus = node(database_url, log)
        async with bus:
            await send(bus, Step("k", 1), delay=0.3)
            await send(bus, Step("k", 2))
            await eventually(lambda: log.done["k"] == [2, 1])

    async def test_key_proceeds_after_a_dead_letter_and_a_replayed_letter_comes_last(self, database_url: str) -> None:
        log, mended = Log(), asyncio.Event()
        bus = Bus("workshop", database_url, **QUICK)

        @bus.handles(Step, retry=Retry.never())
        async def handle(step: Step) -> None:
            if step.number == 1 and not mended.is_set():
                raise Reject("no")
            await log.handle(step)

        async with bus:
            await send(bus, *(Step("k", number) for number in range(3)))
            await eventually(lambda: log.done["k"] == [0, 2])
            assert rows(database_url, "SELECT ordering_key FROM durable.dead_letters") == [("k",)]
            mended.set()
            replay = partial(dead_letters.replay, actor="ada")
            await bus.runtime.database.transaction(replay, Selection(), LetterRange(0, 1_000, 10))
            await eventually(lambda: log.done["k"] == [0, 2, 1])

    async def test_key_must_not_be_empty(self, database_url: str) -> None:
        bus = node(database_url, Log())
        async with bus:
            with pytest.raises(InvalidMessage, match="key is empty"):
                await send(bus, Step("", 1), key="")


def _committed(log: Log, key: str) -> list[int]:
    """Each message once: those of a group that rolled back run again, alone."""
    return list(dict.fromkeys(log.done[key]))


class TestManyKeys:
    """Thousands of keys of one handler, which can take nothing now, and what others have to do meanwhile."""

    KEYS = 20_000

    def fill(self, database: str, message_type: str = "order.stride", keys: int = KEYS, prefix: str = "k") -> None:
        with psycopg.connect(database) as conn:
            conn.execute(
                """INSERT INTO durable.incoming_envelopes (endpoint, id, message_type, source, correlation_id,
                    partition_key, ordering_key, content_type, body, sent_at, owner_id)
                SELECT 'shop', gen_random_uuid(), %s, 'elsewhere', gen_random_uuid(), key, key, 'application/json',
                    convert_to('{"key":"' || key || '","number":1}', 'UTF8'), now(), 0
                FROM (SELECT %s || number AS key FROM generate_series(1, %s) AS number) AS keys""",
                [message_type, prefix, keys],
            )

    def busy(self, database: str, log: Log, go_on: asyncio.Event, **settings: Any) -> Bus:
        """Strides wait until they may go on, steps are handled at once."""
        bus = node(database, log, {**QUICK, **settings})

        @bus.handles(Stride, concurrency=2)
        async def handle(stride: Stride) -> None:
            await go_on.wait()
            await log.handle(stride)

        return bus

    @pytest.mark.parametrize("stop", ["paused", "full"])
    async def test_keys_of_a_stopped_handler_cost_no_look_for_the_others(
        self, database_url: str, stop: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While a delayed message and keys of others are handled, no page is read for the handler that stands."""
        log, go_on = Log(), asyncio.Event()
        self.fill(database_url)
        bus = self.busy(database_url, log, go_on, batch_size=20, buffer_size=20)
        looked: list[Lane] = []
        look = ordering.scan

        def watched(conn: Connection, schema: str, looks: Mapping[Lane, str], **page: Any) -> Any:
            looked.extend(looks)
            return look(conn, schema, looks, **page)

        monkeypatch.setattr(ordering, "scan", watched)
        async with bus:
            assert bus.runtime.node is not None
            strides = bus.runtime.node.agents.handlers["order.stride"]
            if stop == "paused":
                await bus.pause(Stride)
                await eventually(lambda: strides.circuit.is_open, within=20)
            else:
                await eventually(lambda: strides.buffer.used_count >= 20, within=20)
            looked.clear()
            await send(bus, Step("plain", 1), key=None, delay=0.2)
            await send(bus, Step("keyed", 1), delay=0.2)
            await send(bus, Step("now", 1))
            await eventually(lambda: {"plain", "keyed", "now"} <= log.done.keys(), within=20)
            assert looked.count(Lane(message_type="order.stride")) <= 1, "one may have been under way"
            assert not any(key.startswith("k") and key != "keyed" for key in log.done)
            go_on.set()
            await bus.resume(Stride)

    async def test_keys_without_a_claimable_message_are_looked_at_by_page_in_turn_with_others(
        self, database_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each key is held by a message of another type: a look finds them, and can claim nothing."""
        log, pages = Log(), list[Lane]()
        self.fill(database_url, "order.elsewhere")
        self.fill(database_url, "order.stride")
        bus = self.busy(database_url, log, asyncio.Event())
        look = ordering.scan

        def watched(conn: Connection, schema: str, looks: Mapping[Lane, str], **page: Any) -> Any:
            pages.extend(looks)
            return look(conn, schema, looks, **page)

        monkeypatch.setattr(ordering, "scan", watched)
        with psycopg.connect(database_url, autocommit=True) as conn:
            conn.execute(
                "INSERT INTO durable.nodes (service, description, version, capabilities)"
                """ VALUES ('workshop', '', '', '{"message_types": ["order.elsewhere"]}')"""
            )
        async with bus:
            await eventually(lambda: len(pages) > 20, within=20)
            await send(bus, Step("k17x", 1), Step("k17x", 2), delay=0.1)
            await eventually(lambda: log.done["k17x"] == [1, 2], within=30)
            seen = len(pages)
            assert seen < self.KEYS / 100, "it came before all of those keys were looked at"

    async def test_all_keys_of_many_have_their_turn_with_room_for_a_few(self, database_url: str) -> None:
        """The first keys have far more messages than the others; what is finished of them makes no way for itself."""
        log, go_on = Log(), asyncio.Event()
        go_on.set()
        for _ in range(100):
            self.fill(database_url, keys=10, prefix="hot")
        self.fill(database_url, keys=50)
        bus = self.busy(database_url, log, go_on, batch_size=10, buffer_size=10)
        async with bus:
            await eventually(lambda: sum(key.startswith("k") for key in log.done) == 50, within=60)
        assert log.count() < 110, "the others came before those keys had their second turn"
        assert log.overlaps == []


class TestABacklog:
    """It is handled, or sent, as fast as it can be claimed: what have others to do meanwhile?"""

    COUNT = 30_000

    @pytest.mark.parametrize("kind", ["plain", "fair", "outgoing"])
    async def test_backlog_does_not_delay_a_message_becoming_due(
        self, database_url: str, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        settings = {**QUICK, "batch_size": 10, "buffer_size": 20, "forgotten_after": timedelta(minutes=5)}
        log, bus = Log(), Bus("workshop", database_url, transports=[MemoryTransport(load_settings())], **settings)
        bus.route(Stride, to=PEER)

        @bus.handles(Step)
        async def handle(step: Step) -> None:
            await log.handle(step)

        @bus.handles(Leap, fair_by="tenant" if kind == "fair" else None)
        async def leap(leap: Leap) -> None: ...

        taken = 0

        def finished_at_once(agent: HandlingAgent | SendingAgent, claimed: list[LeasedEnvelope]) -> None:
            nonlocal taken
            taken += len(claimed)
            agent.buffer.done(claimed)

        accept = HandlingAgent.accept

        def accepted(agent: HandlingAgent, claimed: list[LeasedEnvelope]) -> None:
            if agent.handler.message_type == "order.leap":
                finished_at_once(agent, claimed)
            else:
                accept(agent, claimed)

        monkeypatch.setattr(HandlingAgent, "accept", accepted)
        monkeypatch.setattr(SendingAgent, "accept", finished_at_once)
        table, address = ("outgoing", PEER) if kind == "outgoing" else ("incoming", "shop")
        with psycopg.connect(database_url) as conn:
            conn.execute(
                f"""INSERT INTO durable.{table}_envelopes ({"destination" if kind == "outgoing" else "endpoint"}, id,
                    message_type, source, correlation_id, fair_key, content_type, body, sent_at, owner_id)
                SELECT %s, gen_random_uuid(), 'order.leap', 'elsewhere', gen_random_uuid(), %s, 'application/json',
                    convert_to('{{}}', 'UTF8'), now(), 0 FROM generate_series(1, %s)""".encode(),
                [address, "" if kind == "fair" else None, self.COUNT],
            )
        async with bus:
            await send(bus, Step("due", 1), key=None, delay=0.2)
            await eventually(lambda: log.count() == 1, within=60)
            assert 0 < taken < self.COUNT, "it was handled while the others still waited"


class TestParking:
    async def test_dead_letter_parks_its_key_when_the_handler_asks_for_parking(self, database_url: str) -> None:
        log = Log()
        nodes = [Bus("workshop", database_url, **QUICK) for _ in range(2)]
        for bus in nodes:

            @bus.handles(Step, retry=Retry.never(), on_dead_letter="park")
            async def handle(step: Step) -> None:
                if step == Step("bad", 1):
                    raise RuntimeError("broken")
                await log.handle(step)

        async with nodes[0], nodes[1]:
            await send(nodes[0], *(Step(key, number) for number in range(4) for key in ("bad", "good")))
            await eventually(lambda: log.done["good"] == [0, 1, 2, 3])
            await eventually(
                lambda: rows(database_url, "SELECT owner_id FROM durable.incoming_envelopes") == [(0,)] * 2
            )
            assert log.done["bad"] == [0]
            ((kind, key, reason),) = rows(database_url, "SELECT kind, key, reason FROM durable.circuits")
            assert (kind, key) == ("key", "bad")
            assert reason.startswith("RuntimeError: broken (message ")
            assert reason.endswith(" became a dead letter)")
            await send(nodes[1], Step("bad", 4), Step("good", 4))
            await eventually(lambda: log.done["good"] == [0, 1, 2, 3, 4])
            assert await nodes[1].resume(key="bad")
            await eventually(lambda: log.done["bad"] == [0, 2, 3, 4])

    async def test_setting_park_stops_an_ordered_handler_as_a_whole(self, database_url: str) -> None:
        log = Log()
        bus = Bus("workshop", database_url, on_dead_letter="park", **QUICK)

        @bus.handles(Step, retry=Retry.never(), ordered=True)
        async def handle(step: Step) -> None:
            if step.number == 1:
                raise RuntimeError("broken")
            await log.handle(step)

        async with bus:
            await send(bus, *(Step(str(number), number) for number in range(4)))
            await eventually(lambda: rows(database_url, "SELECT kind FROM durable.circuits") == [("handler",)])
            assert [number for _, number in log.all] == [0]
            await bus.resume(Step)
            await eventually(lambda: [number for _, number in log.all] == [0, 2, 3])

    async def test_messages_of_a_parked_key_in_memory_go_back_unhandled(self, database_url: str) -> None:
        log = Log()
        bus = Bus("workshop", database_url, **QUICK)

        @bus.handles(Step, concurrency=2)
        async def handle(step: Step) -> None:
            async def park() -> None:
                if step == Step("k", 0):
                    await bus.pause(key="k")
                    assert bus.runtime.node is not None
                    agent = bus.runtime.node.agents.handlers["order.step"]
                    await eventually(lambda: not [x for x in agent.buffer.waiting() if x.ordering_key == "k"])

            await log.handle(step, park)

        async with bus:
            await send(bus, *(Step("k", number) for number in range(4)))
            await eventually(
                lambda: rows(database_url, "SELECT owner_id FROM durable.incoming_envelopes") == [(0,)] * 3
            )
            await send(bus, Step("other", 0))
            await eventually(lambda: log.done["other"] == [0])
            assert log.done["k"] == [0]
            await bus.resume(key="k")
            await eventually(lambda: log.done["k"] == [0, 1, 2, 3])

    def test_an_operator_parks_sees_and_resumes_a_key(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        database_url: str,
    ) -> None:
        monkeypatch.setenv("DURABLE_DATABASE_URL", database_url)
        agent = Agent(tmp_path, monkeypatch, capsys)
        assert agent("pause", "--key", "order-17", "--anyway").out == "the key order-17 is paused until it is resumed\n"
        with psycopg.connect(database_url) as conn:
            conn.execute(
                "INSERT INTO durable.incoming_envelopes (endpoint, id, message_type, source, correlation_id, "
                "partition_key, content_type, body, sent_at, owner_id, ordering_key) SELECT 'local', "
                "gen_random_uuid(), 'order.step', 'x', gen_random_uuid(), 'order-17', 'application/json', '{}', now(),"
                " 0, 'order-17' FROM generate_series(1, 3)"
            )
        (row,) = msgspec.json.decode(agent("circuits", "--json").out)
        assert (row["kind"], row["key"], row["waiting"]) == ("key", "order-17", 3)
        assert "order-17" in agent("status").out
        assert agent("resume", "--key", "order-17").out == "the key order-17 is resumed\n"
        assert agent("pause", "--key", "k", "--handler", "a.b").code == 2


class Stuttering(MemorySender):
    """A destination that fails or is busy as often as the dice say, for parts of a batch too."""

    rng = random.Random(3)

    async def send(self, batch: Any) -> list[Outcome]:
        if self.rng.random() < 0.2:
            return [Failed("stuttered")] * len(batch)
        taken = self.rng.randint(1, len(batch))
        stored = await super().send(batch[:taken])
        return stored + [BUSY] * (len(batch) - taken)


class Unordered(Stuttering):
    """One that stores any part of a batch and not the others, as a broker may."""

    keeps_order = False

    async def send(self, batch: Any) -> list[Outcome]:
        chosen = [self.rng.random() < 0.7 for _ in batch]
        stored = await MemorySender.send(self, [each for each, yes in zip(batch, chosen, strict=True) if yes])
        answers = iter(stored)
        return [next(answers) if yes else BUSY for yes in chosen]


class TestSending:
    @pytest.fixture(params=[MemorySender, Stuttering, Unordered], ids=["well", "stuttering", "in no order"])
    def memory(self, request: pytest.FixtureRequest) -> MemoryTransport:
        class Transport(MemoryTransport):
            def sender(self, destination: str) -> MemorySender:
                made: MemorySender = request.param(self, destination)
                return made

        return Transport(load_settings())

    async def test_keyed_messages_arrive_in_the_order_of_their_commits(
        self, make_database: Callable[[str], str], memory: MemoryTransport
    ) -> None:
        orders, workshop = make_database("orders"), make_database("workshop")
        receiver = Bus("workshop", workshop, transports=[memory], **QUICK)
        receiver.handles(Step)(_nothing)
        receiver.listen(PEER)
        quick = {**QUICK, "batch_size": 8, "failures_to_latch": 1_000}
        senders = [Bus("orders", orders, transports=[memory], **quick) for _ in range(2)]
        for bus in senders:
            bus.route(Step, to=PEER)
        async with receiver, senders[0], senders[1]:
            for number in range(30):
                await send(senders[number % 2], *(Step(key, number) for key in "abc"), Step("hot", number))
            await eventually(lambda: receiver.runtime.counters[Event.HANDLED] == 120, within=40)
        arrived: dict[str, list[str]] = defaultdict(list)
        for key, id_ in rows(workshop, "SELECT partition_key, id FROM durable.envelope_history ORDER BY received_at"):
            arrived[key].append(id_)
        sent = rows(orders, "SELECT partition_key, id FROM durable.envelope_history ORDER BY sent_at, id")
        assert all(arrived[key] == [id_ for each, id_ in sent if each == key] for key in arrived)

    async def test_an_ordered_destination_is_sent_everything_in_the_order_of_its_commits(
        self, make_database: Callable[[str], str]
    ) -> None:
        memory = MemoryTransport(load_settings())
        orders, workshop = make_database("orders"), make_database("workshop")
        log = Log()
        receiver = Bus("workshop", workshop, transports=[memory], **QUICK)

        @receiver.handles(Step, ordered=True, concurrency=8)
        async def handle(step: Step) -> None:
            assert not log.running
            await log.handle(step)

        receiver.listen(PEER)
        senders = [Bus("orders", orders, transports=[memory], batch_size=4, **QUICK) for _ in range(2)]
        for bus in senders:
            bus.route(Step, to=PEER, ordered=True)
        async with receiver, senders[0], senders[1]:
            for number in range(40):
                await send(senders[number % 2], Step(str(number), number), key=None if number % 3 else "k")
            await eventually(lambda: log.count() == 40, within=30)
        assert [number for _, number in log.all] == list(range(40))


async def _nothing(step: Step) -> None:
    pass


class TestSendingInTurns:
    """A slow peer, and tenants with very different numbers of messages."""

    @pytest.mark.parametrize("backlog", [False, True], ids=["in memory", "from the table"])
    async def test_a_tenant_with_thousands_does_not_keep_another_waiting(
        self, make_database: Callable[[str], str], backlog: bool
    ) -> None:
        memory, received = MemoryTransport(load_settings()), list[str]()
        receiver = Bus("workshop", make_database("workshop"), transports=[memory], **QUICK)
        receiver.listen(PEER)

        @receiver.handles(Step, concurrency=1)
        async def handle(step: Step) -> None: ...

        go_on = asyncio.Event()

        async def seen(sender: MemorySender, batch: Sequence[Envelope]) -> list[Outcome]:
            await go_on.wait()
            received.extend(envelope.headers["tenant"] for envelope in batch)
            return await send_batch(sender, batch)

        send_batch = MemorySender.send
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(MemorySender, "send", seen)
            settings = {**QUICK, "batch_size": 5, "buffer_size": 10 if backlog else 2_000, "batches_in_flight": 1}
            sender = Bus("orders", make_database("orders"), transports=[memory], **settings)
            sender.route(Step, to=PEER, fair_by="tenant", weights={"gold": 3})
            async with sender:
                if backlog:
                    await sender.pause(destination=PEER)
                    node = sender.runtime.node
                    assert node is not None
                    await eventually(lambda: node.agents.senders[PEER].paused)
                for tenant, count in (("large", 300), ("gold", 60), ("small", 5)):
                    await send(sender, *(Step("", n) for n in range(count)), key=None, tenant=tenant)
                async with receiver:
                    go_on.set()
                    await sender.resume(destination=PEER)
                    await eventually(lambda: len(received) >= 365, within=60)
        first = received[:40]
        assert first.count("small") == 5
        assert first.count("gold") > first.count("large")
        assert sorted(received) == ["gold"] * 60 + ["large"] * 300 + ["small"] * 5

    async def test_rows_left_by_a_fair_destination_are_sent_when_the_destination_is_no_longer_fair(
        self, make_database: Callable[[str], str]
    ) -> None:
        memory, handled = MemoryTransport(load_settings()), list[int]()
        orders = make_database("orders")
        receiver = Bus("workshop", make_database("workshop"), transports=[memory], **QUICK)
        receiver.listen(PEER)

        @receiver.handles(Step)
        async def handle(step: Step) -> None:
            handled.append(step.number)

        for fair_by in ("tenant", None):
            bus = Bus("orders", orders, transports=[memory], **QUICK)
            bus.route(Step, to=PEER, fair_by=fair_by)
            if fair_by:
                async with bus:
                    await bus.pause(destination=PEER)
                    await send(bus, Step("", 1), key=None, tenant="a")
                    await eventually(lambda: rows(orders, WAITING_TO_BE_SENT) == [("a", 0)])
            else:
                async with receiver, bus:
                    await bus.resume(destination=PEER)
                    await eventually(lambda: handled == [1], within=20)


class TestTurns:
    async def test_a_tenant_with_thousands_does_not_keep_another_waiting(self, database_url: str) -> None:
        log = Log()
        bus = Bus("workshop", database_url, batch_size=10, buffer_size=20, **QUICK)

        @bus.handles(Step, fair_by="tenant", concurrency=1)
        async def handle(step: Step) -> None:
            await log.handle(step)

        async with bus:
            large = [Step("large", number) for number in range(400)]
            await send(bus, *large, key=None, tenant="large")
            await eventually(lambda: log.count() > 20)
            before = log.count()
            await send(bus, Step("small", 0), key=None, tenant="small")
            await eventually(lambda: "small" in log.done)
            behind = log.all.index(("small", 0)) - before
            assert behind <= 40, "it waited for more than what was in memory, and a round"
            await eventually(lambda: log.count() == 401, within=30)

    async def test_weights_set_the_turns_of_each_tenant(self, database_url: str) -> None:
        log = Log()
        bus = Bus("workshop", database_url, **QUICK)

        @bus.handles(Step, fair_by="x-plan", weights={"gold": 3}, concurrency=1)
        async def handle(step: Step) -> None:
            await log.handle(step)

        sender = Bus("workshop", database_url, mode="send-only")
        sender.handles(Step, fair_by="x-plan", weights={"gold": 3})(_nothing)
        for plan in ("gold", "tin"):
            await send(sender, *(Step(plan, n) for n in range(40)), key=None, headers={"x-plan": plan})
        await sender.runtime.stop()
        async with bus:
            await eventually(lambda: log.count() == 80, within=30)
        first = [plan for plan, _ in log.all[:40]]
        assert 28 <= first.count("gold") <= 32

    async def test_rows_left_by_a_fair_handler_are_handled_when_the_handler_is_no_longer_fair(
        self, database_url: str
    ) -> None:
        log = Log()
        sender = Bus("workshop", database_url, mode="send-only")
        sender.handles(Step, fair_by="tenant")(_nothing)
        await send(sender, Step("a", 1), key=None, tenant="blue")
        await sender.runtime.stop()
        async with node(database_url, log):
            await eventually(lambda: log.done["a"] == [1])

    @pytest.mark.parametrize("options", [{"key": "k"}, {"key": None, "tenant": "blue"}], ids=["keyed", "shared"])
    async def test_message_without_a_handler_on_any_node_becomes_a_dead_letter(
        self, database_url: str, options: dict[str, str]
    ) -> None:
        sender = Bus("workshop", database_url, mode="send-only")

        @sender.handles(Stride, fair_by="tenant")
        async def handle(stride: Stride) -> None:
            pass

        await send(sender, Stride("a", 1), **options)
        await sender.runtime.stop()
        async with node(database_url, Log()):
            await eventually(lambda: rows(database_url, "SELECT message_type FROM durable.dead_letters") != [])
        assert rows(database_url, "SELECT count(*) FROM durable.incoming_envelopes") == [(0,)]


async def test_every_address_has_its_turn_however_short_a_look_is(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be more addresses with keys than a look can see in the time of a step."""
    monkeypatch.setattr(ordered_claims, "LONGEST_STEP", 0.0)
    monkeypatch.setattr(ordered_claims, "DESTINATIONS", 8)
    looks: list[int] = []
    poll, look_at = ordered_claims.OrderedClaims.poll, ordered_claims.OrderedClaims._look_at

    async def polled(self: ordered_claims.OrderedClaims) -> None:
        looks.append(0)
        await poll(self)

    async def looked(self: ordered_claims.OrderedClaims, *args: Any) -> Any:
        looks[-1] += 1
        return await look_at(self, *args)

    monkeypatch.setattr(ordered_claims.OrderedClaims, "poll", polled)
    monkeypatch.setattr(ordered_claims.OrderedClaims, "_look_at", looked)
    addresses = [f"memory://place{number}" for number in range(30)]
    transports = [MemoryTransport(load_settings())]
    bus = Bus("workshop", database_url, transports=transports, **dict[str, Any](SLOW_TO_LOOK, batch_size=3))
    for address in addresses:
        bus.listen(address, name=address)
    handled: list[int] = []

    @bus.handles(Step)
    async def step(step: Step) -> None:
        handled.append(step.number)

    async with bus.unit_of_work():
        for number, address in enumerate(addresses):
            bus.send(Step("k", number), to=address, key=f"k{number}")
    async with bus:
        await eventually(lambda: sorted(handled) == list(range(30)), within=30)
    assert max(looks) == 1
