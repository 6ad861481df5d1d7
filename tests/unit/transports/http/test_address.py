"""Which http:// and https:// URIs are understood, and what is said of the others."""

from __future__ import annotations

import pytest

from durable.errors import InvalidSetting
from durable.transports.http.address import HttpAddress, parse


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("http://127.0.0.1:8001", HttpAddress("http", "127.0.0.1", 8001)),
        ("http://127.0.0.1:8001/", HttpAddress("http", "127.0.0.1", 8001)),
        ("http://[::1]:8001/durable", HttpAddress("http", "::1", 8001, "/durable")),
        ("https://billing.example/durable/", HttpAddress("https", "billing.example", 443, "/durable")),
        ("HTTPS://Billing.Example:443", HttpAddress("https", "billing.example", 443)),
        ("http://localhost:0?reuse_port=1", HttpAddress("http", "127.0.0.1", 0, reuse_port=True)),
        ("http://my_host-1:80/a%20b/~c", HttpAddress("http", "my_host-1", 80, "/a%20b/~c")),
    ],
)
def test_a_uri_is_taken_apart(uri: str, address: HttpAddress) -> None:
    assert parse(uri) == address


@pytest.mark.parametrize(
    "uri", ["http://127.0.0.1:8001", "http://[::1]:8001/durable", "https://billing.example/a/b", "https://b.example:1"]
)
def test_address_prints_the_uri_for_peers(uri: str) -> None:
    assert str(parse(uri)) == uri
    assert parse(str(parse(uri))) == parse(uri)


def test_address_for_peers_omits_the_options_of_the_listener() -> None:
    assert str(parse("http://127.0.0.1:8001/in?reuse_port=1")) == "http://127.0.0.1:8001/in"


@pytest.mark.parametrize(
    ("uri", "origin"),
    [
        ("http://billing.example/durable", "http://billing.example:80"),
        ("https://billing.example/durable", "https://billing.example:443"),
        ("https://BILLING.example:8443", "https://billing.example:8443"),
        ("http://[::1]/", "http://[::1]:80"),
    ],
)
def test_the_origin_always_names_the_port(uri: str, origin: str) -> None:
    assert parse(uri).origin == origin


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("[::]", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("127.0.0.1.example", False),
    ],
)
def test_only_the_loopback_is_this_machine_alone(host: str, is_local: bool) -> None:
    assert parse(f"http://{host}:80").is_local is is_local


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "http:",
        "http://",
        "http:///durable",
        "http://:80",
        "tcp://127.0.0.1:80",
        "httpx://127.0.0.1:80",
        "http://127.0.0.1:port",
        "http://127.0.0.1:65536",
        "http://127.0.0.1:-1",
        "http://user@127.0.0.1:80",
        "http://user:secret@127.0.0.1:80",
        "http://127.0.0.1:80/#fragment",
        "http://127.0.0.1:80/?option=1",
        "http://127.0.0.1:80/?reuse_port=2",
        "http://127.0.0.1:80/a b",
        "http://127.0.0.1:80/{path}",
        "http://127.0.0.1:80/ä",
        "http://127.0.0.1:80/%zz",
        "http://127.0.0.1:80//a",
        "http://127.0.0.1:80/a/../b",
        "http://127.0.0.1:80/a/%2E%2e/b",
        "http://127.0.0.1:80/%2e",
        "http://127.1",
        "http://0x7f000001",
        "http://[::ffff:127.0.0.1]",
        "http://127.0.0.1:80/.",
        "http://ho st:80",
        "http://host%00:80",
        "http://-host:80",
        "http://bücher.example:80",
        f"http://{'h' * 64}.example:80",
        "http://[::1",
        "http://[fe80::1%25eth0]:80",
        "http://[not-an-address]:80",
    ],
)
def test_invalid_address_is_refused_with_an_example(uri: str) -> None:
    with pytest.raises(InvalidSetting, match="write it as in http://"):
        parse(uri)
