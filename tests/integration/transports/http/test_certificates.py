"""Certificates of https:// that change while both ends run: the next connection is made with the new ones."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from durable.errors import ConnectionFailed, InvalidSetting, TransportError
from durable.outcomes import STORED
from durable.settings import load_settings
from durable.testing.transports import MemoryReceiver, envelopes
from durable.transports.base import Sender
from durable.transports.http.transport import HttpTransport
from durable.transports.tls import names_in
from tests.support.tls import Authority, Pem


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"))


def transport(**own: Any) -> HttpTransport:
    return HttpTransport(load_settings(**own), service="billing", messages=dict)


@asynccontextmanager
async def listening(pem: Pem, **own: Any) -> AsyncIterator[str]:
    listener = transport(tls_certificate=pem.certificate, tls_key=pem.key, **own).listener("https://127.0.0.1:0", "in")
    await listener.serve(MemoryReceiver())
    try:
        yield listener.address
    finally:
        await listener.close()


async def sent(to: str, trusted: Path) -> None:
    async with transport(tls_ca=trusted).sender(to) as sender:
        await stored(sender)


async def stored(sender: Sender) -> None:
    assert await sender.send(envelopes(2)) == [STORED] * 2


async def test_renewed_certificate_of_a_listener_is_shown_to_the_next_connection(authority: Authority) -> None:
    pem = authority.issue("127.0.0.1", into="renewed", expired=True)
    async with listening(pem) as uri:
        with pytest.raises(ConnectionFailed, match="certificate has expired"):
            await sent(uri, authority.pem)
        authority.issue("127.0.0.1", into="renewed")
        await sent(uri, authority.pem)


async def test_halfway_renewed_files_of_a_listener_leave_the_former_ones_in_use(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pem = authority.issue("127.0.0.1", into="halfway")
    other = authority.issue("127.0.0.9")
    async with listening(pem) as uri:
        pem.certificate.write_bytes(other.certificate.read_bytes())  # the key is still the former one
        await sent(uri, authority.pem)
        await sent(uri, authority.pem)
    assert caplog.text.count("the changed TLS files cannot be used") == 1


async def test_changed_authorities_hold_for_the_next_connection_of_a_sender(
    tmp_path: Path, authority: Authority, stranger: Authority
) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(stranger.pem.read_bytes())
    async with listening(authority.issue("127.0.0.1")) as uri, transport(tls_ca=trusted).sender(uri) as sender:
        with pytest.raises(ConnectionFailed, match="certificate verify failed"):
            await stored(sender)
        trusted.write_bytes(authority.pem.read_bytes())
        await stored(sender)
        trusted.write_bytes(stranger.pem.read_bytes())
        with pytest.raises(ConnectionFailed, match="certificate verify failed"):
            await stored(sender)


async def test_request_under_way_is_finished_with_the_former_certificates(
    tmp_path: Path, authority: Authority, stranger: Authority
) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.pem.read_bytes())
    receiver = MemoryReceiver()
    pem = authority.issue("127.0.0.1")
    listener = transport(tls_certificate=pem.certificate, tls_key=pem.key).listener("https://127.0.0.1:0", "in")
    await listener.serve(receiver)
    async with transport(tls_ca=trusted).sender(listener.address) as sender, asyncio.TaskGroup() as tasks:
        receiver.hold()
        under_way = tasks.create_task(stored(sender))
        await receiver.arrived(1)
        trusted.write_bytes(stranger.pem.read_bytes())
        with pytest.raises(TransportError, match="certificate verify failed"):
            await sender.ping()
        receiver.release()
        await under_way
    await listener.close()


async def test_sender_shows_its_new_certificate_when_the_file_changes(
    authority: Authority,
) -> None:
    """As a proxy does that stands before a listener. It answers nothing."""
    seen: list[list[str]] = []

    async def look(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(names_in(writer.get_extra_info("ssl_object").getpeercert()))
        writer.close()

    pem = authority.issue("127.0.0.1")
    demanding = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=pem.ca)
    demanding.load_cert_chain(pem.certificate, pem.key)
    demanding.verify_mode = ssl.CERT_REQUIRED
    server = await asyncio.start_server(look, "127.0.0.1", 0, ssl=demanding)
    uri = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    own = authority.issue("orders.internal", into="orders")
    async with server, transport(**own.settings).sender(uri) as sender:
        for name in ("orders.internal", "orders-2.internal"):
            authority.issue(name, into="orders")
            with pytest.raises(TransportError):
                await sender.ping()
            assert seen[-1] == [name]


def test_key_with_a_passphrase_is_refused_without_a_prompt(authority: Authority, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as pem

    own = authority.issue("127.0.0.1")
    key, locked = pem.load_pem_private_key(own.key.read_bytes(), None), tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"secret"))
    )
    with pytest.raises(InvalidSetting, match="tls_key: the key has a passphrase"):
        transport(tls_certificate=own.certificate, tls_key=locked).listener("https://127.0.0.1:0", "in")
