"""Attacks on the identity of TCP peers: whose certificate or secret it is decides what a running node believes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from durable import Bus, message
from durable.embedded import Embedded
from durable.embedded.ports import free_port
from durable.envelope import Envelope
from durable.errors import InvalidSetting, PauseListener, TransportError
from durable.outcomes import BUSY, DUPLICATE, STORED, Outcome, Rejected
from durable.settings import load_settings
from durable.testing import eventually
from durable.transports.tcp.transport import TcpTransport
from tests.support.receivers import MemoryReceiver, envelope
from tests.support.tables import Tables, shared_tables
from tests.support.tls import Authority

SECRET, OTHER = "correct horse battery", "staple staple staple"
QUICK: dict[str, Any] = {
    "poll_interval": timedelta(milliseconds=30),
    "ping_interval": timedelta(milliseconds=50),
    "failures_to_latch": 2,
}


@message("tcp.identity.placed")
class Placed(msgspec.Struct):
    number: int


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def billing(database: Tables) -> Tables:
    database.clear()
    return database


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def listening(
    tables: Tables, uri: str = "", handle: Callable[[Placed], None] = lambda _: None, **own: Any
) -> AsyncIterator[str]:
    """A node of billing, and the address that its listener has."""
    uri = uri or f"tcp://127.0.0.1:{free_port()}"
    bus = Bus("billing", tables.url, **QUICK, **own)
    bus.listen(uri)

    @bus.handles(Placed)
    async def bill(placed: Placed) -> None:
        handle(placed)

    async with bus:
        yield uri


async def sent(uri: str, *batch: Envelope, service: str = "orders", **own: Any) -> list[Outcome]:
    async with TcpTransport(load_settings(**own), service, 1).sender(uri) as sender:
        return await sender.send(batch)


def placed(number: int = 17, **changed: Any) -> Envelope:
    return replace(envelope("tcp.identity.placed", body=b'{"number":%d}' % number), **changed)


def billing_at(uri: str, secrets: dict[str, str] | None = None) -> dict[str, Any]:
    return {"billing": {"secrets": secrets or {"1": SECRET}, "at": [uri]}}


Prove = Callable[[Authority, str], tuple[dict[str, Any], dict[str, dict[str, Any]]]]
"""Makes the settings of the listener at an address, and of each of its peers."""


def by_certificate(authority: Authority, uri: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    names = ("orders", "mallory")
    return authority.issue("127.0.0.1").settings, {name: authority.issue(name).settings for name in names}


def by_listed_certificate(authority: Authority, uri: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    known = {"orders": {"certificates": ["orders-7.internal"]}, "mallory": {"certificates": ["mallory.internal"]}}
    peers = {"orders": "orders-7.internal", "mallory": "mallory.internal"}
    own = authority.issue("127.0.0.1").settings | {"peers": known}
    return own, {name: authority.issue(host).settings for name, host in peers.items()}


def by_secret(authority: Authority, uri: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    secrets = {"orders": SECRET, "mallory": OTHER}
    peers = {name: {"peers": billing_at(uri, {"1": secret})} for name, secret in secrets.items()}
    return {"peers": secrets}, peers


@pytest.mark.parametrize("prove", [by_certificate, by_listed_certificate, by_secret], ids=lambda each: each.__name__)
async def test_ids_of_peers_are_their_own(billing: Tables, authority: Authority, prove: Prove) -> None:
    """Knowing the id of another's message is not enough to take it away, also not under the other's name."""
    handled: list[int] = []
    uri = f"tcp://127.0.0.1:{free_port()}"
    own, peers = prove(authority, uri)
    async with listening(billing, uri, lambda each: handled.append(each.number), **own):
        real = placed(17)
        taken = replace(real, body=b'{"number":666}', execution_time=datetime.now(UTC) + timedelta(days=5))
        assert await sent(uri, taken, service="mallory", **peers["mallory"]) == [STORED]
        for expected in (STORED, DUPLICATE):
            assert await sent(uri, real, service="orders", **peers["orders"]) == [expected]
        await eventually(lambda: handled == [17], within=20, what="the handling")
        assert billing.count("dead_letters") == 0
        known = set(billing.rows("SELECT endpoint FROM durable.received_ids"))
        assert known == {"billing<-orders", "billing<-mallory"}


async def test_certificate_names_the_peer_before_its_own_word(billing: Tables, authority: Authority) -> None:
    async with listening(billing, **authority.issue("127.0.0.1").settings) as uri:
        await sent(uri, placed(), service="orders", **authority.issue("mallory").settings)
        assert billing.rows("SELECT endpoint FROM durable.received_ids") == ["billing<-mallory"]


async def test_nodes_with_certificates_of_their_own_are_one_peer(billing: Tables, authority: Authority) -> None:
    """A message whose answer was lost is sent again by another node of its service."""
    hosts = [f"orders-{number}.internal" for number in (1, 2)]
    own: dict[str, Any] = {"peers": {"orders": {"certificates": hosts}}, **authority.issue("127.0.0.1").settings}
    async with listening(billing, **own) as uri:
        batch = placed()
        outcomes = [await sent(uri, batch, **authority.issue(host).settings) for host in hosts]
        assert outcomes == [[STORED], [DUPLICATE]]


FORGED: dict[str, tuple[str, dict[str, Any]]] = {
    "another peer's name": ("orders", {"1": OTHER}),
    "another peer's key": ("shop", {"2": OTHER}),
    "an unknown name": ("mallory", {"1": OTHER}),
    "the secret of another": ("shop", {"1": SECRET}),
}


@pytest.mark.parametrize(("service", "secrets"), FORGED.values(), ids=FORGED)
async def test_peer_cannot_send_as_another(billing: Tables, service: str, secrets: dict[str, str]) -> None:
    async with listening(billing, peers={"orders": SECRET, "shop": OTHER}) as uri:
        with pytest.raises(TransportError, match=r"refused|does not know the secret"):
            await sent(uri, placed(), service=service, peers=billing_at(uri, secrets))
        for own in ({}, {"shared_secret": SECRET}, {"shared_secret": OTHER}):
            with pytest.raises(TransportError, match="refused: a secret that is known here must be proven"):
                await sent(uri, placed(), service="shop", **own)
        assert billing.count("received_ids") == 0
        assert await sent(uri, placed(), service="shop", peers=billing_at(uri, {"1": OTHER})) == [STORED]


async def test_secret_of_a_peer_is_changed_without_a_pause(billing: Tables) -> None:
    old, both, new = {"1": SECRET}, {"1": SECRET, "2": OTHER}, {"2": OTHER}
    steps = [(old, old), (old, both), (both, both), ({"2": OTHER, "1": SECRET}, both), (new, both), (new, new)]
    for sending, receiving in steps:
        async with listening(billing, peers={"orders": {"secrets": receiving}}) as uri:
            assert await sent(uri, placed(), peers=billing_at(uri, sending)) == [STORED]
    async with listening(billing, peers={"orders": {"secrets": new}}) as uri:
        with pytest.raises(TransportError, match="must be proven"):
            await sent(uri, placed(), peers=billing_at(uri, old))


async def test_service_with_the_secret_of_another_peer_is_not_believed(billing: Tables) -> None:
    """A secret that two services know by mistake lets neither answer for the other."""
    async with listening(billing, peers={"orders": SECRET}) as uri:
        peers = {"invoices": {"secrets": {"1": SECRET}, "at": [uri]}}
        with pytest.raises(TransportError, match="peer billing answers in the place of invoices"):
            await sent(uri, placed(), peers=peers)
        assert billing.count("received_ids") == 0


async def test_own_secret_is_shown_where_no_peer_is_known(billing: Tables) -> None:
    async with listening(billing, peers={"orders": SECRET}) as uri:
        assert await sent(uri, placed(), peers={"orders": SECRET}) == [STORED]
        assert billing.rows("SELECT endpoint FROM durable.received_ids") == ["billing<-orders"]


async def test_peer_sends_only_its_types_to_its_endpoints(billing: Tables) -> None:
    may: dict[str, Any] = {
        "orders": {"secrets": {"1": SECRET}, "types": ["shop.*", "tcp.identity.paid"]},
        "shop": {"secrets": {"1": OTHER}, "endpoints": ["elsewhere"]},
    }
    async with listening(billing, peers=may) as uri:
        with pytest.raises(TransportError, match=r"refused: shop may not send to billing: see endpoints in peers"):
            await sent(uri, placed(), service="shop", peers=billing_at(uri, {"1": OTHER}))
        allowed = [placed(message_type="shop.sold"), placed(), placed(message_type="tcp.identity.paid")]
        outcomes = await sent(uri, *allowed, peers=billing_at(uri))
        refusal = Rejected("orders may not send messages of type tcp.identity.placed to billing")
        assert outcomes == [STORED, refusal, STORED]
        assert billing.count("received_ids") == 2


@pytest.mark.parametrize(
    "destination", ["https://shipping.example/in", "rabbitmq://default/queue/x", "tcp://10.0.0.7:1"]
)
async def test_envelope_for_another_service_is_quarantined(billing: Tables, destination: str) -> None:
    peers: dict[str, Any] = {"orders": SECRET, "shipping": {"secrets": {"1": OTHER}, "at": ["tcp://10.0.0.7:1"]}}
    async with listening(billing, peers=peers) as uri:
        strayed = [placed(1, destination=uri), placed(2, destination=destination), placed(3)]
        assert await sent(uri, *strayed, peers=billing_at(uri)) == [STORED] * 3
        assert billing.count("received_ids") == 2
        [reason] = billing.rows("SELECT reason FROM durable.dead_letters")
        assert reason == f"the envelope is for {destination}, which is not this service"


async def test_listener_paused_by_a_message_of_a_peer_is_paused_for_all(billing: Tables) -> None:
    def pause(_: Placed) -> None:
        raise PauseListener(600)

    async with listening(billing, handle=pause, peers={"orders": SECRET, "shop": OTHER}) as uri:
        assert await sent(uri, placed(), peers=billing_at(uri)) == [STORED]

        async def is_busy() -> bool:
            return await sent(uri, placed(), service="shop", peers=billing_at(uri, {"1": OTHER})) == [BUSY]

        await eventually(is_busy, within=20, what="the pause")


@pytest.mark.parametrize(
    "peers",
    [
        {"orders": SECRET, "shop": SECRET},
        {"orders": {"certificates": ["a"]}, "shop": {"certificates": ["a"]}},
        {"orders": {}},
    ],
    ids=["one secret for two", "one certificate for two", "neither"],
)
def test_indistinguishable_peers_are_an_invalid_setting(peers: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"^peers: "):
        TcpTransport(load_settings(peers=peers), "billing", 1)


# Impostors --------------------------------------------------------------------------------------------------------


def without_a_secret(stranger: Authority) -> dict[str, Any]:
    return {}


def with_another_secret(stranger: Authority) -> dict[str, Any]:
    return {"peers": {"orders": OTHER}}


def with_the_shared_secret(stranger: Authority) -> dict[str, Any]:
    return {"shared_secret": SECRET}


def with_a_certificate_of_another_authority(stranger: Authority) -> dict[str, Any]:
    return stranger.issue("127.0.0.1").settings


def without_tls(stranger: Authority) -> dict[str, Any]:
    return {"peers": {"orders": SECRET}}


Imposture = Callable[[Authority], dict[str, Any]]
PLAIN: list[Imposture] = [without_a_secret, with_another_secret, with_the_shared_secret]
ENCRYPTED: list[Imposture] = [with_a_certificate_of_another_authority, without_tls]
IMPOSTORS = [(each, False) for each in PLAIN] + [(each, True) for each in ENCRYPTED]


@pytest.mark.parametrize(("impose", "encrypted"), IMPOSTORS, ids=[each.__name__ for each, _ in IMPOSTORS])
async def test_impostor_on_the_port_of_a_peer_loses_no_message(
    make_database: Any, billing: Tables, authority: Authority, tmp_path: Path, impose: Imposture, encrypted: bool
) -> None:
    """Whoever listens there while the peer is down answers Stored, if only it were asked."""
    uri = f"tcp://127.0.0.1:{free_port()}"
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    certified = authority.issue("127.0.0.1").settings
    ours: dict[str, Any] = certified if encrypted else {"peers": billing_at(uri)}
    theirs: dict[str, Any] = ours if encrypted else {"peers": {"orders": SECRET}}
    handled: list[int] = []
    orders = Bus("orders", make_database("orders"), **QUICK, **ours)
    orders.route(Placed, to=uri)

    taken = MemoryReceiver()
    impostor = TcpTransport(load_settings(**impose(Authority(stranger))), "billing", 1).listener(uri, "in")
    await impostor.serve(taken)
    async with orders:
        async with orders.unit_of_work():
            orders.send(Placed(17))
        await eventually(lambda: orders.statistics().sending[uri].latched, within=20, what="the latch")
        await impostor.close()
        assert taken.stored == {}
        async with listening(billing, uri, lambda each: handled.append(each.number), **theirs):
            await eventually(lambda: handled == [17], within=30, what="the delivery")
