"""What one key promises: a message comes back as it was, from its own envelope, or not at all."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.encryption.cipher import Cipher
from durable.errors import Forged
from durable.messages.digest import message_digest
from durable.messages.sealed import (
    KEY_ID_AT,
    MAGIC,
    Sealed,
    digest_of,
    is_sealed,
    joined,
    message_bytes,
    parted,
)
from durable.messages.validation import MAX_TEXT_BYTES

KEY = bytes(range(32))
CIPHER = Cipher("2026-11", KEY)
ids = st.uuids(version=4)
texts = st.text(max_size=40)
ABOUT: dict[str, Any] = {"envelope_id": UUID(int=17), "message_type": "orders.paid", "tenant": "acme"}


def sealed(message: bytes = b'{"amount":17}', destination: str = "tcp://billing:2301", **about: Any) -> Sealed:
    about = {**ABOUT, **about}
    digest = CIPHER.digest(about["message_type"], message)
    return CIPHER.seal(message, destination=destination, digest=digest, **about)


@given(message=st.binary(max_size=500), envelope_id=ids, message_type=texts, tenant=texts, destination=texts)
def test_message_comes_back_unchanged(
    message: bytes, envelope_id: UUID, message_type: str, tenant: str, destination: str
) -> None:
    about: dict[str, Any] = {"envelope_id": envelope_id, "message_type": message_type, "tenant": tenant}
    body = joined(sealed(message, destination, **about))
    parts = parted(body)
    assert parts is not None
    assert parts.destination == destination
    assert message_bytes(body) == len(message)
    assert CIPHER.open(parts, **about) == message


@given(message=st.binary(min_size=1, max_size=100), bit=st.integers(min_value=0))
def test_any_flipped_bit_refuses(message: bytes, bit: int) -> None:
    body = bytearray(joined(sealed(message)))
    start = len(MAGIC) * 8
    bit = start + bit % (len(body) * 8 - start)
    body[bit // 8] ^= 1 << bit % 8
    parts = parted(bytes(body))
    if parts is not None and parts.key_id == CIPHER.key_id:
        with pytest.raises(Forged, match="not what was sealed"):
            CIPHER.open(parts, **ABOUT)
    else:  # no body of this key, which is refused, or waits for the key that it names
        assert parts is None or parts != sealed(message)


def test_every_bit_of_a_short_body_refuses() -> None:
    whole = joined(sealed(b"x"))
    for bit in range(len(MAGIC) * 8, len(whole) * 8):
        body = bytearray(whole)
        body[bit // 8] ^= 1 << bit % 8
        parts = parted(bytes(body))
        if parts is None or parts.key_id != CIPHER.key_id:
            continue
        with pytest.raises(Forged):
            CIPHER.open(parts, **ABOUT)


@pytest.mark.parametrize(
    "changed",
    [{"envelope_id": UUID(int=18)}, {"message_type": "orders.refunded"}, {"tenant": "globex"}, {"tenant": ""}],
    ids=lambda changed: "-".join(changed),
)
def test_body_does_not_open_in_another_envelope(changed: dict[str, Any]) -> None:
    assert CIPHER.open(sealed(), **ABOUT)
    with pytest.raises(Forged, match="id, type, tenant or destination was changed"):
        CIPHER.open(sealed(), **{**ABOUT, **changed})


@pytest.mark.parametrize(
    "changed",
    [{"destination": "tcp://evil:2301"}, {"digest": bytes(8)}, {"nonce": bytes(12)}],
    ids=lambda c: "".join(c),
)
def test_changed_part_refuses(changed: dict[str, Any]) -> None:
    with pytest.raises(Forged):
        CIPHER.open(sealed()._replace(**changed), **ABOUT)


@given(parts=st.tuples(texts, texts, texts), others=st.tuples(texts, texts, texts))
def test_parts_of_the_additional_data_are_kept_apart(parts: tuple[str, str, str], others: tuple[str, str, str]) -> None:
    def of(names: tuple[str, str, str]) -> Sealed:
        return sealed(b"", names[2], message_type=names[0], tenant=names[1])

    digest = bytes(8)
    nonces = [
        CIPHER.seal(b"", envelope_id=UUID(int=1), message_type=kind, tenant=tenant, destination=to, digest=digest).nonce
        for kind, tenant, to in (parts, others)
    ]
    assert (nonces[0] == nonces[1]) == (parts == others)


def test_key_with_other_bytes_refuses() -> None:
    with pytest.raises(Forged, match="this key has other bytes"):
        Cipher("2026-11", bytes(32)).open(sealed(), **ABOUT)


@given(st.lists(st.tuples(st.binary(max_size=8), ids), unique=True, min_size=2, max_size=20))
def test_different_messages_share_no_nonce(messages: list[tuple[bytes, UUID]]) -> None:
    nonces = {sealed(message, envelope_id=each).nonce for message, each in messages}
    assert len(nonces) == len(messages)


def test_same_message_sealed_again_is_the_same_bytes() -> None:
    assert joined(sealed()) == joined(sealed())


def test_copies_for_two_destinations_share_a_digest_and_no_nonce() -> None:
    first, second = sealed(destination="tcp://a:1"), sealed(destination="tcp://b:1")
    assert first.digest == second.digest
    assert first.nonce != second.nonce
    assert first.ciphertext != second.ciphertext


# ---------------------------------------------------------------- digests


@given(message=st.binary(max_size=50), other=st.binary(max_size=50))
def test_digest_tells_messages_apart_and_knows_a_repeat(message: bytes, other: bytes) -> None:
    digests = [message_digest("orders.paid", joined(sealed(each))) for each in (message, other)]
    assert all(-(2**63) <= digest < 2**63 and digest & 1 for digest in digests)
    assert (digests[0] != digests[1]) == (message != other)


def test_digest_stays_when_a_body_is_encrypted_anew() -> None:
    first, newer = sealed(), Cipher("2027-05", bytes(31) + b"\1")
    again = newer.seal(b'{"amount":17}', destination="tcp://billing:2301", digest=first.digest, **ABOUT)
    assert joined(again) != joined(first)
    assert message_digest("orders.paid", joined(again)) == message_digest("orders.paid", joined(first))
    assert newer.open(again, **ABOUT) == b'{"amount":17}'


def test_digest_of_a_short_message_cannot_be_computed_without_the_key() -> None:
    carried = message_digest("orders.paid", joined(sealed(b"yes")))
    assert carried not in {message_digest("orders.paid", guess) for guess in (b"yes", b"no")}
    assert Cipher("2026-11", bytes(32)).digest("orders.paid", b"yes") != sealed(b"yes").digest


# ---------------------------------------------------------------- the form


@given(st.binary(max_size=200))
def test_any_bytes_are_parted_or_not(body: bytes) -> None:
    for each in (body, MAGIC + body):
        parts = parted(each)
        if parts is not None:
            assert joined(parts) == each
        assert 0 <= message_bytes(each) <= len(each)
        assert (digest_of(each) is None) or is_sealed(each)


def test_broken_off_body_is_not_parted() -> None:
    whole = joined(sealed(b""))
    assert parted(whole) is not None
    assert all(parted(whole[:length]) is None for length in range(len(whole)))
    assert message_bytes(whole[: KEY_ID_AT + 3]) == KEY_ID_AT + 3


def test_body_grows_by_little() -> None:
    whole = joined(sealed(b"x" * 1_000, "x" * MAX_TEXT_BYTES))
    assert len(whole) - 1_000 - MAX_TEXT_BYTES < 200
