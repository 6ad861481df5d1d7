"""Codecs by content type: which one encodes and decodes, and that nothing but InvalidMessage comes of bad ones."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest

import durable
from durable import Codec, Envelope, InvalidMessage, InvalidSetting, JsonCodec, MsgpackCodec, register_codec
from durable.messages import codec
from tests.support.kinds import draft

VENDOR = "application/vnd.acme.order+json"


class Order(msgspec.Struct):
    number: int


class CommaCodec:
    """A user's own: one field, and what the envelope says."""

    content_type = "text/x-comma"

    def encode(self, message: object, envelope: Envelope) -> bytes:
        assert isinstance(message, Order)
        return f"{message.number},{envelope.source}".encode()

    def decode(self, body: bytes, cls: type[Any]) -> Any:
        return cls(int(body.partition(b",")[0]))


class Broken:
    content_type = "text/x-broken"

    def __init__(self, result: object) -> None:
        self.result = result

    def encode(self, message: object, envelope: Envelope) -> Any:
        return self._given()

    def decode(self, body: bytes, cls: type[Any]) -> Any:
        return self._given()

    def _given(self) -> object:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_codecs", dict(codec._codecs))


def test_json_msgpack_and_cloudevents_are_known_from_the_start() -> None:
    assert list(codec.content_types()) == ["application/json", "application/msgpack", "application/cloudevents+json"]


def test_a_codec_of_the_application_encodes_and_decodes_its_content_type() -> None:
    own: Codec = CommaCodec()
    register_codec(own)
    body = codec.encode(Order(7), draft("text/x-comma", source="shop"))
    assert body == b"7,shop"
    assert codec.decode(body, Order, "text/x-comma") == Order(7)


def test_vendor_suffix_is_understood_once_registered() -> None:
    with pytest.raises(InvalidMessage, match="is not understood"):
        codec.decode(b'{"number": 1}', Order, VENDOR)
    register_codec(JsonCodec(VENDOR))
    assert codec.decode(b'{"number": 1}', Order, VENDOR) == Order(1)
    register_codec(MsgpackCodec("application/vnd.acme.order+msgpack"))
    assert codec.decode(b"\x81\xa6number\x01", Order, "application/vnd.acme.order+msgpack") == Order(1)


def test_last_registered_codec_is_used() -> None:
    class Shouting(JsonCodec):
        def decode(self, body: bytes, cls: type[Any]) -> Any:
            return super().decode(body.lower(), cls)

    register_codec(Shouting())
    assert codec.decode(b'{"NUMBER": 1}', Order) == Order(1)


@pytest.mark.parametrize(
    "content_type",
    ["application/json; charset=utf-8", "Application/JSON", " application/json ", 'application/json;charset="utf-8"'],
)
def test_case_and_parameters_of_a_content_type_are_ignored(content_type: str) -> None:
    assert codec.decode(b'{"number": 1}', Order, content_type) == Order(1)


@pytest.mark.parametrize("content_type", ["application/x-python-pickle", "", ";", "json", "text/plain", "\x00", "*/*"])
def test_unknown_content_type_is_invalid_and_the_known_ones_are_named(content_type: str) -> None:
    with pytest.raises(InvalidMessage, match=r"is not understood; known: application/json, application/msgpack, "):
        codec.decode(pickle.dumps(Order(1)), Order, content_type)


def test_class_without_a_codec_for_its_content_type_is_a_wiring_fault() -> None:
    with pytest.raises(InvalidSetting, match=r"no codec is registered for 'text/x-comma'.*register_codec\(\)"):
        codec.encode(Order(1), draft("text/x-comma"))


@pytest.mark.parametrize(
    "content_type", ["", "json", "Application/JSON", "a/b; charset=utf-8", "a/b\n", "a /b", "a/" * 2]
)
def test_a_codec_of_no_content_type_is_refused(content_type: str) -> None:
    with pytest.raises(InvalidSetting, match="is no content type"):
        register_codec(JsonCodec(content_type))
    with pytest.raises(InvalidSetting, match="is no content type"):
        durable.message("codec.order", content_type=content_type)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("nothing to divide"), RecursionError("too deep"), KeyError(), MemoryError()]
)
def test_error_of_a_codec_makes_the_message_invalid(error: Exception) -> None:
    register_codec(Broken(error))
    said = str(error) or type(error).__name__
    with pytest.raises(InvalidMessage, match=f"Order cannot be encoded: {said}") as encoding:
        codec.encode(Order(1), draft("text/x-broken"))
    with pytest.raises(InvalidMessage, match=f"the body is no Order: {said}") as decoding:
        codec.decode(b"", Order, "text/x-broken")
    assert encoding.value.__cause__ is decoding.value.__cause__ is error


@pytest.mark.parametrize("result", ["text", None, Order(1), bytearray(b"x")])
def test_codec_encoding_to_other_than_bytes_is_named(result: object) -> None:
    register_codec(Broken(result))
    with pytest.raises(InvalidMessage, match=rf"Broken.encode\(\) returned {type(result).__name__}, not bytes"):
        codec.encode(Order(1), draft("text/x-broken"))


@pytest.mark.parametrize("result", [{"number": 1}, None, b"x"])
def test_codec_decoding_to_another_class_is_named(result: object) -> None:
    register_codec(Broken(result))
    with pytest.raises(InvalidMessage, match=rf"Broken.decode\(\) returned {type(result).__name__}, not Order"):
        codec.decode(b"", Order, "text/x-broken")
