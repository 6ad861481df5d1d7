"""Deadlines between two clocks, and between versions that know of them and that do not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from pamqp.commands import Basic

from durable.envelope import Envelope
from durable.errors import InvalidMessage
from durable.transports.deadlines import counted_anew, departure
from durable.transports.frames import MAX_ENVELOPES, Batch, Frame, Hello, PartlyReadable, Welcome
from durable.transports.http.headers import read_options
from durable.transports.http.wire import decode_batch, encode_batch
from durable.transports.rabbitmq.arrivals import Origin, mapped
from durable.transports.rabbitmq.message import properties, received
from durable.transports.tcp.client_side import ClientSide, Sendable
from durable.transports.tcp.server_side import Deliver, ServerSide
from durable.transports.wire import MAGIC, Decoder, _decode_batch
from tests.support.receivers import envelope

HERE = datetime(2030, 1, 1, 12, tzinfo=UTC)
THERE = HERE + timedelta(hours=3)  # the receiver's clock is fast
MINUTE = timedelta(minutes=1)


def urgent(left: timedelta = MINUTE) -> Envelope:
    return msgspec.structs.replace(envelope(), deliver_by=HERE + left)


class TestRules:
    def test_rest_of_a_deadline_is_counted_from_the_clock_of_the_receiver(self) -> None:
        for there in (THERE, HERE, HERE - timedelta(days=2)):
            [arrived] = counted_anew([urgent()], HERE, there)
            assert arrived.deliver_by == there + MINUTE

    def test_the_clock_travels_only_beside_a_deadline(self) -> None:
        assert departure([envelope(), urgent()], HERE) == HERE
        assert departure([envelope()], HERE) is None

    def test_deadline_is_kept_without_the_clock_of_the_sender(self) -> None:
        given = [urgent(), envelope()]
        assert counted_anew(given, None, THERE) == given

    def test_a_deadline_beyond_the_calendar_stays(self) -> None:
        last = msgspec.structs.replace(envelope(), deliver_by=datetime.max.replace(tzinfo=UTC))
        assert counted_anew([last], HERE, THERE) == [last]

    def test_zones_of_clocks_are_irrelevant(self) -> None:
        clock = HERE.astimezone(timezone(timedelta(hours=5)))
        assert counted_anew([urgent()], clock, THERE)[0].deliver_by == THERE + MINUTE


def client() -> ClientSide:
    side = ClientSide("orders", 1, 1 << 20)
    side.hear(Frame(Welcome(1, "billing", 2, 1 << 20, MAX_ENVELOPES, 100)))
    return side


def server() -> ServerSide:
    side = ServerSide("billing", 2, 1 << 20)
    side.hear(Frame(Hello([1], "orders", 1, 1 << 20)), 100)
    return side


def decoded(data: bytes) -> Any:
    [item] = Decoder(1 << 20).feed(MAGIC + data)
    return item


class TestOnTheWire:
    def test_tcp_batch_carries_the_clock_of_the_sender(self) -> None:
        offer = client().offer([urgent()], HERE)
        assert isinstance(offer, Sendable)
        match server().hear(decoded(offer.data), 100):
            case Deliver(clock=clock):
                assert clock == HERE
            case other:
                raise AssertionError(other)

    def test_tcp_batch_carries_the_clock_also_with_an_unreadable_neighbour(self) -> None:
        payload = msgspec.msgpack.encode([2, [urgent(), "nonsense"], HERE])
        salvaged = _decode_batch(memoryview(payload), 1, len(payload))
        assert isinstance(salvaged, Frame)
        assert isinstance(salvaged.content, PartlyReadable)
        assert (salvaged.content.clock, len(salvaged.content.envelopes)) == (HERE, 1)

    def test_older_tcp_peer_omits_and_skips_the_clock(self) -> None:
        class OldBatch(msgspec.Struct, array_like=True):
            count: int
            envelopes: list[Envelope]

        sent = urgent()
        new = msgspec.msgpack.encode(Batch(1, [sent], HERE))
        old = msgspec.msgpack.encode(OldBatch(1, [sent]))
        assert msgspec.msgpack.decode(new, type=OldBatch).envelopes == [sent]
        assert msgspec.msgpack.decode(old, type=Batch) == Batch(1, [sent], None)

    def test_http_batch_carries_the_clock_of_the_sender(self) -> None:
        assert decode_batch(encode_batch([urgent()], HERE)).clock == HERE
        assert decode_batch(encode_batch([envelope()], HERE)).clock is None

    def test_older_http_peer_omits_the_clock(self) -> None:
        body = msgspec.msgpack.encode([1, 1, [urgent()]])
        assert decode_batch(body).clock is None


class TestAtABroker:
    def arrive(self, published: datetime, arrived: datetime) -> datetime | None:
        about = properties(urgent(), published)
        return received(about, about.headers or {}, b"{}", arrived).deliver_by

    def test_slow_receiver_gives_at_most_the_rest_of_the_deadline(self) -> None:
        slow = HERE - timedelta(hours=3)
        assert self.arrive(HERE, slow) == slow + MINUTE

    def test_wait_at_the_broker_counts(self) -> None:
        assert self.arrive(HERE, HERE + 10 * MINUTE) == HERE + MINUTE

    def test_deadline_of_an_older_sender_is_kept(self) -> None:
        about = properties(urgent())
        assert received(about, about.headers or {}, b"{}", THERE).deliver_by == HERE + MINUTE

    def foreign(self, expiration: str | None) -> Any:
        about = Basic.Properties(message_id="17", message_type="a.b", expiration=expiration)
        delivery = Basic.Deliver("c", 1, False, "", "q")
        return mapped(delivery, about, b"{}", origin=Origin("q", "q"), limit_bytes=100, now=HERE)

    def test_the_expiration_of_a_foreign_message_counts_from_its_arrival(self) -> None:
        assert self.foreign("60000").deliver_by == HERE + MINUTE
        assert self.foreign("0").deliver_by == HERE
        assert self.foreign(None).deliver_by is None

    def test_expiration_other_than_a_number_is_reported(self) -> None:
        assert "is no number of milliseconds" in self.foreign("soon").reason


class TestOfHttpClients:
    def test_a_time_to_live_counts_from_the_arrival(self) -> None:
        options = read_options([(b"durable-time-to-live", b"60")])
        assert options.deadline(HERE) == HERE + MINUTE
        assert read_options([]).deadline(HERE) is None

    @pytest.mark.parametrize(
        ("headers", "told"),
        [
            ([(b"durable-time-to-live", b"soon")], "is no time; write seconds"),
            ([(b"durable-time-to-live", b"-1")], "is no time; write seconds"),
            ([(b"durable-time-to-live", b"1"), (b"durable-deliver-by", b"2030-01-01T00:00:00Z")], "exclude each other"),
        ],
    )
    def test_malformed_time_to_live_is_refused(self, headers: list[tuple[bytes, bytes]], told: str) -> None:
        with pytest.raises(InvalidMessage, match=told):
            read_options(headers).deadline(HERE)
