"""From a message to its envelopes: destinations, ids, times and headers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Unpack
from uuid import UUID

import msgspec
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.envelope import REPLY_TO, Envelope, new_id
from durable.errors import InvalidMessage, RoutingError, UnknownMessageType
from durable.messages import codec
from durable.messages import validation as screening
from durable.messages.registry import message
from durable.messages.routing import LOCAL, Routes
from durable.outbox.envelope_factory import Cause, EnvelopeFactory, Kind, Outgoing, Sending, SendOptions
from durable.settings import load_settings
from durable.testing import ManualClock
from tests.support.subclasses import TEXTS, Text, moments

NOW = datetime(2024, 2, 29, 12, tzinfo=UTC)
BILLING = "tcp://billing:1"
MAIL = "tcp://mail:1"


@message("composing.placed")
class Placed(msgspec.Struct):
    number: int = 0
    note: str = ""


@message("composing.shipped")
class Shipped(msgspec.Struct):
    ratio: float = 0.0


class Stranger(msgspec.Struct):
    pass


@pytest.fixture
def routes() -> Routes:
    routes = Routes()
    routes.route("composing.placed", BILLING)
    routes.subscribe("composing.shipped", BILLING)
    routes.subscribe("composing.shipped", MAIL)
    routes.handled_here("composing.shipped")
    return routes


@pytest.fixture
def envelope_factory(routes: Routes) -> EnvelopeFactory:
    return EnvelopeFactory("orders", routes, load_settings(max_message_bytes=200), ManualClock(NOW))


def send(
    factory: EnvelopeFactory, message: object, kind: Kind, cause: Cause | None = None, **options: Unpack[SendOptions]
) -> tuple[UUID, list[Envelope]]:
    """The id of what an outbox sends, and its envelopes."""
    envelopes: list[Envelope] = []
    sent = factory.send(Sending(message, kind, None, options, None, cause, envelopes.extend))
    assert sent is not None
    return sent, envelopes


def publish(
    factory: EnvelopeFactory, message: object, cause: Cause | None = None, **options: Unpack[SendOptions]
) -> tuple[UUID, list[Envelope]]:
    return send(factory, message, "event", cause, **options)


def cause() -> Envelope:
    return Envelope(
        id=new_id(),
        message_type="composing.placed",
        destination=LOCAL,
        source="shop",
        correlation_id=new_id(),
        body=b"{}",
        sent_at=NOW,
    )


class TestCommands:
    def test_envelope_carries_body_type_destination_source_and_time(self, envelope_factory: EnvelopeFactory) -> None:
        envelope = envelope_factory.command(Placed(1))
        assert codec.decode(envelope.body, Placed) == Placed(1)
        assert (envelope.message_type, envelope.destination) == ("composing.placed", BILLING)
        assert (envelope.source, envelope.sent_at) == ("orders", NOW)
        assert (envelope.deliver_by, envelope.execution_time, envelope.partition_key) == (None, None, None)

    def test_first_message_of_a_conversation_gives_its_id_to_the_conversation(
        self, envelope_factory: EnvelopeFactory
    ) -> None:
        envelope = envelope_factory.command(Placed())
        assert (envelope.correlation_id, envelope.causation_id) == (envelope.id, None)

    def test_a_message_sent_by_a_handler_names_its_cause(self, envelope_factory: EnvelopeFactory) -> None:
        handled = cause()
        envelope = send(envelope_factory, Placed(), "command", Cause(handled))[1][0]
        assert (envelope.correlation_id, envelope.causation_id) == (handled.correlation_id, handled.id)
        assert envelope.id not in (handled.id, handled.correlation_id)

    def test_handler_running_again_sends_the_same_ids(self, envelope_factory: EnvelopeFactory) -> None:
        handled = cause()
        first, second = (
            [send(envelope_factory, Placed(), "command", attempt)[1][0].id for _ in range(3)]
            for attempt in (Cause(handled), Cause(handled))
        )
        assert first == second
        assert len(set(first)) == 3

    def test_ids_differ_by_cause_and_service(self, envelope_factory: EnvelopeFactory, routes: Routes) -> None:
        handled, other = cause(), cause()
        elsewhere = EnvelopeFactory("shipping", routes, load_settings(), ManualClock(NOW))
        ids = {
            send(envelope_factory, Placed(), "command", Cause(handled))[1][0].id,
            send(envelope_factory, Placed(), "command", Cause(other))[1][0].id,
            send(elsewhere, Placed(), "command", Cause(handled))[1][0].id,
            publish(envelope_factory, Shipped(), Cause(handled))[0],
        }
        assert len(ids) == 4

    def test_business_key_determines_the_id_for_every_sender(self, envelope_factory: EnvelopeFactory) -> None:
        assert (
            envelope_factory.command(Placed(), id_from="17").id == envelope_factory.command(Placed(1), id_from="17").id
        )
        assert (
            envelope_factory.command(Placed(), id_from="17").id
            == send(envelope_factory, Placed(), "command", Cause(cause()), id_from="17")[1][0].id
        )
        assert (
            envelope_factory.command(Placed(), id_from="18").id != envelope_factory.command(Placed(), id_from="17").id
        )
        assert (
            publish(envelope_factory, Shipped(), id_from="17")[0] != envelope_factory.command(Placed(), id_from="17").id
        )

    @pytest.mark.parametrize("key", ["", "a\nb", "\ud800"])
    def test_business_key_must_be_printable_text(self, envelope_factory: EnvelopeFactory, key: str) -> None:
        with pytest.raises(InvalidMessage, match="id_from"):
            envelope_factory.command(Placed(), id_from=key)

    def test_the_caller_may_name_the_destination(self, envelope_factory: EnvelopeFactory) -> None:
        assert envelope_factory.command(Placed(), to=MAIL).destination == MAIL

    def test_destination_given_by_the_caller_is_resolved_and_a_route_is_used_unchanged(self, routes: Routes) -> None:
        def by_type(uri: str, message_type: str) -> str:
            return f"{uri}/{message_type}"

        envelope_factory = EnvelopeFactory("orders", routes, load_settings(), ManualClock(NOW), resolve=by_type)
        routed = envelope_factory.command(Placed())
        assert routed.destination == BILLING
        assert envelope_factory.command(Placed(), to=MAIL).destination == f"{MAIL}/{routed.message_type}"

    def test_unregistered_class_is_refused(self, envelope_factory: EnvelopeFactory) -> None:
        with pytest.raises(UnknownMessageType):
            envelope_factory.command(Stranger(), to=MAIL)

    def test_an_event_with_many_subscribers_is_not_sent_as_a_command(
        self, envelope_factory: EnvelopeFactory, routes: Routes
    ) -> None:
        routes.subscribe("composing.placed", MAIL)
        envelope_factory.command(Placed())  # its route counts, not the subscriber
        with pytest.raises(RoutingError, match=r"use send\(\)"):
            publish(envelope_factory, Placed())


class TestEvents:
    def test_every_subscriber_gets_an_envelope_under_the_same_id(self, envelope_factory: EnvelopeFactory) -> None:
        event_id, envelopes = publish(envelope_factory, Shipped())
        assert [envelope.destination for envelope in envelopes] == [BILLING, MAIL, LOCAL]
        assert {envelope.id for envelope in envelopes} == {event_id}
        first, *others = (msgspec.structs.replace(envelope, destination="") for envelope in envelopes)
        assert others == [first, first]

    def test_event_without_subscribers_is_checked(self, envelope_factory: EnvelopeFactory) -> None:
        nobody = EnvelopeFactory("orders", Routes(), load_settings(), ManualClock(NOW))
        event_id, envelopes = publish(nobody, Shipped())
        assert (event_id.version, envelopes) == (7, [])
        with pytest.raises(InvalidMessage):
            publish(nobody, Shipped(float("nan")))


class TestCascading:
    def test_cascaded_event_is_published_and_other_messages_are_sent(self, envelope_factory: EnvelopeFactory) -> None:
        handled = cause()
        assert [e.destination for e in send(envelope_factory, Shipped(), "cascade", Cause(handled))[1]] == [
            BILLING,
            MAIL,
            LOCAL,
        ]
        (command,) = send(envelope_factory, Placed(), "cascade", Cause(handled))[1]
        assert (command.destination, command.causation_id) == (BILLING, handled.id)


class TestOptions:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (timedelta(minutes=1), NOW + timedelta(minutes=1)),
            (90, NOW + timedelta(seconds=90)),
            (0.5, NOW + timedelta(milliseconds=500)),
            (NOW.replace(hour=23), NOW.replace(hour=23)),
        ],
    )
    def test_a_time_may_be_given_or_counted_from_now(
        self, envelope_factory: EnvelopeFactory, given: Any, expected: datetime
    ) -> None:
        assert envelope_factory.command(Placed(), deliver_by=given).deliver_by == expected
        if not isinstance(given, datetime):
            assert envelope_factory.command(Placed(), delay=given).execution_time == expected
        else:
            assert envelope_factory.command(Placed(), at=given).execution_time == expected

    def test_an_aware_time_of_any_zone_is_kept(self, envelope_factory: EnvelopeFactory) -> None:
        tokyo = (NOW + timedelta(days=1)).astimezone(timezone(timedelta(hours=9)))
        assert envelope_factory.command(Placed(), at=tokyo).execution_time == tokyo

    @pytest.mark.parametrize("name", ["deliver_by", "at"])
    def test_a_time_without_a_zone_is_refused(self, envelope_factory: EnvelopeFactory, name: str) -> None:
        options: Any = {name: datetime(2025, 1, 1)}
        with pytest.raises(InvalidMessage, match="has no time zone"):
            envelope_factory.command(Placed(), **options)

    def test_a_remote_message_is_not_put_off_for_longer_than_its_duplicates_are_recognised(
        self, envelope_factory: EnvelopeFactory, routes: Routes
    ) -> None:
        routes.handled_here("composing.placed")
        with pytest.raises(InvalidMessage, match="dedupe_window"):
            envelope_factory.command(Placed(), delay=timedelta(days=7), to="tcp://127.0.0.1:1")
        envelope_factory.command(Placed(), delay=timedelta(days=6, hours=23), to="tcp://127.0.0.1:1")
        envelope_factory.command(Placed(), delay=timedelta(days=70), to=LOCAL)

    def test_a_message_cannot_wait_twice(self, envelope_factory: EnvelopeFactory) -> None:
        with pytest.raises(InvalidMessage, match="exclude each other"):
            envelope_factory.command(Placed(), at=NOW, delay=1)

    def test_headers_are_copied(self, envelope_factory: EnvelopeFactory) -> None:
        headers = {"tenant": "blue"}
        envelope = envelope_factory.command(Placed(), headers=headers, key="order-1")
        headers["tenant"] = "red"
        assert (envelope.headers, envelope.partition_key) == ({"tenant": "blue"}, "order-1")

    def test_the_address_for_replies_travels_as_a_header(self, envelope_factory: EnvelopeFactory) -> None:
        envelope = envelope_factory.command(Placed(), headers={"tenant": "blue"}, reply_to=MAIL)
        assert envelope.headers == {"tenant": "blue", REPLY_TO: MAIL}


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "options"),
        [
            (Placed(note="x" * 200), {}),
            (Placed(note="\ud800"), {}),
            (Shipped(float("inf")), {"to": MAIL}),
            (Placed(), {"headers": {"a": "\r\n"}}),
            (Placed(), {"headers": {"a": 1}}),
            (Placed(), {"headers": {str(number): "" for number in range(101)}}),
            (Placed(), {"reply_to": "tcp://\0"}),
            (Placed(), {"key": "\0"}),
            (Placed(), {"to": "tcp://a\nb"}),
            (Placed(), {"to": ""}),
            (Placed(), {"reply_to": ""}),
            (Placed(), {"reply_to": "nowhere"}),
            (Placed(), {"headers": {"": "b"}}),
            (Placed(), {"tenant": ""}),
        ],
    )
    def test_unstorable_or_undecodable_message_is_refused(
        self, envelope_factory: EnvelopeFactory, given: object, options: Any
    ) -> None:
        with pytest.raises(InvalidMessage):
            envelope_factory.command(given, **options)

    def test_the_refusal_names_the_class_and_the_flaw(self, envelope_factory: EnvelopeFactory) -> None:
        with pytest.raises(InvalidMessage, match=r"^Placed cannot be sent: partition_key has a control character"):
            envelope_factory.command(Placed(), key="\0")

    @given(
        note=st.text(st.characters(exclude_categories=()), max_size=20),
        key=st.none() | st.text(st.characters(exclude_categories=()), max_size=20),
        headers=st.dictionaries(st.text(max_size=10), st.text(st.characters(exclude_categories=()), max_size=10)),
        seconds=st.none() | st.integers(-1_000, 1_000),
    )
    def test_composed_envelope_is_always_sound(
        self, note: str, key: str | None, headers: dict[str, str], seconds: int | None
    ) -> None:
        envelope_factory = EnvelopeFactory("orders", Routes(), load_settings(), ManualClock(NOW))
        options: Any = {"headers": headers}
        if key is not None:
            options["key"] = key
        if seconds is not None:
            options |= {"delay": seconds, "deliver_by": seconds}
        try:
            envelope = envelope_factory.command(Placed(note=note), to=MAIL, **options)
        except InvalidMessage:
            return
        assert screening.find_error(envelope, max_message_bytes=1 << 20) is None
        assert codec.decode(envelope.body, Placed).note == note
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(envelope), type=Envelope) == envelope


def test_outgoing_constructed_by_a_middleware_is_refused(envelope_factory: EnvelopeFactory) -> None:
    """It belongs to no outbox, and would be lost."""
    with pytest.raises(TypeError, match=r"replace\(\)"):
        envelope_factory.send(Outgoing(Placed()))


LATER = NOW + timedelta(minutes=1)
OF_SUBCLASSES: dict[str, Any] = {
    **{f"{option} {name}": {option: text} for option in ("key", "tenant", "id_from") for name, text in TEXTS.items()},
    **{f"value of a header {name}": {"headers": {"a": text}} for name, text in TEXTS.items()},
    **{f"name of a header {name}": {"headers": {text: "a"}} for name, text in TEXTS.items()},
    **{f"at {name}": {"at": moment} for name, moment in moments(LATER).items()},
    **{f"deliver_by {name}": {"deliver_by": moment} for name, moment in moments(LATER).items()},
    "reply_to": {"reply_to": Text(MAIL)},
}


@pytest.mark.parametrize("options", OF_SUBCLASSES.values(), ids=list(OF_SUBCLASSES))
def test_options_of_subclasses_make_the_envelope_of_plain_ones(envelope_factory: EnvelopeFactory, options: Any) -> None:
    [envelope] = send(envelope_factory, Placed(1), "command", **options)[1]
    fields = [value for value in msgspec.structs.astuple(envelope) if isinstance(value, str | datetime)]

    assert {type(each) for each in (*fields, *envelope.headers, *envelope.headers.values())} <= {str, datetime}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(envelope), type=Envelope) == envelope


@pytest.mark.parametrize("key", TEXTS.values(), ids=list(TEXTS))
def test_business_key_of_a_subclass_makes_the_id_of_plain_text(envelope_factory: EnvelopeFactory, key: str) -> None:
    made = envelope_factory.command(Placed(), id_from=key)
    assert made.id == envelope_factory.command(Placed(), id_from="acme").id


def test_time_of_another_library_is_kept_in_the_header(envelope_factory: EnvelopeFactory) -> None:
    at: Any = moments(LATER)["pandas"] + pd.Timedelta(nanoseconds=1)
    [envelope] = send(envelope_factory, Placed(1), "command", at=at)[1]

    assert envelope.due_at == LATER


def test_clock_of_another_library_dates_the_envelope(routes: Routes) -> None:
    clock = ManualClock(moments(NOW)["datetime"])
    [envelope] = send(EnvelopeFactory("orders", routes, load_settings(), clock), Placed(1), "command")[1]

    assert type(envelope.sent_at) is datetime
