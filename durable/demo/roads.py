"""The road from one service to the other: a transport, what both need for it, and the broker if there is one.

tcp         every punctuality node listens on the same port, and airline nodes connect to it by mutual TLS
http        the same, as plain HTTP
rabbitmq    airline nodes publish to the topic exchange of a private broker; punctuality nodes share a queue there
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path

from durable.embedded.ports import free_port
from durable.embedded.rabbitmq import Broker, find_scripts, rabbitmq
from durable.errors import InvalidSetting, needs


@dataclass(frozen=True, slots=True)
class Road:
    """The URIs of its two ends, and settings for the nodes of both services."""

    transport: str
    sends_to: str
    listens_on: str
    settings: Mapping[str, str] = field(default_factory=dict)
    broker: Broker | None = None
    """None where the services talk to each other."""


@contextmanager
def _direct(transport: str, _folder: Path) -> Iterator[Road]:
    address = f"{transport}://127.0.0.1:{free_port()}"
    yield Road(transport, sends_to=address, listens_on=f"{address}?reuse_port=1")


@contextmanager
def _by_mutual_tls(folder: Path) -> Iterator[Road]:
    from durable.demo import certificates

    with _direct("tcp", folder) as road:
        yield replace(road, settings=certificates.write(folder / "tls"))


@contextmanager
def _through_rabbitmq(folder: Path) -> Iterator[Road]:
    with rabbitmq(folder / "rabbitmq") as broker:
        yield Road(
            "rabbitmq",
            sends_to="rabbitmq://default/topic",
            listens_on="rabbitmq://default/topic/airline",
            settings={"DURABLE_AMQP_URL": broker.url},
            broker=broker,
        )


ROADS: Mapping[str, Callable[[Path], AbstractContextManager[Road]]] = {
    "tcp": _by_mutual_tls,
    "http": partial(_direct, "http"),
    "rabbitmq": _through_rabbitmq,
}


def check(transport: str) -> None:
    """Raise InvalidSetting when there is no such transport, or when something that it needs is not installed."""
    if transport not in ROADS:
        raise InvalidSetting(f"--transport: {transport!r} is none of {', '.join(ROADS)}")
    extra, module = ("demo", "durable.demo.certificates") if transport == "tcp" else (transport, _package(transport))
    with needs(f"--transport {transport}", extra=extra):
        import_module(module)
    if transport == "rabbitmq":
        find_scripts()


def _package(transport: str) -> str:
    return f"durable.transports.{transport}"


def opened(transport: str, folder: Path) -> AbstractContextManager[Road]:
    """The road of this transport; it ends with the block. Its broker keeps its data and its log in the folder."""
    return ROADS[transport](folder)
