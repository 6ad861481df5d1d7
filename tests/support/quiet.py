"""The gauges of a schema in which nothing waits."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from durable.envelope import NodeId
from durable.storage.gauges import Gauges, Side
from durable.storage.nodes import Node


def quiet_gauges(now: datetime, node: Node, **changes: Any) -> Gauges:
    """This node is alive, and nothing waits, except for the changes."""
    quiet = Gauges(
        now=now,
        server_started_at=now - timedelta(days=1),
        unowned={Side.OUTGOING: [], Side.INCOMING: []},
        owned={Side.OUTGOING: {}, Side.INCOMING: {}},
        refused={Side.OUTGOING: 0, Side.INCOMING: 0},
        scheduled={Side.OUTGOING: 0, Side.INCOMING: 0},
        overdue=None,
        late_schedules=(),
        dead_letters=0,
        parked=[],
        behind={},
        parked_types={},
        circuits=[],
        open_circuits={},
        nodes=[node],
        locked={NodeId(node.node_id)},
        partitioned_days=8,
        estimates={},
    )
    return quiet._replace(**changes)
