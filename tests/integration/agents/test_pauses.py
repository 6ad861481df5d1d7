"""Handlers and listeners that are paused: by code, by an operator, by plain SQL; every node obeys."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path

import msgspec
import psycopg
import pytest

from durable import Bus, Context, InvalidSetting, PauseListener, Retry, message
from durable.settings import load_settings
from durable.storage import circuits
from durable.storage.nodes import capabilities
from durable.telemetry import Event
from durable.transports.memory import MemoryTransport
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK
from tests.support.command import Agent
from tests.support.servers import AnyBroker, Names
from tests.support.tables import change

PEER = "memory://billing"
OPEN = "INSERT INTO durable.circuits (kind, key, reason, actor) VALUES ('handler', 'pauses.placed', 'by hand', 'psql')"


@message("pauses.placed")
class Placed(msgspec.Struct):
    number: int


@message("pauses.stop")
class Stop(msgspec.Struct):
    pass


class Shop:
    """A service of two nodes on one database, and what they have handled."""

    def __init__(self, database: str) -> None:
        self.database = database
        self.handled: list[int] = []
        self.nodes = [self._node(), self._node()]

    def _node(self) -> Bus:
        bus = Bus("shop", self.database, **QUICK)

        @bus.handles(Placed)
        async def handle(placed: Placed) -> None:
            self.handled.append(placed.number)

        return bus

    async def place(self, *numbers: int) -> None:
        for number in numbers:
            async with self.nodes[0].unit_of_work() as uow:
                uow.send(Placed(number))

    async def everybody(self, paused: bool) -> None:
        await eventually(lambda: all(is_paused(node) == paused for node in self.nodes))

    def rows(self, sql: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.database) as conn:
            return conn.execute(sql.encode()).fetchall()


async def ignore(placed: Placed) -> None:
    pass


def is_paused(bus: Bus) -> bool:
    node = bus.runtime.node
    return node is not None and node.agents.handlers["pauses.placed"].circuit.is_open


@pytest.fixture
def shop(database_url: str) -> Shop:
    return Shop(database_url)


async def test_handler_paused_by_one_node_runs_on_no_node_until_resumed(shop: Shop) -> None:
    first, second = shop.nodes
    async with first, second:
        await first.pause(Placed, reason="the warehouse burns")
        await shop.everybody(paused=True)
        await shop.place(1, 2, 3)
        await eventually(lambda: shop.rows("SELECT owner_id FROM durable.incoming_envelopes") == [(0,)] * 3)
        assert shop.handled == []
        assert shop.rows("SELECT kind, key, reason, actor, until FROM durable.circuits") == [
            ("handler", "pauses.placed", "the warehouse burns", "shop, in its code", None)
        ]

        assert await second.resume(Placed)
        await eventually(lambda: sorted(shop.handled) == [1, 2, 3])
        assert not await second.resume(Placed)


async def test_pause_reaches_the_other_node_before_its_next_poll(database_url: str) -> None:
    slow = {**QUICK, "poll_interval": timedelta(minutes=5)}
    first, second = (Bus("shop", database_url, **slow) for _ in range(2))
    for bus in (first, second):
        bus.handles(Placed)(ignore)
    async with first, second:
        await first.pause(Placed)
        await eventually(lambda: is_paused(second), within=30)
        await first.resume(Placed)
        await eventually(lambda: not is_paused(second), within=30)


async def test_a_pause_ends_by_itself(shop: Shop) -> None:
    async with shop.nodes[0], shop.nodes[1]:
        await shop.nodes[0].pause(Placed, for_=5)
        await shop.everybody(paused=True)
        await shop.place(1)
        await eventually(lambda: shop.handled == [1], within=30)
        await shop.everybody(paused=False)


async def test_plain_sql_pauses_and_resumes(shop: Shop) -> None:
    async with shop.nodes[0], shop.nodes[1]:
        await change(shop.database, OPEN)
        await shop.everybody(paused=True)
        await shop.place(1)
        await change(shop.database, "DELETE FROM durable.circuits")
        await eventually(lambda: shop.handled == [1])


@pytest.mark.parametrize("until", ["infinity", "20000-01-01"])
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_endless_pause_by_plain_sql_lasts_until_resumed(database_url: str, driver: str, until: str) -> None:
    shop = Shop(database_url.replace("postgresql://", f"postgresql+{driver}://"))
    async with shop.nodes[0], shop.nodes[1]:
        await change(database_url, OPEN)
        await change(database_url, f"UPDATE durable.circuits SET until = '{until}', since = '-infinity'")
        (row,) = await shop.nodes[0].runtime.database.transaction(circuits.read)
        assert row.until is None
        await shop.everybody(paused=True)
        assert await shop.nodes[0].resume(Placed)
        await shop.place(1)
        await eventually(lambda: shop.handled == [1])


async def test_pausing_again_changes_the_reason_and_the_time(shop: Shop) -> None:
    async with shop.nodes[0]:
        await shop.nodes[0].pause(Placed, for_=3600, reason="first")
        await shop.nodes[0].pause(Placed, reason="second")
    assert shop.rows("SELECT reason, until FROM durable.circuits") == [("second", None)]


async def test_pause_releases_the_waiting_messages_and_lets_the_running_one_finish(database_url: str) -> None:
    bus = Bus("shop", database_url, **QUICK)
    handled: list[int] = []

    @bus.handles(Placed, concurrency=1)
    async def handle(placed: Placed) -> None:
        if not handled:
            await bus.pause(Placed)
            await eventually(lambda: is_paused(bus))
        handled.append(placed.number)

    async with bus:
        async with bus.unit_of_work() as uow:
            for number in range(5):
                uow.send(Placed(number))
        await eventually(lambda: bus.runtime.counters[Event.HANDLED] == 1)

        def released() -> bool:
            with psycopg.connect(database_url) as conn:
                owners = conn.execute("SELECT owner_id FROM durable.incoming_envelopes").fetchall()
            return owners == [(0,)] * 4

        await eventually(released)
        assert handled == [0]
        await bus.resume(Placed)
        await eventually(lambda: sorted(handled) == [0, 1, 2, 3, 4])


async def test_a_paused_listener_answers_busy_and_nothing_is_latched_or_lost(
    make_database: Callable[[str], str],
) -> None:
    memory = MemoryTransport(load_settings())
    receiver = Bus("billing", make_database("billing"), transports=[memory], **QUICK)
    sender = Bus("orders", make_database("orders"), transports=[memory], **QUICK)
    handled: list[int] = []

    @receiver.handles(Placed)
    async def handle(placed: Placed) -> None:
        handled.append(placed.number)

    receiver.listen(PEER, name="billing-in")
    sender.route(Placed, to=PEER)
    async with receiver, sender:
        await receiver.pause(listener="billing-in")
        numbers = count()
        while not sender.runtime.counters[Event.BUSY]:  # the pause is obeyed within a moment
            async with sender.unit_of_work() as uow:
                uow.send(Placed(next(numbers)))
        first = next(numbers)
        for number in range(first, first + 3):
            async with sender.unit_of_work() as uow:
                uow.send(Placed(number))
        await eventually(lambda: sender.runtime.counters[Event.BUSY] >= 3)
        assert set(handled) <= set(range(first))
        assert sender.runtime.counters[Event.LATCHED] == sender.runtime.counters[Event.SEND_FAILED] == 0
        assert await receiver.resume(listener="billing-in")
        await eventually(lambda: sorted(handled) == list(range(first + 3)))


async def test_a_handler_may_ask_for_a_pause_and_its_message_is_not_counted(database_url: str) -> None:
    bus = Bus("shop", database_url, **QUICK)
    attempts: list[int] = []

    def circuits() -> list[tuple[str, ...]]:
        with psycopg.connect(database_url) as conn:
            return conn.execute("SELECT kind, key, reason FROM durable.circuits").fetchall()

    @bus.handles(Placed, retry=Retry.never())
    async def handle(placed: Placed, ctx: Context) -> None:
        attempts.append(ctx.attempt)
        if len(attempts) == 1:
            raise PauseListener(0.3, "the bank asks for patience")

    async with bus:
        async with bus.unit_of_work() as uow:
            uow.send(Placed(1))
        opened = await eventually(circuits)
        await eventually(lambda: bus.runtime.counters[Event.HANDLED] == 1)
    assert attempts == [1, 1]
    assert opened == [("handler", "pauses.placed", "the bank asks for patience")]


@pytest.mark.parametrize("named", [{}, {"cls": Placed, "listener": "shop"}, {"listener": "shop", "key": "k"}])
async def test_pause_of_no_target_or_of_two_is_refused(shop: Shop, named: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting, match="one of them"):
        await shop.nodes[0].pause(**named)  # type: ignore[arg-type]


@pytest.mark.parametrize("named", [{"key": ""}, {"listener": " "}])
async def test_a_pause_of_an_empty_name_is_refused(shop: Shop, named: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting, match="is no name"):
        await shop.nodes[0].pause(**named)  # type: ignore[arg-type]


@pytest.mark.parametrize("for_", [0, -1.5, timedelta(0)])
async def test_pause_refuses_a_span_not_above_zero(shop: Shop, for_: float | timedelta) -> None:
    with pytest.raises(InvalidSetting, match="above 0"):
        await shop.nodes[0].pause(Placed, for_=for_)


TOPIC = "rabbitmq://default/topic"
OF_PLACED = "rabbitmq://default/exchange/durable/shop:pauses.placed"


@pytest.mark.parametrize("by", ["the bus", "its handler"])
async def test_address_resolved_by_type_pauses_the_resolved_destination(
    database_url: str, broker: AnyBroker, queue_name: Names, by: str
) -> None:
    exchange = queue_name("topic")
    bus = Bus("shop", database_url, amqp_url=broker.url, amqp_exchange=exchange, **QUICK)
    bus.subscribe(Placed, to=TOPIC)
    resolved = OF_PLACED.replace("/durable/", f"/{exchange}/")

    @bus.handles(Stop)
    async def stop(stop: Stop, ctx: Context) -> None:
        ctx.circuit.open(destination=TOPIC)

    async with bus:
        if by == "the bus":
            await bus.pause(destination=TOPIC)
        else:
            async with bus.unit_of_work() as uow:
                uow.send(Stop())
        await eventually(lambda: bus.statistics().sending[resolved].paused)
        async with bus.unit_of_work() as uow:
            uow.send(Placed(1), to=TOPIC)
        assert await bus.resume(destination=TOPIC)
        await eventually(lambda: not bus.statistics().sending[resolved].paused)


# ---------------------------------------------------------------- durable-agent


@pytest.mark.usefixtures("no_messages")  # it is one destination for each type of the process, and a list shows fifty
def test_pause_command_resolves_an_address_by_type(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_AMQP_URL", "amqp://guest:guest@127.0.0.1:1/")
    name = agent.application(f'bus.subscribe(OrderPlaced, to="{TOPIC}")\n')
    assert agent("pause", f"{name}:bus", "--destination", TOPIC).code == 0
    paused = {row["key"] for row in msgspec.json.decode(agent("circuits", "--json").out)}
    assert any(key.endswith(f":{name}.order-placed") for key in paused)
    assert agent("resume", f"{name}:bus", "--destination", TOPIC).code == 0
    assert msgspec.json.decode(agent("circuits", "--json").out) == []


@pytest.fixture
def agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], database_url: str
) -> Agent:
    monkeypatch.setenv("DURABLE_DATABASE_URL", database_url)
    return Agent(tmp_path, monkeypatch, capsys)


def test_destination_of_an_older_release_is_named_in_its_stored_spelling(agent: Agent, database_url: str) -> None:
    old, new = "tcp://localhost:9", "tcp://127.0.0.1:9"
    assert agent("pause", "--destination", old, "--anyway").code == 0
    with psycopg.connect(database_url) as conn:
        conn.execute("UPDATE durable.circuits SET key = %s WHERE key = %s", (old, new))
    assert agent("pause", "--destination", old).code == 0
    assert [row["key"] for row in msgspec.json.decode(agent("circuits", "--json").out)] == [old]
    assert agent("resume", "--destination", new).code == 1
    assert agent("resume", "--destination", old).code == 0
    assert agent("resume", "--destination", old)[:2] == (1, f"the destination {old} was not paused\n")


@pytest.mark.parametrize(("flag", "kind"), [("--key", "key"), ("--handler", "handler")])
def test_resume_command_ends_a_pause_before_a_park(agent: Agent, database_url: str, flag: str, kind: str) -> None:
    with psycopg.connect(database_url) as conn:
        insert = "INSERT INTO durable.circuits (kind, key, reason, actor, parked) VALUES (%s, 'k', %s, 'node 3', true)"
        conn.execute(insert, [kind, "letter 7"])
    assert agent("pause", flag, "k", "--for", "1h", "--anyway").code == 0
    rows = msgspec.json.decode(agent("circuits", "--json").out)
    assert [(row["state"], row["parked"], row["until"] is None) for row in rows] == [
        ("parked", True, True),
        ("paused", False, False),
    ]
    left = "is not paused any more, and still parked by a dead letter: letter 7; resume it again to go on"
    assert agent("resume", flag, "k") == (0, f"the {kind} k {left}\n", "")
    assert msgspec.json.decode(agent("circuits", "--json").out)[0]["reason"] == "letter 7"
    assert agent("resume", flag, "k") == (0, f"the {kind} k is resumed\n", "")
    assert agent("resume", flag, "k").code == 1


@pytest.mark.parametrize("key", [" ", "\xa0"])
def test_key_of_white_space_is_paused_and_resumed(agent: Agent, key: str) -> None:
    assert agent("pause", "--key", key, "--anyway").code == 0
    assert agent("resume", "--key", key).code == 0
    for flag, name in (("--key", ""), ("--handler", key)):
        assert agent("resume", flag, name).code == 2


def test_pause_and_resume_commands_stop_and_restart_a_handler(agent: Agent) -> None:
    assert agent("pause", "--handler", "a.b", "--for", "60", "--reason", "moving house", "--anyway") == (
        0,
        "the handler a.b is paused for 60 s\n",
        "",
    )
    assert "moving house" in agent("circuits").out
    assert agent("resume", "--handler", "a.b").out == "the handler a.b is resumed\n"
    assert agent("resume", "--handler", "a.b")[:2] == (1, "the handler a.b was not paused\n")
    assert msgspec.json.decode(agent("pause", "--listener", "shop", "--json", "--anyway").out) == {
        "paused": True,
        "kind": "listener",
        "key": "shop",
        "seconds": None,
    }
    assert msgspec.json.decode(agent("resume", "--listener", "shop", "--json").out)["resumed"] is True


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give one of --handler"),
        (["--handler", "a", "--listener", "b"], "give one of --handler"),
        (["--destination", "tcp://127.0.0.1:1", "--listener", "b"], "give one of --handler"),
        (["--handler", "", "--anyway"], "--handler: the text is empty"),
        (["--key", "", "--anyway"], "--key: '' is not a name"),
        (["--handler", "a", "--for", "0"], "--for: 0 is not a duration"),
        (["--handler", "a", "--for", "nan"], "--for: 'nan' is no length of time"),
        (["--handler", "a", "--for", "1 fortnight"], "--for: '1 fortnight' is no length of time"),
    ],
)
def test_pause_command_refuses_contradictory_arguments(agent: Agent, arguments: list[str], reason: str) -> None:
    ended = agent("pause", *arguments)
    assert ended.code == 2
    assert reason in ended.err


def test_endless_pause_is_shown_as_until_resumed(agent: Agent, database_url: str) -> None:
    agent("pause", "--handler", "a.b", "--anyway")
    for until in ("NULL", "'infinity'"):
        with psycopg.connect(database_url, autocommit=True) as conn:
            conn.execute(f"UPDATE durable.circuits SET until = {until}".encode())
        for command in ("circuits", "status"):
            assert "until it is resumed" in agent(command).out
        assert msgspec.json.decode(agent("circuits", "--json").out)[0]["until"] is None


def test_pause_of_an_older_version_tells_its_handler(agent: Agent, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO durable.nodes (service, description, version, capabilities) VALUES ('shop', '', '', %s)",
            [capabilities({"a.b": "a.b.v2", "a.b.v2": "a.b.v2"})],
        )
    assert agent("pause", "--handler", "a.b").out == (
        "handling of a.b is paused until it is resumed; the other versions go on: their handler is a.b.v2\n"
    )
    assert agent("pause", "--handler", "a.b.v2").out == "the handler a.b.v2 is paused until it is resumed\n"
    assert agent("resume", "--handler", "a.b").out.endswith("is resumed; its handler is a.b.v2, which stays paused\n")


@pytest.mark.parametrize("is_paused", [False, True], ids=["parked", "parked and paused"])
def test_resume_under_an_older_name_tells_of_a_pause_alone(agent: Agent, database_url: str, is_paused: bool) -> None:
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO durable.nodes (service, description, version, capabilities) VALUES ('shop', '', '', %s)",
            [capabilities({"booking": "ordering", "ordering": "ordering"})],
        )
        conn.execute(
            "INSERT INTO durable.placements (side, name, ordering_key) VALUES ('incoming', 'booking', 'whole')"
        )
        conn.execute(
            "INSERT INTO durable.circuits (kind, key, reason, actor, parked, ordering_key)"
            " VALUES ('handler', 'ordering', 'refused', 'node 1', true, 'whole')"
        )
    if is_paused:
        agent("pause", "--handler", "ordering")
    left = "; its handler is ordering, which stays paused" if is_paused else ""
    assert agent("resume", "--handler", "booking").out == f"the handler booking is resumed{left}\n"


def test_pause_command_stops_a_destination(agent: Agent) -> None:
    name = agent.application('bus.route(OrderPlaced, to="tcp://127.0.0.1:2302")\n')
    assert agent("pause", f"{name}:bus", "--destination", "tcp://127.0.0.1:2302").out == (
        "the destination tcp://127.0.0.1:2302 is paused until it is resumed\n"
    )
    [circuit] = msgspec.json.decode(agent("circuits", "--json").out)
    assert (circuit["kind"], circuit["state"], circuit["probing"]) == ("destination", "paused", False)
    assert agent("resume", f"{name}:bus", "--destination", "tcp://127.0.0.1:2302").code == 0
    ended = agent("pause", f"{name}:bus", "--destination", "tcp://127.0.0.1:2303")
    assert (ended.code, "tcp://127.0.0.1:2302" in ended.err) == (2, True)
    ended = agent("pause", f"{name}:bus", "--destination", "billing")
    assert (ended.code, "no transport has this scheme" in ended.err) == (2, True)


def test_pause_command_suggests_the_nearest_handled_type(agent: Agent) -> None:
    name = agent.application("@bus.handles(OrderPlaced)\ndef handle(order: OrderPlaced) -> None: ...\n")
    ended = agent("pause", f"{name}:bus", "--handler", f"{name}.order-place")
    assert ended.code == 2
    assert f"did you mean '{name}.order-placed'?" in ended.err


@pytest.mark.parametrize(
    ("option", "typo", "stored"),
    [
        ("handler", "a.order-place", "a.order-placed"),
        ("listener", "sho", "shop"),
        ("destination", "tcp://127.0.0.1:230", "tcp://127.0.0.1:2302"),
        ("key", "order-1x", "order-17"),
    ],
)
def test_pause_command_suggests_the_nearest_stored_name(
    agent: Agent, database_url: str, option: str, typo: str, stored: str
) -> None:
    later = timedelta(hours=1)
    with psycopg.connect(database_url) as conn:
        row = (
            "message_type, source, correlation_id, content_type, headers, body, sent_at, owner_id, epoch, attempts, "
            "execution_time"
        )
        values = "'a.order-placed', 'elsewhere', gen_random_uuid(), 'text/plain', '{}', '', now(), 0, 0, 0, now() + %s"
        conn.execute(
            f"INSERT INTO durable.incoming_envelopes (id, endpoint, partition_key, {row}) "
            f"VALUES (gen_random_uuid(), 'shop', 'order-17', {values})".encode(),
            (later,),
        )
        conn.execute(
            f"INSERT INTO durable.outgoing_envelopes (id, destination, {row}) "
            f"VALUES (gen_random_uuid(), 'tcp://127.0.0.1:2302', {values})".encode(),
            (later,),
        )

    ended = agent("pause", f"--{option}", typo)

    assert ended.code == 2
    assert f"--{option}: no {option} {typo!r} is declared or stored; did you mean {stored!r}?" in ended.err
    assert agent("circuits", "--json").out.strip() == "[]"
    assert agent("pause", f"--{option}", stored, "--for", "1h30m").code == 0
    resumed = agent("resume", f"--{option}", typo)
    assert (resumed.code, f"did you mean {stored!r}?" in resumed.out) == (1, True)
    assert agent("pause", f"--{option}", typo, "--anyway").code == 0


def test_pause_command_takes_names_declared_only_by_the_application(agent: Agent) -> None:
    name = agent.application(
        'bus.listen("tcp://127.0.0.1:2399", name="door")\nbus.subscribe(OrderPlaced, to="tcp://127.0.0.1:2350")\n'
    )

    assert agent("pause", f"{name}:bus", "--listener", "door").code == 0
    assert agent("pause", f"{name}:bus", "--listener", name).code == 0
    assert agent("pause", f"{name}:bus", "--destination", "tcp://127.0.0.1:2350").code == 0
    assert agent("pause", f"{name}:bus", "--destination", "tcp://127.0.0.1:23501").code == 2
