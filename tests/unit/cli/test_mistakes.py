"""Mistakes in an application's module, and in the names of commands: each error says where it is, or what to write."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from sqlalchemy.exc import ProgrammingError

from durable.cli import pauses
from durable.cli.arguments import parse_pairs
from durable.cli.endings import ending_of
from durable.cli.target import load_target
from durable.dead_letters import bodies
from durable.errors import InvalidMessage, InvalidSetting, StorageUnavailable
from durable.storage import known_names
from durable.storage.outages import Lack
from tests.support.command import Agent


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


MISTAKES = {
    "bus.route(OrderPlaced)": "route: missing a required argument: 'to'",
    "bus.route(OrderPlaced, to='nowhere')": "nowhere: no transport has this scheme",
    "bus.route(OrderPlaced, ot='tcp://127.0.0.1:2302')": "unknown parameter 'ot'",
    "bus.listen('tpc://127.0.0.1:2302')": "no transport has this scheme",
    "bus.handles(OrderPlaced)(17)": "give a function",
    "bus.send(OrderPlaced(1))": "send() needs a transaction",
    "raise LookupError('no such customer')": "LookupError: no such customer",
    "def broken(:": "SyntaxError",
}


@pytest.mark.parametrize(("mistake", "told"), MISTAKES.items(), ids=list(MISTAKES))
def test_mistake_in_a_module_is_told_with_its_file_and_line(agent: Agent, mistake: str, told: str) -> None:
    name = agent.application(f"\n\n{mistake}\n")
    line = (agent.folder / f"{name}.py").read_text().splitlines().index(mistake) + 1
    code, _, err = agent("describe", f"{name}:bus")
    assert code == 2
    assert told in err.replace("keyword-only ", "")  # so exact since Python 3.12
    assert f"{name}.py:{line})" in err


def test_mistake_in_an_option_names_no_line() -> None:
    with pytest.raises(InvalidSetting) as mistake:
        raise InvalidSetting("--limit: give 1 or more")
    plain = mistake.value.with_traceback(None)
    assert ending_of(plain).message == "--limit: give 1 or more"


@pytest.mark.parametrize(
    ("given", "written"), [("base.py:bus", "base:bus"), ("shop/base.py:bus", "shop.base:bus"), ("base.py", "base:bus")]
)
def test_file_instead_of_a_module_is_told_with_the_module(agent: Agent, given: str, written: str) -> None:
    code, _, err = agent("describe", given)
    assert (code, err.endswith(f"write {written}\n")) == (2, True)


class Refused(Exception):
    def __init__(self, sqlstate: str | None) -> None:
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("text", "sqlstate", "advice"),
    [
        ('FATAL:  database "shop" does not exist', None, "create it: createdb shop"),
        ('FATAL:  database "the shop" does not exist', "3D000", "create it: createdb 'the shop'"),
        ("la base de données n'existe pas", "3D000", "create it: createdb NAME"),
        ("x", "28P01", "check user and password in the setting database_url"),
        ('FATAL:  password authentication failed for user "ada"', None, "check user and password in the setting"),
        ('FATAL:  role "ada" does not exist', None, "check user and password in the setting"),
        ('permission denied for database "a "b""', None, 'run: GRANT CONNECT ON DATABASE "a ""b""" TO ROLE'),
        ("droit refusé", "42501", "as owner of the database, run: GRANT CONNECT ON DATABASE NAME TO ROLE"),
        ('role "ada" is not permitted to log in', "28000", 'run: ALTER ROLE "ada" LOGIN'),
        (
            'database "shop" is not currently accepting connections',
            None,
            'ALTER DATABASE "shop" ALLOW_CONNECTIONS true',
        ),
        ('too many connections for role "ada"', "53300", 'run: ALTER ROLE "ada" CONNECTION LIMIT -1'),
        ("FATAL:  sorry, too many clients already", None, "lower pool_size, or raise max_connections"),
        ("session is read-only", None, "wait for a primary, or correct target_session_attrs"),
        ("connection refused", None, "check that Postgres runs, and the setting database_url"),
        ("the system is starting up", "57P03", "check that Postgres runs, and the setting database_url"),
    ],
)
def test_advice_for_a_refused_connection_follows_its_cause(text: str, sqlstate: str | None, advice: str) -> None:
    error = StorageUnavailable(f"the database cannot be used: {text}")
    error.__cause__ = Refused(sqlstate)
    _, _, told = ending_of(error).message.partition(f"{text}; ")
    assert advice in told


