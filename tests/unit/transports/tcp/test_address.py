"""What may be written as the address of a TCP connection, and nothing that is not meant."""

from __future__ import annotations

import pytest

from durable.errors import InvalidSetting
from durable.settings import load_settings
from durable.transports.tcp.address import TcpAddress, parse
from durable.transports.tcp.transport import TcpTransport
from durable.transports.tcp.unix import UnixAddress


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("tcp://127.0.0.1:2301", TcpAddress("127.0.0.1", 2301)),
        ("tcp://127.255.3.4:1/", TcpAddress("127.255.3.4", 1)),
        ("tcp://[::1]:65535", TcpAddress("::1", 65535)),
        ("tcp://localhost:0", TcpAddress("127.0.0.1", 0)),
        ("unix:///run/orders.sock", UnixAddress("/run/orders.sock")),
        ("unix:///run/my%20orders.sock", UnixAddress("/run/my orders.sock")),
        ("unix:////run/./a//b/../orders.sock", UnixAddress("/run/a/b/../orders.sock")),
    ],
)
def test_an_address_on_this_machine_is_understood(uri: str, address: TcpAddress | UnixAddress) -> None:
    assert parse(uri) == address


@pytest.mark.parametrize(
    ("uri", "host", "is_local"),
    [
        ("tcp://127.0.0.1:2301", "127.0.0.1", True),
        ("tcp://[::1]:2301", "::1", True),
        ("tcp://LOCALHOST:2301", "127.0.0.1", True),
        ("tcp://0.0.0.0:2301", "0.0.0.0", False),
        ("tcp://10.0.0.1:2301", "10.0.0.1", False),
        ("tcp://[::]:2301", "::", False),
        ("tcp://[fe80::1]:2301", "fe80::1", False),
        ("tcp://billing.internal.:2301", "billing.internal", False),
        ("tcp://localhost.example.com:2301", "localhost.example.com", False),
    ],
)
def test_local_address_is_told_from_others(uri: str, host: str, is_local: bool) -> None:
    address = parse(uri)
    assert isinstance(address, TcpAddress)
    assert (address.host, address.is_local) == (host, is_local)


@pytest.mark.parametrize(
    "host",
    ["127.1", "0x7f000001", "127.0.0.1.", "[::ffff:127.0.0.1]", "[fe80::1%25eth0]", "a..b", "-a", "a b", "2130706433"],
)
def test_a_host_with_two_readings_is_refused(host: str) -> None:
    with pytest.raises(InvalidSetting):
        parse(f"tcp://{host}:2301")


@pytest.mark.parametrize(
    ("query", "reuse_port", "tls"),
    [("", False, None), ("?tls=1", False, True), ("?reuse_port=1&tls=0", True, False), ("?reuse_port=1", True, None)],
)
def test_options_are_understood(query: str, reuse_port: bool, tls: bool | None) -> None:
    assert parse(f"tcp://127.0.0.1:2301{query}") == TcpAddress("127.0.0.1", 2301, reuse_port, tls)


@pytest.mark.parametrize("query", ["x=1", "tls", "tls=", "tls=yes", "tls=1&tls=1", "reuse_port=0", "tls=1&"])
def test_an_unknown_option_is_refused(query: str) -> None:
    with pytest.raises(InvalidSetting, match="the only options are"):
        parse(f"tcp://127.0.0.1:2301?{query}")


@pytest.mark.parametrize(
    "uri",
    [
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:2301/path",
        "tcp://:2301",
        "tcp://user@127.0.0.1:2301",
        "tcp://127.0.0.1:2301?x=1",
        "tcp://127.0.0.1:2301#x",
        "unix://run/orders.sock",
        "unix:///run/",
        "unix:///",
        "unix:///run/.",
        "unix:///run/..",
        "unix:orders.sock",
        "unix:///run/a%00b",
        "amqp://localhost",
        "127.0.0.1:2301",
        "",
    ],
)
def test_invalid_address_is_refused_with_an_example(uri: str) -> None:
    with pytest.raises(InvalidSetting, match=r"write .*(tcp://127\.0\.0\.1:2301|unix:///path/to\.sock)"):
        parse(uri)


@pytest.mark.parametrize("port", ["65536", "-1", "abc", "1e3"])
def test_invalid_port_is_refused(port: str) -> None:
    with pytest.raises(InvalidSetting, match="not a valid address"):
        parse(f"tcp://127.0.0.1:{port}")


def test_too_long_socket_path_is_refused() -> None:
    parse("unix:///" + "x" * 106)
    with pytest.raises(InvalidSetting, match="at most 107 bytes"):
        parse("unix:///" + "x" * 107)
    with pytest.raises(InvalidSetting, match="at most 107 bytes"):
        parse("unix:///" + "ä" * 54)


def test_address_is_printed_unchanged() -> None:
    for uri in ("tcp://127.0.0.1:2301", "tcp://[::1]:2301", "tcp://10.0.0.7:1?tls=1", "unix:///run/orders.sock"):
        assert str(parse(uri)) == uri


def test_port_0_can_be_listened_on_and_not_sent_to() -> None:
    transport = TcpTransport(load_settings(), "orders", 1)
    transport.check("tcp://127.0.0.1:0")
    transport.listener("tcp://127.0.0.1:0", "in")
    with pytest.raises(InvalidSetting, match="port 0"):
        transport.sender("tcp://127.0.0.1:0")
