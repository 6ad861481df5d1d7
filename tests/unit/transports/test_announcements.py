"""Announcements: whose name, which services, and addresses that lead nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from durable.errors import InvalidMessage
from durable.settings import load_settings
from durable.transports.announcements import MOST_PLACES, Announcer, accepted, announced, learned, place_of
from durable.transports.tcp.address import parse_destination
from tests.support.hubs import listing

SECRET = "a secret of sixteen characters"
PEERS = {
    "stock": {"secrets": {"1": SECRET + "1"}},
    "billing": {"secrets": {"1": SECRET + "2"}, "at": ["tcp://billing.internal:2302"], "types": ["inventory.*"]},
    "prices": {"secrets": {"1": SECRET + "3"}, "types": ["*"], "offers": ["prices", "price.*"]},
}
SETTINGS = load_settings(peers=PEERS)
HERE = Announcer("stock", 7, "stock")
AWAY = Announcer("stock", 7, "stock", "10.0.0.7", ("stock.internal",))


def addresses(announcer: Announcer, *given: str, **own: Any) -> list[str]:
    """Return the addresses at which a service is known that is announced at these."""
    announcement = listing("inventory", announcer.application, announcer.node)
    [known] = accepted(SETTINGS, "hub", announcer, [announcement.__class__(*_with(announcement, given))], **own)
    assert known.application == announcer.name
    return known.addresses


def _with(announcement: Any, at: tuple[str, ...]) -> tuple[Any, ...]:
    return announcement.offer, announcement.application, announcement.node, list(at), announcement.since


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://[::1]:1", "unix:///run/x", "http://localhost:80/a"])
def test_peer_of_this_machine_announces_local_addresses(address: str) -> None:
    assert addresses(HERE, address) == [address]
    with pytest.raises(InvalidMessage, match="on the machine of each caller"):
        addresses(AWAY, address)


@pytest.mark.parametrize("address", ["tcp://10.0.0.7:1", "tcp://stock.internal:1", "https://stock.internal"])
def test_peer_of_another_machine_announces_addresses_of_its_origin(address: str) -> None:
    assert addresses(AWAY, address) == [address]
    with pytest.raises(InvalidMessage, match="not on this machine"):
        addresses(HERE, address)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://10.0.0.8:1",
        "tcp://metadata.internal:80",
        "http://169.254.169.254/latest",
        "tcp://0.0.0.0:1",
        "tcp://10.0.0.7",
        "tcp://10.0.0.7:0",
        "tcp://10.0.0.7:99999",
        "tcp://a@10.0.0.7:1",
        "tcp://10.0.0.7:1/path",
        "tcp://10.0.0.7:1#x",
        "ftp://10.0.0.7:1",
        "tcp://10.0.0.7:1\n",
        "",
        "unix://host/path",
    ],
)
def test_address_is_refused_when_leading_elsewhere(address: str) -> None:
    with pytest.raises(InvalidMessage):
        addresses(AWAY, address)
    assert addresses(AWAY, address, "tcp://10.0.0.7:1") == ["tcp://10.0.0.7:1"]


def test_address_of_another_peer_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="is an address of billing"):
        addresses(Announcer("stock", 7, "stock", "10.0.0.7", ("billing.internal",)), "tcp://billing.internal:2302")


def test_peer_with_addresses_of_its_own_has_no_others() -> None:
    settings = load_settings(peers={"stock": {"secrets": {"1": SECRET}, "at": ["tcp://stock.example:2304"]}})
    one = listing("inventory", at="tcp://stock.example:2304")
    assert accepted(settings, "hub", AWAY, [one])[0].addresses == ["tcp://stock.example:2304"]
    with pytest.raises(InvalidMessage, match="below no address of stock"):
        accepted(settings, "hub", AWAY, [listing("inventory", at="tcp://10.0.0.7:2304")])


def test_name_of_this_host_is_on_this_machine() -> None:
    assert addresses(HERE, "tcp://here.internal:1", hosts={"here.internal"}) == ["tcp://here.internal:1"]


@pytest.mark.parametrize(
    ("announcer", "reason"),
    [
        (Announcer("hub", 7), "the name of this service"),
        (Announcer("orders", 7, "hub"), "the name of this service"),
        (Announcer("stock", 7), "the name of a peer, and not proved"),
        (Announcer("billing", 7, "billing"), "billing may not offer inventory"),
        (Announcer("prices", 7, "prices"), "prices may not offer inventory"),
        (Announcer("HUB", 7), "the name of this service"),
        (Announcer("Stock", 7), "the name of a peer, and not proved"),
        (Announcer("", 7), "is no name of a service"),
        (Announcer("hub ", 7), "is no name of a service"),
        (Announcer("a\nb", 7), "is no name of a service"),
        (Announcer("hub\u200b", 7), "is no name of a service"),
    ],
)
def test_announcer_without_the_right_is_refused(announcer: Announcer, reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        accepted(SETTINGS, "hub", announcer, [listing("inventory", announcer.application, 7)])


def test_name_is_the_proven_one() -> None:
    [known] = accepted(SETTINGS, "hub", Announcer("call me stock", 7, "stock"), [listing("x", "call me stock")])
    assert known.application == "stock"


@pytest.mark.parametrize("service", ["prices", "price.old"])
def test_offers_of_a_peer_allow_its_announcements(service: str) -> None:
    assert accepted(SETTINGS, "hub", Announcer("prices", 7, "prices"), [listing(service, "prices")])


def test_service_is_announced_once() -> None:
    with pytest.raises(InvalidMessage, match="announced twice"):
        accepted(SETTINGS, "hub", HERE, [listing("x"), listing("x")])


@pytest.mark.parametrize(
    ("own_host", "seen"),
    [
        ("", ["tcp://127.0.0.1:1?tls=1", "tcp://127.0.0.1:2", "unix:///run/x", "tcp://stock:3"]),
        ("10.0.0.7", ["tcp://10.0.0.7:1?tls=1", "tcp://stock:3"]),
        ("fe80::7", ["tcp://[fe80::7]:1?tls=1", "tcp://stock:3"]),
    ],
)
def test_addresses_are_told_as_the_other_end_sees_them(own_host: str, seen: list[str]) -> None:
    one = listing("x", at="tcp://0.0.0.0:1?tls=1")
    one.addresses.extend(["tcp://127.0.0.1:2", "unix:///run/x", "tcp://stock:3", "nonsense"])
    assert announced(one, own_host).addresses == learned(one, own_host).addresses == seen


def test_places_are_compared_without_options() -> None:
    assert place_of("tcp://localhost:1?tls=1") == place_of("tcp://127.0.0.1:1/")
    assert place_of("https://a") == place_of("https://a:443/")


@pytest.mark.parametrize(
    "other",
    ["tcp://[::ffff:127.0.0.1]:1", "tcp://0.0.0.0:1", "tcp://[::1]:1", "tcp://LOCALHOST.:1", "tcp://here.internal:1"],
)
def test_places_of_this_machine_have_one_name(other: str) -> None:
    assert place_of(other, {"here.internal"}) == place_of("tcp://127.0.0.1:1")


@pytest.mark.parametrize("other", ["unix:///tmp/../tmp/a.sock", "unix:////tmp/./a.sock", "unix:///tmp/%61.sock"])
def test_paths_are_compared_without_detours(other: str) -> None:
    assert place_of(other) == place_of("unix:///tmp/a.sock")


def test_address_against_the_rules_of_its_transport_is_neither_announced_nor_learned() -> None:
    good, bad = "tcp://127.0.0.1:1", "tcp://127.0.0.1:1?bogus=1"
    assert addresses(HERE, bad, good, check=parse_destination) == [good]
    with pytest.raises(InvalidMessage, match="the only options are"):
        addresses(HERE, bad, check=parse_destination)
    told = replace(listing("inventory"), addresses=[bad, good])
    assert learned(told, "", parse_destination).addresses == [good]


def test_different_addresses_of_an_announcement_have_a_limit() -> None:
    at = [f"tcp://127.0.0.1:{port}" for port in range(1, MOST_PLACES + 2)]
    assert addresses(HERE, *at[1:]) == at[1:]
    with pytest.raises(InvalidMessage, match="more than 100 different addresses"):
        addresses(HERE, *at)


@given(st.text(max_size=40) | st.from_regex(r"(tcp|unix|http)://[ -~]{0,30}", fullmatch=True))
def test_any_address_is_refused_or_leads_where_the_peer_is(address: str) -> None:
    try:
        known = addresses(AWAY, address)
    except InvalidMessage:
        return
    assert known == [address]
    assert any(host in address.lower() for host in ("10.0.0.7", "stock.internal"))
