"""A request shows that its sender knows the secret, and nothing else passes for that."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from durable.transports.http.auth import (
    SCHEME,
    Bearer,
    Signature,
    bearer,
    parse,
    signature,
)

SECRET, OTHER = "correct horse battery", "staple staple staple"
NOW = 1_767_225_600
NONCE = "0123456789abcdef"
DIGEST = "0" * 64


def signed(secret: str = SECRET, target: bytes = b"/batches?a=1", body: bytes = b"body") -> Signature:
    credentials = parse(signature(secret, "POST", target, body, timestamp=NOW, nonce=NONCE))
    assert isinstance(credentials, Signature)
    return credentials


def test_signature_covers_the_documented_lines() -> None:
    lines = [
        "Durable-HMAC-SHA256",
        "POST",
        "/batches?a=1",
        "1767225600",
        "0123456789abcdef",
        hashlib.sha256(b"body").hexdigest(),
    ]
    expected = hmac.digest(SECRET.encode(), "\n".join(lines).encode(), "sha256").hex()
    assert signed() == Signature(NOW, NONCE, expected)


def test_signature_matches_its_own_request() -> None:
    assert signed().matches([SECRET], "POST", b"/batches?a=1", b"body")


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("PUT", b"/batches?a=1", b"body"),
        ("POST", b"/batches?a=2", b"body"),
        ("POST", b"/batches", b"body"),
        ("POST", b"/durable/batches?a=1", b"body"),
        ("POST", b"/batches?a=1", b"body "),
        ("POST", b"/batches?a=1", b""),
    ],
)
def test_a_signature_matches_no_other_request(method: str, target: bytes, body: bytes) -> None:
    assert not signed().matches([SECRET], method, target, body)


@pytest.mark.parametrize("change", [Signature(NOW + 1, NONCE, ""), Signature(NOW, NONCE + "0", "")])
def test_timestamp_and_nonce_cannot_be_exchanged(change: Signature) -> None:
    forged = Signature(change.timestamp, change.nonce, signed().digest)
    assert not forged.matches([SECRET], "POST", b"/batches?a=1", b"body")


HEADERS = [(b"Idempotency-Key", b" order-17 "), (b"durable-source", b"till"), (b"ce-id", b"1"), (b"accept", b"*/*")]


def test_signature_covers_the_headers_of_the_message() -> None:
    lines = [
        "Durable-HMAC-SHA256",
        "POST",
        "/messages",
        "1767225600",
        "0123456789abcdef",
        hashlib.sha256(b"body").hexdigest(),
        "ce-id:1",
        "durable-source:till",
        "idempotency-key:order-17",
    ]
    shown = signature(SECRET, "POST", b"/messages", b"body", timestamp=NOW, nonce=NONCE, headers=HEADERS)
    credentials = parse(shown)
    assert isinstance(credentials, Signature)
    assert credentials.digest == hmac.digest(SECRET.encode(), "\n".join(lines).encode(), "sha256").hex()

    def matches(headers: list[tuple[bytes, bytes]]) -> bool:
        return credentials.matches([SECRET], "POST", b"/messages", b"body", headers)

    assert matches(HEADERS)
    assert matches([*reversed(HEADERS[:3]), (b"via", b"a proxy")])
    assert not matches(HEADERS[1:])
    assert not matches([*HEADERS, (b"Durable-Execute-At", b"2030-01-01T00:00:00Z")])
    assert not matches([(b"idempotency-key", b"order-18"), *HEADERS[1:]])


def test_a_signature_with_another_secret_does_not_match() -> None:
    assert not signed(OTHER).matches([SECRET], "POST", b"/batches?a=1", b"body")


@pytest.mark.parametrize("known", [[SECRET, OTHER], [OTHER, SECRET]])
def test_old_and_new_secret_are_accepted_during_a_rotation(known: list[str]) -> None:
    assert signed().matches(known, "POST", b"/batches?a=1", b"body")
    assert Bearer(SECRET).matches(known)


def test_empty_secrets_match_nothing() -> None:
    assert not signed().matches([], "POST", b"/batches?a=1", b"body")
    assert not Bearer("").matches([])


@pytest.mark.parametrize(("off", "timely"), [(0, True), (300, True), (-300, True), (301, False), (-301, False)])
def test_a_signature_holds_for_five_minutes_to_either_side(off: int, timely: bool) -> None:
    assert signed().is_timely(NOW + off, 300) is timely


def test_a_bearer_token_is_the_secret() -> None:
    credentials = parse(bearer(SECRET))
    assert credentials == Bearer(SECRET)
    assert isinstance(credentials, Bearer)
    assert credentials.matches([SECRET])
    assert not credentials.matches([OTHER])
    assert not credentials.matches([SECRET + "x", SECRET[:-1]])


def test_the_names_of_the_schemes_are_matched_in_any_case() -> None:
    assert parse("bearer abc") == Bearer("abc")
    shown = signature(SECRET, "POST", b"/", b"", timestamp=NOW, nonce=NONCE)
    assert parse(shown.replace(SCHEME, SCHEME.lower())) == parse(shown)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Basic dXNlcjpwYXNz",
        SCHEME,
        f"{SCHEME} ",
        f"{SCHEME} timestamp=x, nonce={NONCE}, signature={DIGEST}",
        f"{SCHEME} timestamp=-1, nonce={NONCE}, signature={DIGEST}",
        f"{SCHEME} timestamp={'9' * 5_000}, nonce={NONCE}, signature={DIGEST}",
        f"{SCHEME} timestamp=\N{ARABIC-INDIC DIGIT ONE}, nonce={NONCE}, signature={DIGEST}",
        f"{SCHEME} timestamp=1, nonce=short, signature={DIGEST}",
        f"{SCHEME} timestamp=1, nonce={'n' * 101}, signature={DIGEST}",
        f"{SCHEME} timestamp=1, nonce=with\nline+feed+in+it, signature={DIGEST}",
        f"{SCHEME} timestamp=1, nonce={NONCE}, signature={DIGEST}0",
        f"{SCHEME} timestamp=1, nonce={NONCE}, signature={DIGEST[:-1]}",
        f"{SCHEME} timestamp=1, nonce={NONCE}, signature={DIGEST}, timestamp=2",
    ],
)
def test_unknown_authorization_is_ignored(header: str) -> None:
    assert parse(header) is None


@given(st.text())
@example("Bearer \udcff")
@example("Bearer ä")
def test_any_header_is_parsed_and_judged_without_an_error(header: str) -> None:
    credentials = parse(header)
    if isinstance(credentials, Bearer):
        assert not credentials.matches([SECRET])
