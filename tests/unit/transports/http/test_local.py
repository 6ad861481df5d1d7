"""Which requests went to another address than their client has signed."""

from __future__ import annotations

from typing import Any

import pytest

from durable.transports.http.local import is_elsewhere

HERE, LAN, OUTSIDE = ("127.0.0.1", 8002), ("192.168.7.4", 8002), ("192.168.7.9", 40_000)


def scope(server: tuple[str, int | None] | None, client: tuple[str, int] | None, scheme: str = "http") -> Any:
    return {"scheme": scheme, "server": server, "client": client}


FROM_LOOPBACK = ("127.0.0.1", 40_000)

SIGNED_HERE = {
    "the address itself": (scope(HERE, FROM_LOOPBACK), "http://127.0.0.1:8002"),
    "the name of this machine": (scope(HERE, FROM_LOOPBACK), "http://localhost:8002"),
    "the name of this machine, IPv6": (scope(("::1", 8002), ("::1", 4)), "http://localhost:8002"),
    "an IPv6 address written at length": (scope(("::1", 8002), ("::1", 4)), "http://[0:0:0:0:0:0:0:1]:8002"),
    "the port of HTTP": (scope(("127.0.0.1", 80), FROM_LOOPBACK), "http://127.0.0.1"),
    "another machine through a tunnel of its own": (scope(LAN, OUTSIDE), "http://127.0.0.1:9"),
    "a name with a certificate": (scope(HERE, FROM_LOOPBACK, "https"), "https://billing:8002"),
    "a name in plain text": (scope(HERE, FROM_LOOPBACK), "http://billing:8002"),
    "a socket of Unix": (scope(("/run/billing", None), None), "http://127.0.0.1:8002"),
}

ELSEWHERE = {
    "another port": (scope(HERE, FROM_LOOPBACK), "http://127.0.0.1:8001"),
    "another address of loopback": (scope(("127.0.0.2", 8002), FROM_LOOPBACK), "http://127.0.0.1:8002"),
    "another address than the name": (scope(("127.0.0.2", 8002), FROM_LOOPBACK), "http://localhost:8002"),
    "the machine's address in its network": (scope(LAN, (LAN[0], 40_000)), "http://127.0.0.1:8002"),
    "the same over TLS": (scope(LAN, (LAN[0], 40_000), "https"), "http://127.0.0.1:8002"),
    "TLS on this port": (scope(HERE, FROM_LOOPBACK, "https"), "http://127.0.0.1:8002"),
    "an address that is none": (scope(HERE, FROM_LOOPBACK), "http://127.0.0.1:port"),
}


@pytest.mark.parametrize(("seen", "signed"), SIGNED_HERE.values(), ids=SIGNED_HERE.keys())
def test_request_signed_for_the_address_of_its_connection_is_here(seen: Any, signed: str) -> None:
    assert not is_elsewhere(seen, signed)


@pytest.mark.parametrize(("seen", "signed"), ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_request_signed_for_another_address_of_the_machine_is_elsewhere(seen: Any, signed: str) -> None:
    assert is_elsewhere(seen, signed)
