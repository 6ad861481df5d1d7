"""Digests are stored: they must be the same in every process, on every machine, for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from durable.digest import body_digest, fingerprint


def test_digests_never_change() -> None:
    assert body_digest(b"") == -1970711489451281740
    assert body_digest(b'{"number":1}') == -5928270893045608628
    assert fingerprint("ValueError", "app.py:handle") == "0c796b8ea7cb367a"


@given(st.binary())
def test_a_digest_fits_a_bigint(body: bytes) -> None:
    assert -(2**63) <= body_digest(body) < 2**63


@given(st.lists(st.binary(max_size=20), unique=True))
def test_other_bodies_have_other_digests(bodies: list[bytes]) -> None:
    assert len({body_digest(body) for body in bodies}) == len(bodies)


def test_the_parts_of_a_fingerprint_do_not_run_into_each_other() -> None:
    assert fingerprint("ab", "c") != fingerprint("a", "bc")
    assert fingerprint("a") != fingerprint("a", "")


def test_a_fingerprint_is_made_of_any_text() -> None:
    assert fingerprint("\ud800", "\0") == fingerprint("?", "\0")
