"""Targets: texts that operators, applications and peers write: durations, addresses, URLs, settings, HTTP headers."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import strategies as st

from durable import database_url
from durable.cli import arguments as cli_arguments
from durable.duration import duration, time_from_now
from durable.errors import InvalidMessage, InvalidSetting, WiringError
from durable.settings import Settings, load_settings, secret_names
from durable.transports.addresses import canonical
from durable.transports.http import address as http
from durable.transports.http import auth, headers
from durable.transports.rabbitmq import address as rabbitmq
from durable.transports.tcp import address as tcp
from tests.fuzz.damage import damaged, damaged_text, hostile_text
from tests.fuzz.targets import of_rules

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

# Durations --------------------------------------------------------------------------------------------------------

_DURATIONS = [
    "10s",
    "5m",
    "1h30m",
    "500ms",
    "7d",
    "2w",
    "1.5 h",
    "90",
    "-3",
    "1e9",
    "inf",
    "nan",
    "999999999999w",
    "PT30S",
]
durations = damaged_text(st.sampled_from(_DURATIONS)) | st.floats().map(repr) | hostile_text


def check_duration(text: str) -> str:
    try:
        span = duration(text)
    except ValueError as error:
        _is_said(error, text)
        return "none"
    assert duration(span) == span
    assert abs(duration(span.total_seconds()) - span) <= timedelta(milliseconds=1) * (1 + abs(span.days) / 1_000)
    try:
        assert time_from_now(text) == span >= timedelta(0)
    except ValueError as error:
        _is_said(error, text)
        return "not from now"
    return "length"


def check_arguments(text: str) -> str:
    """Every parser of the command line."""
    words = []
    for parse, errors in (
        (lambda: cli_arguments.parse_duration(text, option="--delay"), InvalidSetting),
        (lambda: cli_arguments.parse_span(text, option="--within"), InvalidSetting),
        (lambda: cli_arguments.parse_id(text), InvalidSetting),
        (lambda: cli_arguments.parse_time(text, NOW, option="--since"), WiringError),
        (lambda: cli_arguments.parse_coming_time(text, NOW, option="--at"), WiringError),
    ):
        try:
            value: Any = parse()
        except errors as error:
            _is_said(error, "")
        else:
            words.append(type(value).__name__)
            if isinstance(value, datetime):
                assert value.tzinfo is not None
            if isinstance(value, timedelta):
                assert timedelta(0) <= value <= timedelta(days=36_500)
    return " ".join(words) or "none"


_ARGUMENTS = [
    "2h",
    "2h ago",
    "in 2h",
    "2030-12-31T23:59Z",
    "0001-01-01T00:00+14:00",
    "9999-12-31T23:59:59-12:00",
    "019b76da-a800-7cc1-8a2f-2b1c0d9a3e41",
    "999999999d",
    "999999999d ago",
    "20300101",
    "2030-W01-1T00Z",
]
arguments = damaged_text(st.sampled_from(_ARGUMENTS), most=2) | durations

# Addresses --------------------------------------------------------------------------------------------------------

_ADDRESSES = [
    "tcp://127.0.0.1:2301",
    "tcp://[::1]:2301?tls=1",
    "tcp://billing.internal:2301?reuse_port=1&tls=0",
    "unix:///run/a.sock",
    "unix:///run/%C3%A9.sock",
    "http://127.0.0.1:8001",
    "https://billing.example/durable",
    "http://[::1]:8001/a%20b?reuse_port=1",
    "rabbitmq://default/queue/mail?type=quorum&prefetch=5",
    "rabbitmq://default/topic",
    "rabbitmq://default/exchange/a/b",
    "rabbitmq://default/topic/orders?types=a,b&max_length=9",
    "memory://orders",
    "local",
    "tcp://user:pw@h:1",
    "acme://x",
]
addresses = damaged_text(st.sampled_from(_ADDRESSES))


def check_address(uri: str) -> str:
    words = []
    for parse in (tcp.parse, http.parse, rabbitmq.parse):
        try:
            address: Any = parse(uri)
        except InvalidSetting as error:
            _is_said(error, uri)
            continue
        again = parse(str(address))
        if getattr(address, "reuse_port", False):  # which a sender is not told
            address = replace(address, reuse_port=False)
        assert again == address
        assert str(again) == str(address)
        words.append(type(address).__name__)
    try:
        canonical(uri)
    except InvalidSetting as error:
        _is_said(error, uri)
    else:
        words.append("destination")
    return " ".join(words) or "none"


_URLS = [
    "postgresql+asyncpg://user:secret-word@host:5432/name",
    "postgresql://host1:1,host2:2/name?sslmode=require",
    "postgresql+psycopg://u:p%40@[::1]:5432/n?ssl=true",
    "postgres://u@/n?host=/run/pg&port=5433",
    "postgresql://u:p@h/n?application_name=x&options=-c%20a%3Db&connect_timeout=5",
]
urls = damaged_text(st.sampled_from(_URLS))


def check_database_url(text: str) -> str:
    try:
        url = database_url.parse(text)
    except InvalidSetting as error:
        _hides("secret-word", error)
        return "none"
    assert repr(url) == repr(replace(url, password="another", query={}))
    again = database_url.parse(url.libpq())
    assert replace(again, driver=url.driver) == url
    try:
        database_url.check_for_asyncpg(url)
    except InvalidSetting:
        return "not for asyncpg"
    database_url.for_asyncpg({name: value for name, value in url.query.items() if name != "connect_timeout"})
    return f"{len(url.hosts)} hosts"


# Settings ---------------------------------------------------------------------------------------------------------

_VALUES = st.one_of(
    hostile_text,
    durations,
    addresses,
    damaged_text(
        st.sampled_from(
            ['{"a": "b"}', '{"orders": {"secrets": {"1": "correct horse battery"}}}', "a,b", "[]", "0", "1e3"]
        )
    ),
    st.integers(-1, 2**64).map(str),
)
settings = st.tuples(st.sampled_from(list(Settings.model_fields)), _VALUES)


def check_setting(given: tuple[str, str]) -> str:
    name, value = given
    try:
        made = load_settings(**{name: value})
    except InvalidSetting as error:
        if name in secret_names():
            _hides("correct horse", error)
        return "refused"
    if name in secret_names():
        _hides("correct horse", made)
    found = getattr(made, name)
    if name not in ("database_url", "lock_database_url", "amqp_url", "amqp_brokers", "peers"):
        assert getattr(load_settings(**{name: found}), name) == found
    return f"accepted {type(found).__name__}"


# Headers of HTTP --------------------------------------------------------------------------------------------------

_DIGEST = b"0" * 64
_AUTHORIZATIONS = [
    b"Durable-HMAC-SHA256 to=billing, at=http://127.0.0.1:8002, from=orders, key=2026-11, timestamp=1767225600, "
    b"nonce=0123456789abcdef, body=" + _DIGEST + b", signature=" + _DIGEST,
    b"Durable-HMAC-SHA256 to=billing, at=https://[::1], timestamp=1767225600, nonce=0123456789abcdef, body="
    + _DIGEST
    + b", signature="
    + _DIGEST,
    b"Bearer correct horse battery",
    b"bearer",
    b"Basic dTpw",
]
authorizations = damaged(st.sampled_from(_AUTHORIZATIONS)).map(lambda value: value.decode("latin-1"))


def check_authorization(value: str) -> str:
    shown = auth.parse(value)
    match shown:
        case None:
            return "none"
        case auth.Bearer(token):
            assert auth.parse(auth.bearer(token)) == shown
            assert token not in repr(shown) or not token or token in "Bearer()"
            return "bearer"
        case auth.Signature():
            assert auth.parse(str(shown)) == shown
            assert shown.secret_of(["correct horse battery"], "POST", b"/batches", 0) is None
            shown.is_timely(0.0, 300.0)
            return "signature of a peer" if shown.key else "signature"


_NAMES = [
    b"idempotency-key",
    b"durable-correlation-id",
    b"Durable-Partition-Key",
    b"durable-deliver-by",
    b"durable-time-to-live",
    b"durable-execute-at",
    b"durable-source",
    b"durable-header-x",
    b"durable-header-",
    b"durable-typo",
    b"traceparent",
]
_HEADER_VALUES = [
    b"order-17",
    b'"a \\"b"',
    b"019b76da-a800-7cc1-8a2f-2b1c0d9a3e41",
    b"2030-01-31T12:00:00Z",
    b"30",
    b"1.5",
    b"999999999.999999",
    b"0001-01-01T00:00:00+14:00",
    b"9999-12-31T23:59:59-14:00",
    "é".encode(),
]
message_headers = st.lists(
    st.tuples(damaged(st.sampled_from(_NAMES), most=1), damaged(st.sampled_from(_HEADER_VALUES), most=2)), max_size=4
)


def check_headers(given: list[tuple[bytes, bytes]]) -> str:
    words = []
    try:
        key = headers.read_key(given)
    except InvalidMessage:
        pass
    else:
        if key is not None:
            escaped = key.replace("\\", "\\\\").replace('"', '\\"')
            assert headers.read_key([(b"Idempotency-Key", f'"{escaped}"'.encode())]) == key
            assert headers.id_of(key, "shop-in", "web.sold") == headers.id_of(key, "shop-in", "web.sold")
            words.append("key")
    try:
        options = headers.read_options(given)
        deadline = options.deadline(NOW)
        own = headers.own_headers(given)
    except InvalidMessage:
        return " ".join([*words, "refused"])
    assert deadline is None or deadline.tzinfo is not None
    written = [
        (name.encode(), str(value).encode())
        for name, value in zip(headers.OPTIONS, _fields(options), strict=True)
        if value is not None
    ]
    assert headers.read_options(written) == options
    assert (
        headers.own_headers(
            [(f"Durable-Header-{name}".encode("latin-1"), value.encode()) for name, value in own.items()]
        )
        == own
    )
    assert all(value.isprintable() for value in headers.trace_context(given).values())
    return " ".join([*words, "options", *(["own"] if own else [])])


def _fields(options: headers.Options) -> list[Any]:
    return [getattr(options, name) for name in options.__struct_fields__]


TARGETS = [
    of_rules("durations", durations, check_duration),
    of_rules("cli-arguments", arguments, check_arguments),
    of_rules(
        "addresses",
        addresses,
        check_address,
        known=["unix:///run/\ud800", "unix:///a%2541", "unix:///a%23", "unix:///a%ff", "tcp://127.0.0.1:23\n01"],
    ),
    of_rules(
        "database-urls",
        urls,
        check_database_url,
        known=[
            "postgresql://\ud800:password@host/name",
            "postgresql://:password@host/name",
            "postgresql://[fe80::1%25ab]/name",
            "postgresql://[:%01]/name",
            "postgresql://%ff/name",
        ],
    ),
    of_rules(
        "settings",
        settings,
        check_setting,
        known=[("shared_secret", "correct horse battery \udcff"), ("partitions_ahead", "18446744073709551615")],
    ),
    of_rules("http-authorization", authorizations, check_authorization),
    of_rules("http-message-headers", message_headers, check_headers),
]


def _hides(secret: str, shown: object) -> None:
    assert secret not in str(shown)
    assert secret not in repr(shown)


def _is_said(error: Exception, text: str) -> None:
    """An error says what is wrong and what to do: it is never bare."""
    assert len(str(error)) > len(text) or len(str(error)) > 20
