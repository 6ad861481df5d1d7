"""`durable-agent topology` and what `doctor` says of RabbitMQ, on a real broker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from durable.embedded import Broker
from tests.support.broker import Foreign, foreign
from tests.support.command import Agent
from tests.support.servers import AnyBroker, Names

T = TypeVar("T")

DECLARED = "durable-agent topology --apply declares it, and so does this service when it starts"
NEVER = 2_147_483_647
QUORUM = {"x-queue-type": "quorum", "x-delivery-limit": NEVER}

HANDLER = """
@bus.handles(OrderPlaced)
async def place(order: OrderPlaced) -> None:
    pass
"""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.fixture
def exchange(broker: AnyBroker, queue_name: Names, monkeypatch: pytest.MonkeyPatch) -> str:
    """The topic exchange of this test; the broker is `default`."""
    name = queue_name("exchange")
    monkeypatch.setenv("DURABLE_AMQP_URL", broker.url)
    monkeypatch.setenv("DURABLE_AMQP_EXCHANGE", name)
    return name


def on(broker: AnyBroker, act: Callable[[Foreign], Awaitable[T]]) -> T:
    """What a foreign client does, from a test that is no coroutine because the command has a loop of its own."""

    async def connect() -> T:
        async with foreign(broker.url) as client:
            return await act(client)

    return asyncio.run(connect())


def topology(agent: Agent, module: str, *options: str, code: int = 0) -> Any:
    ended = agent("topology", f"{module}:bus", "--json", *options)
    assert (ended.code, ended.err) == (code, "")
    return json.loads(ended.out)


def state(document: Any, kind: str) -> dict[str, str]:
    """By name, on the only broker."""
    [broker] = document["brokers"]
    return {thing["name"]: thing["state"] for thing in broker[kind]}


# ---------------------------------------------------------------- topology


def test_missing_topology_is_shown_and_declared_only_with_apply(
    agent: Agent, broker: AnyBroker, exchange: str, queue_name: Names
) -> None:
    module = agent.application(HANDLER + 'bus.listen("rabbitmq://default/topic/shop")')
    queue = f"{module}:{module}.order-placed"
    queue_name.also(queue)

    before = topology(agent, module, code=1)
    still = topology(agent, module, code=1)
    applied = topology(agent, module, "--apply")
    after = topology(agent, module)

    assert before == still
    assert (before["healthy"], state(before, "exchanges"), state(before, "queues")) == (
        False, {exchange: "missing"}, {queue: "missing"}
    )  # fmt: skip
    assert before["problems"] == [
        f"exchange {exchange}: missing; {DECLARED}",
        f"queue {queue}: missing; {DECLARED}",
    ]
    assert after == applied == {
        "healthy": True,
        "problems": [],
        "brokers": [{
            "broker": "default",
            "exchanges": [{
                "name": exchange, "declared": True, "state": "present", "reason": "",
                "message_count": None, "consumer_count": None,
            }],
            "queues": [{
                "name": queue, "declared": True, "state": "present", "reason": "", "arguments": QUORUM,
                "message_count": 0, "consumer_count": 0,
            }],
            "bindings": [{
                "exchange": exchange, "routing_key": f"shop:{module}.order-placed", "queue": queue,
                "state": "declared on apply",
            }],
        }],
    }  # fmt: skip
    on(broker, lambda client: client.publish(f"shop:{module}.order-placed", b"{}", exchange=exchange))
    assert on(broker, lambda client: client.count(queue)) == 1


def test_topology_is_printed_as_tables_with_advice(agent: Agent, exchange: str, queue_name: Names) -> None:
    mine, others = queue_name("mine"), queue_name("others")
    module = agent.application(f"""
