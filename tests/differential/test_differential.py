"""Random workloads come to the same in memory and in every real world: see the package."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from durable.embedded import Embedded
from tests.differential.hunting import WAYS, Worlds, compare, leaving_at_once, report
from tests.differential.workload import drawn
from tests.support.servers import AnyBroker, older_servers

EXAMPLES = 3
"""Workloads for each world here; `make differential` runs as many as are wanted."""


@pytest.fixture(scope="module")
def worlds(servers: Callable[[int], Embedded], request: pytest.FixtureRequest) -> Iterator[Worlds]:
    def amqp_url() -> str:
        broker: AnyBroker = request.getfixturevalue("broker")
        return broker.url

    made = Worlds(servers, amqp_url)
    with leaving_at_once():
        yield made
    made.close()


@pytest.mark.parametrize("world", [*WAYS, *(f"postgres {version}" for version in older_servers())])
async def test_workloads_come_to_the_same_as_in_memory(
    worlds: Worlds, world: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "durable")
    make = worlds.maker(world)
    first = 1_000 * [*WAYS, "postgres"].index("postgres" if world.startswith("postgres") else world)
    for seed in range(first, first + EXAMPLES):
        workload = drawn(seed)
        if lines := await compare(workload, make):
            pytest.fail(await report(workload, make, lines))
