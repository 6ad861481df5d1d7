"""Digests are stored: they must be the same in every process, on every machine, for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from durable.messages.digest import fingerprint, message_digest


def test_digests_never_change() -> None:
    assert message_digest("", b"") == -7712737833812065720
    assert message_digest("a.b", b'{"number":1}') == -8757395454862913857
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
