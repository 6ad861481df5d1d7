"""Bodies that look encrypted, by hypothesis: whole ones, and such as only begin so."""

from __future__ import annotations

from hypothesis import strategies as st

from durable.messages.sealed import DIGEST_BYTES, LONGEST_KEY_ID, MAGIC, NONCE_BYTES, TAG_BYTES

_TEXTS = st.one_of(
    st.text(max_size=8).map(lambda text: text.encode(errors="surrogatepass")),
    st.sampled_from([b"local", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"\xe0\x80\x80", b"\xff", b"\0"]),
    st.binary(max_size=4),
)
_KEY_IDS = st.one_of(
    st.from_regex(r"\A[A-Za-z0-9._-]{1,9}\Z").map(str.encode),
    st.sampled_from([b"", b"a\n", b"a\\b", b"x" * LONGEST_KEY_ID, b"x" * (LONGEST_KEY_ID + 1)]),
    _TEXTS,
)


@st.composite
def looking_sealed(draw: st.DrawFn) -> bytes:
    """Draw bytes that begin as an encrypted body does; most are one, or one that is wrong in one place."""
    if draw(st.integers(0, 9)) == 0:
        return MAGIC + draw(st.binary(max_size=300))
    key_id, destination = draw(_KEY_IDS), draw(_TEXTS)
    off = draw(st.sampled_from([0] * 8 + [1, -1]))
    body = b"".join(
        (
            *(MAGIC, draw(st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)), bytes(NONCE_BYTES)),
            *(bytes([len(key_id)]), key_id, (max(0, len(destination) + off)).to_bytes(2, "big"), destination),
            bytes(draw(st.integers(TAG_BYTES - 1, TAG_BYTES + 3))),
        )
    )
    return body[: draw(st.one_of(st.just(len(body)), st.integers(0, len(body))))]
