"""The way between the services over each transport, with a proxy in each direction, or before the broker.

A secret, where there is one, comes with TLS: without it a proof holds for one pair of addresses, and a proxy between
them is an impostor. The plain half of the runs shows the proxies' small pieces to the readers of the wire.

tcp, http   two nodes of a service listen on one port; the other service is led there by a proxy
rabbitmq    each service has a queue, with one consumer at a time; each reaches the broker by a proxy of its own
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from durable.embedded.ports import free_port
from durable.embedded.rabbitmq import Broker, rabbitmq
from tests.chaos.fleet import SERVICES
from tests.chaos.wires import Wire
from tests.support.tls import issue

SECRET = "the secret of both services"
OTHER = dict(zip(SERVICES, reversed(SERVICES), strict=True))


@dataclass(frozen=True)
class Road:
    """Settings of the nodes of each service, and what can be broken."""

    environments: dict[str, dict[str, str]]
    wires: dict[str, Wire]
    broker: Broker | None = None


@asynccontextmanager
async def road(transport: str, folder: Path, is_secured: bool) -> AsyncIterator[Road]:
    if transport == "rabbitmq":
        async with _through_a_broker(folder) as through:
            yield through
        return
    scheme = "https" if is_secured and transport == "http" else transport
    common = _secured(folder) if is_secured else {}
    ports = {service: free_port() for service in SERVICES}
    wires = {service: Wire(f"{service} peer", f"tcp://127.0.0.1:{ports[OTHER[service]]}") for service in SERVICES}
    async with wires["orders"], wires["billing"]:
        environments = {
            service: {
                "CHAOS_LISTEN": f"{scheme}://127.0.0.1:{ports[service]}?reuse_port=1",
                "CHAOS_SEND_TO": f"{scheme}://127.0.0.1:{wires[service].port}",
                **common,
            }
            for service in SERVICES
        }
        yield Road(environments, {wire.name: wire for wire in wires.values()})


def _secured(folder: Path) -> dict[str, str]:
    """A secret, and files of TLS for both services."""
    pem = issue(folder)
    tls = {f"DURABLE_{name.upper()}": str(path) for name, path in pem.settings.items()}
    return {"DURABLE_SHARED_SECRET": SECRET, **tls}


@asynccontextmanager
async def _through_a_broker(folder: Path) -> AsyncIterator[Road]:
    with rabbitmq(folder / "rabbitmq") as broker:
        wires = {service: Wire(f"{service} broker", f"tcp://127.0.0.1:{broker.port}") for service in SERVICES}
        async with wires["orders"], wires["billing"]:
            environments = {
                service: {
                    "CHAOS_LISTEN": f"rabbitmq://default/queue/{service}?ordered=yes",
                    "CHAOS_SEND_TO": f"rabbitmq://default/queue/{OTHER[service]}",
                    "DURABLE_AMQP_URL": f"amqp://guest:guest@{urlsplit(wires[service].uri).netloc}/",
                }
                for service in SERVICES
            }
            yield Road(environments, {wire.name: wire for wire in wires.values()}, broker)
