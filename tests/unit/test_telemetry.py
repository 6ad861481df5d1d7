"""Counters of what happened."""

from __future__ import annotations

from durable.telemetry import Counters, Event


def test_events_are_counted_each_by_itself() -> None:
    counters = Counters()
    counters.add(Event.SENT)
    counters.add(Event.SENT, 4)
    counters.add(Event.BUSY, 0)
    assert (counters[Event.SENT], counters[Event.BUSY], counters[Event.LATCHED]) == (5, 0, 0)


def test_a_snapshot_names_every_event_and_does_not_change() -> None:
    counters = Counters()
    counters.add(Event.HANDLED)
    before = counters.snapshot()
    counters.add(Event.HANDLED)
    assert set(before) == {event.value for event in Event}
    assert (before["handled"], counters.snapshot()["handled"]) == (1, 2)
