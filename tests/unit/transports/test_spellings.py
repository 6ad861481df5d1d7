"""Spellings of addresses: one place has one destination, and different places stay different."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from durable.cli import pauses
from durable.cli.dead_letters import selection as letters
from durable.cli.scheduled import selection as scheduled
from durable.errors import InvalidSetting
from durable.grammar import suggestion
from durable.pipeline.publishable import whole
from durable.settings import Settings
from durable.storage.circuits import CircuitKind
from durable.transports import peers
from durable.transports.addresses import as_stored, canonical, canonical_name, spellings
from durable.transports.rabbitmq.address import destination

T = TypeVar("T")

ONE = [
    ("http://billing.example", "http://billing.example:80"),
    ("http://billing.example", "http://billing.example:"),
    ("https://billing.example/d", "https://billing.example:443/d"),
    ("http://billing.example/d", "http://Billing.Example./d/"),
    ("http://billing.example/a", "http://billing.example/%61"),
    ("http://billing.example/%C3%A9", "http://billing.example/%c3%a9"),
    ("http://[::1]:8001", "http://[0:0:0:0:0:0:0:1]:8001"),
    ("http://127.0.0.1:8001", "http://localhost:8001"),
    ("http://127.0.0.1:8001", "http://LOCALHOST.:8001"),
    ("tcp://[::1]:1", "tcp://[0:0::1]:1"),
    ("tcp://billing.example:1", "tcp://billing.example.:1/"),
    ("tcp://127.0.0.1:1", "tcp://localhost.:1"),
    ("https://localhost", "https://LocalHost.:443"),
    ("unix:///a/b.sock", "unix:///a//./b.sock"),
    ("unix:///a/b.sock", "unix:////a/%62.sock"),
    ("tcp://127.0.0.1:1", "TCP://LOCALHOST.:1"),
    ("https://billing.example/A", "Https://billing.example/A"),
    ("unix:///A.sock", "UNIX:///A.sock"),
    ("rabbitmq://default/queue/A", "RabbitMQ://default/queue/A"),
    ("memory://Orders", "MEMORY://Orders"),
    ("lines:///A", "LINES:///A"),
    ("rabbitmq://default/queue/a%2Fb", "rabbitmq://d%65fault/queue/%61%2fb?prefetch=3"),
    ("rabbitmq://default/queue/a", "rabbitmq://default/queue/a?declare=no"),
    ("rabbitmq://default/exchange/x/a%2Bb", "rabbitmq://default/exchange/%78/a+b"),
]
SEVERAL = [
    ("http://billing.example/a%2Fb", "http://billing.example/a/b"),
    ("http://billing.example/a%3Fb", "http://billing.example/a%23b"),
    ("http://billing.example/a%21", "http://billing.example/a!"),
    ("http://billing.example/A", "http://billing.example/a"),
    ("http://billing.example", "https://billing.example"),
    ("http://billing.example:443", "https://billing.example"),
    ("http://127.0.0.1:1", "http://[::1]:1"),
    ("http://localhost:1", "http://localhost.example:1"),
    ("https://localhost:1", "https://127.0.0.1:1"),
    ("tcp://127.0.0.1:1", "tcp://127.0.0.2:1"),
    ("unix:///a/../b", "unix:///b"),
    ("unix:///A", "unix:///a"),
    ("rabbitmq://default/queue/a%2Fb", "rabbitmq://default/exchange/a/b"),
    ("rabbitmq://default/queue/a", "rabbitmq://Default/queue/a"),
]


@pytest.mark.parametrize(("written", "other"), ONE)
def test_spellings_of_one_place_are_one_destination(written: str, other: str) -> None:
    assert canonical(other) == written == canonical(written)


@pytest.mark.parametrize(("one", "other"), SEVERAL)
def test_different_places_are_two_destinations(one: str, other: str) -> None:
    assert canonical(one) != canonical(other)


@pytest.mark.parametrize(("written", "other"), ONE)
def test_commands_take_every_spelling_of_a_destination(written: str, other: str) -> None:
    nowhere = "postgresql://127.0.0.1:1/none"
    assert pauses._keys(None, CircuitKind.DESTINATION, other) == [written]
    assert scheduled.choose(address=other, database=nowhere).selection.address == written
    assert letters.choose(address=other, database=nowhere).selection.address == written


def test_published_rows_have_one_spelling_of_each_destination() -> None:
    """Those that came in keep the address that their sender named, and malformed ones are refused later."""
    odd = ["local", "tcp://b", None]
    given = [each for pair in ONE for each in pair] + odd
    expected = [written for written, _ in ONE for _ in range(2)] + odd
    for endpoint, stored in ((None, expected), ("in", given)):
        columns = {
            "destination": pa.array(given, pa.string()),
            "endpoint": pa.array([endpoint] * len(given), pa.string()),
        }
        batch = whole(pa.RecordBatch.from_pydict(columns), datetime.now(UTC))
        assert batch.column("destination").to_pylist() == stored


@pytest.mark.parametrize("name", ["local", "orders", "", "tcp://b", "lines:///%61"])
def test_other_name_is_left_unchanged(name: str) -> None:
    assert canonical_name(name) == name


@pytest.mark.parametrize(
    ("written", "other"), [each for each in ONE if not each[0].startswith(("unix:", "memory:", "lines:"))]
)
def test_peer_is_known_at_every_spelling_of_its_address(written: str, other: str) -> None:
    """Its secret is shown there; `at` may have any spelling, too."""
    at, _, _ = other.partition("?")
    known: Any = {"billing": {"secrets": {"1": "s" * 32}, "at": [at]}}
    settings = Settings(peers=known)
    peers.check(settings)
    assert [peers.peer_at(settings, uri) for uri in (written, at)] == ["billing", "billing"]


SENT = ("queue/mail", "exchange/fanout/key")


@pytest.mark.parametrize("exchange", ["durable", "a/b +", "fanout"])
@pytest.mark.parametrize(
    "at", ["", "/", "/queue", "/queue/mail", "/%71ueue/m%61il", "/exchange", "/exchange/", "/exchange/durable",
           "/exchange/dur%61ble/", "/exchange/durable/orders:orders.paid", "/exchange/a%2fb%20+", "/exchange/fanout",
           "/exchange/fanout/key", "/exchange/durables", "/topic", "/topic/", "/%74opic", "/topic/orders",
           "/topic/orders/", "/quue/mail", "/Topic", "/mail", "//topic"],
)  # fmt: skip
@pytest.mark.parametrize("scheme", ["rabbitmq", "RabbitMQ"])
def test_address_of_rabbitmq_is_a_place_of_a_peer_and_of_no_topic_or_refused(
    scheme: str, at: str, exchange: str
) -> None:
    known: Any = {"billing": {"secrets": {"1": "s" * 32}, "at": [f"{scheme}://default{at}"]}}
    settings = Settings(peers=known, amqp_exchange=exchange)

    def is_below(to: str) -> bool:
        uri = f"rabbitmq://default/{to}"
        sent_to = destination(uri, service="orders", message_type="orders.paid", exchange=exchange)
        return peers.peer_at(settings, str(sent_to)) == "billing"

    on_topic = ("topic", f"exchange/{quote(exchange, safe='')}/key")
    is_topic = at.startswith(("/topic", "/%74opic")) or any(map(is_below, on_topic))
    if is_topic or at.startswith(("/quue", "/Topic", "/mail", "//")):
        advice = "takes in a topic, which is no peer; write the queues" if is_topic else "leads nowhere; write it as in"
        with pytest.raises(InvalidSetting, match=advice):
            peers.check(settings)
    else:
        peers.check(settings)
        assert "/exchange" in at or any(map(is_below, SENT))


@pytest.mark.parametrize(
    ("written", "other"), [each for each in ONE if each[0].startswith(("http", "tcp:", "rabbitmq://default/queue"))]
)
def test_address_of_two_peers_is_refused_in_every_spelling(written: str, other: str) -> None:
    places = {"shop": [written], "store": ["https://elsewhere.example", other.partition("?")[0]]}
    known: Any = {name: {"secrets": {"1": name * 5}, "at": at} for name, at in places.items()}
    with pytest.raises(InvalidSetting, match=r"shop and store are both at .*; leave it in at of the one"):
        peers.check(Settings(peers=known))


@pytest.mark.parametrize(("one", "other"), [("/d", "/d/e"), ("", "/d"), ("/d", "/e")])
def test_peers_at_two_addresses_of_one_host_are_taken(one: str, other: str) -> None:
    places = {"shop": one, "store": other}
    known: Any = {
        name: {"secrets": {"1": name * 5}, "at": [f"https://shop.example{path}"] * 2} for name, path in places.items()
    }
    peers.check(Settings(peers=known))


class Place(NamedTuple):
    """A place of HTTP, in its one spelling. A segment is a list of single characters, or of their escapes."""

    scheme: str
    host: str
    port: int
    path: tuple[tuple[str, ...], ...]


PLAIN = "aZ09-_~"
names = st.sampled_from(["billing.example", "a-1.b", "xn--bcher-kva.example", "127.0.0.1", "10.0.0.7"])
addresses = st.integers(0, 2**128 - 1).map(ipaddress.IPv6Address).filter(lambda ip: ip.ipv4_mapped is None).map(str)
characters = st.sampled_from([*PLAIN, *"!$&+=:@", "%2F", "%3F", "%23", "%25", "%C3%A9", "%20", "%3A"])
segments = st.lists(characters, min_size=1, max_size=4).map(tuple)
places = st.builds(
    Place,
    st.sampled_from(["http", "https"]),
    names | addresses,
    st.sampled_from([80, 443, 1, 8001]),
    st.lists(segments, max_size=3).map(tuple),
)


def chosen(data: st.DataObject, *among: T) -> T:
    return data.draw(st.sampled_from(among))


def spelled(data: st.DataObject, place: Place) -> str:
    host, path = spelled_host(data, place.host, is_named=place.scheme == "https"), ""
    for segment in place.path:
        path += "/" + "".join(spelled_character(data, each) for each in segment)
    is_default = place.port == {"http": 80, "https": 443}[place.scheme]
    port = chosen(data, f":{place.port}", f":0{place.port}", *(["", ":"] if is_default else []))
    return f"{place.scheme}://{host}{port}{path}{chosen(data, '', '/')}{chosen(data, '', '?reuse_port=1')}"


def spelled_host(data: st.DataObject, host: str, *, is_named: bool) -> str:
    """`is_named`: a certificate tells localhost from 127.0.0.1."""
    if ":" in host:
        long = ipaddress.ip_address(host).exploded
        return f"[{chosen(data, host, host.upper(), long, long.upper())}]"
    if host == "127.0.0.1":
        return host if is_named else chosen(data, host, "localhost", "LocalHost", "localhost.")
    return host if host[0].isdigit() else chosen(data, host, host.upper(), f"{host}.", host.title())


def spelled_character(data: st.DataObject, character: str) -> str:
    if character in PLAIN:
        return chosen(data, character, f"%{ord(character):02x}", f"%{ord(character):02X}")
    return chosen(data, character, character.lower()) if character.startswith("%") else character


@given(data=st.data(), place=places, other=places)
def test_two_spellings_are_one_destination_when_their_places_are_one(
    data: st.DataObject, place: Place, other: Place
) -> None:
    one, again = canonical(spelled(data, place)), canonical(spelled(data, place))
    assert one == again == canonical(one)
    another = place._replace(**{field: getattr(other, field) for field in chosen(data, *CHANGES)})
    assert (canonical(spelled(data, another)) == one) is (another == place)


labels = st.sampled_from(["", "a", "B-1", "localhost", "127", "0", "1", "xn--bcher-kva", "é", "\u212a", "_", "-", "v1"])
dotted = st.lists(labels, min_size=1, max_size=5).map(".".join)
bracketed = st.sampled_from(["::1", "0::1", "v1.a", "127.0.0.1", "fe80::1%25lo", "::ffff:1.2.3.4", "a", ""])
authorities = st.builds(
    "{}{}{}".format,
    dotted | st.builds("{}[{}]{}".format, st.sampled_from(["", "x"]), bracketed, st.sampled_from(["", "x", "."])),
    st.sampled_from(["", ".", ".."]),
    st.sampled_from(["", ":", ":1", ":01", ":80", ":443", ":\uff11", ":0"]),
)
escapes = st.sampled_from(
    [*"aA.~/;+ é?#", "//", "%2e", "%2F", "%2f", "%41", "%2541", "%25", "%", "%C3%A9", "%c3%a9", "%00"]
)
tails = st.lists(escapes, max_size=6).map("".join)
queries = st.sampled_from(["", "?", "?reuse_port=1", "?tls=1", "?prefetch=2", "#", "#x"])
schemes = st.sampled_from(["tcp://", "http://", "https://", "unix://", "rabbitmq://", "memory://", "lines://"])
routes = st.builds("{}{}{}".format, st.sampled_from(["default/queue/", "b/exchange/x/", "/"]), tails, queries)
written = st.builds("{}{}".format, schemes, st.builds("{}{}{}".format, authorities, tails, queries) | routes)


@settings(max_examples=1_000)
@given(uri=written)
@example("tcp://a..:1")
@example("http://localhost...:80")
def test_spelling_of_a_destination_is_its_own_spelling(uri: str) -> None:
    with suppress(InvalidSetting):
        one = canonical(uri)
        assert canonical(one) == one


NO_HOSTS = {
    "tcp://a..:1": "dots",
    "tcp://.a:1": "neither",
    "tcp://localhost..:1": "dots",
    "http://localhost...:80": "dots",
    "https://localhost..": "dots",
    "http://a..b": "dots",
    "tcp://[v1.a]:1": "",
    "tcp://[::1]x:1": "neither",
    "tcp://x[::1]:1": "",
    "http://[::1]x": "neither",
    "tcp://\u212a:1": "xn--",
    "http://\u212a": "xn--",
    "tcp://bücher.example:1": "xn--",
    "https://bücher.example": "xn--",
    "tcp://a:\uff11": "",
}


@pytest.mark.parametrize("uri", NO_HOSTS)
def test_odd_host_is_refused_with_advice(uri: str) -> None:
    with pytest.raises(InvalidSetting, match=rf"{NO_HOSTS[uri]}.*; write"):
        canonical(uri)


CHANGES = [("scheme",), ("host",), ("port",), ("path",), ("host", "port"), ("scheme", "path")]

paths = st.lists(st.sampled_from(["a", "A", "b c", "..", "%", "é", "?", "a#b"]), min_size=1, max_size=4).filter(
    lambda segments: segments[-1] != ".."
)


@given(data=st.data(), path=paths, other=paths)
def test_spellings_of_one_socket_are_one_destination(data: st.DataObject, path: list[str], other: list[str]) -> None:
    def spelling(segments: list[str]) -> str:
        escaped = ("".join(f"%{byte:02x}" for byte in each.encode()) for each in segments)
        return "unix://" + "".join(chosen(data, "/", "//", "/./") + each for each in escaped)

    one = canonical(spelling(path))
    assert one == canonical(spelling(path)) == canonical(one)
    assert (canonical(spelling(other)) == one) is (path == other)


def test_address_of_a_person_has_the_stored_spelling() -> None:
    old, new = "tcp://localhost:1", "tcp://127.0.0.1:1"
    assert spellings(old) == [new, old]
    assert spellings(new) == [new]
    assert as_stored([new], old, [old]) == [old]
    assert as_stored([new], old, [old, new]) == as_stored([new], old, []) == [new]


def test_suggestion_is_another_name_than_the_written_one() -> None:
    assert suggestion("tcp://localhost:1", ["tcp://localhost:1"]) == ""
    assert "localhost:2" in suggestion("tcp://localhost:1", ["tcp://localhost:1", "tcp://localhost:2"])
