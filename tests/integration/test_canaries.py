"""Canaries: secrets, planted wherever the settings may hold one, are seen in no log, error, repr, document or metric.

Each secret is two marks with something between them that URLs are split at, so that a part of it is found, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
from pydantic import SecretStr
from sqlalchemy import make_url

from durable import Bus, Retry, message
from durable.errors import DurableError
from durable.redaction import redacted
from durable.settings import load_settings, secret_names
from durable.telemetry import log
from durable.testing import eventually
from tests.support.command import Agent
from tests.support.tables import Tables

MARKS = ("kq7wxm", "vj3nzp")
SEPARATORS = {
    "none": "",
    "at": "@",
    "colon": ":",
    "encoded at": "%40",
    "all of URLs": "@:/?#",
    "percent": "%",
    "quote": "'",
    "space": " ",
    "bracket": "[",
}
SECRETS = {name: MARKS[0].join(("Ca", separator)) + MARKS[1] + "9x" for name, separator in SEPARATORS.items()}

SECRET_FIELDS = sorted(secret_names())

_DATABASE = (
    "postgresql+psycopg://app:{}@127.0.0.1:1/orders",
    "postgresql+asyncpg://app:{}@127.0.0.1:1/orders",
    "postgresql://app:{}@/orders?host=/nowhere",
    "postgresql://127.0.0.1:1/orders?user=app&password={}",
    "postgresql://127.0.0.1:1/orders?sslmode=verify-full&sslpassword={}",
    "postgresql://app:{}@127.0.0.1:port/orders",
    "postgresql+pg8000://app:{}@127.0.0.1:1/orders",
    "mysql://app:{}@127.0.0.1/orders",
    "app:{}@127.0.0.1/orders",
    "host=127.0.0.1 port=1 user=app password='{}'",
    "{}",
)
_BROKER = (
    "amqp://app:{}@127.0.0.1:1/vhost",
    "amqps://app:{}@127.0.0.1:1/",
    "amqp://app:{}@127.0.0.1:port/",
    "http://app:{}@127.0.0.1/",
    "app:{}@127.0.0.1",
    "{}",
)
_SECRET = ("correct {} battery staple", "{}", ["{}"], {"a": "{}"}, b"{}")
PLACES: dict[str, tuple[Any, ...]] = {
    "database_url": _DATABASE,
    "lock_database_url": _DATABASE,
    "amqp_url": _BROKER,
    "amqp_brokers": (*({"main": url} for url in _BROKER), ["{}"], "{}"),
    "peers": (
        {"billing": "correct {} battery staple"},
        {"correct {} battery staple": "http://127.0.0.1:1"},
        {"billing": {"secrets": {"1": "correct {} battery staple"}, "at": ["http://127.0.0.1:1"]}},
        {"billing": {"secrets": {"correct {} battery staple": "correct horse battery"}}},
        {"billing": {"secrets": {"1": "correct horse battery"}, "at": ["http://app:{}@127.0.0.1:1"]}},
        {"billing": ["{}"]},
        ["{}"],
        "{}",
    ),
}
ADDRESSES = (
    "tcp://app:{}@127.0.0.1:1",
    "tcp://{}@127.0.0.1:1",
    "unix://app:{}@/run/in.sock",
    "http://app:{}@127.0.0.1:1",
    "https://app:{}@127.0.0.1:1/path",
    "rabbitmq://app:{}@127.0.0.1/queue/mail",
    "amqp://app:{}@127.0.0.1/",
    "memory://app:{}@x",
    "tcp://127.0.0.1:1?password={}",
)


_SHOWN_TABLES = ("nodes", "circuits", "dead_letters", "failed_attempts", "envelope_history")


def planted(template: Any, secret: str) -> Any:
    match template:
        case str():
            return template.replace("{}", secret)
        case bytes():
            return template.replace(b"{}", secret.encode())
        case dict():
            return {planted(key, secret): planted(value, secret) for key, value in template.items()}
        case _:
            return [planted(each, secret) for each in template]


def assert_hidden(*texts: object) -> None:
    """Hosts are written in lower case."""
    for text in texts:
        found = [mark for mark in MARKS if mark in str(text).lower()]
        assert not found, text


def traced(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@message("canaries.placed")
class Placed(msgspec.Struct):
    number: int


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.DEBUG)
    return lambda: caplog.text


CASES = [
    pytest.param(field, template, id=f"{field}-{number}")
    for field in SECRET_FIELDS
    for number, template in enumerate(PLACES.get(field, _SECRET))
]


@pytest.mark.parametrize(("field", "template"), CASES)
def test_a_secret_setting_is_never_shown(field: str, template: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for secret in SECRETS.values():
        show_everywhere(field, planted(template, secret), monkeypatch)


def show_everywhere(field: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for give in ("in code", "in the environment"):
        own = {field: value}
        if give == "in the environment":
            if isinstance(value, bytes):
                continue
            monkeypatch.setenv(f"DURABLE_{field.upper()}", value if isinstance(value, str) else json.dumps(value))
            own = {}
        try:
            settings = load_settings(**own)
        except DurableError as error:
            assert_hidden(error, repr(error), traced(error))
            continue
        assert_hidden(settings, repr(settings), settings.model_dump(), settings.model_dump_json())


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
@pytest.mark.parametrize(
    ("field", "template"),
    [case for case in CASES if case.values[0] in ("database_url", "lock_database_url", "amqp_url", "peers")],
)
async def test_bus_does_not_show_an_unusable_secret(
    field: str, template: Any, secret: str, logged: Callable[[], str]
) -> None:
    own = {"database_url": "postgresql+asyncpg://127.0.0.1:1/orders", field: planted(template, secret)}
    database = own.pop("database_url")
    try:
        bus = Bus("shop", database, start_timeout=0.1, **own)
        bus.listen("rabbitmq://default/queue/mail")
        bus.route(Placed, to="http://127.0.0.1:1")
        assert_hidden(repr(bus), vars(bus), bus.runtime)
        async with bus:
            pass
    except Exception as error:
        assert_hidden(error, repr(error), traced(error) if isinstance(error, DurableError) else "")
        log.error("start failed: %s %r", error, error, exc_info=error)
    else:
        pytest.fail("nothing listens at port 1")
    assert_hidden(logged())


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
@pytest.mark.parametrize("address", ADDRESSES)
def test_address_with_a_password_is_refused_without_showing_the_password(address: str, secret: str) -> None:
    uri = address.replace("{}", secret)
    for is_route in (True, False):
        with pytest.raises(DurableError) as raised:
            declare(uri, is_route=is_route)
        assert_hidden(raised.value, repr(raised.value), traced(raised.value))


def declare(uri: str, *, is_route: bool) -> None:
    bus = Bus("shop", "postgresql://127.0.0.1:1/orders", amqp_url="amqp://127.0.0.1:1/")
    if is_route:
        bus.route(Placed, to=uri)
    else:
        bus.listen(uri)
    bus.runtime.check_wiring()


@pytest.mark.parametrize("command", [["doctor"], ["status"], ["nodes"], ["circuits"], ["topology"], ["run"]])
@pytest.mark.parametrize("options", [[], ["--json"], ["--debug"]], ids=str)
def test_failing_command_does_not_show_the_password(
    command: list[str],
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    agent = Agent(tmp_path, monkeypatch, capsys)
    monkeypatch.setenv("DURABLE_START_TIMEOUT", "0.1")
    bus = f"{agent.application()}:bus"
    for template in _DATABASE[:7]:
        for name in ("at", "all of URLs", "encoded at"):
            monkeypatch.setenv("DURABLE_DATABASE_URL", template.format(SECRETS[name]))
            ended = agent(*command, bus, *options)
            assert ended.code or command == ["topology"]
            assert_hidden(ended.out, ended.err)


@pytest.mark.parametrize("name", ["none", "at", "all of URLs", "quote", "percent"])
async def test_running_node_shows_no_secret(
    name: str,
    tables: Tables,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    logged: Callable[[], str],
) -> None:
    """A handler fails with them in its error, a stranger shows one; all that an operator can ask is looked at."""
    secret = SECRETS[name]
    url = make_url(tables.url).set(password=secret).render_as_string(hide_password=False)
    environment = {
        "database_url": url,
        "amqp_url": f"amqp://app:{quote(secret, safe='')}@127.0.0.1:1/",
        "shared_secret": f"correct {secret} battery",
        "peers": json.dumps({"billing": f"staple {secret} staple"}),
        "metrics_port": "0",
    }
    for field, value in environment.items():
        monkeypatch.setenv(f"DURABLE_{field.upper()}", value)
    agent = Agent(tmp_path, monkeypatch, capsys)
    bus = Bus("shop", poll_interval="50ms")
    bus.listen("http://127.0.0.1:0")

    @bus.handles(Placed, retry=Retry(immediate=1, delays=[]))
    async def place(placed: Placed) -> None:
        try:
            raise ConnectionError(f"cannot reach {url}")
        except ConnectionError as error:
            raise LookupError(f"no price behind {environment['shared_secret']}: {error}") from error

    texts: list[object] = []
    async with bus:
        async with bus.unit_of_work():
            bus.send(Placed(1))
        await eventually(lambda: tables.count("dead_letters") == 1, what="the letter")
        assert bus.runtime.node is not None
        async with httpx.AsyncClient() as client:
            for path in ("metrics", "health", "health/ready", "health/live"):
                texts.append((await client.get(f"{bus.runtime.metrics_address}/{path}")).text)
            texts.append(
                await client.post(f"{bus.runtime.node.listeners[0].address}/batches", headers={"authorization": secret})
            )
        texts += [bus.runtime, bus.statistics(), vars(bus)]
        texts += [row for table in _SHOWN_TABLES for row in tables.rows(f"SELECT * FROM durable.{table}")]
        module, ids = f"{agent.application()}:bus", [str(tables.one("SELECT letter_id FROM durable.dead_letters"))]
        for command in (
            ["doctor", module], ["status"], ["nodes"], ["circuits"], ["actions"], ["topology", module],
            ["dead-letters", "list"], ["dead-letters", "show", *ids], ["dead-letters", "discard", *ids, "--yes"],
        ):  # fmt: skip
            for options in ([], ["--json"]):
                ended = await asyncio.to_thread(agent.as_given, *command, *options)
                assert ended.out or ended.err
                texts += [ended.out, ended.err]
    texts += tables.rows("SELECT * FROM durable.actions")
    assert_hidden(*texts, logged())


def test_a_line_of_log_shows_no_secret_of_a_library(caplog: pytest.LogCaptureFixture) -> None:
    load_settings(shared_secret=SecretStr(SECRETS["at"]))
    texts = [
        f"cannot reach postgresql://app:{SECRETS['at']}@db/x and amqp://u:{SECRETS['colon']}@h",
        f"invalid dsn: host=db password={SECRETS['none']} sslpassword='{SECRETS['space']}'",
        f"the header was {SECRETS['at']}, which is none",
        f"the header was {SECRETS['at'].replace('@', '%40')}",
    ]
    for text in texts:
        try:
            raise ValueError(text)
        except ValueError as error:
            log.exception("failed: %s %r %s", error, error, {"cause": error})
        assert_hidden(redacted(text))
    assert len(caplog.records) == len(texts)
    assert_hidden(caplog.text)


@pytest.mark.parametrize(
    "text", ["see docs/http.md", "tcp://127.0.0.1:2301", "http://a:80/x", "set shared_secret on both ends", "x == 3"]
)
def test_text_without_secrets_stays_unchanged(text: str) -> None:
    assert redacted(text) == text
