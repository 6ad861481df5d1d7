"""HTTP as a transport over TLS, signed: connections that are encrypted break in ways of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from pydantic import SecretStr

from durable.settings import Settings
from durable.testing.transports import ChaosProxy, DirectContract, Link
from durable.transports.base import Transport
from durable.transports.http.transport import HttpTransport
from tests.contract.links import Wire
from tests.support.tls import issue


@pytest.fixture(scope="module")
def https(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Settings], Transport]:
    pem = issue(tmp_path_factory.mktemp("tls"))
    own = {
        "tls_certificate": pem.certificate,
        "tls_key": pem.key,
        "tls_ca": pem.ca,
        "shared_secret": SecretStr("correct horse battery"),
    }
    return lambda settings: HttpTransport(settings.model_copy(update=own), service="billing", messages=dict)


class TestHttps(DirectContract):
    impossible_uris = ("https://", "https://127.0.0.1:99999", "https://127.0.0.1:8001/?query", "https://u@127.0.0.1:1")

    @pytest.fixture
    async def link(self, https: Callable[[Settings], Transport]) -> AsyncIterator[Link]:
        async with (
            Wire(https, "https://127.0.0.1:0/durable") as link,
            ChaosProxy(link.listener.address.replace("https://", "tcp://")) as proxy,
        ):
            link.through(proxy, f"{proxy.uri.replace('tcp://', 'https://')}/durable")
            yield link
