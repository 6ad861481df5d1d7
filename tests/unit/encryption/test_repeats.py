"""Digests of arrivals: of what was opened, compared with what can be opened."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from durable import Keys
from durable.encryption.repeats import arrival_digest, is_another, known_arrival
from durable.encryption.ring import KeyRing
from durable.envelope import Envelope
from durable.messages.sealed import NONCE_BYTES, Sealed, joined, parted

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEYS = {name: bytes([number]) * 32 for number, name in enumerate("abc")}
FORMS = ("readable", "a", "b", "forged", "unknown key")


def ring(names: Sequence[str]) -> KeyRing:
    return KeyRing((lambda: Keys({name: KEYS[name] for name in names})) if names else None)


def envelope(form: str, message: bytes) -> Envelope:
    """A message as it arrives: readable, encrypted with one of the keys, or bytes that only look so."""
    made = Envelope(
        id=UUID(int=17), message_type="a.b", destination="memory://here", source="orders", correlation_id=UUID(int=1),
        body=message, sent_at=NOW,
    )  # fmt: skip
    if form == "readable":
        return made
    if form in KEYS:
        return ring([form]).sealed([made])[0]
    real = parted(ring(["a"]).sealed([made])[0].body)
    assert real is not None
    key_id = "no-such-key" if form == "unknown key" else "a"
    fake = Sealed(b"\1" * 8, b"0" * NONCE_BYTES, key_id, real.destination, b"x" * len(real.ciphertext))
    return replace(made, body=joined(fake))


def another(keys: KeyRing, first: Envelope, second: Envelope) -> bool:
    return is_another(keys, known_arrival(keys, first, NOW), second, NOW)


def opens(form: str, held: Collection[str]) -> bool:
    return form == "readable" or form in held


@given(
    st.sampled_from(FORMS), st.sampled_from(FORMS), st.sets(st.sampled_from("ab")), st.binary(max_size=5),
    st.binary(max_size=5),
)  # fmt: skip
def test_duplicate_has_the_same_bytes_or_the_same_opened_message(
    first: str, second: str, held: set[str], message: bytes, other: bytes
) -> None:
    keys = ring(sorted(held))
    one, two = envelope(first, message), envelope(second, other)
    is_same = opens(first, held) and opens(second, held) and message == other
    assert another(keys, one, two) != (is_same or (one.body == two.body))


@given(st.binary(max_size=5), st.sets(st.sampled_from("ab")))
def test_message_encrypted_anew_is_a_duplicate(message: bytes, held: set[str]) -> None:
    """`keys rotate` keeps the digest: known by one key that the ring has, or had."""
    first = envelope("a", message)
    rotating = ring(["b", "a"])
    again = replace(first, body=rotating.resealed(first, first))
    assert again.body != first.body
    known = known_arrival(ring(["a"]), first, NOW)
    assert not is_another(ring(sorted(held)), known, again, NOW)


def test_claimed_digest_of_an_unopened_body_takes_no_id() -> None:
    real = envelope("a", b"17")
    parts = parted(real.body)
    assert parts is not None
    copied = replace(real, body=joined(parts._replace(ciphertext=b"x" * len(parts.ciphertext))))
    assert arrival_digest(ring(["a"]), copied) != arrival_digest(ring(["a"]), real)
    assert another(ring(["a"]), copied, real)
