"""The two looks of `status` at nodes that own messages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from durable.cli.health import read_twice
from durable.envelope import NodeId
from durable.settings import Settings
from durable.storage.gauges import Side
from durable.storage.nodes import Node
from durable.storage.status import StatusSnapshot
from tests.support.quiet import quiet_gauges

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
NODE = NodeId(1)
AGES = {"alive": timedelta(0), "dead": timedelta(0), "stale": timedelta(hours=1), "of the future": -timedelta(hours=1)}


def snapshot(state: str, owned: int) -> StatusSnapshot:
    age = AGES[state]
    node = Node(NODE, "orders", "host:1", "0", NOW, NOW - age, age, "{}")
    owners = {Side.OUTGOING: {NODE: owned} if owned else {}, Side.INCOMING: {}}
    changes: dict[str, Any] = {"owned": owners} | ({"locked": set()} if state == "dead" else {})
    return cast(StatusSnapshot, SimpleNamespace(gauges=quiet_gauges(NOW, node, **changes)))


@pytest.mark.parametrize(
    ("looks", "owned", "dormant"),
    [
        (["alive"], 1, []),
        (["dead"], 0, []),
        (["dead", "dead"], 1, [NODE]),
        (["dead", "alive"], 1, []),
        (["stale", "stale"], 1, [NODE]),
        (["stale", "alive"], 1, []),
        (["of the future", "of the future"], 1, [NODE]),
        (["of the future", "alive"], 1, []),
        (["stale", "dead"], 1, [NODE]),
    ],
)
def test_owner_without_life_at_two_looks_is_dormant(looks: list[str], owned: int, dormant: list[NodeId]) -> None:
    snapshots = [snapshot(state, owned) for state in looks]
    read = iter(snapshots)
    settings = Settings(dormant_grace=timedelta(microseconds=1))

    assert read_twice(lambda: next(read), settings) == (snapshots[-1], dormant)
    assert next(read, None) is None
