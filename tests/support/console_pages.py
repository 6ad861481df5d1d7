"""Pages of a console in this process, as a browser gets them, and what they show as text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape

import httpx
from starlette.applications import Starlette
from starlette.routing import Mount

from durable import Bus
from durable.console import Person, Role, console_app

OPERATOR, VIEWER = "operator's secret 1234", "viewer's secret 123456"
TOKENS = {OPERATOR: Person("olga", Role.OPERATOR), VIEWER: Person("vic", Role.VIEWER)}


async def shown(url: str, path: str, token: str = OPERATOR, *, status: int = 200) -> str:
    """The HTML of a page of the service whose database is at this URL."""
    bus = Bus("shop", url)
    app = Starlette(routes=[Mount("/console", console_app(bus, tokens=TOKENS))])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=("10.0.0.1", 1234))
    headers = {"accept": "text/html", "authorization": f"Bearer {token}"}
    try:
        async with httpx.AsyncClient(transport=transport, base_url="https://shop.example", headers=headers) as client:
            response = await client.get(f"/console{path}")
    finally:
        await bus.runtime.stop()
    assert response.status_code == status, response.text
    return str(response.text)


def plain(html: str) -> str:
    """The text of HTML, on one line."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def section(page: str, title: str) -> str:
    """The HTML of the section with this heading."""
    parts: list[str] = re.findall(r"<section.*?</section>", page, re.S)
    (found,) = [each for each in parts if f">{title}</h2>" in each]
    return found


def rows(html: str) -> Iterator[list[str]]:
    """The texts of the cells, row by row."""
    for row in re.findall(r"<tr>(.*?)</tr>", html, re.S):
        if cells := re.findall(r"<td[^>]*>(.*?)</td>", row, re.S):
            yield [plain(cell) for cell in cells]


def row(html: str, begin: str) -> list[str]:
    """The cells of the row whose first cell begins so."""
    (found,) = [each for each in rows(html) if each[0].startswith(begin)]
    return found
