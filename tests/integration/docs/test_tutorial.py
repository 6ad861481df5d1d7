"""The tutorial, as its page says: two services, an outage, and a dead letter that is replayed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from durable.embedded.ports import free_port
from tests.failure.waiting import eventually
from tests.integration.docs.test_quickstart import Shell
from tests.support.pages import DOCS, EXAMPLES


@pytest.fixture
def databases(make_database: Callable[[str], str]) -> dict[str, str]:
    return {"ORDERS_DATABASE": make_database("orders"), "STOCK_DATABASE": make_database("stock")}


@pytest.fixture
def shell(tmp_path: Path, databases: dict[str, str]) -> Shell:
    for path in (EXAMPLES / "tutorial").glob("*.py"):
        shutil.copy(path, tmp_path)
    addresses = {f"{name}_ADDRESS": f"tcp://127.0.0.1:{free_port()}" for name in ("ORDERS", "STOCK")}
    return Shell(tmp_path, **databases, **addresses)


async def test_tutorial_behaves_as_its_page_says(shell: Shell, databases: dict[str, str]) -> None:
    def states() -> list[str]:
        with psycopg.connect(databases["ORDERS_DATABASE"]) as conn:
            return [state for (state,) in conn.execute("SELECT state FROM orders ORDER BY id")]

    for service in ("orders", "stock"):
        assert "is up to date" in shell.run("durable-agent", "migrate", f"{service}:bus")
    shell.run("python", "stock.py")
    with shell.start("durable-agent", "run", "orders:bus"):
        with shell.start("durable-agent", "run", "stock:bus"):
            shell.run("python", "orders.py", "teapot")
            await eventually(lambda: states() == ["reserved"], within=60)

        shell.run("python", "orders.py", "teapot")  # stock was killed
        assert shell.environment["STOCK_ADDRESS"] in shell.run("durable-agent", "status", "orders:bus")
        with shell.start("durable-agent", "run", "stock:bus"):
            await eventually(lambda: states() == ["reserved", "reserved"], within=60)

            shell.run("python", "orders.py", "teapot")
            await eventually(
                lambda: "SoldOut" in shell.run("durable-agent", "dead-letters", "list", "stock:bus"), within=60
            )
            shell.run("python", "stock.py")
            shell.run("durable-agent", "dead-letters", "replay", "stock:bus", "--all")
            await eventually(lambda: states() == ["reserved", "reserved", "reserved"], within=60)


def test_page_shows_the_commands() -> None:
    text = (DOCS / "tutorial.md").read_text()
    for command in (
        "python stock.py",
        "python orders.py teapot",
        "durable-agent run stock:bus",
        "durable-agent dead-letters list stock:bus",
        "durable-agent dead-letters replay stock:bus --all",
    ):
        assert f"\n{command}" in text
