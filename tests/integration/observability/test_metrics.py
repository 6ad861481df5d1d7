"""/metrics and /health as a scraper and a probe see them: two services on a real Postgres, over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psycopg
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricsData, NumberDataPoint
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Mount

from durable import Bus, Reject, Retry, message
from durable.errors import InvalidSetting, StorageUnavailable
from durable.node import Node
from durable.telemetry import Event, Subject
from durable.testing import InMemoryBus, eventually
from durable.version import __version__
from tests.support.command import Agent
from tests.support.tables import change

SOON = timedelta(milliseconds=30)
NOBODY = "tcp://127.0.0.1:1"
DOCUMENT = Path(__file__).parents[3] / "docs" / "telemetry.md"


@message("metrics.placed")
class Placed(msgspec.Struct):
    number: int


@message("metrics.lost")
class Lost(msgspec.Struct):
    number: int


class Scrape:
    """What one GET of /metrics has brought."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self._samples[f"durable_{name}", frozenset(labels.items())]

    def labels(self, name: str, label: str) -> set[str]:
        return {sample.labels[label] for sample in self.families[f"durable_{name}"].samples}


class Probe:
    """A client of what one bus serves."""

    def __init__(self, bus: Bus, client: httpx.AsyncClient) -> None:
        self._bus = bus
        self._client = client

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self._client.get(f"{self._bus.runtime.metrics_address}{path}", headers=headers)

    async def scrape(self) -> Scrape:
        answer = await self.get("/metrics")
        assert answer.status_code == 200
        return Scrape(answer.text)


@asynccontextmanager
async def probed(bus: Bus) -> AsyncIterator[Probe]:
    async with bus, httpx.AsyncClient(timeout=60) as client:
        yield Probe(bus, client)


def make_bus(name: str, url: str, **settings: Any) -> Bus:
    return Bus(name, url, metrics_port=0, poll_interval=SOON, **settings)


