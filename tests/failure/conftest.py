"""Fixtures of the failure tests: a pair of services on databases of their own, over any transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.failure.services import Pair, Way, free_port, pair_of_services


@pytest.fixture
def transport() -> str:
    """What the pair talks over; a test that is about transports is parametrised with others."""
    return "tcp"


@pytest.fixture
def way(transport: str, request: pytest.FixtureRequest) -> Way:
    if transport != "rabbitmq":
        return Way(f"{transport}://127.0.0.1:{free_port()}")
    broker = request.getfixturevalue("broker")
    queue = request.getfixturevalue("queue_name")("billing")
    return Way(f"rabbitmq://default/queue/{queue}", {"AMQP_URL": broker.url}, broker.url, queue)


@pytest.fixture
def pair(make_database: Callable[[str], str], tmp_path: Path, way: Way) -> Iterator[Pair]:
    """Two services, not started yet."""
    with pair_of_services(make_database("orders"), make_database("billing"), tmp_path, way) as services:
        yield services
