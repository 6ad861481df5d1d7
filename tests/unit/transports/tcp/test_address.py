"""What may be written as the address of a TCP connection: this machine, and nothing that is not meant."""

from __future__ import annotations

import pytest

from durable.errors import InvalidSetting
from durable.settings import load_settings
from durable.transports.tcp.address import TcpAddress, UnixAddress, parse
from durable.transports.tcp.transport import TcpTransport


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("tcp://127.0.0.1:2301", TcpAddress("127.0.0.1", 2301)),
        ("tcp://127.255.3.4:1/", TcpAddress("127.255.3.4", 1)),
        ("tcp://[::1]:65535", TcpAddress("::1", 65535)),
        ("tcp://localhost:0", TcpAddress("127.0.0.1", 0)),
        ("unix:///run/orders.sock", UnixAddress("/run/orders.sock")),
        ("unix:///run/my%20orders.sock", UnixAddress("/run/my orders.sock")),
    ],
)
def test_an_address_on_this_machine_is_understood(uri: str, address: TcpAddress | UnixAddress) -> None:
    assert parse(uri) == address


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "10.0.0.1", "[::]", "[fe80::1]", "[::ffff:127.0.0.1]", "example.com", "127.1"]
)
def test_another_machine_is_refused_with_advice(host: str) -> None:
    with pytest.raises(InvalidSetting, match=r"not this machine.*not encrypted or authenticated; use 127\.0\.0\.1"):
        parse(f"tcp://{host}:2301")


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
    for uri in ("tcp://127.0.0.1:2301", "tcp://[::1]:2301", "unix:///run/orders.sock"):
        assert str(parse(uri)) == uri


def test_port_0_can_be_listened_on_and_not_sent_to() -> None:
    transport = TcpTransport(load_settings(), "orders", 1)
    transport.check("tcp://127.0.0.1:0")
    transport.listener("tcp://127.0.0.1:0", "in")
    with pytest.raises(InvalidSetting, match="port 0"):
        transport.sender("tcp://127.0.0.1:0")
