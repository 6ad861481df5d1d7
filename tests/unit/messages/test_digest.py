"""Digests are stored: they must be the same in every process, on every machine, for ever."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from durable.envelope import Envelope
from durable.messages.digest import conflicts, fingerprint, message_digest, terms_digest


def test_digests_never_change() -> None:
    assert terms_digest(PLAIN) == 1200277452322792319
    assert message_digest("", b"") == -7712737833812065720
    assert message_digest("a.b", b'{"number":1}') == -8757395454862913858
    assert fingerprint("ValueError", "app.py:handle") == "0c796b8ea7cb367a"


@given(st.binary())
def test_a_digest_fits_a_bigint(body: bytes) -> None:
    assert -(2**63) <= message_digest("a", body) < 2**63


@given(st.lists(st.binary(max_size=20), unique=True))
def test_other_bodies_have_other_digests(bodies: list[bytes]) -> None:
    assert len({message_digest("a", body) for body in bodies}) == len(bodies)


def test_type_counts_and_is_kept_apart_from_the_body() -> None:
    assert message_digest("a", b"b") != message_digest("b", b"b")
    assert message_digest("ab", b"") != message_digest("a", b"b")


def test_parts_of_a_fingerprint_are_kept_apart() -> None:
    assert fingerprint("ab", "c") != fingerprint("a", "bc")
    assert fingerprint("a") != fingerprint("a", "")


def test_a_fingerprint_is_made_of_any_text() -> None:
    assert fingerprint("\ud800", "\0") == fingerprint("?", "\0")


SENT = datetime(2026, 1, 1, tzinfo=UTC)
DAY = 86_400.0


def envelope(**changes: Any) -> Envelope:
    given: dict[str, Any] = {"id": UUID(int=17), "message_type": "a.b", "destination": "x", "source": "orders"}
    return Envelope(**{**given, "correlation_id": UUID(int=1), "body": b"{}", "sent_at": SENT, **changes})


def after(seconds: float) -> datetime:
    return SENT + timedelta(seconds=seconds)


PLAIN = envelope(headers={"tenant": "7"}, partition_key="order-17")
# The message that came first, and the one that came later.
OTHERS = {
    "another key": (PLAIN, replace(PLAIN, partition_key="order-18")),
    "no key": (PLAIN, replace(PLAIN, partition_key=None)),
    "an empty key": (replace(PLAIN, partition_key=None), replace(PLAIN, partition_key="")),
    "another content type": (PLAIN, replace(PLAIN, content_type="application/msgpack")),
    "another tenant": (PLAIN, replace(PLAIN, headers={"tenant": "8"})),
    "a reply-to": (replace(PLAIN, headers={**PLAIN.headers, "reply-to": "x"}), PLAIN),
    "headers run together": (envelope(headers={"a": "bc"}), envelope(headers={"ab": "c"})),
    "expired on arrival": (replace(PLAIN, deliver_by=SENT), PLAIN),
    "expired long since": (replace(PLAIN, deliver_by=after(-DAY)), replace(PLAIN, deliver_by=after(60))),
    "a second for a minute": (replace(PLAIN, deliver_by=after(1)), replace(PLAIN, deliver_by=after(60))),
    "a day for ever": (replace(PLAIN, deliver_by=after(DAY)), PLAIN),
}  # fmt: skip
COPIES = {
    "itself": (PLAIN, PLAIN),
    "another trace": (PLAIN, replace(PLAIN, headers={**PLAIN.headers, "traceparent": "00-1", "baggage": "b"})),
    "through a dead letter queue": (PLAIN, replace(PLAIN, headers={**PLAIN.headers, "x-death": "[...]"})),
    "the order of headers": (envelope(headers={"a": "1", "b": "2"}), envelope(headers={"b": "2", "a": "1"})),
    "a deadline counted anew": (replace(PLAIN, deliver_by=after(31.9)), replace(PLAIN, deliver_by=after(32.1))),
    "the same deadline, sent later": (
        replace(PLAIN, deliver_by=after(DAY)), replace(PLAIN, sent_at=after(DAY - 60), deliver_by=after(DAY)),
    ),
    "the same time to live, sent later": (
        replace(PLAIN, deliver_by=after(60)), replace(PLAIN, sent_at=after(DAY), deliver_by=after(DAY + 60)),
    ),
    "put off": (PLAIN, replace(PLAIN, execution_time=after(DAY))),
    "one that lives longer": (PLAIN, replace(PLAIN, deliver_by=SENT)),
}  # fmt: skip


@pytest.mark.parametrize(("known", "later"), OTHERS.values(), ids=OTHERS.keys())
def test_terms_tell_another_message_from_a_copy(known: Envelope, later: Envelope) -> None:
    assert conflicts(terms_digest(known), terms_digest(later))


@pytest.mark.parametrize(("known", "later"), COPIES.values(), ids=COPIES.keys())
def test_terms_of_a_copy_do_not_conflict(known: Envelope, later: Envelope) -> None:
    assert not conflicts(terms_digest(known), terms_digest(later))


def test_unknown_terms_conflict_with_none() -> None:
    assert not conflicts(0, terms_digest(PLAIN))
    assert not conflicts(terms_digest(PLAIN), 0)


@given(st.text(), st.dictionaries(st.text(), st.text()), st.none() | st.datetimes(timezones=st.just(UTC)))
def test_terms_fit_a_bigint_and_are_known(key: str, headers: dict[str, str], moment: datetime | None) -> None:
    terms = terms_digest(envelope(partition_key=key, headers=headers, deliver_by=moment, execution_time=moment))
    assert -(2**63) <= terms < 2**63
    assert terms != 0
    assert not conflicts(terms, terms)
