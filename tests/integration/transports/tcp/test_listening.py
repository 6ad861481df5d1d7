"""Addresses of TCP that are taken."""

from __future__ import annotations

import contextlib

import pytest

from durable.errors import InvalidSetting
from durable.transports.tcp.address import TcpAddress, parse


def test_taken_port_is_refused_with_advice() -> None:
    for shared, told in (("", r"add \?reuse_port=1 to the address of each"), ("?reuse_port=1", "stop it, or add it")):
        bound = TcpAddress("127.0.0.1", 0).bind()
        with contextlib.closing(bound.socket):
            address = parse(f"{bound.uri}{shared}")
            assert isinstance(address, TcpAddress)
            with pytest.raises(InvalidSetting, match=f"cannot listen here: .*; another process listens here.*{told}"):
                address.bind()


def test_address_of_another_machine_is_refused_without_advice_to_share() -> None:
    with pytest.raises(InvalidSetting, match="cannot listen here: ") as refused:
        TcpAddress("192.0.2.1", 2301).bind()
    assert "another process" not in str(refused.value)
