"""Filters of every page: each holds whatever a message may have, and nothing of it is cut."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from durable import Bus, message
from durable.errors import InvalidMessage
from durable.messages.validation import MAX_TEXT_BYTES
from tests.integration.console.visiting import ADMIN, add_letters, bearer
from tests.support.tables import Tables

TEXTS = [
    *(("/dead-letters/all", name) for name in ("fingerprint", "side", "message_type", "exception_type", "address")),
    *(("/dead-letters/all", name) for name in ("key", "text")),
    *(("/actions", name) for name in ("actor", "verb", "target")),
    ("/messages", "key"),
]
OTHERS = [
    *((page, name) for page in ("/dead-letters/all", "/actions") for name in ("since", "until")),
    *(("/messages", name) for name in ("id", "conversation")),
    *(("/actions/export", name) for name in ("actor", "verb", "target", "since", "until")),
]
LONGEST = "a" * MAX_TEXT_BYTES


@message("filters.ordered")
class Ordered(msgspec.Struct):
    number: int


@pytest_asyncio.fixture
async def bus(tables: Tables) -> AsyncIterator[Bus]:
    bus = Bus("shop", tables.url)
    bus.handles(Ordered)(handle)
    yield bus
    await bus.runtime.stop()


async def handle(ordered: Ordered) -> None: ...


def typed(page: str, name: str) -> tuple[str, int]:
    """What the field of a form holds, and how much it may hold."""
    found = re.search(rf'name="{name}" value="([^"]*)"[^>]* maxlength="(\d+)"', page)
    assert found is not None
    return html.unescape(found[1]), int(found[2])


@pytest.mark.parametrize(("page", "name"), TEXTS)
async def test_filter_is_taken_whole(app: Starlette, page: str, name: str) -> None:
    async with bearer(app, ADMIN) as client:
        for asked in (LONGEST, " \u202ea b "):
            found = await client.get(page, params={name: asked})
            assert (found.status_code, typed(found.text, name)) == (200, (asked, MAX_TEXT_BYTES))


@pytest.mark.parametrize("asked", [LONGEST + "a", "\u0416" * 501, "a\0", "a\nb"], ids=["long", "wide", "nul", "lines"])
@pytest.mark.parametrize(("page", "name"), TEXTS + OTHERS)
async def test_filter_beyond_every_message_is_refused(app: Starlette, page: str, name: str, asked: str) -> None:
    async with bearer(app, ADMIN) as client:
        refused = await client.get(page, params={name: asked})
        assert (refused.status_code, f"{name}: " in refused.text) == (422, True)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.text(min_size=1))
@example(key=LONGEST)
@example(key="\u0416" * 500)
@example(key=" customer 17 ")
@example(key=" ")
@example(key="\u202e71 remotsuc\u200b")
@example(key="\x85&key=+%20\"'<b>")
async def test_key_finds_its_message_on_every_page(app: Starlette, bus: Bus, tables: Tables, key: str) -> None:
    tables.clear()
    add_letters(tables, 2)
    try:
        async with bus.unit_of_work() as uow:
            uow.send(Ordered(1), key=key)
    except InvalidMessage:
        assume(False)
    tables.execute(
        "UPDATE durable.dead_letters SET partition_key = %s WHERE letter_id = (SELECT min(letter_id) FROM "
        "durable.dead_letters)",
        key,
    )
    async with bearer(app, ADMIN) as client:
        steps = (await client.get("/messages", params={"key": key})).text
        assert steps.count('class="name depth-0">') == 2
        link = re.search(r'href="/console([^"]*)">All dead letters with this key', steps)
        assert link is not None
        letters = await client.get(html.unescape(link[1]))
        assert "Discard 1 letter<" in letters.text
        assert httpx.URL(html.unescape(link[1])).params["key"] == typed(letters.text, "key")[0] == key
