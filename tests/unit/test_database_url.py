"""The URL of a database: understood as users write it, in the words of each driver; no fault shows a part of it."""

from __future__ import annotations

import re
from inspect import signature
from typing import Any
from urllib.parse import quote

import pytest
from asyncpg import connect
from hypothesis import example, given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from sqlalchemy.dialects.postgresql import asyncpg, psycopg
from sqlalchemy.engine import make_url

from durable import database_url
from durable.database_url import _TAKEN, DatabaseUrl, check_environment, check_for_asyncpg, for_asyncpg
from durable.errors import InvalidSetting
from durable.settings import load_settings
from durable.storage.database import async_url, sync_url

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("text", "user", "password", "hosts", "database"),
    [
        ("postgresql://app:pw@db:5432/orders", "app", "pw", (("db", 5432),), "orders"),
        ("postgres://app@db/orders", "app", None, (("db", None),), "orders"),
        ("postgresql+asyncpg://app:p@s:s@db/orders", "app", "p@s:s", (("db", None),), "orders"),
        ("postgresql://app%40x:p%40%2F%25@db/orders", "app@x", "p@/%", (("db", None),), "orders"),
        ("postgresql://app@server:pw@db/orders", "app@server", "pw", (("db", None),), "orders"),
        ("postgresql:///orders?host=/run/pg", None, None, (("", None),), "orders"),
        ("postgresql://app:@/orders", "app", "", (("", None),), "orders"),
        ("postgresql://app:pw@[::1]:5433/orders", "app", "pw", (("::1", 5433),), "orders"),
        ("postgresql://app:pw@one:5432,two:5433/orders", "app", "pw", (("one", 5432), ("two", 5433)), "orders"),
        ("postgresql://db?user=app&password=p%26w&dbname=orders&port=99", "app", "p&w", (("db", 99),), "orders"),
        ("postgresql://%2Frun%2Fpg/orders", None, None, (("/run/pg", None),), "orders"),
    ],
)
def test_each_part_is_understood(
    text: str, user: str | None, password: str | None, hosts: tuple[tuple[str, int | None], ...], database: str
) -> None:
    url = database_url.parse(text)
    assert (url.user, url.password, url.hosts, url.database) == (user, password, hosts, database)
    again = database_url.parse(url.libpq())
    assert (again.user, again.password, again.hosts, again.database) == (user, password, hosts, database)


@given(texts, texts, texts)
def test_any_user_and_password_survive_every_form(user: str, password: str, database: str) -> None:
    url = DatabaseUrl("", (("db", 5432),), user, password, database)
    assert database_url.parse(url.libpq()) == url
    settings = load_settings(database_url=url.libpq())
    for of_sqlalchemy in (async_url(settings), sync_url(settings)):
        assert (of_sqlalchemy.username, of_sqlalchemy.password) == (user, password)
        written = make_url(of_sqlalchemy.render_as_string(hide_password=False))
        assert (written.username, written.password, written.database) == (user, password, database)


PLACES = [
    ("user", "postgresql://{}:pw@db/orders"),
    ("password", "postgresql://app:{}@db/orders"),
    ("host", "postgresql://app:pw@{}/orders"),
    ("dbname", "postgresql://app:pw@db/{}"),
    *(
        (name, f"postgresql+psycopg://db/?{name}={{}}")
        for name in ("application_name", "dbname", "host", "options", "passfile", "password", "service", "user")
    ),
]


def as_told(text: str) -> list[dict[str, Any]]:
    """What libpq reads of the URL, by each way to it, and what asyncpg is given where it takes the URL."""
    url, settings = database_url.parse(text), load_settings(database_url=text)
    dialects: list[Any] = [psycopg.dialect, asyncpg.dialect]
    _, of_psycopg = dialects[0]().create_connect_args(sync_url(settings))
    told = [conninfo_to_dict(url.libpq()), conninfo_to_dict(make_conninfo(**of_psycopg))]
    if url.driver != "psycopg":
        _, of_asyncpg = dialects[1]().create_connect_args(async_url(settings))
        told.append({"dbname": of_asyncpg.pop("database", None)} | of_asyncpg)
    return told


