"""Fixtures of the failure tests: a pair of services on databases of their own, over any transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest

from durable.embedded.ports import free_port
from durable.testing.transports import Link
from tests.contract.links import LinkOver, http_link, memory_link, rabbitmq_link, tcp_link, unix_link
from tests.failure.books import close_books
from tests.failure.services import Pair, Way, pair_of_services
from tests.support.servers import AnyBroker, Names


@pytest.fixture(autouse=True)
def closed_books() -> Iterator[None]:
    yield
    close_books()


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
def link_over(broker: AnyBroker, queue_name: Names) -> LinkOver:
    """`async with link_over("tcp") as link`: a listener, and a sender with a way to it that can be cut."""
    links: dict[str, Callable[[], AbstractAsyncContextManager[Link]]] = {
        "memory": memory_link,
        "tcp": tcp_link,
        "unix": unix_link,
        "http": http_link,
        "rabbitmq": partial(rabbitmq_link, broker.url, queue_name("link")),
    }
    return lambda transport: links[transport]()


@pytest.fixture
def pair(make_database: Callable[[str], str], tmp_path: Path, way: Way) -> Iterator[Pair]:
    """Two services, not started yet."""
    with pair_of_services(make_database("orders"), make_database("billing"), tmp_path, way) as services:
        yield services
