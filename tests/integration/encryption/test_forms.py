"""The form of an encrypted body: SQL finds in any bytes what durable.messages.sealed finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from durable.embedded import Embedded
from durable.messages.sealed import DIGEST_BYTES, KEY_ID_AT, MAGIC, digest_of, is_sealed, parted
from durable.storage.sql import columns
from tests.support.sealed_looks import looking_sealed
from tests.support.tables import Tables, shared_tables

CUT = [MAGIC, MAGIC.ljust(KEY_ID_AT, b"\0"), MAGIC.ljust(KEY_ID_AT + 1, b"\0"), MAGIC + bytes(DIGEST_BYTES)]


@pytest.fixture(scope="module")
def tables(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


def told(tables: Tables, rule: str, bodies: list[bytes]) -> list[Any]:
    """Return what Postgres says of these bodies."""
    values = ", ".join(f"({place}, '\\x{each.hex()}'::bytea)" for place, each in enumerate(bodies))
    return list(tables.rows(f"SELECT {rule} FROM (VALUES {values}) AS t (place, body) ORDER BY place"))


@settings(deadline=None, max_examples=200)
@example(bodies=CUT)
@given(bodies=st.lists(st.one_of(looking_sealed(), st.binary(max_size=40)), min_size=1, max_size=20))
def test_postgres_reads_any_body_as_python_does(tables: Tables, bodies: list[bytes]) -> None:
    parts = [parted(each) for each in bodies]
    key_ids = [None if each is None else each.key_id for each in parts]
    assert told(tables, columns.is_sealed("body"), bodies) == list(map(is_sealed, bodies))
    assert told(tables, columns.key_id_of("body"), bodies) == key_ids
    digests = f"CASE WHEN {columns.carries_digest('body')} THEN {columns.carried_digest('body')} END"
    assert told(tables, digests, bodies) == list(map(digest_of, bodies))