ODD_WORDS = {
    "service": (
        'definition of service "x" not found',
        "name a service of the service file (PGSERVICEFILE, ~/.pg_service.conf) in database_url or PGSERVICE",
    ),
    "file": ('service file "/x" not found', "name a service of the service file"),
    "port": ('invalid port number: "99999"', "correct it in the setting database_url, or in the environment (PGPORT"),
    "mode": ('invalid sslmode value: "odd"', "correct it in the setting database_url"),
    "number": (
        'connection to server at "::1", port 5432 failed: invalid integer value "x" for connection option "keepalives"',
        "correct it in the setting database_url",
    ),
}


@pytest.mark.parametrize(("text", "advice"), ODD_WORDS.values(), ids=list(ODD_WORDS))
def test_word_unknown_to_libpq_is_a_bad_setting(text: str, advice: str) -> None:
    told = f"the database cannot be used: connection is bad: {text}"
    ending = ending_of(StorageUnavailable(told))
    assert ending.code == 2
    assert ending.message.startswith(f"{told}; {advice}")


@pytest.mark.parametrize("environment", [{"PGSERVICE": "none_such"}, {"PGSSLMODE": "odd"}], ids=str)
def test_environment_of_odd_words_is_a_bad_setting(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, _, err = agent("status", "--database", "postgresql:///shop?host=/nowhere")
    assert (code, any(value in err for value in environment.values())) == (2, True)


ODD_PORTS = ("abc", "99999", "-1", "0", "5432,abc", "5432,", " 5432")
TAKES_A_PORT = {
    "status": ["status", "--database", "postgresql://localhost/shop"],
    "migrate": ["migrate", "--database", "postgresql://localhost/shop"],
    "migrate --status": ["migrate", "--status", "--database", "postgresql:///shop?host=/nowhere"],
    "run": ["run", "BUS"],
    "send": ["send", "BUS", "NAME.order-placed", '{"order_id": 7}'],
    "doctor": ["doctor", "BUS"],
}


@pytest.mark.parametrize("port", ODD_PORTS)
def test_odd_port_of_the_environment_is_a_bad_setting(agent: Agent, monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("PGPORT", port)
    told = f"error: PGPORT: {port!r} is no port; give one from 1 to 65535, or unset it\n"
    assert agent(*TAKES_A_PORT["status"]) == (2, "", told)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("command", TAKES_A_PORT)
def test_odd_port_of_the_environment_is_told_by_each_command(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, command: str, driver: str
) -> None:
    name = agent.application()
    monkeypatch.setenv("PGPORT", "abc")
    monkeypatch.setenv("DURABLE_DATABASE_URL", f"postgresql+{driver}://localhost/shop")
    words = [word.replace("BUS", f"{name}:bus").replace("NAME", name) for word in TAKES_A_PORT[command]]
    code, out, err = agent(*words)
    assert (code, "PGPORT: 'abc' is no port" in out + err) == (2, True)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["a=1", "a=2"], "--header: 'a' is given twice; give it once"),
        (["a=1", "b=1", "a=1"], "--header: 'a' is given twice; give it once"),
        (["a"], "--header: give NAME=VALUE, such as a=1, not 'a'"),
        (["=1"], "--header: give NAME=VALUE, such as a=1, not '=1'"),
    ],
)
def test_pair_of_an_option_is_given_once(given: list[str], told: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^{re.escape(told)}$"):
        parse_pairs(given, option="--header", such_as="NAME=VALUE, such as a=1")


@pytest.mark.parametrize("command", [("send", "APP", "shop.order", "{}", "--header"), ("console", "--service")])
def test_name_of_a_repeated_option_is_given_once(agent: Agent, command: tuple[str, ...]) -> None:
    app = f"{agent.application()}:bus"
    *words, option = [app if word == "APP" else word for word in command]
    url = "postgresql://localhost/x"
    code, _, err = agent(*words, option, f"stock={url}", option, f"stock={url}")
    assert (code, f"{option}: 'stock' is given twice; give it once" in err) == (2, True)


@pytest.mark.parametrize("kind", ["application/json", "application/vnd.acme+json", "application/cloudevents+json"])
@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b'{"order_id": 1, "order_id": 2}', "the key 'order_id' stands twice"),
        (b'{"note": "\\ud800"}', "is a lone surrogate"),
        (b'{"note": "\xff"}', "is no JSON"),
        (b"{", "is no JSON"),
    ],
)
def test_edited_body_is_strict_json_without_an_application(kind: str, body: bytes, fault: str) -> None:
    with pytest.raises(InvalidMessage, match=fault):
        bodies.refuse_untyped(body, kind)
    bodies.refuse_untyped(b'{"order_id": 1}', kind)


