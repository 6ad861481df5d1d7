"""Databases with an encoding or with settings of their own: they are archived all the same, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from pyspark.sql import SparkSession

from durable.embedded import Embedded
from durable.errors import InvalidSetting
from durable.pipeline.archive import archive
from durable.pipeline.copying import connection
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import SOURCES
from durable.pipeline.status import read_status
from durable.storage import migrator
from tests.support.archiving import Archiver, origin_of
from tests.support.clusters import clusters
from tests.support.command import Agent
from tests.support.history import add_history

SETTINGS = {
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "sql_standard",
    "quote_all_identifiers": "on",
    "bytea_output": "escape",
    "TimeZone": "Asia/Kathmandu",
    "extra_float_digits": "-15",
    "standard_conforming_strings": "off",
    "array_nulls": "off",
    "client_encoding": "LATIN1",
}


@pytest.fixture
def latin(server: Embedded) -> Iterator[str]:
    """The URL of a database whose texts are not in UTF-8."""
    name = f"latin_{uuid4().hex[:12]}"
    with psycopg.connect(server.uri(), autocommit=True) as conn:
        made = sql.SQL("CREATE DATABASE {} ENCODING 'LATIN1' LOCALE_PROVIDER libc LOCALE 'C' TEMPLATE template0")
        conn.execute(made.format(sql.Identifier(name)))
        yield server.uri(name)
        conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.mark.parametrize("local_rows", [0, 1_000], ids=["spark", "without-spark"])
def test_settings_of_a_database_change_no_archive(
    spark: SparkSession, database_url: str, tmp_path: Path, local_rows: int
) -> None:
    with psycopg.connect(database_url, autocommit=True) as conn:
        name = sql.Identifier(conn.info.dbname)
        for setting, value in SETTINGS.items():
            conn.execute(
                sql.SQL("ALTER DATABASE {} SET {} = {}").format(name, sql.Identifier(setting), sql.Literal(value))
            )
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute("SET DateStyle = ISO; SET IntervalStyle = postgres")
        add_history(conn, 7)
    archiver = Archiver(spark, database_url, tmp_path)
    assert [each.lag_rows for each in read_status(database_url, "durable", archiver.lake).tables] == [7, 0]
    assert archiver.run(local_rows=local_rows).rows == 7
    assert archiver.verify().is_whole
    assert archiver.ids() == list(range(1, 8))


def test_database_of_another_encoding_is_refused(latin: str) -> None:
    with pytest.raises(InvalidSetting, match="encoding LATIN1 cannot"):
        migrator.upgrade(latin.replace("postgresql://", "postgresql+psycopg://"), "durable")
    with pytest.raises(InvalidSetting, match="encoding LATIN1 cannot"), connection(latin):
        pass


@pytest.fixture(params=["a standby", "read-only by default"])
def read_only_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database with archived history that takes no writes now."""
    with clusters() as made:
        first = made.new()
        first.execute("CREATE DATABASE shop")
        url = first.uri("shop")
        migrator.upgrade(url.replace("postgresql://", "postgresql+psycopg://"), "durable")
        with psycopg.connect(url, autocommit=True) as conn:
            add_history(conn, 3)
        for table in SOURCES:
            archive(pytest.fail, Lake(str(tmp_path / "lake")), table, origin_of(url))
        if request.param == "a standby":
            standby = made.empty()
            first.back_up(standby, "-R")
            standby.start()
            url = standby.uri("shop")
        else:
            first.execute("ALTER DATABASE shop SET default_transaction_read_only = on")
        yield url


def test_read_only_database_is_read_and_its_writers_name_the_primary(
    read_only_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DURABLE_DATABASE_URL", read_only_url)
    agent = Agent(tmp_path, monkeypatch, capsys)
    place = ("--lake", str(tmp_path / "lake"))
    assert agent("pipeline", "status", *place).code == 0
    for command in (("archive",), ("verify",), ("purge", "--keep", "30")):
        code, _, err = agent("pipeline", *command, "--service", "shop", *place)
        assert (code, err.count("name the primary in the setting database_url"), "check that" in err) == (1, 1, False)
