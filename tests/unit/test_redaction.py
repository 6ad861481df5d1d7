"""Texts from outside as they are shown: one line, nothing that a terminal obeys, no secret."""

from __future__ import annotations

import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.errors import ConnectionFailed
from durable.outcomes import Rejected, tidy
from durable.redaction import LONGEST, has_password, keep_secret, printable, redacted, shown
from durable.telemetry import log

HOSTILE = "a\nCRITICAL forged\r\x1b[31m\x00\u2028\u202e\ud800\x85"


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_becomes_one_printable_line(text: str) -> None:
    assert printable(text).isprintable()
    assert shown(text).isprintable()
    printable(text).encode()


@given(st.text(st.characters(exclude_categories=["C", "Zl", "Zp", "Zs"])))
def test_printable_text_stays_unchanged(text: str) -> None:
    assert printable(text) == text[:LONGEST]


def test_a_long_text_is_cut() -> None:
    assert len(printable("x" * 100_000)) == LONGEST


@pytest.mark.parametrize("argument", [HOSTILE, ValueError(HOSTILE), [HOSTILE], {"a": HOSTILE}], ids=repr)
def test_each_argument_of_a_log_line_is_printable(argument: object, caplog: pytest.LogCaptureFixture) -> None:
    log.error("said: %s", argument)
    log.error("said: %r", argument)
    log.error("said: %(name)s", {"name": argument})
    assert len(caplog.records) == 3
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_traceback_in_the_log_writes_no_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("attempt failed")
    [record] = caplog.records
    assert record.exc_text is not None
    lines = record.exc_text.split("\n")
    assert lines[0] == "  Traceback (most recent call last):"
    assert [line.startswith("  ") and line.isprintable() for line in lines] == [True] * len(lines)
    assert "CRITICAL forged" in lines[-1]


def test_a_number_of_a_log_line_stays_a_number(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log.info("%d of %5.1f%s", 3, 2.5, None)
    assert caplog.records[0].getMessage() == "3 of   2.5None"


def test_an_error_and_a_reason_are_printable() -> None:
    assert str(ConnectionFailed(HOSTILE)).replace("\n", "").isprintable()
    (rejected,) = tidy([Rejected(HOSTILE)])
    assert isinstance(rejected, Rejected)
    assert rejected.reason.isprintable()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://app:pw@db/x", "postgresql://app:***@db/x"),
        ("amqps://app:p@w:d/?@h:1/ and more", "amqps://app:***@h:1/ and more"),
        ("url='http://a:b@c'", "url='http://a:***@c'"),
        ("password=abc&x=1", "password=***&x=1"),
        ("sslpassword = 'a b' host=h", "sslpassword = *** host=h"),
        ("DURABLE_SHARED_SECRET=abc def", "DURABLE_SHARED_SECRET=*** def"),
        ("postgresql://app@db/x", "postgresql://app@db/x"),
        ("https://ghp_token@host/x", "https://***@host/x"),
        ("tcp://127.0.0.1:2301", "tcp://127.0.0.1:2301"),
        ("postgresql://u:pa ss@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:abc'def@h/db", "postgresql://u:***@h/db"),
        ('amqp://u:a"b@h/', "amqp://u:***@h/"),
        ("postgresql://u:p@ss:w/o@rd@h/db", "postgresql://u:***@h/db"),
        ("tcp://h:2301 refused name@x", "tcp://h:2301 refused name@x"),
        ("E at tcp://h:2304: no postgresql://u:pw@db/x", "E at tcp://h:2304: no postgresql://u:***@db/x"),
        ("amqp://h:5672, amqp://u:pw@h", "amqp://h:5672, amqp://u:***@h"),
        (r"host=h password='a\'b c' user=x", "host=h password=*** user=x"),
        ("Password=Foo;Pwd=bar;", "Password=***;Pwd=***;"),
        ("password: hunter2x", "password: ***"),
        ("{'password': 'hunter2x', 'port': 5432}", "{'password': ***, 'port': 5432}"),
        ('{"http_secret": "a \\" b"}', '{"http_secret": ***}'),
        ('{"secret":17}', '{"secret":***}'),
        ("Authorization: Bearer zzzz.zz-zz", "Authorization: Bearer ***"),
        ("authorization=Basic dXNlcjpwdw==", "authorization=Basic ***"),
        ('Bearer realm="durable"', 'Bearer realm="durable"'),
        ("show a secret, as a bearer token", "show a secret, as a bearer token"),
        ("shared_secret: it has at least 16 characters", "shared_secret: it has at least 16 characters"),
        ('password authentication failed for user "x"', 'password authentication failed for user "x"'),
    ],
)
def test_secret_is_replaced_by_its_form(text: str, expected: str) -> None:
    assert redacted(text) == expected


@pytest.mark.parametrize(
    "part",
    [
        "x",
        "x.",
        "x=",
        "x://",
        "x://x:",
        "x://@",
        "password",
        "password ",
        "password=",
        "password='",
        "token = ",
        "password:",
        "'password': '",
        "Bearer ",
    ],
)
def test_long_text_of_a_peer_is_read_in_one_pass(part: str) -> None:
    """A pattern that begins again at each character would not come to its end."""
    text = f"@ = :// {part * (50_000 // len(part))}"
    began = time.process_time()
    assert redacted(text).startswith("@ = :// ")
    assert has_password(f"{text} secret=x")
    assert time.process_time() - began < 3


def test_a_known_secret_is_replaced_everywhere() -> None:
    keep_secret(["redaction-9@x y", "postgresql://app:redaction%2D8@db/x"])
    said = "redaction-9@x y, redaction-9%40x%20y, redaction%2D8, redaction-8"
    assert redacted(said) == "***, ***, ***, ***"


@pytest.mark.parametrize("before", range(0, 60, 7))
def test_a_secret_is_shown_in_no_part_where_a_text_is_cut(before: int) -> None:
    keep_secret(["canary-0123456789"])
    said = shown("-" * before + "canary-0123456789 " * LONGEST)
    assert "canary"[:4] not in said
    assert shown("-" * before + "canary-0123456789 " * 20, 100).count("***") > 5


def test_a_long_secret_is_hidden_within_words() -> None:
    keep_secret(["hunter-0123456789", "hunter-9"])
    assert redacted("xhunter-0123456789_ xhunter-9_ hunter-9") == "x***_ xhunter-9_ ***"


def test_password_equal_to_a_name_or_short_replaces_no_words() -> None:
    keep_secret(
        ["postgresql://durable-x:durable-x@db/other", "postgresql://u:p@db/x", "amqp://a:vhost-name@h/vhost-name"]
    )
    said = "durable-x, p, vhost-name and amqp"
    assert redacted(said) == said


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("postgresql://app:pw@db/x", True),
        ("postgresql://db/x?user=app&password=pw", True),
        ("host=db password='a b'", True),
        ("postgresql://app@db/x", False),
        ("postgresql://postgres:@/x?host=/tmp/sockets", False),
        ("mysql://root@localhost/x", False),
        ("tcp://127.0.0.1:2301", False),
        ("order_id = 7", False),
    ],
)
def test_password_is_told_by_its_form(text: str, is_one: bool) -> None:
    assert has_password(text) == is_one


def test_word_known_as_a_secret_is_no_password() -> None:
    keep_secret(["postgres", "sockets"])
    assert not has_password("postgresql://postgres:@/x?host=/tmp/sockets")
