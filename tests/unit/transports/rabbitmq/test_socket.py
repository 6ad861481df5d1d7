"""Frames that the library cannot read are replaced by ones like them that it can."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp.body import ContentBody
from pamqp.commands import Basic, Channel
from pamqp.exceptions import PAMQPException
from pamqp.frame import marshal, unmarshal
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

from durable.transports.rabbitmq.message import UNREADABLE
from durable.transports.rabbitmq.socket import mended

CHANNEL = 5
NOT_UTF8 = b"k\xff\xfe"

shorts = st.binary(max_size=255).map(lambda text: bytes([len(text)]) + text)


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack("!BHI", kind, CHANNEL, len(payload)) + payload + b"\xce"


@pytest.mark.parametrize(
    "readable",
    [
        marshal(Basic.Deliver("tag", 1, True, "orders", "ä"), CHANNEL),
        marshal(ContentHeader(0, 17, Basic.Properties(headers={"a": 1}, message_type="t")), CHANNEL),
        marshal(ContentBody(b"\xff" * 9), CHANNEL),
        marshal(Channel.CloseOk(), CHANNEL),
        marshal(Heartbeat(), 0),
    ],
    ids=["method", "header", "body", "another method", "heartbeat"],
)
def test_readable_frame_stays_unchanged(readable: bytes) -> None:
    assert mended(readable) == readable


@given(st.binary(min_size=2, max_size=60), st.integers(0, 2**40))
def test_unreadable_properties_keep_the_size_of_the_body_and_the_reason(properties: bytes, size: int) -> None:
    broken = frame(2, struct.pack("!HHQ", 60, 0, size) + properties)
    _, channel, header = unmarshal(mended(broken))
    assert isinstance(header, ContentHeader)
    assert (channel, header.body_size) == (CHANNEL, size)
    if mended(broken) != broken:
        with pytest.raises((PAMQPException, ValueError, OverflowError, RecursionError)):
            unmarshal(broken)
        assert header.properties.headers is not None
        assert header.properties.headers[UNREADABLE]


@given(shorts, st.integers(1, 2**63 - 1), st.booleans(), shorts, shorts)
def test_unreadable_delivery_keeps_its_textual_fields(
    tag: bytes, number: int, redelivered: bool, exchange: bytes, key: bytes
) -> None:
    arguments = tag + struct.pack("!Q?", number, redelivered) + exchange + key
    _, channel, delivery = unmarshal(mended(frame(1, struct.pack("!I", Basic.Deliver.index) + arguments)))
    assert isinstance(delivery, Basic.Deliver)
    assert (channel, delivery.delivery_tag, delivery.redelivered) == (CHANNEL, number, redelivered)
    for given_, shown in ((exchange, delivery.exchange), (key, delivery.routing_key)):
        assert shown == given_[1:].decode(errors="replace").encode()[:255].decode(errors="ignore")


def test_unmendable_frame_is_left_to_the_library() -> None:
    broken = frame(1, b"\0\0\0\0")
    assert mended(broken) == broken
