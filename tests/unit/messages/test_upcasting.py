"""Old versions of a message: which handler gets them, as what, and what becomes of an upcaster that fails."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from durable import Bus, InvalidMessage, InvalidSetting, UnknownMessageType, message, upcaster
from durable.cli.topology import needed
from durable.messages.codecs.msgpack import MSGPACK
from durable.messages.routing import LOCAL
from durable.messages.upcasting import decode, newer_types, sent_class
from durable.outbox.envelope_factory import EnvelopeFactory
from tests.support.kinds import draft


class V1(msgspec.Struct):
    total: str


class V2(BaseModel):
    cents: int


class V3(msgspec.Struct):
    cents: int
    currency: str


V1_TYPE, V2_TYPE, V3_TYPE = "orders.placed", "orders.placed.v2", "orders.placed.v3"


@pytest.fixture(autouse=True)
def _versions(no_messages: None) -> None:
    message("orders.placed")(V1)
    message("orders.placed", version=2, content_type=MSGPACK)(V2)
    message("orders.placed", version=3)(V3)


def to_v2(old: V1) -> V2:
    return V2(cents=round(float(old.total) * 100))


def to_v3(old: V2) -> V3:
    return V3(old.cents, "EUR")


def declare_chain() -> None:
    upcaster(V1, to=V2)(to_v2)
    upcaster(V2, to=V3)(to_v3)


def arrived(message_type: str, body: bytes, content_type: str = "application/json") -> Any:
    return draft(content_type, message_type=message_type, body=body)


def bus() -> Bus:
    return Bus("shop", "postgresql://localhost/shop")


async def handle(placed: V3) -> None: ...


async def handle_v1(placed: V1) -> None: ...


class TestDecoding:
    def test_every_version_arrives_as_the_newest_under_any_codec(self) -> None:
        declare_chain()
        assert decode(arrived(V1_TYPE, b'{"total":"4.20"}'), V3) == V3(420, "EUR")
        assert decode(arrived(V2_TYPE, b'{"cents":7}'), V3) == V3(7, "EUR")
        assert decode(arrived(V2_TYPE, b"\x81\xa5cents\x07", MSGPACK), V3) == V3(7, "EUR")
        assert decode(arrived(V3_TYPE, b'{"cents":7,"currency":"CHF"}'), V3) == V3(7, "CHF")

    def test_handler_of_a_middle_version_gets_older_messages_as_its_version(self) -> None:
        declare_chain()
        assert decode(arrived(V1_TYPE, b'{"total":"4.20"}'), V2) == V2(cents=420)
        assert decode(arrived(V2_TYPE, b'{"cents":7}'), V2) == V2(cents=7)
        assert decode(arrived(V1_TYPE, b'{"total":"4.20"}'), V1) == V1("4.20")

    def test_sent_class_is_the_class_of_the_stored_type(self) -> None:
        declare_chain()
        assert [sent_class(name, V3) for name in (V1_TYPE, V2_TYPE, V3_TYPE)] == [V1, V2, V3]
        assert sent_class(V1_TYPE, V1) is V1

    def test_raising_upcaster_makes_the_message_invalid(self) -> None:
        declare_chain()
        with pytest.raises(InvalidMessage, match=r"upcaster .*to_v2 failed: ValueError: could not convert") as invalid:
            decode(arrived(V1_TYPE, b'{"total":"a lot"}'), V3)
        assert isinstance(invalid.value.__cause__, ValueError)

    def test_upcaster_returning_another_class_makes_the_message_invalid(self) -> None:
        broken: Any = lambda old: None  # noqa: E731
        upcaster(V1, to=V2)(broken)
        with pytest.raises(InvalidMessage, match=r"upcaster .* returned NoneType, not V2"):
            decode(arrived(V1_TYPE, b'{"total":"1"}'), V2)

    def test_body_unfit_for_its_own_version_is_invalid(self) -> None:
        declare_chain()
        with pytest.raises(InvalidMessage, match="the body is no V1"):
            decode(arrived(V1_TYPE, b'{"cents":7,"currency":"EUR"}'), V3)


class TestDeclaring:
    def test_circular_chain_is_refused(self) -> None:
        declare_chain()
        with pytest.raises(InvalidSetting, match="leads back to where it began"):
            upcaster(V3, to=V1)
        with pytest.raises(InvalidSetting, match="leads back to where it began"):
            upcaster(V3, to=V3)
        assert list(newer_types(V1_TYPE)) == [V2_TYPE, V3_TYPE]

    def test_an_old_version_has_one_upcaster(self) -> None:
        declare_chain()
        with pytest.raises(InvalidSetting, match=r"orders.placed is upcast by .*to_v2 already"):

            @upcaster(V1, to=V3)
            def directly(old: V1) -> V3:
                return V3(0, "EUR")

    def test_module_loaded_again_declares_its_upcaster_again(self) -> None:
        declare_chain()
        declare_chain()

    def test_unregistered_class_has_no_versions(self) -> None:
        class Other(msgspec.Struct):
            pass

        with pytest.raises(UnknownMessageType):
            upcaster(Other, to=V2)

    def test_an_upcaster_does_no_io(self) -> None:
        async def fetches(old: V1) -> V2:
            return V2(cents=0)

        declare: Any = upcaster(V1, to=V2)
        with pytest.raises(InvalidSetting, match="must be a plain function"):
            declare(fetches)


class TestHandlers:
    def test_the_handler_of_the_newest_version_gets_them_all(self) -> None:
        declare_chain()
        shop = bus()
        shop.handles(V3)(handle)
        assert {name: handler.message_type for name, handler in shop.application.by_type().items()} == dict.fromkeys(
            (V1_TYPE, V2_TYPE, V3_TYPE), V3_TYPE
        )

    def test_the_order_of_the_declarations_makes_no_difference(self) -> None:
        shop = bus()
        shop.handles(V3)(handle)
        declare_chain()
        assert list(shop.application.by_type()) == [V3_TYPE, V1_TYPE, V2_TYPE]

    def test_service_handling_the_old_version_continues_with_the_old_version(self) -> None:
        declare_chain()
        shop = bus()
        shop.handles(V1)(handle_v1)
        assert list(shop.application.by_type()) == [V1_TYPE]

    def test_second_handler_of_a_version_is_refused(self) -> None:
        declare_chain()
        shop = bus()
        shop.handles(V1)(handle_v1)
        with pytest.raises(InvalidSetting, match=r"orders.placed is handled by .*handle_v1, and upcast for .*handle;"):
            shop.handles(V3)(handle)
        assert list(shop.application.handlers) == [V1_TYPE]

    async def test_late_upcaster_for_a_handled_version_is_refused_at_the_start(self) -> None:
        shop = bus()
        shop.handles(V1)(handle_v1)
        shop.handles(V3)(handle)
        declare_chain()
        with pytest.raises(InvalidSetting, match="remove that handler, or the upcaster"):
            await shop.runtime.check()

    def test_old_version_sent_goes_to_the_handler_of_the_new_one(self) -> None:
        declare_chain()
        shop = bus()
        shop.handles(V3)(handle)
        envelope_factory = EnvelopeFactory("shop", shop.application.routes, shop.settings, shop.runtime.clock)
        sent = envelope_factory.command(V1("4.20"))
        assert (sent.destination, sent.message_type) == (LOCAL, V1_TYPE)
        assert [envelope.destination for envelope in envelope_factory.cascaded(V2(cents=1))] == [LOCAL]
        assert shop.application.routes.destinations() == {V3_TYPE: [LOCAL]}

    def test_rabbitmq_is_asked_for_every_version(self) -> None:
        declare_chain()
        shop = Bus("shop", "postgresql://localhost/shop", amqp_url="amqp://localhost")
        shop.handles(V3)(handle)
        shop.listen("rabbitmq://default/topic/orders")
        bindings = needed(shop)["default"].bindings
        assert [binding.routing_key for binding in bindings] == [
            f"orders:{each}" for each in (V1_TYPE, V2_TYPE, V3_TYPE)
        ]
        listened = shop.application.handled_classes()
        assert listened == dict.fromkeys((V3_TYPE, V1_TYPE, V2_TYPE), V3)