bus.listen("rabbitmq://default/queue/{mine}?type=classic&max_length=5")
bus.route(OrderPlaced, to="rabbitmq://default/queue/{others}")
bus.subscribe(OrderShipped, to="rabbitmq://default/topic")
""")

    ended = agent("topology", f"{module}:bus", "--apply")

    arguments = "x-queue-type=classic, x-max-length=5, x-overflow=reject-publish"
    lines = [" ".join(line.split()) for line in ended.out.splitlines()]
    assert ended.code == 1
    assert "broker default" in lines
    assert f"{exchange} this service present" in lines
    assert f"{mine} this service present 0 0 {arguments}" in lines
    assert f"{others} others missing" in lines
    assert f"queue {others}: missing; until another service declares it, messages for it wait" in ended.out


def test_topology_of_others_is_inspected_and_never_declared(
    agent: Agent, broker: AnyBroker, exchange: str, queue_name: Names
) -> None:
    queue = queue_name()
    module = agent.application(f"""
bus.route(OrderPlaced, to="rabbitmq://default/queue/{queue}")
bus.route(OrderShipped, to="rabbitmq://default/exchange/{queue}-events/a")
""")

    for _ in range(2):
        seen = topology(agent, module, "--apply", code=1)
        assert (state(seen, "queues"), state(seen, "exchanges")) == ({queue: "missing"}, {f"{queue}-events": "missing"})

    queue_name.also(f"{queue}-events")
    on(broker, lambda client: client.declare(queue, message_ttl=60_000))
    on(broker, lambda client: client.bind(queue, f"{queue}-events", "a", type="fanout"))
    assert topology(agent, module)["healthy"]


def test_queue_with_other_arguments_is_shown_and_stops_apply(
    agent: Agent, broker: AnyBroker, exchange: str, queue_name: Names
) -> None:
    queue = queue_name()
    on(broker, lambda client: client.declare(queue, type="classic"))
    module = agent.application(f'bus.listen("rabbitmq://default/queue/{queue}")')
    reason = f"queue {queue}: its x-queue-type is classic, and quorum was asked for; write type=classic in its address"

    seen = topology(agent, module, code=1)
    applied = agent("topology", f"{module}:bus", "--apply")

    assert state(seen, "queues") == {queue: "refused"}
    assert reason in seen["problems"][0]
    assert (applied.code, applied.out) == (2, "")
    assert reason in applied.err
    assert on(broker, lambda client: client.exists(queue))


def test_every_broker_is_inspected(
    agent: Agent, broker: AnyBroker, exchange: str, queue_name: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DURABLE_AMQP_BROKERS", json.dumps({"second": broker.url}))
    queue = queue_name()
    module = agent.application(f"""
