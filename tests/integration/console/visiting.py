"""Browsers without a screen for the console: people, their tokens, and the forms that they send."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from sqlalchemy import create_engine
from starlette.applications import Starlette

from durable.console import Person, Role
from durable.storage.rows import Letter
from tests.support import letters
from tests.support.tables import Tables

OPERATOR, VIEWER, ADMIN = "operator's secret 1234", "viewer's secret 123456", "admin's secret 1234567"
TOKENS = {
    OPERATOR: Person("olga", Role.OPERATOR),
    VIEWER: Person("vic", Role.VIEWER),
    ADMIN: Person("ada", Role.ADMIN),
}
HIDDEN = re.compile(r'<input type="hidden" name="([^"]+)" value="([^"]*)">')
SECRET = re.compile(r'name="form" value="([^"]+)"')


def browser(app: Starlette, *, address: str = "10.0.0.1", **headers: str) -> httpx.AsyncClient:
    """A client of the mounted console, at this address, that keeps cookies, as a browser does."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(address, 1234))
    accepts = {"accept": "text/html"} | headers
    return httpx.AsyncClient(transport=transport, base_url="https://shop.example/console", headers=accepts)


def bearer(app: Starlette, token: str) -> httpx.AsyncClient:
    return browser(app, authorization=f"Bearer {token}")


@asynccontextmanager
async def logged_in(app: Starlette, token: str = OPERATOR) -> AsyncIterator[httpx.AsyncClient]:
    async with browser(app) as client:
        assert (await submit(client, "/login", "/login", token=token)).status_code == 303
        yield client


async def submit(client: httpx.AsyncClient, page: str, action: str, **fields: str) -> httpx.Response:
    """Send the first form of a page for this action, with what it holds, as a browser does; or one with the page's
    secret alone. A field that is given takes the place of a packed one.
    """
    text = (await client.get(page)).text
    found = SECRET.search(text)
    assert found is not None
    held = {"form": found[1]}
    for form in re.findall(r'<form method="post" action="([^"]+)">(.*?)</form>', text, re.DOTALL):
        if form[0].endswith(action):
            held |= {name: html.unescape(value) for name, value in HIDDEN.findall(form[1])}
            break
    left = {name: value for name, value in held.items() if name.removeprefix("packed-") not in fields}
    return await client.post(action, data=left | fields)


def add_letters(tables: Tables, count: int, letter: Letter = letters.LETTER, **options: Any) -> list[int]:
    engine = create_engine(tables.url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as conn:
        letters.incoming(conn, [letters.envelope(number, **options) for number in range(count)], letter)
    engine.dispose()
    return tables.rows("SELECT letter_id FROM durable.dead_letters ORDER BY 1")