@pytest.mark.parametrize(("name", "place"), PLACES)
@given(st.characters())
@example("\0")
@example(",")
@example("\n")
@example("=")
def test_character_reaches_the_server_or_is_refused(name: str, place: str, character: str) -> None:
    value = f"a{character}b"
    try:
        told = as_told(place.format(quote(value, safe="", errors="surrogatepass")))
    except InvalidSetting:
        assert character == "\0" or "\ud800" <= character <= "\udfff" or name == "host"
    else:
        assert [each[name] for each in told] == [value] * len(told)


@pytest.mark.parametrize(
    "place", [*(place for _, place in PLACES), "postgresql://db/orders?port={}", "postgresql://db/?{}=1"]
)
@pytest.mark.parametrize("end", ["%00", "\0", "%00_other", "x%00"])
@pytest.mark.parametrize("setting", ["database_url", "lock_database_url"])
def test_nul_is_refused_in_every_part(setting: Any, place: str, end: str) -> None:
    with pytest.raises(InvalidSetting, match=rf"^{setting}: the URL holds a NUL"):
        load_settings(**{setting: place.format(end)})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("postgresql://a@db/orders?user=b", "user"),
        ("postgresql://a:one@db/orders?password=two", "password"),
        ("postgresql://a:@db/orders?password=two", "password"),
        ("postgresql://db/orders?dbname=other", "dbname"),
    ],
)
def test_parameter_is_refused_when_the_place_of_the_url_says_otherwise(text: str, name: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^database_url: {name} stands twice"):
        database_url.parse(text)


@pytest.mark.parametrize("port", ["0", "00000", "65536", "99999"])
@pytest.mark.parametrize("text", ["postgresql://db:{}/orders", "postgresql://one:1,two:{}/orders"])
def test_number_above_all_ports_is_refused(text: str, port: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^database_url: a port .* from 1 to 65535"):
        database_url.parse(text.format(port))


@pytest.mark.parametrize(
    ("query", "libpq"),
    [
        ("sslmode=verify-full&sslrootcert=/ca", {"sslmode": "verify-full", "sslrootcert": "/ca"}),
        ("ssl=require", {"sslmode": "require"}),
        ("ssl=verify-ca&sslrootcert=/ca", {"sslmode": "verify-ca", "sslrootcert": "/ca"}),
        ("ssl=true", {"sslmode": "verify-full", "sslrootcert": "system"}),
        ("ssl=TRUE&sslrootcert=/ca", {"sslmode": "verify-full", "sslrootcert": "/ca"}),
        ("ssl=false", {"sslmode": "disable"}),
        ("ssl=require&sslmode=require", {"sslmode": "require"}),
        ("application_name=a+b", {"application_name": "a b"}),
    ],
)
def test_tls_is_said_in_the_words_of_libpq(query: str, libpq: dict[str, str]) -> None:
    assert database_url.parse(f"postgresql://db/orders?{query}").query == libpq


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("sslmode=verify_full", "sslmode is none of disable, allow"),
        ("ssl=maybe", "sslmode is none of"),
        ("ssl=true&sslmode=disable", "ssl and sslmode say different things"),
        ("sslmode=require&sslrootcert=system", "needs sslmode=verify-full"),
        ("sslmode=require&sslcert=/c", "sslcert without sslkey"),
        ("sslmode", "not a Postgres URL"),
        ("x/y=1", "not a Postgres URL"),
    ],
)
def test_a_contradiction_is_refused(query: str, fault: str) -> None:
    with pytest.raises(InvalidSetting, match=fault):
        database_url.parse(f"postgresql://db/orders?{query}")


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://app:MA/RK@db/orders",
        "postgresql://app:12/MARK@db/orders",
        "postgresql://app:MA?RK@db/orders",
        "postgresql://app:12?MARK@db/orders",
        "postgresql://app:MARK%ff@db/orders",
        "postgresql://app:MARK@db:port/orders",
        "postgresql://app:MARK@db:999999/orders",
        "postgresql://app:MARK@one%2Ctwo/orders",
        "mysql://app:MARK@db/orders",
        "app:MARK@db/orders",
        "host=db password=MARK",
        "MARK",
        "",
    ],
)
def test_text_without_a_url_is_refused_without_showing_a_part(text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^lock_database_url: not a Postgres URL") as refused:
        database_url.parse(text, "lock_database_url")
    assert "MARK" not in repr(refused.value)
    assert "MA" not in str(refused.value)


def test_empty_hostaddr_is_for_libpq_alone() -> None:
    url = database_url.parse("postgresql://postgres:@/shop?host=/tmp/x&hostaddr=&port=5432")
    assert "hostaddr=" in url.libpq()
    assert for_asyncpg({"host": "/tmp/x", "hostaddr": ""}) == {"host": "/tmp/x"}
    assert for_asyncpg({"hostaddr": "::1"}) == {"hostaddr": "::1"}  # asyncpg refuses it


def test_asyncpg_is_told_by_a_dsn_and_by_server_settings() -> None:
    given = {
        "host": "db",
        "sslmode": "verify-full",
        "sslrootcert": "/a b",
        "gssencmode": "disable",
        "application_name": "orders",
        "connect_timeout": "7",
        "server_settings": {"x": "1"},
    }
    assert for_asyncpg(given) == {
        "host": "db",
        "dsn": "postgresql://?sslmode=verify-full&sslrootcert=%2Fa%20b",
        "timeout": 7.0,
        "server_settings": {"application_name": "orders", "x": "1"},
    }


def test_asyncpg_gets_no_unknown_option() -> None:
    for query in ("channel_binding=require", "require_auth=scram-sha-256", "service=x"):
        with pytest.raises(InvalidSetting, match=r"asyncpg has no .*postgresql\+psycopg"):
            check_for_asyncpg(database_url.parse(f"postgresql://db/orders?{query}"))
    check_for_asyncpg(database_url.parse("postgresql://db/orders?channel_binding=prefer"))


def test_several_hosts_are_tried_in_turn() -> None:
    settings = load_settings(database_url="postgresql://app:pw@one:5432,two:5433/orders")
    for url in (sync_url(settings), async_url(settings)):
        assert (url.query["host"], url.query["port"]) == ("one,two", "5432,5433")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("postgresql://one,two/orders", (("one", 5432), ("two", 5432))),
        ("postgresql://one:1,two/orders", (("one", 1), ("two", 5432))),
        ("postgresql://one,two/orders?port=7", (("one", 7), ("two", 7))),
        ("postgresql://one,two/orders?port=7,8", (("one", 7), ("two", 8))),
        ("postgresql:///orders?host=one,/run/pg", (("one", 5432), ("/run/pg", 5432))),
        ("postgresql:///orders?host=one,::1&port=7", (("one", 7), ("::1", 7))),
        ("postgresql:///orders?host=one,two&port=7,8", (("one", 7), ("two", 8))),
        ("postgresql:///orders?host=one,two&port=7,", (("one", 7), ("two", 5432))),
        ("postgresql://lost/orders?host=one,two", (("one", 5432), ("two", 5432))),
    ],
)
def test_each_of_several_hosts_has_a_port_on_every_path(text: str, hosts: tuple[tuple[str, int], ...]) -> None:
    url = database_url.parse(text)
    assert url.hosts == hosts
    assert database_url.parse(url.libpq()).hosts == hosts
    names, ports = [host for host, _ in hosts], [port for _, port in hosts]
    settings = load_settings(database_url=text)
    dialects: list[Any] = [asyncpg.dialect, psycopg.dialect]
    _, of_asyncpg = dialects[0]().create_connect_args(async_url(settings))
    assert (of_asyncpg["host"], of_asyncpg["port"]) == (names, ports)
    _, of_psycopg = dialects[1]().create_connect_args(sync_url(settings))
    assert (of_psycopg["host"], of_psycopg["port"]) == (",".join(names), ",".join(map(str, ports)))
    told = conninfo_to_dict(url.libpq())
    assert (told["host"], told["port"]) == (of_psycopg["host"], of_psycopg["port"])


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("sslmod=require", "parameter 1 of the URL is unknown; did you mean 'sslmode'?"),
        ("sslmode=require&conect_timeout=5", "parameter 2 of the URL is unknown; did you mean 'connect_timeout'?"),
        ("statement_timeout=5000", "parameter 1 of the URL is unknown; take those of libpq, and options=-c%20NAME"),
        ("command_timeout=5", "parameter 1 of the URL is unknown; "),
        ("SSLMODE=require", "parameter 1 of the URL is unknown; "),
        ("connect_timeout=5s", "connect_timeout is no number of seconds"),
        ("target_session_attrs=writable", "target_session_attrs is none of any, read-write"),
        ("host=one,two&port=1,2,3", "3 ports for 2 hosts; give one port, or one for each"),
        ("host=one,", "one of several hosts is empty"),
        ("port=x", "not a Postgres URL"),
        ("port=99999", "a port of the URL is no port; give one from 1 to 65535"),
        ("host=one,two&port=1,0", "a port of the URL is no port; give one from 1 to 65535"),
        ("host=one&host=two", "host stands twice in the URL; give it once"),
        ("sslmode=require&user=a&sslmode=disable", "sslmode stands twice in the URL; give it once"),
        ("dbname=other", "dbname stands twice in the URL; give it once"),
    ],
)
@pytest.mark.parametrize("setting", ["database_url", "lock_database_url"])
def test_mistake_in_a_parameter_is_told_by_its_setting(setting: Any, query: str, fault: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^{setting}: {re.escape(fault)}"):
        load_settings(**{setting: f"postgresql:///orders?{query}"})


def test_host_of_a_parameter_stands_for_several_of_the_url() -> None:
    url = database_url.parse("postgresql://one,two/orders?host=/run/pg")
    told = conninfo_to_dict(url.libpq())
    assert told["host"] == "/run/pg"
    assert sync_url(load_settings(database_url=url.libpq())).query["host"] == "/run/pg"


def test_part_of_a_password_is_no_parameter() -> None:
    with pytest.raises(InvalidSetting, match="not a Postgres URL") as refused:
        database_url.parse("postgresql://app:12?MARK=x@db/orders")
    assert "MARK" not in str(refused.value)


@pytest.mark.parametrize("name", sorted(_TAKEN - {"hostaddr", "require_auth", "service", "servicefile", "ssl"}))
def test_known_parameter_has_a_meaning_for_asyncpg(name: str) -> None:
    told = for_asyncpg({name: "7"})
    known = {*signature(connect).parameters} | {"dbname"}
    assert set(told) <= known


@pytest.mark.parametrize(
    ("text", "is_local"),
    [
        ("postgresql:///x", True),
        ("postgresql:///x?host=/run/pg", True),
        ("postgresql://127.0.0.1/x", True),
        ("postgresql://[::1]/x", True),
        ("postgresql://db/x", False),
        ("postgresql://localhost,db/x", False),
        ("postgresql:///x?host=db", False),
    ],
)
def test_a_database_on_this_machine_is_told_from_others(text: str, is_local: bool) -> None:
    assert database_url.parse(text).is_local is is_local


@pytest.mark.parametrize(
    ("url", "environment"),
    [
        ("postgresql://db/shop", {}),
        ("postgresql://db/shop", {"PGPORT": ""}),
        ("postgresql://db/shop", {"PGPORT": "5433"}),
        ("postgresql:///shop", {"PGHOST": "a,b", "PGPORT": "5432,5433"}),
        ("postgresql://db:5432/shop", {"PGPORT": "abc"}),
        ("postgresql://a,b:5433/shop", {"PGPORT": "abc"}),
        ("postgresql:///shop?service=shop", {"PGPORT": "abc"}),
        ("postgresql:///shop", {"PGSERVICE": "shop", "PGPORT": "abc"}),
    ],
)
def test_port_of_the_environment_is_taken_or_left_alone(url: str, environment: dict[str, str]) -> None:
    parsed = database_url.parse(url)
    assert check_environment(parsed, environment) is parsed
