"""TLS 1.3 over TCP: each end knows the other by its certificate, or by a proof of the secret; strangers get nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from durable.errors import InvalidSetting, TransportError
from durable.outcomes import STORED
from durable.setting_types import Peer
from durable.settings import load_settings
from durable.testing import eventually
from durable.testing.transports import MemoryReceiver, envelopes
from durable.transports.frames import Frame, Hello, Ping
from durable.transports.tcp.conversation import MAX_PINGS
from durable.transports.tcp.transport import TcpListener, TcpTransport
from durable.transports.wire import MAGIC, encode
from tests.support.tls import Authority, Pem

PATIENT = load_settings(
    connect_timeout=timedelta(seconds=10), send_timeout=timedelta(seconds=10), drain_timeout=timedelta(seconds=5)
)
SECRET: dict[str, Any] = {"shared_secret": SecretStr("correct horse battery")}
OTHER_SECRET: dict[str, Any] = {"shared_secret": SecretStr("incorrect horse battery")}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def billing(authority: Authority) -> Pem:
    return authority.issue("127.0.0.2")


@pytest.fixture(scope="module")
def orders(authority: Authority) -> Pem:
    return authority.issue("127.0.0.3")


def transport(**own: Any) -> TcpTransport:
    return TcpTransport(PATIENT.model_copy(update=own), "orders", 1)


class Serving:
    def __init__(self, listener: TcpListener) -> None:
        self.listener = listener
        self.receiver = MemoryReceiver()

    async def dropped(self, count: int = 1) -> None:
        await eventually(lambda: self.listener.statistics()["dropped"] >= count)

    async def stores_nothing(self) -> None:
        """Wait until the listener has dropped the only connection."""
        await self.dropped()
        assert not self.receiver.stored


@asynccontextmanager
async def serving(uri: str = "tcp://127.0.0.2:0", **own: Any) -> AsyncIterator[Serving]:
    served = Serving(TcpTransport(PATIENT.model_copy(update=own), "billing", 2).listener(uri, "billing-in"))
    await served.listener.serve(served.receiver)
    try:
        yield served
    finally:
        await served.listener.close()


async def sent(to: str, **own: Any) -> None:
    async with transport(**own).sender(to) as sender:
        assert await sender.send(envelopes(3)) == [STORED] * 3


async def refused(to: str, match: str, **own: Any) -> None:
    async with transport(**own).sender(to) as sender:
        with pytest.raises(TransportError, match=match):
            await sender.send(envelopes(1))


class TestMutual:
    async def test_peers_with_certificates_of_one_authority_talk(
        self, billing: Pem, orders: Pem, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with serving(**billing.settings) as served:
            await sent(served.listener.address, **orders.settings)
            assert len(served.receiver.stored) == 3
        assert not caplog.records

    async def test_a_client_with_an_older_version_of_tls_is_refused(self, billing: Pem, orders: Pem) -> None:
        older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        older.load_verify_locations(cafile=orders.ca)
        older.load_cert_chain(orders.certificate, orders.key)
        older.maximum_version = ssl.TLSVersion.TLSv1_2
        async with serving(**billing.settings) as served:
            port = int(served.listener.address.rpartition(":")[2])
            with pytest.raises(OSError, match=r"(?i)ssl|reset|^$"):
                await asyncio.open_connection("127.0.0.2", port, ssl=older)
            await served.stores_nothing()

    async def test_a_client_without_a_certificate_is_refused(self, billing: Pem) -> None:
        async with serving(**billing.settings) as served:
            await refused(f"{served.listener.address}?tls=1", "(?i)certificate|closed|reset", tls_ca=billing.ca)
            await served.stores_nothing()

    async def test_a_client_with_a_certificate_of_another_authority_is_refused(
        self, billing: Pem, stranger: Authority
    ) -> None:
        theirs = stranger.issue("127.0.0.3")
        own = theirs.settings | {"tls_ca": billing.ca}
        async with serving(**billing.settings) as served:
            await refused(served.listener.address, "(?i)ca|closed|reset", **own)
            await served.stores_nothing()

    async def test_a_client_with_an_expired_certificate_is_refused(
        self, billing: Pem, authority: Authority, caplog: pytest.LogCaptureFixture
    ) -> None:
        expired = authority.issue("127.0.0.3", into="expired", expired=True)
        async with serving(**billing.settings) as served:
            await refused(served.listener.address, "(?i)expired|closed|reset", **expired.settings)
            await served.stores_nothing()
        assert "certificate has expired" in caplog.text

    async def test_client_with_an_unlisted_name_is_refused(
        self, billing: Pem, orders: Pem, authority: Authority, caplog: pytest.LogCaptureFixture
    ) -> None:
        mallory = authority.issue("mallory.internal")
        async with serving(**billing.settings, peers={"orders": Peer(certificates=("127.0.0.3",))}) as served:
            await sent(served.listener.address, **orders.settings)
            await refused(served.listener.address, "(?i)closed|reset", **mallory.settings)
            assert len(served.receiver.stored) == 3
        assert "certificate is for mallory.internal, none of peers" in caplog.text

    async def test_a_proof_of_the_secret_does_not_replace_the_certificate(self, billing: Pem) -> None:
        async with serving(**billing.settings, **SECRET) as served:
            await refused(
                f"{served.listener.address}?tls=1", "(?i)certificate|closed|reset", tls_ca=billing.ca, **SECRET
            )
            await served.stores_nothing()

    async def test_a_secret_of_one_end_is_not_needed_by_the_other(self, billing: Pem, orders: Pem) -> None:
        async with serving(**billing.settings, **SECRET) as served:
            await sent(served.listener.address, **orders.settings)
        async with serving(**billing.settings) as served:
            await sent(served.listener.address, **orders.settings, **SECRET)


class TestImpostors:
    """Who listens in the place of a peer."""

    async def test_a_listener_with_a_certificate_of_another_authority_is_not_believed(
        self, orders: Pem, stranger: Authority
    ) -> None:
        theirs = stranger.issue("127.0.0.2")
        async with serving(**theirs.settings) as served:
            await refused(
                served.listener.address, "the peer's certificate is refused: .*self.signed|unable", **orders.settings
            )
            await served.stores_nothing()

    async def test_a_listener_with_the_certificate_of_another_name_is_not_believed(
        self, orders: Pem, authority: Authority
    ) -> None:
        other = authority.issue("127.0.0.9")
        async with serving(**other.settings) as served:
            await refused(served.listener.address, "is refused: IP address mismatch", **orders.settings)
            await served.stores_nothing()

    async def test_a_listener_with_an_expired_certificate_is_not_believed(
        self, orders: Pem, authority: Authority
    ) -> None:
        expired = authority.issue("127.0.0.2", into="expired listener", expired=True)
        async with serving(**expired.settings) as served:
            await refused(served.listener.address, "is refused: certificate has expired", **orders.settings)
            await served.stores_nothing()

    async def test_a_listener_without_tls_is_not_believed(self, orders: Pem, caplog: pytest.LogCaptureFixture) -> None:
        async with serving("tcp://127.0.0.2:0") as served:
            await refused(served.listener.address, "(?i)tls|closed|reset", **orders.settings)
            await served.stores_nothing()
        assert "the peer speaks TLS, and this connection is not encrypted" in caplog.text

    @pytest.mark.parametrize("encrypted", [False, True])
    async def test_listener_without_the_secret_is_not_believed(self, encrypted: bool, billing: Pem) -> None:
        own: dict[str, Any] = {"tls_certificate": billing.certificate, "tls_key": billing.key} if encrypted else {}
        trust: dict[str, Any] = {"tls_ca": billing.ca} if encrypted else {}
        async with serving(**own, **OTHER_SECRET) as served:
            await refused(_tls(served, encrypted), "refused: a secret that is known here", **trust, **SECRET)
            await served.stores_nothing()

    async def test_a_listener_without_a_secret_is_not_believed(self) -> None:
        async with serving() as served:
            await refused(served.listener.address, "did not prove that it knows the secret", **SECRET)
            assert not served.receiver.stored


class TestOneSided:
    """The listener has a certificate, and the client the secret."""

    @pytest.fixture
    async def served(self, billing: Pem) -> AsyncIterator[Serving]:
        async with serving(tls_certificate=billing.certificate, tls_key=billing.key, **SECRET) as served:
            yield served

    async def test_client_with_the_secret_sends(self, served: Serving, billing: Pem) -> None:
        await sent(_tls(served), tls_ca=billing.ca, **SECRET)

    @pytest.mark.parametrize("own", [{}, OTHER_SECRET], ids=["no secret", "another secret"])
    async def test_client_without_the_secret_is_refused(
        self, served: Serving, billing: Pem, own: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        await refused(_tls(served), "refused: a secret that is known here must be proven", tls_ca=billing.ca, **own)
        await served.stores_nothing()
        assert "must be proven" in caplog.text

    async def test_both_secrets_are_valid_while_one_replaces_the_other(self, billing: Pem) -> None:
        both: dict[str, Any] = {"previous_shared_secret": SECRET["shared_secret"], **OTHER_SECRET}
        async with serving(tls_certificate=billing.certificate, tls_key=billing.key, **both) as served:
            await sent(_tls(served), tls_ca=billing.ca, **SECRET)
            await sent(_tls(served), tls_ca=billing.ca, **OTHER_SECRET)


class TestPlaintext:
    async def test_a_client_without_tls_is_refused_on_a_tls_port(
        self, billing: Pem, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with serving(**billing.settings) as served:
            await refused(f"{served.listener.address}?tls=0", "(?i)tls|closed|reset")
            await served.stores_nothing()
            assert "the peer does not speak TLS 1.3 here" in caplog.text

    async def test_a_silent_client_counts_as_a_connection_and_is_dropped_in_time(self, billing: Pem) -> None:
        own = {**billing.settings, "connect_timeout": timedelta(seconds=0.3), "tcp_connections": 2}
        async with serving(**own) as served:
            port = int(served.listener.address.rpartition(":")[2])
            silent = [await asyncio.open_connection("127.0.0.2", port) for _ in range(3)]
            async with asyncio.timeout(20):
                for reader, _ in silent:
                    with contextlib.suppress(OSError):
                        await reader.read()
            await served.dropped(3)
            for _, writer in silent:
                writer.close()


class TestViolations:
    @pytest.mark.parametrize("leaves", [False, True], ids=["dropped", "leaving at once"])
    async def test_ended_connection_takes_no_writes(
        self, billing: Pem, orders: Pem, leaves: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusted.load_verify_locations(cafile=orders.ca)
        trusted.load_cert_chain(orders.certificate, orders.key)
        pings = b"".join(encode(Frame(Ping(), channel)) for channel in range(1, MAX_PINGS + (not leaves) + 1))
        async with serving(**billing.settings) as served:
            port = int(served.listener.address.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.2", port, ssl=trusted)
            writer.write(MAGIC + encode(Frame(Hello([1], "orders", 1, 1 << 20))) + pings)
            if leaves:
                writer.close()
            with contextlib.suppress(OSError):
                while await reader.read(1 << 16):
                    pass
            if not leaves:
                await served.dropped()
            writer.transport.abort()
        assert not [record for record in caplog.records if record.name == "asyncio"]


class TestReload:
    async def test_a_renewed_certificate_is_shown_to_the_next_connection(
        self, authority: Authority, orders: Pem
    ) -> None:
        pem = authority.issue("127.0.0.2", into="renewed", expired=True)
        async with serving(**pem.settings) as served:
            await refused(served.listener.address, "certificate has expired", **orders.settings)
            authority.issue("127.0.0.2", into="renewed")
            await sent(served.listener.address, **orders.settings)

    async def test_a_renewed_certificate_of_a_sender_is_shown_on_its_next_connection(
        self, authority: Authority, billing: Pem
    ) -> None:
        pem = authority.issue("127.0.0.3", into="sender", expired=True)
        async with (
            serving(**billing.settings) as served,
            transport(**pem.settings).sender(served.listener.address) as sender,
        ):
            with pytest.raises(TransportError):
                await sender.send(envelopes(1))
            authority.issue("127.0.0.3", into="sender")
            assert await sender.send(envelopes(1)) == [STORED]

    async def test_removed_authority_is_no_longer_trusted(
        self, tmp_path: Path, authority: Authority, stranger: Authority, billing: Pem, orders: Pem
    ) -> None:
        trusted = tmp_path / "ca.pem"
        trusted.write_bytes(authority.pem.read_bytes())
        async with serving(**{**billing.settings, "tls_ca": trusted}) as served:
            await sent(served.listener.address, **orders.settings)
            trusted.write_bytes(stranger.pem.read_bytes())
            await refused(served.listener.address, "(?i)ca|closed|reset", **orders.settings)

    async def test_mismatched_files_leave_the_former_ones_in_use(
        self, authority: Authority, orders: Pem, caplog: pytest.LogCaptureFixture
    ) -> None:
        pem = authority.issue("127.0.0.2", into="halfway")
        async with serving(**pem.settings) as served:
            pem.certificate.write_bytes(orders.certificate.read_bytes())  # the key is still the former one
            for _ in range(3):
                await sent(served.listener.address, **orders.settings)
            warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
            assert ["cannot be used" in record.message for record in warnings] == [True]
            os.unlink(pem.certificate)
            await sent(served.listener.address, **orders.settings)


class TestWiring:
    @pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "[::]", "billing.internal"])
    def test_an_address_beyond_loopback_is_never_plain(self, host: str) -> None:
        with pytest.raises(InvalidSetting, match="must be encrypted; leave out tls=0"):
            transport().check(f"tcp://{host}:2301?tls=0")

    @pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "[::]"])
    def test_a_listener_beyond_loopback_needs_a_certificate(self, host: str) -> None:
        with pytest.raises(InvalidSetting, match="needs a certificate; set tls_certificate and tls_key"):
            transport().listener(f"tcp://{host}:2301", "in")

    def test_a_listener_beyond_loopback_knows_its_peers(self, billing: Pem) -> None:
        own = {"tls_certificate": billing.certificate, "tls_key": billing.key}
        with pytest.raises(InvalidSetting, match="peers must show who they are; set tls_ca"):
            transport(**own).listener("tcp://0.0.0.0:2301", "in")
        transport(**own, tls_ca=billing.ca).listener("tcp://0.0.0.0:2301", "in")
        transport(**own, **SECRET).listener("tcp://0.0.0.0:2301", "in")

    def test_names_of_peers_need_their_certificates(self, billing: Pem) -> None:
        with pytest.raises(InvalidSetting, match=r"peers: .* demands no certificates"):
            transport(peers={"orders": Peer(certificates=("orders",))}).listener("tcp://127.0.0.1:2301", "in")

    @pytest.mark.parametrize("name", ["tls_ca", "tls_certificate", "tls_key"])
    def test_unusable_file_is_named(self, billing: Pem, tmp_path: Path, name: str) -> None:
        for content in (None, b"", b"-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"):
            broken = tmp_path / "broken.pem"
            if content is not None:
                broken.write_bytes(content)
            with pytest.raises(InvalidSetting, match=f"{name}.* cannot be used"):
                transport(**{**billing.settings, name: broken}).check("tcp://10.0.0.7:2301")

    def test_key_with_a_passphrase_is_refused_without_a_prompt(self, billing: Pem, tmp_path: Path) -> None:
        from cryptography.hazmat.primitives import serialization as pem

        key = pem.load_pem_private_key(billing.key.read_bytes(), None)
        locked = tmp_path / "locked.pem"
        locked.write_bytes(
            key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"secret"))
        )
        with pytest.raises(InvalidSetting, match="tls_key: the key has a passphrase"):
            transport(**{**billing.settings, "tls_key": locked}).check("tcp://10.0.0.7:2301")

    def test_a_listener_is_no_name(self, billing: Pem) -> None:
        with pytest.raises(InvalidSetting, match="listen on an address of this machine"):
            transport(**billing.settings).listener("tcp://billing.internal:2301", "in")


def _tls(served: Serving, encrypted: bool = True) -> str:
    return f"{served.listener.address}?tls=1" if encrypted else served.listener.address