bus.listen("rabbitmq://default/queue/{queue}")
bus.route(OrderPlaced, to="rabbitmq://second/queue/{queue}")
""")

    seen = topology(agent, module, "--apply")

    assert [(each["broker"], each["queues"][0]["declared"]) for each in seen["brokers"]] == [
        ("default", True), ("second", False)
    ]  # fmt: skip


def test_application_without_rabbitmq_has_no_topology(agent: Agent) -> None:
    module = agent.application('bus.listen("tcp://127.0.0.1:0")')

    assert agent("topology", f"{module}:bus") == (0, "no rabbitmq:// address is declared\n", "")
    assert topology(agent, module) == {"healthy": True, "problems": [], "brokers": []}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('bus.listen("rabbitmq://default/topic")', "say whose messages to listen to"),
        ('bus.listen("rabbitmq://default/topic/shop")', "no message type is handled here, so the address"),
        ('bus.listen("rabbitmq://secnd/queue/a")', "no broker has this name"),
        ('bus.listen("rabbitmq://default/queue/a?typ=quorum")', "unknown option typ; did you mean 'type'"),
        ('bus.listen("rabbitmq://default/queue/a"); bus.listen("rabbitmq://default/queue/a?max_length=1")',
         "it shares the queue a with rabbitmq://default/queue/a"),
    ],
)  # fmt: skip
def test_invalid_address_is_bad_configuration(agent: Agent, exchange: str, source: str, message: str) -> None:
    ended = agent("topology", f"{agent.application(source)}:bus")

    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert message in ended.err


def test_missing_broker_url_is_bad_configuration(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DURABLE_AMQP_URL", raising=False)
    module = agent.application('bus.listen("rabbitmq://default/queue/a")')

    ended = agent("topology", f"{module}:bus")

    assert ended.code == 2
    assert "set DURABLE_AMQP_URL, as in amqps://user:***@host:5671/vhost" in ended.err


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("amqp://guest:tops3cret@127.0.0.1:{port}/", "ACCESS_REFUSED"),
        ("amqp://guest:guest@127.0.0.1:{port}/no-such-vhost", "refuses the virtual host"),
        ("amqp://guest:tops3cret@127.0.0.1:1/", "Connect call failed"),
    ],
    ids=["password", "vhost", "port"],
)
def test_unusable_broker_is_named_with_the_reason_without_its_password(
    agent: Agent, own_broker: Broker, monkeypatch: pytest.MonkeyPatch, url: str, reason: str
) -> None:
    monkeypatch.setenv("DURABLE_AMQP_URL", url.format(port=own_broker.port))
    module = agent.application('bus.listen("rabbitmq://default/queue/a")')

    ended = agent("topology", f"{module}:bus")

    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert ended.err.endswith("; check that the broker default runs, and its URL in the settings\n")
    assert reason in ended.err
    assert "tops3cret" not in ended.err


# ---------------------------------------------------------------- doctor


@pytest.fixture
def database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_DATABASE_URL", database_url)


def checked(agent: Agent, module: str) -> list[tuple[str, str, str]]:
    """What doctor says of the topology: verdict, detail and advice of each check."""
    checks = json.loads(agent("doctor", f"{module}:bus", "--json").out)["checks"]
    return [(each["verdict"], each["detail"], each["advice"]) for each in checks if each["name"] == "topology"]


@pytest.mark.usefixtures("database")
def test_doctor_compares_the_broker_with_the_application(
    agent: Agent, broker: AnyBroker, exchange: str, queue_name: Names
) -> None:
    queue = queue_name()
    module = agent.application(f"""
bus.listen("rabbitmq://default/queue/{queue}")
bus.route(OrderPlaced, to="rabbitmq://default/topic")
""")

    assert checked(agent, module) == [
        ("warn", f"exchange {exchange}: missing", DECLARED),
        ("warn", f"queue {queue}: missing", DECLARED),
    ]
    assert agent("topology", f"{module}:bus", "--apply").code == 0
    assert checked(agent, module) == [("ok", "exchanges and queues on rabbitmq://default exist as declared (2)", "")]
    on(broker, lambda client: client.delete(queue))
    on(broker, lambda client: client.declare(queue, type="classic"))
    [(verdict, detail, advice)] = checked(agent, module)
    assert (verdict, detail) == ("fail", f"queue {queue}: its x-queue-type is classic, and quorum was asked for")
    assert advice.startswith("write type=classic in its address")


@pytest.mark.usefixtures("database")
def test_doctor_names_an_unreachable_broker(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_AMQP_URL", "amqp://guest:guest@127.0.0.1:1/")
    module = agent.application('bus.listen("rabbitmq://default/queue/a")')

    [(verdict, detail, advice)] = checked(agent, module)

    assert (verdict, advice) == ("fail", "check that the broker default runs, and its URL in the settings")
    assert "Connect call failed" in detail


@pytest.mark.usefixtures("database")
def test_doctor_names_an_invalid_address(agent: Agent, exchange: str) -> None:
    module = agent.application('bus.listen("rabbitmq://default/topic/shop")')

    assert checked(agent, module) == [
        ("fail", "rabbitmq://default/topic/shop: no message type is handled here, so the address has no queues",
         "declare handlers"),
    ]  # fmt: skip


@pytest.mark.usefixtures("database")
def test_doctor_omits_topology_when_rabbitmq_is_unused(agent: Agent) -> None:
    assert checked(agent, agent.application()) == []
