"""The recipe of docs/security.md, as it stands: an authority, two services with mutual TLS, and every rotation."""

from __future__ import annotations

import re
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from durable import Bus, message
from durable.embedded.ports import free_port
from durable.errors import TransportError
from durable.outcomes import STORED
from durable.settings import Settings, load_settings
from durable.testing import eventually
from durable.testing.transports import envelope
from durable.transports.tcp.transport import TcpTransport
from tests.failure.workbench import QUICK
from tests.support.pages import DOCS

ORDERS, BILLING = "127.0.0.2", "127.0.0.3"
"""Addresses of the two hosts; the page has names, which nobody resolves here."""
BLOCKS = dict(re.findall(r"<!-- run: ([^\n]+) -->\n```sh\n(.*?)```", (DOCS / "security.md").read_text(), re.DOTALL))
STEPS = ["both authorities", "certificates of the new authority", "new authority alone"]


@message("recipe.order-placed")
class OrderPlaced(msgspec.Struct):
    number: int


class Recipe:
    """The folder in which the commands of the page run; it is both hosts' /etc/durable, too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._functions = ""

    def run(self, block: str) -> None:
        """Run the commands of one block, after the functions of those before."""
        commands = self._here(BLOCKS[block])
        script = f"set -euo pipefail\n{self._functions}\n{commands}"
        subprocess.run(["bash", "-c", script], cwd=self._folder, check=True, capture_output=True)
        self._functions += "\n".join(re.findall(r"^\w+\(\) \{.*?^\}$", commands, re.DOTALL | re.MULTILINE))

    def settings(self, service: str) -> dict[str, Any]:
        lines = self._here(BLOCKS[f"settings of {service}"]).splitlines()
        given = dict(line.split("=", 1) for line in lines)
        return {name.removeprefix("DURABLE_").lower(): value.strip("'") for name, value in given.items()}

    def _here(self, text: str) -> str:
        for name, address in (("orders.internal", ORDERS), ("billing.internal", BILLING)):
            text = text.replace(f"DNS:{name}", f"IP:{address}").replace(name, address)
        return text.replace("/etc/durable/", f"{self._folder}/")


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    recipe = Recipe(tmp_path)
    recipe.run("authority")
    recipe.run("certificates")
    return recipe


async def reaches(settings: Settings, uri: str) -> bool:
    """Tell whether a sender with these settings, on a new connection, has a message stored."""
    async with TcpTransport(settings, "orders", 1).sender(uri) as sender:
        try:
            return await sender.send([envelope("recipe.order-placed", b'{"number": 0}')]) == [STORED]
        except TransportError:
            return False


@asynccontextmanager
async def listening(recipe: Recipe, database_url: str, handled: list[int]) -> AsyncIterator[str]:
    uri = f"tcp://{BILLING}:{free_port()}"
    billing = Bus("billing", database_url, **QUICK, **recipe.settings("billing"))
    billing.listen(uri)

    @billing.handles(OrderPlaced)
    async def handle(placed: OrderPlaced) -> None:
        handled.append(placed.number)

    async with billing:
        yield uri


async def test_two_hosts_of_the_recipe_talk(
    recipe: Recipe, database_url: str, make_database: Callable[[str], str]
) -> None:
    handled: list[int] = []
    orders = Bus("orders", make_database("orders"), **QUICK, **recipe.settings("orders"))
    async with listening(recipe, database_url, handled) as uri:
        orders.route(OrderPlaced, to=uri)
        async with orders:
            async with orders.unit_of_work():
                for number in range(5):
                    orders.send(OrderPlaced(number))
            await eventually(lambda: sorted(handled) == list(range(5)))


async def test_certificates_and_authority_of_the_recipe_are_rotated_without_a_restart(
    recipe: Recipe, database_url: str, tmp_path: Path
) -> None:
    async with listening(recipe, database_url, []) as uri:
        orders = load_settings(**recipe.settings("orders"))
        assert await reaches(orders, uri)
        recipe.run("renewal")
        assert await reaches(orders, uri)

        kept = {name: (tmp_path / name).read_bytes() for name in ("orders.pem", "orders-key.pem")}
        for step in STEPS:
            recipe.run(step)
            assert await reaches(orders, uri), step

        for name, content in kept.items():
            (tmp_path / name).write_bytes(content)
        assert not await reaches(orders, uri), "a certificate of the old authority"


def test_every_marked_block_of_the_page_is_run() -> None:
    assert set(BLOCKS) == {"authority", "certificates", "settings of orders", "settings of billing", "renewal", *STEPS}
    assert len(BLOCKS) == (DOCS / "security.md").read_text().count("```sh")
