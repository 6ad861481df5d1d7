"""A request shows that its sender knows the secret, and nothing else passes for that."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from durable.transports.http.auth import (
    SCHEME,
    Bearer,
    Signature,
    answering,
    bearer,
    parse,
    sign,
    sign_answer,
    unsigned,
)

SECRET, OTHER = "correct horse battery", "staple staple staple"
NOW = 1_767_225_600
NONCE = "0123456789abcdef"
DIGEST = "0" * 64


def signed(secret: str = SECRET, target: bytes = b"/batches?a=1", body: bytes = b"body") -> Signature:
    said = unsigned(
        body, to="billing", at="http://127.0.0.1:8002", timestamp=NOW, nonce=NONCE, sender="orders", key="2026-11"
    )
    credentials = parse(str(sign(secret, said, "POST", target, len(body))))
    assert isinstance(credentials, Signature)
    return credentials


def test_signature_covers_the_documented_lines() -> None:
    hashed = hashlib.sha256(b"body").hexdigest()
    who = ("billing", "http://127.0.0.1:8002", "orders", "2026-11")
    lines = ["Durable-HMAC-SHA256", "POST", "/batches?a=1", *who, "1767225600", "0123456789abcdef", "4", hashed]
    expected = hmac.digest(SECRET.encode(), "\n".join(lines).encode(), "sha256").hex()
    assert signed() == Signature(*who, NOW, NONCE, hashed, expected)


def test_signature_matches_its_own_request() -> None:
    assert signed().secret_of([OTHER, SECRET], "POST", b"/batches?a=1", 4) == SECRET
    assert signed().is_for(b"body")
    assert not signed().is_for(b"bodY")


@pytest.mark.parametrize(
    ("method", "target", "length"),
    [
        ("PUT", b"/batches?a=1", 4),
        ("POST", b"/batches?a=2", 4),
        ("POST", b"/batches", 4),
        ("POST", b"/durable/batches?a=1", 4),
        ("POST", b"/batches?a=1", 5),
        ("POST", b"/batches?a=1", 0),
        ("POST", b"/batches?a=1", None),
    ],
)
def test_a_signature_matches_no_other_request(method: str, target: bytes, length: int | None) -> None:
    assert signed().secret_of([SECRET], method, target, length) is None


CHANGES = [
    {"timestamp": NOW + 1},
    {"nonce": NONCE + "0"},
    {"body": "0" * 64},
    {"to": "shipping"},
    {"at": "http://127.0.0.1:8003"},
    {"sender": "shop"},
    {"key": "1"},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_no_part_of_a_signature_can_be_exchanged(change: dict[str, Any]) -> None:
    assert dataclasses.replace(signed(), **change).secret_of([SECRET], "POST", b"/batches?a=1", 4) is None


def test_answer_is_signed_for_one_request() -> None:
    hashed = hashlib.sha256(b"stored").hexdigest()
    lines = ["Durable-HMAC-SHA256 answer", signed().digest, "billing", "200", hashed]
    expected = hmac.digest(SECRET.encode(), "\n".join(lines).encode(), "sha256").hex()
    shown = sign_answer(SECRET, signed(), "billing", 200, b"stored")
    assert shown == f"service=billing, signature={expected}"
    assert answering(shown, SECRET, signed(), 200, b"stored") == "billing"
    for other in (
        answering(shown, OTHER, signed(), 200, b"stored"),
        answering(shown, SECRET, signed(target=b"/ping"), 200, b"stored"),
        answering(shown, SECRET, signed(), 413, b"stored"),
        answering(shown, SECRET, signed(), 200, b"Stored"),
        answering("", SECRET, signed(), 200, b"stored"),
        answering(shown.replace("billing", "shipping"), SECRET, signed(), 200, b"stored"),
        answering("service=billing, signature=\udcff", SECRET, signed(), 200, b"stored"),
        answering(f"service=billing, signature={signed().digest}", SECRET, signed(), 200, b"stored"),
    ):
        assert not other


HEADERS = [(b"Idempotency-Key", b" order-17 "), (b"durable-source", b"till"), (b"ce-id", b"1"), (b"accept", b"*/*")]


def test_signature_covers_the_headers_of_the_message() -> None:
    lines = [
        "Durable-HMAC-SHA256",
        "POST",
        "/messages",
        "billing",
        "http://127.0.0.1:8002",
        "",
        "",
        "1767225600",
        "0123456789abcdef",
        "4",
        hashlib.sha256(b"body").hexdigest(),
        "ce-id:1",
        "durable-source:till",
        "idempotency-key:order-17",
    ]
    said = unsigned(b"body", to="billing", at="http://127.0.0.1:8002", timestamp=NOW, nonce=NONCE)
    shown = sign(SECRET, said, "POST", b"/messages", 4, HEADERS)
    credentials = parse(str(shown))
    assert isinstance(credentials, Signature)
    assert credentials.digest == hmac.digest(SECRET.encode(), "\n".join(lines).encode(), "sha256").hex()

    def matches(headers: list[tuple[bytes, bytes]]) -> bool:
        return credentials.secret_of([SECRET], "POST", b"/messages", 4, headers) == SECRET

    assert matches(HEADERS)
    assert matches([*reversed(HEADERS[:3]), (b"via", b"a proxy")])
    assert not matches(HEADERS[1:])
    assert not matches([*HEADERS, (b"Durable-Execute-At", b"2030-01-01T00:00:00Z")])
    assert not matches([(b"idempotency-key", b"order-18"), *HEADERS[1:]])


def test_a_signature_with_another_secret_does_not_match() -> None:
    assert signed(OTHER).secret_of([SECRET], "POST", b"/batches?a=1", 4) is None


@pytest.mark.parametrize("known", [[SECRET, OTHER], [OTHER, SECRET]])
def test_old_and_new_secret_are_accepted_during_a_rotation(known: list[str]) -> None:
    assert signed().secret_of(known, "POST", b"/batches?a=1", 4) == SECRET


def test_empty_secrets_match_nothing() -> None:
    assert signed().secret_of([], "POST", b"/batches?a=1", 4) is None


@pytest.mark.parametrize(("off", "timely"), [(0, True), (300, True), (-300, True), (301, False), (-301, False)])
def test_a_signature_holds_for_five_minutes_to_either_side(off: int, timely: bool) -> None:
    assert signed().is_timely(NOW + off, 300) is timely


def test_a_bearer_token_is_the_secret() -> None:
    credentials = parse(bearer(SECRET))
    assert credentials == Bearer(SECRET)
    assert isinstance(credentials, Bearer)
    assert SECRET not in repr(credentials)


def test_the_names_of_the_schemes_are_matched_in_any_case() -> None:
    assert parse("bearer abc") == Bearer("abc")
    shown = str(signed())
    assert parse(shown.replace(SCHEME, SCHEME.lower())) == parse(shown)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Basic dXNlcjpwYXNz",
        SCHEME,
        f"{SCHEME} ",
        f"{SCHEME} to=a, timestamp=x, nonce={NONCE}, body={DIGEST}, signature={DIGEST}",
        f"{SCHEME} to=a, timestamp=-1, nonce={NONCE}, body={DIGEST}, signature={DIGEST}",
        f"{SCHEME} to=a, timestamp={'9' * 5_000}, nonce={NONCE}, body={DIGEST}, signature={DIGEST}",
        f"{SCHEME} to=a, timestamp=\N{ARABIC-INDIC DIGIT ONE}, nonce={NONCE}, body={DIGEST}, signature={DIGEST}",
        f"{SCHEME} to=a, timestamp=1, nonce={NONCE}, signature={DIGEST}",
        f"{SCHEME} to=a, timestamp=1, nonce={NONCE}, body={DIGEST[1:]}, signature={DIGEST}",
        f"{SCHEME} timestamp=1, nonce={NONCE}, body={DIGEST}, signature={DIGEST}",
        f"{SCHEME} to=a b, timestamp=1, nonce={NONCE}, body={DIGEST}, signature={DIGEST}",
        f"{SCHEME} to=a, from=b, timestamp=1, nonce={NONCE}, body={DIGEST}, signature={DIGEST}",
        f"{SCHEME} to=a, key=1, timestamp=1, nonce={NONCE}, body={DIGEST}, signature={DIGEST}",
        f"{SCHEME} to=a, timestamp=1, nonce=short, body={DIGEST}, signature={DIGEST}",
        f"{SCHEME} to=a, timestamp=1, nonce={'n' * 101}, body={DIGEST}, signature={DIGEST}",
        f"{SCHEME} to=a, timestamp=1, nonce=with\nline+feed+in+it, body={DIGEST}, signature={DIGEST}",
        f"{SCHEME} to=a, timestamp=1, nonce={NONCE}, body={DIGEST}, signature={DIGEST}0",
        f"{SCHEME} to=a, timestamp=1, nonce={NONCE}, signature={DIGEST[:-1]}",
        f"{SCHEME} to=a, timestamp=1, nonce={NONCE}, body={DIGEST}, signature={DIGEST}, timestamp=2",
    ],
)
def test_unknown_authorization_is_ignored(header: str) -> None:
    assert parse(header) is None


@given(st.text())
@example("Bearer \udcff")
@example("Bearer ä")
def test_any_header_is_parsed_and_judged_without_an_error(header: str) -> None:
    assert parse(header) is None or isinstance(parse(header), Bearer)
