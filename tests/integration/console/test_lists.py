"""Lists of pages: bounded, with a link to the rows that come next."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from durable.listed import SHOWN
from durable.storage import circuits
from durable.storage.circuits import OpenCircuit
from durable.storage.gauges import MOST_COUNTED
from tests.integration.console.visiting import OPERATOR, bearer
from tests.support.lists import grow
from tests.support.tables import Tables

MANY = SHOWN + 1
LISTS = {
    "keys": ("/handlers", r'aria-label="Unpark (order-\d+)"'),
    "types": ("/handlers", r'class="name">(a\.b\d+)<br>'),
    "latches": ("/circuits", r'class="name">(tcp://.+?)<br>'),
    "nodes": ("/nodes", r'class="name">(host:\d+)</td>'),
    "schedules": ("/scheduled", r'class="name">(daily \d+)<br>'),
    "delayed": ("/scheduled", r'\?id=([0-9a-f-]+)">'),
    "causes": ("/dead-letters", r">(Error\d+)</a>"),
}


async def pages(client: httpx.AsyncClient, path: str) -> AsyncIterator[str]:
    """The pages of a list, as its links lead from one to the next."""
    query = ""
    while True:
        text = (await client.get(path + query)).text
        yield text
        found = re.search(r'rel="next" href="([^"]+)"', text)
        if found is None:
            return
        query = html.unescape(found[1])


@pytest.mark.parametrize("growth", LISTS)
async def test_list_comes_in_pages(app: Starlette, tables: Tables, growth: str) -> None:
    path, row = LISTS[growth]
    grow(tables, growth, 2 * SHOWN + 1)
    async with bearer(app, OPERATOR) as client:
        found = [re.findall(row, text) async for text in pages(client, path)]
        last = (await client.get(path)).text

    assert [len(set(each)) for each in found] == [SHOWN, SHOWN, 1]
    assert len({each for page in found for each in page}) == 2 * SHOWN + 1
    assert f"1 to {SHOWN} of {2 * SHOWN + 1}." in last


@pytest.mark.parametrize(
    ("growth", "row", "command"),
    [
        ("latches", r"<li>destination ", "status --json"),
        ("latches", r'class="name">(tcp://.+?)</td>', "status"),
        ("destinations", r'class="name">(tcp://.+?)</td>', "status"),
        ("types", r'class="name">(a\.b.+?)</td>', "status"),
    ],
    ids=["needs", "latches", "destinations", "types"],
)
async def test_overview_is_bounded(app: Starlette, tables: Tables, growth: str, row: str, command: str) -> None:
    grow(tables, growth, MANY)
    async with bearer(app, OPERATOR) as client:
        text = (await client.get("/")).text

    assert len(re.findall(row, text)) == SHOWN
    assert f"And 1 more: <code>durable-agent {command} --limit {MANY}</code>" in text


async def test_overview_counts_every_open_circuit(app: Starlette, tables: Tables) -> None:
    grow(tables, "keys", MOST_COUNTED + 1)
    grow(tables, "latches", 1)
    async with bearer(app, OPERATOR) as client:
        assert f"<dt>Open circuits</dt><dd>{MOST_COUNTED + 2:,}</dd>" in (await client.get("/")).text


async def test_messages_behind_a_key_are_counted(app: Starlette, tables: Tables) -> None:
    grow(tables, "keys", 1)
    grow(tables, "types", 3)
    tables.execute("UPDATE durable.incoming_envelopes SET ordering_key = 'order-1', partition_key = 'order-1'")
    async with bearer(app, OPERATOR) as client:
        assert re.search(
            r'order-1</td>\s*<td data-label="Waiting" class="num">3</td>', (await client.get("/handlers")).text
        )


@pytest.mark.parametrize("page", ["0", "x", "-1", "1e3", "9" * 20])
async def test_odd_number_of_a_page_is_the_first_one(app: Starlette, tables: Tables, page: str) -> None:
    grow(tables, "keys", MANY)
    async with bearer(app, OPERATOR) as client:
        assert f"1 to {SHOWN} of" in (await client.get("/circuits", params={"page": page})).text


@pytest.mark.parametrize("path", ["/circuits", "/nodes", "/dead-letters"])
async def test_page_beyond_the_last_one_says_so(app: Starlette, tables: Tables, path: str) -> None:
    for growth in ("keys", "nodes", "causes"):
        grow(tables, growth, MANY)
    async with bearer(app, OPERATOR) as client:
        text = (await client.get(f"{path}?page=999999")).text
    assert "There is no page 999999." in text
    assert 'rel="prev"' in text


async def test_links_of_a_list_keep_the_page_of_the_other(app: Starlette, tables: Tables) -> None:
    grow(tables, "schedules", MANY)
    grow(tables, "delayed", MANY)
    async with bearer(app, OPERATOR) as client:
        text = html.unescape((await client.get("/scheduled?schedules=2")).text)
    assert 'href="?schedules=2&messages=2"' in text


@pytest.mark.parametrize("path", ["/handlers", "/circuits"])
async def test_page_reads_a_bounded_number_of_keys(
    app: Starlette, tables: Tables, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    made: list[object] = []

    def counted(*values: Any) -> OpenCircuit:
        made.append(values)
        return OpenCircuit(*values)

    monkeypatch.setattr(circuits, "OpenCircuit", counted)
    grow(tables, "keys", 3 * MOST_COUNTED)
    async with bearer(app, OPERATOR) as client:
        assert (await client.get(path)).status_code == 200
    assert len(made) == MOST_COUNTED + SHOWN