@pytest.fixture(autouse=True)
def _fresh_and_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are read at each look, however slow this machine is; two tests turn that off."""
    monkeypatch.setattr("durable.observability.monitor._FRESH", 0.0)
    monkeypatch.setattr("durable.observability.monitor._PATIENCE", 60.0)


async def test_messages_sent_received_and_handled_are_counted_on_both_sides(
    make_database: Callable[[str], str],
) -> None:
    here, there = make_bus("shop", make_database("shop")), make_bus("billing", make_database("billing"))
    there.listen("tcp://127.0.0.1:0")
    handled: list[int] = []

    @there.handles(Placed, retry=Retry(immediate=1, delays=[3600]))
    async def place(placed: Placed) -> None:
        handled.append(placed.number)
        if placed.number == 3:
            raise Reject("no such order")
        if placed.number == 4:
            raise ValueError("not yet")

    async with probed(there) as billing:
        assert there.runtime.node is not None
        peer = there.runtime.node.listeners[0].address
        here.route(Placed, to=peer)
        async with probed(here) as shop:
            async with here.unit_of_work():
                for number in range(10):
                    here.send(Placed(number))
            await eventually(lambda: len(handled) == 11, what="ten messages, one of them twice")

            async def sent() -> bool:
                return (await shop.scrape()).value("messages_sent_total", destination=peer) == 10

            await eventually(sent, what="ten deletions")
            sending, receiving = await shop.scrape(), await billing.scrape()

    assert sending.value("send_duration_seconds_count", destination=peer) >= 1
    assert sending.value("messages_send_failed_total", destination=peer) == 0
    assert sending.value("destination_latched", destination=peer) == 0
    assert sending.value("send_waiting_messages", destination=peer) == 0
    assert sending.value("info", service="shop", version=__version__) == 1
    kind = {"message_type": "metrics.placed"}
    assert receiving.value("messages_received_total", endpoint="billing") == 10
    assert receiving.value("messages_handled_total", **kind) == 8
    assert receiving.value("handler_failures_total", **kind) == 3
    assert receiving.value("messages_retried_total", **kind) == 1
    assert receiving.value("messages_dead_lettered_total", **kind) == 1
    assert receiving.value("handler_duration_seconds_count", **kind) == 11
    assert receiving.value("handler_duration_seconds_bucket", le="+Inf", **kind) == 11
    assert receiving.value("dead_letters") == 1
    assert receiving.value("scheduled_messages", side="incoming") == 1
    assert receiving.value("listener_connections_total", listener=peer) == 1
    assert (receiving.value("node_alive"), receiving.value("nodes", state="alive")) == (1, 1)
    assert receiving.value("pool_size", pool="agents") == 4


async def test_latched_destination_and_its_backlog_are_shown(database_url: str) -> None:
    bus = make_bus("shop", database_url, failures_to_latch=1, ping_interval=timedelta(minutes=1))
    bus.route(Placed, to=NOBODY)
    async with probed(bus) as probe:
        async with bus.unit_of_work():
            for number in range(3):
                bus.send(Placed(number))

        async def released() -> bool:
            return (await probe.scrape()).value("outgoing_unowned_messages", destination=NOBODY) == 3

        await eventually(released, what="the rows of a latched destination are nobody's")
        scrape = await probe.scrape()
        assert scrape.value("destination_latched", destination=NOBODY) == 1
        assert scrape.value("destination_latches_total", destination=NOBODY) == 1
        assert scrape.value("messages_send_failed_total", destination=NOBODY) >= 1
        assert scrape.value("circuit_open_seconds", kind="destination", key=NOBODY, parked="false") > 0
        assert 0 < scrape.value("outgoing_oldest_unowned_seconds", destination=NOBODY) < 60
        assert (await probe.get("/health")).json() == {
            "healthy": True, "problems": [], "service": "shop", "node": bus.runtime.node_id
        }  # fmt: skip


async def test_undeclared_destinations_share_one_label(database_url: str) -> None:
    bus = make_bus("shop", database_url, failures_to_latch=1, ping_interval=timedelta(minutes=1))
    bus.route(Placed, to=NOBODY)
    async with probed(bus) as probe:
        async with bus.unit_of_work():
            for port in range(2, 7):
                bus.send(Lost(port), to=f"tcp://127.0.0.1:{port}")

        async def latched() -> bool:
            scrape = await probe.scrape()
            is_there = "other" in scrape.labels("destination_latched", "destination")
            return is_there and scrape.value("destination_latched", destination="other") == 5

        await eventually(latched, what="five destinations under one label")
        await eventually(lambda: _all_released(database_url, 5), what="what was to be sent is nobody's")
        scrape = await probe.scrape()
        for name in ("messages_sent", "send_waiting_messages", "send_duration_seconds", "outgoing_unowned_messages"):
            assert scrape.labels(name, "destination") == {NOBODY, "other"}
        assert scrape.labels("circuit_open_seconds", "key") == {"other"}
        assert scrape.value("outgoing_unowned_messages", destination="other") == 5


def _all_released(url: str, count: int) -> bool:
    with psycopg.connect(url) as conn:
        row = conn.execute("SELECT count(*) FROM durable.outgoing_envelopes WHERE owner_id = 0").fetchone()
    return row == (count,)


async def test_scrapes_in_quick_succession_read_the_tables_once(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("durable.observability.monitor._FRESH", 3600.0)
    bus = make_bus("shop", database_url)
    async with probed(bus) as probe:
        reads = 0
        transaction = bus.runtime.database.transaction

        async def counting(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal reads
            reads += work.__module__ == "durable.storage.gauges"
            return await transaction(work, *args, **kwargs)

        monkeypatch.setattr(bus.runtime.database, "transaction", counting)
        await asyncio.gather(*(probe.get(path) for path in ["/metrics", "/health"] * 5))
        assert reads == 1


async def test_health_is_503_with_its_problems(database_url: str) -> None:
    bus = make_bus("shop", database_url, health_dead_letters=1)
    async with probed(bus) as probe:
        assert (await probe.get("/health")).status_code == 200
        with psycopg.connect(database_url, autocommit=True) as conn:
            conn.execute(
                "INSERT INTO durable.dead_letters (side, address, body, exception_type, reason, fingerprint, node_id)"
                " VALUES ('incoming', 'orders', '', 'ValueError', 'no', 'f', 1)"
            )
        answer = await probe.get("/health")
        assert answer.status_code == 503
        assert answer.json()["problems"] == ["1 dead letter is unresolved: see durable-agent dead-letters list"]
        assert (await probe.scrape()).value("healthy") == 0
        assert (await probe.get("/health/live")).status_code == 204


async def test_process_without_its_database_answers_health_and_metrics(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = make_bus("shop", database_url)
    bus.route(Placed, to=NOBODY)
    async with probed(bus) as probe:

        async def never(*_: Any) -> None:
            await asyncio.sleep(60)

        with monkeypatch.context() as hanging:
            hanging.setattr("durable.observability.monitor._PATIENCE", 0.2)
            hanging.setattr(bus.runtime.database, "transaction", never)
            answer, scrape = await probe.get("/health"), await probe.scrape()
        assert answer.status_code == 503
        assert answer.json()["problems"] == ["the database cannot be read: it did not answer in time"]
        assert (scrape.value("database_up"), scrape.value("healthy")) == (0, 0)
        assert scrape.value("messages_sent_total", destination=NOBODY) == 0
        assert "durable_dead_letters" not in scrape.families
        assert (await probe.scrape()).value("database_up") == 1


async def test_readiness_says_whether_a_message_could_be_stored(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = make_bus("shop", database_url)
    async with probed(bus) as probe:
        assert (await probe.get("/health/ready")).status_code == 204

        async def away() -> None:
            raise StorageUnavailable("no database for now")

        with monkeypatch.context() as lost:
            lost.setattr(bus.runtime.database, "ping", away)
            assert (await probe.get("/health/ready")).status_code == 503
            assert (await probe.get("/health/live")).status_code == 204
        assert (await probe.get("/health/ready")).status_code == 204


@pytest.mark.parametrize("mode", ["full", "send-only"])
async def test_mounted_readiness_follows_the_bus(database_url: str, mode: Any) -> None:
    bus = Bus("web", database_url, mode=mode)
    transport = httpx.ASGITransport(app=Starlette(routes=[Mount("/internal", app=bus.metrics_app())]))
    async with httpx.AsyncClient(transport=transport, base_url="http://web") as client:
        before = await client.get("/internal/health/ready")
        async with bus:
            running = await client.get("/internal/health/ready")
        after = await client.get("/internal/health/ready")
    assert (before.status_code, running.status_code, after.status_code) == (503, 204, 503)


class Unjoinable(Node):
    """A node that never joins the others."""

    async def run(self, stopping: asyncio.Event, started: asyncio.Future[None]) -> None:
        raise StorageUnavailable("no node for now")


async def test_process_without_its_node_is_unhealthy_until_joined_again(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = make_bus("shop", database_url, heartbeat_interval=timedelta(milliseconds=50))
    async with probed(bus) as probe:
        monkeypatch.setattr("durable.runtime.Node", Unjoinable)
        await change(database_url, "DELETE FROM durable.nodes")
        await eventually(lambda: bus.runtime.node_id == 0, within=15, what="the node is lost")
        answer, scrape = await probe.get("/health"), await probe.scrape()
        assert answer.status_code == 503
        assert "this process is no node now: see its log for why it cannot join the nodes" in answer.json()["problems"]
        assert (scrape.value("node_alive"), scrape.value("node_id")) == (0, 0)
        assert (await probe.get("/health/ready")).status_code == 503


async def test_counters_survive_a_node_and_the_loop_is_watched(database_url: str) -> None:
    bus = make_bus("shop", database_url, heartbeat_interval=timedelta(milliseconds=50))

    @bus.handles(Placed)
    async def place(placed: Placed) -> None: ...

    async with probed(bus) as probe:

        async def counted() -> bool:
            return (await probe.scrape()).value("messages_handled_total", message_type="metrics.placed") == 1

        async with bus.unit_of_work():
            bus.send(Placed(1))
        await eventually(counted, what="the message was handled")
        first = bus.runtime.node_id
        await change(database_url, "DELETE FROM durable.nodes")
        await eventually(lambda: bus.runtime.node_id not in (first, 0), within=15, what="another node")

        async def watched() -> bool:
            return (await probe.scrape()).value("event_loop_lag_seconds_count") > 0

        await eventually(watched, what="the loop was measured")
        assert await counted()


async def test_metrics_app_is_mountable_and_shows_other_registered_metrics(database_url: str) -> None:
    bus = Bus("web", database_url, mode="send-only")
    registry = CollectorRegistry()
    Counter("orders_cancelled", "by customers", registry=registry).inc(3)
    app = Starlette(routes=[Mount("/internal", app=bus.metrics_app(registry))])
    transport = httpx.ASGITransport(app=app)
    async with bus, httpx.AsyncClient(transport=transport, base_url="http://web") as client:
        scrape = Scrape((await client.get("/internal/metrics")).text)
        health = await client.get("/internal/health")
    assert scrape.families["orders_cancelled"].samples[0].value == 3
    assert scrape.value("node_alive") == 0
    assert (health.status_code, health.json()["node"]) == (200, None)


async def test_openmetrics_is_served_on_request(database_url: str) -> None:
    async with probed(make_bus("shop", database_url)) as probe:
        answer = await probe.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    assert "durable_healthy 1.0" in answer.text.splitlines()


async def test_every_metric_is_documented_and_every_documented_metric_exists(database_url: str) -> None:
    bus = make_bus("shop", database_url)
    bus.listen("tcp://127.0.0.1:0")
    bus.route(Lost, to=NOBODY)

    @bus.handles(Placed)
    async def place(placed: Placed) -> None: ...

    async with probed(bus) as probe:
        told = {
            f"{name}_total" if family.type == "counter" else name
            for name, family in (await probe.scrape()).families.items()
            if name.startswith("durable_")
        }
    documented = set(re.findall(r"^\| `(durable_[a-z_]+)", DOCUMENT.read_text(), re.MULTILINE))
    assert told - documented == set()
    assert documented - told == {"durable_listener_down"}


class Collected:
    """What one collection of an OpenTelemetry reader has brought."""

    def __init__(self, data: MetricsData | None) -> None:
        self.points = {
            (metric.name, frozenset((point.attributes or {}).items())): point.value
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
            if isinstance(point, NumberDataPoint)
        }
        self.names = {name for name, _ in self.points}

    def value(self, name: str, **labels: str) -> float:
        return self.points[f"durable_{name}", frozenset(labels.items())]


async def test_opentelemetry_has_the_metrics_of_prometheus(database_url: str) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    bus = make_bus("shop", database_url)
    bus.listen("tcp://127.0.0.1:0")
    bus.route(Lost, to=NOBODY)
    bus.meter(provider)

    @bus.handles(Placed)
    async def handle(placed: Placed) -> None:
        if placed.number == 2:
            raise Reject("no")

    assert Collected(reader.get_metrics_data()).names == set()
    async with probed(bus) as probe:
        async with bus.unit_of_work() as uow:
            for number in (1, 2, 3):
                uow.send(Placed(number))
        await eventually(
            lambda: bus.statistics().tallies[Subject.MESSAGE_TYPE]["metrics.placed"].counts.get(Event.HANDLED) == 2
        )

        async def counted() -> Collected:
            return Collected(await asyncio.to_thread(reader.get_metrics_data))

        async def has_all() -> bool:
            await asyncio.sleep(0.6)  # what was seen is shared for half a second
            return (await counted()).value("messages_dead_lettered", message_type="metrics.placed") == 1

        await eventually(has_all, within=20)
        found, scrape = await counted(), await probe.scrape()
        told = {name for name, family in scrape.families.items() if name.startswith("durable_") and family.samples}
        assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in found.names} == told
        assert found.value("messages_handled", message_type="metrics.placed") == 2
        assert found.value("handler_duration_seconds_bucket", message_type="metrics.placed", le="+Inf") == scrape.value(
            "handler_duration_seconds_count", message_type="metrics.placed"
        )
        assert found.value("dead_letters") == 1
        assert Collected(reader.get_metrics_data()).value("node_alive") == 1, "in the event loop"
    await asyncio.sleep(0.6)
    assert Collected(reader.get_metrics_data()).names == set()
    provider.shutdown()


async def test_mounted_app_counts_receptions_across_runs(database_url: str) -> None:
    bus = make_bus("shop", database_url)
    transport = httpx.ASGITransport(bus.asgi(allow_local=True))

    @bus.handles(Placed)
    async def handle(placed: Placed) -> None: ...

    async def post(path: str) -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.post(path, json={"number": 1})).status_code

    async with probed(bus) as probe:
        assert await post("/messages/metrics.placed") == 202
        assert await post("/messages/metrics.unheard-of") == 404
        scrape = await probe.scrape()
        assert scrape.value("listener_envelopes_total", listener="asgi:shop") == 1
        assert scrape.value("listener_refused_total", listener="asgi:shop") == 1
    async with bus:
        assert await post("/messages/metrics.placed") == 202
        assert bus.statistics().listeners["asgi:shop"]["envelopes"] == 2


def test_alerts_and_dashboard_use_only_existing_metrics() -> None:
    text = DOCUMENT.read_text()
    documented = set(re.findall(r"^\| `(durable_[a-z_]+)", text, re.MULTILINE))
    dashboard = DOCUMENT.with_name("grafana.json").read_text()
    assert json.loads(dashboard)["panels"]
    for used in (text.partition("```yaml")[2].partition("```")[0], dashboard):
        names = {re.sub(r"_(bucket|count|sum)$", "", name) for name in re.findall(r"durable_[a-z_]+", used)}
        assert len(names) > 5
        assert names - documented == set()


@pytest.mark.parametrize(
    ("module", "extra", "use"),
    [
        ("prometheus_client", "metrics", lambda bus: bus.metrics_app()),
        ("opentelemetry", "tracing", lambda bus: bus.trace()),
        ("opentelemetry", "tracing", lambda bus: bus.meter()),
    ],
    ids=["metrics", "tracing", "meter"],
)
def test_missing_dependency_is_named_with_its_extra(
    module: str, extra: str, use: Callable[[Bus], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == module or name in (
            "durable.application.tracing",
            "durable.observability.metrics.meters",
            *_ON_PROMETHEUS,
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidSetting, match=rf"needs {module}; run: pip install 'durable-bus\[{extra}\]'"):
        use(Bus("shop", "postgresql://127.0.0.1/shop"))


_ON_PROMETHEUS = ("durable.observability.metrics.server", "durable.observability.metrics.prometheus")


async def test_a_bus_in_memory_has_statistics_and_no_database() -> None:
    bus = Bus("shop", "postgresql://127.0.0.1/shop")
    transport = httpx.ASGITransport(app=Starlette(routes=[Mount("/internal", app=bus.metrics_app())]))
    async with InMemoryBus(bus), httpx.AsyncClient(transport=transport, base_url="http://web") as client:
        scrape = Scrape((await client.get("/internal/metrics")).text)
        assert bus.statistics().service == "shop"
    assert (scrape.value("database_up"), scrape.value("node_alive")) == (0, 0)


async def test_occupied_metrics_port_is_an_invalid_setting(database_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidSetting, match=f"metrics_port: cannot listen on 127.0.0.1 port {port}"):
            async with Bus("shop", database_url, metrics_port=port):
                pass


METRICS_AT = "metrics at %s/metrics, health at %s/health"


def test_a_node_of_the_command_line_serves_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], database_url: str
) -> None:
    agent = Agent(tmp_path, monkeypatch, capsys)
    monkeypatch.setenv("DURABLE_DATABASE_URL", database_url)
    module = agent.application()
    with agent.process("run", f"{module}:bus", "--json", "--metrics-port", "0") as process:
        assert process.stdout is not None
        lines = map(json.loads, iter(process.stdout.readline, b""))
        told: dict[str, str] = {}
        while not told.keys() >= {METRICS_AT, "node %d of %s joined"}:  # until it is a node, it is not healthy
            record = next(lines)
            told[record["event"]] = record["message"]
        address = told[METRICS_AT].split()[2].removesuffix("/metrics,")
        scrape = Scrape(httpx.get(f"{address}/metrics").text)
        assert httpx.get(f"{address}/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")
    assert scrape.families["python_info"].samples[0].value == 1
    assert scrape.labels("info", "service") == {module}
