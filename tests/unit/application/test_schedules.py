"""Declared schedules: what is refused, and the ids and headers of what they bring."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from durable import Bus, message
from durable.application.schedules import Schedule
from durable.errors import InvalidSetting, RoutingError

AT = datetime(2030, 1, 1, 3, tzinfo=UTC)
BILLING = "tcp://127.0.0.1:1"


@message("schedules.compact")
class Compact(msgspec.Struct):
    level: int = 0


async def coroutine(at: datetime) -> Compact:
    return Compact()


@pytest.fixture
def bus() -> Bus:
    bus = Bus("orders")
    bus.route(Compact, to=BILLING)
    return bus


def declared(bus: Bus, message: object = Compact(), name: str = "nightly", **options: Any) -> Schedule:
    bus.every(options.pop("cron", "0 3 * * *"), message, name=name, **options)
    return bus.application.schedules.pop(name)


class TestEnvelopes:
    def test_occurrence_has_the_same_id_on_every_node(self, bus: Bus) -> None:
        envelope_factory = bus.runtime.envelope_factory
        [first] = declared(bus).envelopes(envelope_factory, AT)
        [again] = declared(bus, lambda at: Compact()).envelopes(envelope_factory, AT)
        [other_name] = declared(bus, name="weekly").envelopes(envelope_factory, AT)
        [other_time] = declared(bus).envelopes(envelope_factory, AT + timedelta(days=1))
        [asked_for] = declared(bus).envelopes(envelope_factory, AT, asked_for=True)
        assert first.id == again.id
        assert len({first.id, other_name.id, other_time.id, asked_for.id}) == 4

    def test_headers_name_the_schedule_and_the_occurrence(self, bus: Bus) -> None:
        schedule = declared(bus, headers={"tenant": "blue"}, key="order-1", deliver_by=timedelta(hours=1))
        [envelope] = schedule.envelopes(bus.runtime.envelope_factory, AT)
        assert envelope.headers == {
            "tenant": "blue",
            "schedule": "nightly",
            "occurrence": "2030-01-01T03:00:00+00:00",
        }
        assert (envelope.partition_key, envelope.destination) == ("order-1", BILLING)
        assert envelope.deliver_by == envelope.sent_at + timedelta(hours=1)

    def test_a_function_is_told_the_occurrence(self, bus: Bus) -> None:
        [envelope] = declared(bus, lambda at: Compact(at.hour)).envelopes(bus.runtime.envelope_factory, AT)
        assert envelope.body == b'{"level":3}'

    def test_an_event_goes_to_every_subscriber(self) -> None:
        bus = Bus("orders")
        for uri in ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"):
            bus.subscribe(Compact, to=uri)
        assert len(declared(bus).envelopes(bus.runtime.envelope_factory, AT)) == 2

    def test_fingerprints_of_schedules_differ_in_every_field(self, bus: Bus) -> None:
        same = [declared(bus).declaration for _ in range(2)]
        others = [
            declared(bus, Compact(1)),
            declared(bus, cron="0 4 * * *"),
            declared(bus, tz="Europe/Vienna"),
            declared(bus, misfire="all"),
            declared(bus, to="tcp://127.0.0.1:2"),
            declared(bus, key="k"),
            declared(bus, lambda at: Compact()),
        ]
        assert len(set(same)) == 1
        assert len({*same, *(other.declaration for other in others)}) == 8


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"cron": "nonsense"}, "cron 'nonsense'"),
            ({"tz": "Europe/Wien"}, "Europe/Vienna"),
            ({"misfire": "sometimes"}, "'once', 'all' or 'skip'"),
            ({"name": ""}, "give printable text"),
            ({"name": "a:b"}, "give printable text"),
            ({"name": "-a"}, "give printable text"),
            ({"name": "01900000-0000-7000-8000-000000000000"}, "give printable text"),
            ({"name": "x" * 120}, "the name has 120 characters; give 100 at most"),
            ({"delay": 5}, "delay= cannot be given"),
            ({"id_from": "x"}, "id_from= cannot be given"),
            ({"dleay": 5}, "unknown parameter 'dleay'; did you mean 'delay'"),
            ({"deliver_by": AT}, "must be a timedelta"),
            ({"message": coroutine}, "a plain function"),
            ({"message": 17}, "a plain function"),
            ({"message": Compact}, "a plain function"),
            ({"to": "pigeon://x"}, "no transport"),
        ],
    )
    def test_invalid_schedule_is_refused_at_its_declaration(self, bus: Bus, options: dict[str, Any], told: str) -> None:
        with pytest.raises(InvalidSetting, match=told):
            declared(bus, **options)

    def test_second_schedule_of_one_name_is_refused(self, bus: Bus) -> None:
        bus.every("* * * * *", Compact(), name="a")
        with pytest.raises(InvalidSetting, match="there is a schedule of this name already"):
            bus.every("0 * * * *", Compact(), name="a")

    def test_a_message_without_a_destination_is_told_when_the_bus_starts(self) -> None:
        bus = Bus("orders")
        with pytest.raises(RoutingError, match="no destination"):
            declared(bus).check(bus.runtime.envelope_factory)