@pytest.mark.parametrize(
    ("options", "environment", "told"),
    [
        ({"database": "mysql://127.0.0.1/shop"}, {}, "--database: not a Postgres URL"),
        ({"database": "postgresql:///shop", "schema": "A"}, {}, "--schema: give lower-case letters"),
        ({}, {"DURABLE_DATABASE_URL": "mysql://127.0.0.1/shop"}, "database_url: not a Postgres URL"),
        ({"database": "postgresql:///shop"}, {"DURABLE_BATCH_SIZE": "0"}, "batch_size: "),
    ],
)
def test_fault_of_a_setting_is_told_by_its_option(
    options: dict[str, str], environment: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DURABLE_DATABASE_URL", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidSetting, match=f"^{re.escape(told)}"):
        load_target(**options)


def test_wrapped_lack_keeps_its_own_advice() -> None:
    lack = Lack("the database cannot be used: no such table; run: durable-agent migrate APP:BUS")
    error = StorageUnavailable(f"{lack}; 3 letters were replayed: run the command again for the rest")
    error.__cause__ = lack
    assert ending_of(error).message == str(error)


def test_missing_role_of_a_statement_is_to_be_created() -> None:
    error = ProgrammingError("GRANT", {}, Exception('role "the nodes" does not exist'))
    assert ending_of(error).message.endswith("does not exist; create it: createuser 'the nodes'")


@pytest.mark.parametrize("letters", [["16"], ["01900000-0000-7000-8000-000000000000"]])
@pytest.mark.parametrize("command", [["replay"], ["discard", "--reason", "old", "--yes"]], ids=["replay", "discard"])
def test_named_letters_exclude_all(agent: Agent, command: list[str], letters: list[str]) -> None:
    database = ["--database", "postgresql://127.0.0.1:1/shop"]
    code, _, err = agent("dead-letters", *command, *letters, "--all", *database)
    assert (code, "--all excludes letters that are named; leave --all out" in err) == (2, True)


def test_pause_without_a_name_asks_for_one(agent: Agent) -> None:
    code, _, err = agent("pause", "--database", "postgresql://127.0.0.1:1/shop")
    assert (code, "no name is given; give one of --handler" in err) == (2, True)


def test_command_without_a_letter_asks_for_one_with_an_example(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_DATABASE_URL", "postgresql://127.0.0.1:1/shop")
    code, _, err = agent("dead-letters", "show", f"{agent.application()}:bus")
    assert code == 2
    assert "LETTER: name a letter, such as 1: `durable-agent dead-letters list app" in err


def test_known_handlers_are_listed_once(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    name = agent.application("\n@bus.handles(OrderPlaced)\nasync def place(order: OrderPlaced) -> None: ...\n")
    monkeypatch.setenv("DURABLE_DATABASE_URL", "postgresql://127.0.0.1:1/shop")
    monkeypatch.setattr(pauses, "schema_connection", lambda settings: nullcontext())
    monkeypatch.setattr(known_names, "read", lambda *_: [f"{name}.order-placed", "z"])
    code, _, err = agent("pause", f"{name}:bus", "--handler", "x")
    assert (code, f"known: {name}.order-placed, z; or give --anyway" in err) == (2, True)
