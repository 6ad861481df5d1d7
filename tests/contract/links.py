"""The links of durable's own transports, with a proxy where there is a network."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from durable.settings import Settings
from durable.testing.transports import PATIENT, ChaosProxy, Link, Way
from durable.transports.base import Transport
from durable.transports.http.transport import HttpTransport
from durable.transports.memory import MemoryTransport
from durable.transports.rabbitmq.transport import RabbitTransport
from durable.transports.tcp.transport import TcpTransport
from tests.support.tls import Pem

LinkOver = Callable[[str], AbstractAsyncContextManager[Link]]
"""Makes the link of a transport that is given by name."""

PREFETCH = 50


class Wire(Link):
    """A link whose sender and listener are connected through a proxy."""

    proxy: ChaosProxy

    def through(self, proxy: ChaosProxy, send_to: str) -> None:
        self.proxy = proxy
        self.send_to = send_to
        self.way = Way.through(proxy)


class Brokered(Link):
    """A link whose sender and listener each reach the broker through a proxy."""

    before: ChaosProxy
    behind: ChaosProxy


def tcp(settings: Settings) -> Transport:
    return TcpTransport(settings, "billing", 2)


def secured(**own: object) -> Callable[[Settings], Transport]:
    """TCP with these settings besides those of the link."""
    return lambda settings: TcpTransport(settings.model_copy(update=own), "billing", 2)


def http(settings: Settings) -> Transport:
    return HttpTransport(settings, service="billing", messages=dict)


@asynccontextmanager
async def memory_link() -> AsyncIterator[Link]:
    transport, uri = MemoryTransport(PATIENT), "memory://billing"
    async with Link(transport.with_settings, uri) as link:
        link.way = Way(
            cut=lambda: transport.break_(uri),
            silence=lambda: transport.silence(uri),
            restore=lambda: transport.restore(uri),
        )
        yield link


@asynccontextmanager
async def tcp_link(settings: Settings = PATIENT) -> AsyncIterator[Wire]:
    async with Wire(tcp, "tcp://127.0.0.1:0", settings) as link, ChaosProxy(link.listener.address) as proxy:
        link.through(proxy, proxy.uri)
        yield link


@asynccontextmanager
async def tls_link(**own: object) -> AsyncIterator[Wire]:
    """TCP with these settings of TLS, for the sender and the listener alike."""
    async with (
        Wire(secured(**own), "tcp://127.0.0.1:0") as link,
        ChaosProxy(link.listener.address) as proxy,
    ):
        link.through(proxy, proxy.uri)
        yield link


@asynccontextmanager
async def secret_link(pem: Pem) -> AsyncIterator[Wire]:
    """TCP with a certificate at the listener, and a secret that both ends know. Without TLS the proxy, which gives the
    connection other addresses, would be taken for an impostor."""
    secret = {"shared_secret": SecretStr("correct horse battery")}
    sending = secured(tls_ca=pem.ca, **secret)
    listening = secured(tls_certificate=pem.certificate, tls_key=pem.key, **secret)
    async with (
        Wire(sending, "tcp://127.0.0.1:0", listening=listening) as link,
        ChaosProxy(link.listener.address) as proxy,
    ):
        link.through(proxy, f"{proxy.uri}?tls=1")
        yield link


@asynccontextmanager
async def unix_link(settings: Settings = PATIENT) -> AsyncIterator[Wire]:
    with socket_folder() as folder:
        listen_at, send_to = f"unix://{folder}/in", f"unix://{folder}/proxy"
        async with Wire(tcp, listen_at, settings) as link, ChaosProxy(listen_at, at=send_to) as proxy:
            link.through(proxy, send_to)
            yield link


@asynccontextmanager
async def http_link(settings: Settings = PATIENT) -> AsyncIterator[Wire]:
    async with (
        Wire(http, "http://127.0.0.1:0/durable", settings) as link,
        ChaosProxy(link.listener.address.replace("http://", "tcp://")) as proxy,
    ):
        link.through(proxy, f"{proxy.uri.replace('tcp://', 'http://')}/durable")
        yield link


def rabbitmq(url: str) -> Callable[[Settings], Transport]:
    """Of a broker that is reached at this URL."""

    def make(settings: Settings) -> Transport:
        reached = {"amqp_url": SecretStr(url), "amqp_prefetch": PREFETCH}
        return RabbitTransport(settings.model_copy(update=reached), service="billing", messages=dict)

    return make


@asynccontextmanager
async def rabbitmq_link(url: str, queue: str, settings: Settings = PATIENT) -> AsyncIterator[Brokered]:
    """Through this broker, with a proxy before it and another behind it."""
    async with ChaosProxy(url) as before, ChaosProxy(url) as behind:
        sending, listening = rabbitmq(through_proxy(before, url)), rabbitmq(through_proxy(behind, url))
        async with Brokered(sending, f"rabbitmq://default/queue/{queue}", settings, listening=listening) as link:
            link.before, link.behind = before, behind
            link.way, link.listener_way = Way.through(before), Way.through(behind)
            yield link


def through_proxy(proxy: ChaosProxy, url: str) -> str:
    """The URL of a broker, reached through this proxy."""
    netloc = urlsplit(url).netloc
    return url.replace(netloc, f"{netloc.rpartition('@')[0]}@{urlsplit(proxy.uri).netloc}")


@contextmanager
def socket_folder() -> Iterator[Path]:
    """For socket files: their paths are short, and pytest's are not."""
    path = tempfile.mkdtemp(dir="/tmp")
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path)
