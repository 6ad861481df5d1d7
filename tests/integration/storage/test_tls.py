"""Postgres over TLS: each way to write it in a URL holds for each driver, against a server that takes nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from durable import Bus, message
from durable.cli.doctor import database as doctor
from durable.errors import DurableError
from durable.pipeline import copying
from durable.settings import Settings, load_settings
from durable.storage.database import async_url, lock_url, sync_url
from durable.storage.engines import Limits, make_async_engine, make_engine
from durable.testing import eventually
from tests.support.command import Agent
from tests.support.tls import Authority
from tests.support.tls_postgres import PASSWORD, USER, TlsPostgres, tls_postgres

ASK = "SELECT ssl, version, client_dn FROM pg_stat_ssl WHERE pid = pg_backend_pid()"


@message("tls-postgres.placed")
class Placed(msgspec.Struct):
    number: int


@pytest.fixture(scope="module")
def server() -> Iterator[TlsPostgres]:
    with tls_postgres() as server:
        yield server


def settings_for(url: str) -> Settings:
    return load_settings(database_url=url, lock_database_url=url)


def limits(settings: Settings) -> Limits:
    return Limits.of(settings.statement_timeout)


def by_asyncpg(url: str) -> Any:
    return _asked_async(settings_for(url.replace("postgresql://", "postgresql+asyncpg://")))


def by_async_psycopg(url: str) -> Any:
    return _asked_async(settings_for(url.replace("postgresql://", "postgresql+psycopg://")))


def _asked_async(settings: Settings) -> Any:
    async def ask() -> Any:
        engine = make_async_engine(async_url(settings), settings, limits(settings))
        try:
            async with engine.connect() as conn:
                return tuple((await conn.execute(text(ASK))).one())
        finally:
            await engine.dispose()

    return asyncio.run(ask())


def by_psycopg(url: str) -> Any:
    settings = settings_for(url)
    engine = make_engine(sync_url(settings), settings, limits(settings))
    with engine.connect() as conn:
        row = tuple(conn.execute(text(ASK)).one())
    engine.dispose()
    return row


def by_lock(url: str) -> Any:
    with psycopg.connect(lock_url(settings_for(url))) as conn:
        return conn.execute(ASK.encode()).fetchone()


def by_pipeline(url: str) -> Any:
    with copying.connection(url) as conn:
        return tuple(conn.execute(text(ASK)).one())


def by_adbc(url: str) -> Any:
    from adbc_driver_postgresql import dbapi

    with closing(dbapi.connect(copying.libpq_url(url))) as conn, closing(conn.cursor()) as cursor:
        cursor.execute(ASK)
        return cursor.fetchone()


DRIVERS = [by_asyncpg, by_async_psycopg, by_psycopg, by_lock, by_pipeline, by_adbc]


@pytest.fixture(params=DRIVERS, ids=lambda driver: driver.__name__)
def driver(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    found: Callable[[str], Any] = request.param
    return found


@pytest.mark.parametrize(
    "query",
    [
        "",
        "sslmode=prefer",
        "sslmode=require",
        "ssl=require",
        "sslmode=require&channel_binding=prefer&gssencmode=disable&application_name=orders&connect_timeout=9",
        "sslmode=verify-ca&sslrootcert={ca}",
        "sslmode=verify-full&sslrootcert={ca}",
        "ssl=verify-full&sslrootcert={ca}",
        "ssl=true&sslrootcert={ca}",
        "sslmode=verify-full&sslrootcert={ca}&ssl_min_protocol_version=TLSv1.3",
    ],
)
def test_each_form_of_url_is_understood(server: TlsPostgres, driver: Callable[[str], Any], query: str) -> None:
    encrypted, version, _ = driver(server.url(query.format(ca=server.authority)))
    assert (encrypted, version) == (True, "TLSv1.3")


def test_a_certificate_of_the_client_is_shown(server: TlsPostgres, driver: Callable[[str], Any]) -> None:
    files = f"sslrootcert={server.authority}&sslcert={server.client.certificate}&sslkey={server.client.key}"
    assert driver(server.url(f"sslmode=verify-full&{files}", user="certain"))[2].endswith("CN=certain")


@pytest.mark.parametrize(
    ("query", "host"),
    [
        ("sslmode=disable", "127.0.0.1"),
        ("ssl=off", "127.0.0.1"),
        ("sslmode=verify-ca&sslrootcert={other}", "127.0.0.1"),
        ("sslmode=verify-full&sslrootcert={other}", "127.0.0.1"),
        ("sslmode=verify-full&sslrootcert={ca}", "localhost"),
        ("sslmode=verify-full&sslrootcert=/nowhere/ca.pem", "127.0.0.1"),
        ("ssl=true", "127.0.0.1"),
    ],
)
def test_wrong_server_is_refused(
    server: TlsPostgres, driver: Callable[[str], Any], query: str, host: str, tmp_path: Path
) -> None:
    own = query.format(ca=server.authority, other=Authority(tmp_path, "other").pem)
    with pytest.raises((DBAPIError, DurableError, OSError, psycopg.Error, *_of_adbc())) as refused:
        driver(server.url(own, host=host))
    assert PASSWORD not in str(refused.value)


def _of_adbc() -> tuple[type[Exception], ...]:
    from adbc_driver_manager import Error

    return (Error,)


async def test_a_node_sends_and_handles_over_tls(server: TlsPostgres) -> None:
    bus = Bus("shop", server.url(f"sslmode=verify-full&sslrootcert={server.authority}"))
    handled: list[int] = []

    @bus.handles(Placed)
    async def handle(placed: Placed) -> None:
        handled.append(placed.number)

    async with bus:
        async with bus.unit_of_work():
            bus.send(Placed(1))
        await eventually(lambda: handled == [1])
        with psycopg.connect(f"postgresql://owner@/orders?host={server.socket_folder}&port={server.port}") as conn:
            seen = conn.execute(
                "SELECT DISTINCT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = %s", (USER,)
            ).fetchall()
    assert seen == [(True,)]


ARCHIVE = ("pipeline", "archive", "--lake", "lake", "--service", "shop")


@pytest.mark.parametrize("command", [("doctor",), ("status",), ARCHIVE], ids=str)
def test_a_command_works_over_tls(
    server: TlsPostgres,
    command: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DURABLE_DATABASE_URL", server.url(f"ssl=verify-full&sslrootcert={server.authority}"))
    ended = Agent(tmp_path, monkeypatch, capsys)(*command)
    assert "refused" not in ended.out + ended.err
    assert (ended.code, ended.err) == (0, "")


def test_a_wrong_password_is_told_without_any(
    server: TlsPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.url("sslmode=require").replace("p%40ss", "wr0ng%40")
    monkeypatch.setenv("DURABLE_DATABASE_URL", url)
    for options in ((), ("--json",), ("--debug",)):
        ended = Agent(tmp_path, monkeypatch, capsys)("status", *options)
        assert ended.code == 1
        said = ended.out + ended.err
        assert "password authentication failed" in said
        assert "wr0ng" not in said


@pytest.mark.parametrize(
    ("url", "is_encrypted", "verdict"),
    [
        ("postgresql://db/x?sslmode=verify-full", True, "ok"),
        ("postgresql://db/x?sslmode=require", True, "warn"),
        ("postgresql://db/x", False, "warn"),
        ("postgresql://127.0.0.1/x", False, "ok"),
    ],
)
def test_doctor_warns_of_an_unchecked_server(url: str, is_encrypted: bool, verdict: str) -> None:
    check = doctor.encryption(load_settings(database_url=url), is_encrypted)
    assert (check.verdict, bool(check.advice)) == (verdict, verdict == "warn")
