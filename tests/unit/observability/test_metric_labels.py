"""The values of labels: every declared name is one, and all others share `other`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from durable import Bus, message, upcaster
from durable.envelope import NodeId
from durable.observability.metrics import process, service
from durable.observability.metrics.families import Family, declared
from durable.observability.monitor import Reading
from durable.storage.circuits import CircuitKind, OpenCircuit
from durable.storage.gauges import Side, Unowned
from durable.storage.nodes import Node
from tests.support.quiet import quiet_gauges
from tests.unit.observability.test_metrics import NOTHING

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
STALE = timedelta(seconds=10)
PEER, STRANGER = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"


@message("labels.placed")
class Placed(msgspec.Struct):
    number: int


@message("labels.placed.v2")
class PlacedV2(msgspec.Struct):
    order: int


@upcaster(Placed, to=PlacedV2)
def upcast(old: Placed) -> PlacedV2:
    return PlacedV2(old.number)


@message("labels.billed")
class Billed(msgspec.Struct):
    number: int


async def handle(placed: PlacedV2) -> None: ...


def shop() -> Bus:
    bus = Bus("shop", "postgresql://127.0.0.1:1/shop")
    bus.route(Billed, to=PEER)
    bus.handles(PlacedV2)(handle)
    bus.listen("tcp://127.0.0.1:0", name="east")
    bus.asgi(name="web")
    bus.every("0 3 * * *", PlacedV2(1), name="nightly")
    return bus


def of_service(unowned: dict[Side, list[Unowned]], circuits: list[OpenCircuit]) -> dict[str, Family]:
    node = Node(NodeId(1), "shop", "host:1", "0", NOW, NOW, timedelta(0), "{}")
    reading = Reading(quiet_gauges(NOW, node, unowned=unowned, circuits=circuits), [])
    return {each.name: each for each in service.families(reading, declared(shop().application), STALE)}


WAITING = [
    (Side.OUTGOING, "destination", PEER, PEER),
    (Side.OUTGOING, "destination", STRANGER, "other"),
    (Side.INCOMING, "message_type", "labels.placed.v2", "labels.placed.v2"),
    (Side.INCOMING, "message_type", "labels.placed", "labels.placed"),
    (Side.INCOMING, "message_type", "labels.billed", "other"),
]


@pytest.mark.parametrize(("side", "label", "name", "shown"), WAITING)
def test_messages_wait_under_their_declared_name(side: Side, label: str, name: str, shown: str) -> None:
    waiting = Unowned(name, 3, timedelta(minutes=1))
    found = of_service({each: [waiting] if each is side else [] for each in Side}, [])
    for metric, value in (("unowned_messages", 3), ("oldest_unowned_seconds", 60)):
        samples = {sample.labels[label]: sample.value for sample in found[f"durable_{side}_{metric}"].samples}
        assert {name: each for name, each in samples.items() if each} == {shown: value}


STOPPED = [
    (CircuitKind.DESTINATION, PEER, PEER),
    (CircuitKind.DESTINATION, STRANGER, "other"),
    (CircuitKind.HANDLER, "labels.placed.v2", "labels.placed.v2"),
    (CircuitKind.HANDLER, "labels.placed", "labels.placed"),
    (CircuitKind.HANDLER, "labels.billed", "other"),
    (CircuitKind.LISTENER, "east", "east"),
    (CircuitKind.LISTENER, "web", "web"),
    (CircuitKind.LISTENER, "west", "other"),
    (CircuitKind.SCHEDULE, "nightly", "nightly"),
    (CircuitKind.SCHEDULE, "hourly", "other"),
    (CircuitKind.KEY, "order-7", "other"),
    (CircuitKind.KEY, PEER, "other"),
]


@pytest.mark.parametrize(("kind", "name", "shown"), STOPPED)
def test_circuit_is_shown_under_its_declared_name(kind: CircuitKind, name: str, shown: str) -> None:
    stopped = OpenCircuit(kind, name, "refused", NOW - timedelta(minutes=1), None, "ada", probing=False)
    found = of_service({Side.OUTGOING: [], Side.INCOMING: []}, [stopped])
    labels = {"kind": str(kind), "key": shown, "parked": "false"}
    assert found["durable_circuit_open_seconds"].samples == [(labels, 60.0)]


def test_attempts_are_counted_under_the_type_of_the_handler_alone() -> None:
    families = {each.name: each for each in process.families(NOTHING, declared(shop().application), NOW)}
    kinds = {sample.labels["message_type"] for sample in families["durable_messages_handled"].samples}
    assert kinds == {"labels.placed.v2"}
    endpoints = {sample.labels["endpoint"] for sample in families["durable_messages_received"].samples}
    assert endpoints == {"east", "web"}
