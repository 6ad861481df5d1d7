"""Databases of ADBC in one process: one for a URL while it is in use, and none that is neither in use nor kept.

Errors of a COPY are told in the words of durable, wherever it meets them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import adbc_driver_postgresql
import psycopg
import pytest
from adbc_driver_manager import AdbcDatabase

from durable.errors import InvalidSetting, StorageUnavailable
from durable.pipeline import copying
from durable.pipeline.copying import arrow_connection, copy
from durable.storage.slices import Slice
from tests.support.root import ROOT

KEPT = 4


class Handles:
    """Handles of the driver, by the order in which they were opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.closed, handles = 0, list[int](), self
        driver = adbc_driver_postgresql._driver_path()

        class Handle(AdbcDatabase):
            def __init__(self, **options: Any) -> None:
                super().__init__(**options)
                self.number, handles.opened = handles.opened, handles.opened + 1

            def close(self) -> None:
                super().close()
                handles.closed.append(self.number)

        monkeypatch.setattr(adbc_driver_postgresql, "connect", lambda url: Handle(driver=driver, uri=url))


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handles]:
    copying._database.cache_clear()
    yield Handles(monkeypatch)
    copying._database.cache_clear()


def url_of(database_url: str, number: int) -> str:
    """Return another URL of the same database."""
    return f"{database_url}{'&' if '?' in database_url else '?'}application_name=n{number}"


def ask(url: str) -> int:
    with arrow_connection(url) as conn:
        return answer(conn)


def answer(conn: Any) -> int:
    with conn.cursor() as cursor:
        cursor.execute("SELECT 17")
        ((found,),) = cursor.fetchall()
    return int(found)


def test_database_serves_all_connections_of_its_url(database_url: str, handles: Handles) -> None:
    with arrow_connection(database_url) as conn:
        assert [ask(database_url) for _ in range(3)] == [17] * 3
        assert answer(conn) == 17
    assert (handles.opened, handles.closed) == (1, [])


def test_evicted_database_is_closed(database_url: str, handles: Handles) -> None:
    for number in range(KEPT + 3):
        assert ask(url_of(database_url, number)) == 17
    assert handles.closed == [0, 1, 2]


def test_database_in_use_is_closed_with_its_last_connection(database_url: str, handles: Handles) -> None:
    with ExitStack() as later:
        first = later.enter_context(arrow_connection(url_of(database_url, 0)))
        with arrow_connection(url_of(database_url, 0)) as second:
            for number in range(1, KEPT + 1):
                ask(url_of(database_url, number))
            assert (answer(first), answer(second)) == (17, 17)
        del second
        assert (answer(first), handles.closed) == (17, [])
        del first
    assert handles.closed == [0]


def test_evicted_database_is_closed_after_a_connection_failed_to_begin(
    database_url: str, handles: Handles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the server went away")

    with monkeypatch.context() as patch:
        patch.setattr("adbc_driver_manager.dbapi.Connection", fail)
        with pytest.raises(RuntimeError, match="went away"):
            ask(database_url)
    copying._database.cache_clear()
    assert handles.closed == [0]


def test_threads_leave_no_more_databases_open_than_are_kept(database_url: str, handles: Handles) -> None:
    urls = [url_of(database_url, number % 7) for number in range(70)]
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(ask, urls)) == [17] * len(urls)
    assert handles.opened > KEPT
    assert handles.opened - len(handles.closed) == KEPT


FAILS = """
CREATE FUNCTION public.fail_at(number bigint) RETURNS text LANGUAGE plpgsql AS $$ BEGIN
    IF number > 100000 THEN {fault}; END IF;
    RETURN repeat('x', 100);
END $$
"""
FAULTS = {
    "a right is missing": ("RAISE insufficient_privilege", InvalidSetting, r"insufficient_privilege.*--grant-to ROLE$"),
    "an error": ("PERFORM 1 / (number - number)", StorageUnavailable, "division by zero"),
    "the session is ended": (
        "PERFORM pg_terminate_backend(pg_backend_pid())",
        StorageUnavailable,
        "terminat|closed the connection",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("first", [1, 100_001], ids=["amid-the-rows", "at-the-first-row"])
def test_fault_of_a_copy_is_told_with_its_remedy(database_url: str, fault: str, first: int) -> None:
    statement, raised, said = FAULTS[fault]
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(FAILS.format(fault=statement).encode())
    rows, read = Slice(f"generate_series({first}::bigint, 200000) AS n"), list[int]()
    with pytest.raises(raised, match=rf"^reading from the database failed: .*(?:{said})"):
        read.extend(batch.num_rows for batch in copy(database_url, (rows,), ["public.fail_at(n)"]))
    assert bool(read) == (first == 1)


BARE = re.compile(r"fetch_record_batch\(|from adbc_driver_manager import .*\bError\b")


def test_results_of_adbc_are_read_where_their_errors_are_translated() -> None:
    texts = {path.name: path.read_text("utf-8") for path in (ROOT / "durable").rglob("*.py")}
    found = {name: BARE.findall(text) for name, text in texts.items() if BARE.search(text)}
    assert found == {"copying.py": ["from adbc_driver_manager import Error"]}
