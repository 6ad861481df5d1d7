"""Steps of the databases' clocks, while nodes die and stand still: others take over as fast as without the steps."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.simulation.faults import Fault
from tests.simulation.world import World

_HOUR = 3_600.0
_LOOK_AT = 29.5
"""A moment before all faults end: nodes that were lost in the first seconds are struck off."""


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("error", "lasts"), [(-_HOUR, 60.0), (_HOUR, 0.0)], ids=["set back", "set forward"])
def test_dead_and_frozen_nodes_are_replaced_when_the_databases_clock_is_set(
    seed: int, error: float, lasts: float
) -> None:
    kill, freeze = Fault("kill", 2, "a0", 0.0, 20), Fault("freeze", 2, "b1", 60.0, 21)
    clocks = [Fault("clock", 4, service, lasts, error) for service in "ab"]
    world = World(seed, [kill, freeze, *clocks])
    nodes: list[tuple[int, int]] = []
    newest: list[int] = []

    def look() -> None:
        for server in world.servers.values():
            rows = server.store.tables["nodes"].rows
            beating = [row for row in rows.values() if server.now() - row.heartbeat_at < timedelta(seconds=9)]
            nodes.append((len(rows), len(beating)))
            newest.append(max(row.node_id for row in rows.values()))

    world.loop.call_later(_LOOK_AT, look, context=world.outside)
    outcome = world.run()

    assert outcome.violations == []
    assert nodes == [(2, 2), (1, 1)]
    assert newest[0] == 3, "only the process that was killed has another node"
    assert newest[1] in (1, 2)
