"""Repeats: a duplicate is what loses nothing, whatever times its sender claims."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from hypothesis import example, given
from hypothesis import strategies as st

from durable.envelope import Envelope
from durable.messages.digest import conflicts, message_digest, terms_digest
from durable.messages.repeats import DEADLINE_JITTER, DUE_JITTER, Known, outlives, would_be_lost

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DAY = 86_400

seconds = st.integers(-DAY, DAY) | st.sampled_from([-3600, -1, 0, 1, 2, 10, 11, 600])
optional = st.none() | seconds


def at(offset: float | None) -> datetime | None:
    return None if offset is None else NOW + timedelta(seconds=offset)


def envelope(sent: float, life: float | None, due: float | None) -> Envelope:
    """A message that was sent, may be delivered until, and is due so many seconds from now."""
    given: dict[str, Any] = {"id": UUID(int=17), "message_type": "a.b", "destination": "x", "source": "orders"}
    given |= {"sent_at": at(sent), "deliver_by": at(life), "execution_time": at(due)}
    return Envelope(**given, correlation_id=UUID(int=1), body=b"{}")


def known(first: Envelope, waits: bool, expired: bool) -> Known:
    return Known.of(
        message_digest("a.b", b"{}"),
        terms_digest(first),
        NOW,
        due_at=first.execution_time,
        expired=first.deliver_by if expired else None,
        deliver_by=first.deliver_by if waits else None,
    )


def handled_at(deliver_by: datetime | None, due: datetime | None) -> datetime | None:
    """When a message is handled by a service that is free; None when it expires before."""
    begins = max(due or NOW, NOW)
    return None if deliver_by is not None and deliver_by <= begins else begins


@given(seconds, optional, optional, seconds, optional, optional)
@example(-3600, -3000, None, 0, 600, None)  # expired on arrival, with the same span of life
@example(82_800, 83_400, 82_800, 0, 600, None)  # put off, and sent in the future
def test_message_is_handled_in_time_or_raises_an_alarm_when_its_id_is_taken(
    first_sent: float, first_life: float | None, first_due: float | None,
    sent: float, life: float | None, due: float | None,
) -> None:  # fmt: skip
    """Whatever a stranger claims of its times: the known message waits when the newcomer comes."""
    first, newcomer = envelope(first_sent, first_life, first_due), envelope(sent, life, due)
    waiting = known(first, waits=True, expired=False)
    if conflicts(waiting.terms, terms_digest(newcomer)) or would_be_lost(waiting, newcomer, NOW):
        return  # an alarm
    alone = handled_at(newcomer.deliver_by, newcomer.execution_time)
    deadline = newcomer.deliver_by if outlives(waiting, newcomer) else first.deliver_by
    if alone is not None and newcomer.deliver_by is None:
        assert deadline is None
    begins = handled_at(deadline, first.execution_time)
    if alone is not None and begins is not None:
        assert begins <= alone + DUE_JITTER
    elif alone is not None:  # by the jitter of one of the two, it could not be handled in time
        assert newcomer.deliver_by is not None
        assert newcomer.deliver_by <= alone + DUE_JITTER + DEADLINE_JITTER


@given(seconds, optional, optional, st.integers(0, DAY), st.floats(-0.9, 0.9))
def test_repeat_of_a_handled_message_is_a_duplicate(
    sent: float, life: float | None, due: float | None, later: int, jitter: float
) -> None:
    first = known(envelope(sent, life, due), waits=False, expired=False)
    if due is not None and due > 0:
        due = max(due, 0) + later  # by its delay, counted anew
    repeat = envelope(sent, None if life is None else life + jitter, due)
    assert not would_be_lost(first, repeat, NOW)
    assert not outlives(first, repeat)


@given(st.integers(1, DAY), st.integers(0, DAY))
def test_business_key_sent_again_lives_on_with_its_duplicate(life: int, passed: int) -> None:
    first = known(envelope(-passed, life - passed, None), waits=True, expired=False)
    again = envelope(0, life, None)
    assert not conflicts(first.terms, terms_digest(again))
    if life > passed:
        assert not would_be_lost(first, again, NOW)
        assert outlives(first, again) == (passed > DEADLINE_JITTER.total_seconds())
    elif life > DEADLINE_JITTER.total_seconds() and passed > life:
        assert would_be_lost(first, again, NOW)


@given(seconds, st.integers(-DAY, -1), st.floats(-0.9, 0.9))
def test_repeat_of_an_expired_message_is_a_duplicate(sent: float, life: int, jitter: float) -> None:
    first = known(envelope(sent, life, None), waits=False, expired=True)
    assert not would_be_lost(first, envelope(sent, life + jitter, None), NOW)
