"""Settings of a database that change how a driver writes or reads values: messages are handled as they were sent."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from psycopg import sql
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import durable.storage.sql
from durable import Bus, message
from durable.embedded import Embedded
from durable.settings import load_settings
from durable.testing import eventually
from tests.support.tables import Tables, shared_tables

FORMATS = {
    "standard_conforming_strings": "off",
    "escape_string_warning": "on",
    "backslash_quote": "off",
    "bytea_output": "escape",
    "array_nulls": "off",
    "extra_float_digits": "-15",
    "xmlbinary": "hex",
    "client_encoding": "LATIN1",
    "quote_all_identifiers": "on",
}
LEFT_TO_THE_APPLICATION = {"array_nulls", "client_encoding"}
"""On an engine that it gives."""
TOLD = "back\\slash 'quoted' \\x7b é 日本"


@message("formats.told")
class Told(msgspec.Struct):
    way: str
    told: str = TOLD


@message("formats.repeated")
class Repeated(msgspec.Struct):
    way: str
    told: str = TOLD


@pytest.fixture
def tables(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@asynccontextmanager
async def opened_bus(tables: Tables, driver: str, *, is_given: bool) -> AsyncIterator[Bus]:
    url, sync_url = (tables.url.replace("postgresql:", f"postgresql+{each}:") for each in (driver, "psycopg"))
    if not is_given:
        yield Bus("billing", settings=load_settings(database_url=url))
        return
    engine, sync_engine = create_async_engine(url), create_engine(sync_url)
    yield Bus("billing", tables.url, engine=engine, sync_engine=sync_engine)
    await engine.dispose()
    sync_engine.dispose()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize(
    ("setting", "is_given"),
    [(each, given) for each in FORMATS for given in (False, True) if not (given and each in LEFT_TO_THE_APPLICATION)],
)
async def test_messages_are_handled_as_sent_in_every_format_of_the_database(
    tables: Tables, setting: str, driver: str, is_given: bool
) -> None:
    names = sql.Identifier(str(tables.one("SELECT current_database()"))), sql.Identifier(setting)
    changed = sql.SQL("ALTER DATABASE {} SET {} = {}").format(*names, sql.Literal(FORMATS[setting]))
    tables.execute(changed.as_string(None))
    tables.execute("CREATE TABLE effects (way text, told text)")
    async with opened_bus(tables, driver, is_given=is_given) as bus:
        await exchange(bus, tables)
    assert set(tables.rows("SELECT told FROM effects")) == {TOLD}
    assert set(tables.rows("SELECT partition_key FROM durable.envelope_history")) == {None, "日本", "é日"}
    assert tables.dead_letters() == []


async def exchange(bus: Bus, tables: Tables) -> None:
    """Send messages alone and together, from the loop and from a thread, until all are handled."""

    @bus.handles(Told)
    async def tell(told: Told, session: AsyncSession) -> None:
        await session.execute(text("INSERT INTO effects VALUES (:way, :told)"), {"way": told.way, "told": told.told})

    @bus.handles(Repeated)
    def repeat(repeated: Repeated, session: Session) -> None:
        for key in ("é日", None):
            bus.send(Told(f"{repeated.way}, key {key}", repeated.told), key=key)

    async with bus:
        async with bus.unit_of_work():
            bus.send(Told("alone"))
        async with bus.unit_of_work():
            bus.send(Told("with others"))
            bus.send(Told("with others, delayed"), delay=0.1)
            bus.send(Repeated("by a sync handler"), key="日本")
        await eventually(lambda: tables.one("SELECT count(*) FROM effects") == 5, what="all effects")


def test_every_array_of_bytes_is_written_the_same_way_everywhere() -> None:
    texts = [path.read_text("utf-8") for path in Path(durable.storage.sql.__file__).parent.glob("*.py")]
    arrays = [array for each in texts for array in re.findall(r"CAST\((\S+) AS bytea\[\]", each)]
    assert len(arrays) == sum(each.count("AS bytea[]") for each in texts) == 7
    assert [array for array in arrays if not re.fullmatch(r":\w+", array)] == []
