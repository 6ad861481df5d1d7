"""Ids that carry their time: one rule in Python, in SQL and on Spark, for every version of every variant of a UUID.

Ids are checked by their time in Python, and lie by it in the partitions of Postgres: by two rules an id of the year
2100 would pass the check, and lie where nothing forgets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from durable import Bus, message
from durable.embedded import Embedded
from durable.embedded.ports import free_port
from durable.envelope import derived_id, new_id, unix_ms
from durable.outcomes import DUPLICATE, STORED
from durable.pipeline.publish import uuid8_of
from durable.settings import load_settings
from durable.storage.sql.columns import DATED, GENERATED
from durable.testing import eventually
from durable.transports.tcp.transport import TcpTransport
from tests.support.receivers import envelope
from tests.support.tables import Tables, shared_tables

KINDS = [(version, variant) for version in range(16) for variant in range(16)]


@message("dated.placed")
class Placed(msgspec.Struct):
    number: int


@pytest.fixture(scope="module")
def tables(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


def of_kind(version: int, variant: int, moment: datetime, rest: int) -> UUID:
    """An id with these 4 bits in the place of the version, these in that of the variant, and a time before both."""
    fixed = 0xF << 76 | 0xF << 60
    made_ms = int(moment.timestamp() * 1_000)
    return UUID(int=made_ms << 80 | (rest & (1 << 80) - 1 & ~fixed) | version << 76 | variant << 60)


def told(tables: Tables, rule: str, ids: list[UUID]) -> list[bool]:
    """What Postgres says of these ids."""
    values = ", ".join(f"({place}, '{each}'::uuid)" for place, each in enumerate(ids))
    return [bool(row) for row in tables.rows(f"SELECT {rule} FROM (VALUES {values}) AS t (place, id) ORDER BY place")]


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, (1 << 128) - 1), min_size=1, max_size=20), rest=st.integers(0, (1 << 80) - 1))
def test_times_in_ids_are_the_same_to_python_and_postgres(tables: Tables, ids: list[int], rest: int) -> None:
    all_kinds = [of_kind(version, variant, datetime(2022, 1, 1, tzinfo=UTC), rest) for version, variant in KINDS]
    some = [*all_kinds, *(UUID(int=each) for each in ids), new_id(), uuid4()]
    assert told(tables, DATED, some) == [unix_ms(each) is not None for each in some]


def test_generated_ids_are_known_as_such(tables: Tables) -> None:
    made = [new_id(), derived_id(new_id(), "a"), uuid8_of("b")]
    assert told(tables, GENERATED, made) == [True] * 3
    business_keys = [uuid4(), of_kind(8, 0, datetime(2022, 1, 1, tzinfo=UTC), 1)]
    assert told(tables, GENERATED, business_keys) == [False] * 2


@pytest.mark.parametrize("variant", [0, 7, 12, 14])
async def test_id_of_another_variant_is_remembered_as_one_without_a_time(tables: Tables, variant: int) -> None:
    """Of the year 2100 or of today: neither lies in a partition of its day."""
    tables.clear()
    uri = f"tcp://127.0.0.1:{free_port()}"
    bus = Bus("shop", tables.url, poll_interval=timedelta(milliseconds=30))
    bus.listen(uri)
    seen: list[int] = []

    @bus.handles(Placed)
    async def place(placed: Placed) -> None:
        seen.append(placed.number)

    moments = datetime(2100, 1, 1, tzinfo=UTC), datetime.now(UTC)
    batch = [
        replace(envelope("dated.placed", b'{"number": 1}'), id=of_kind(7, variant, each, 5 + place))
        for place, each in enumerate(moments)
    ]
    async with bus, TcpTransport(load_settings(), "till", 1).sender(uri) as sender:
        assert await sender.send(batch) == [STORED] * 2
        assert await sender.send(batch) == [DUPLICATE] * 2
        await eventually(lambda: seen == [1, 1], within=20, what="the handling")
        assert tables.count("received_ids") == 0
        assert tables.count("undated_ids") == 2
        assert tables.count("dead_letters") == 0
