"""The services of examples/calls, as the page runs them: a provider, a caller, and a provider that is gone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from durable.embedded.ports import free_port
from tests.failure.waiting import eventually
from tests.integration.docs.test_quickstart import Shell
from tests.support.pages import DOCS, EXAMPLES, blocks

FOLDER = EXAMPLES / "calls"


@pytest.fixture
def shell(tmp_path: Path, make_database: Callable[[str], str]) -> Shell:
    for path in FOLDER.glob("*.py"):
        shutil.copy(path, tmp_path)
    names = ("ORDERS", "INVENTORY")
    databases = {f"{name}_DATABASE": make_database(name.lower()) for name in names}
    addresses = {f"{name}_ADDRESS": f"tcp://127.0.0.1:{free_port()}" for name in names}
    return Shell(tmp_path, **databases, **addresses)


async def test_services_call_as_the_page_says(shell: Shell) -> None:
    for service in ("inventory", "orders"):
        assert "is up to date" in shell.run("durable-agent", "migrate", f"{service}:bus")
    assert shell.run("python", "orders.py", "teapot") == "no teapot: the inventory is closed\n"
    with shell.start("durable-agent", "run", "inventory:bus"):
        await eventually(lambda: left(shell) == "12", within=60)
        said = shell.run("python", "orders.py", "teapot", "teapot", "teapot", "cup").splitlines()
        assert said == [
            "order 1: teapot, 1 left",
            "order 2: teapot, 0 left",
            "no teapot: 0 of teapot are left",
            "order 3: cup, 11 left",
        ]
        assert left(shell) == "11"


def left(shell: Shell) -> str:
    """The cups that are left, or nothing while the inventory is closed."""
    try:
        return shell.run("durable-agent", "call", "orders:bus", "Inventory.left", '{"sku": "cup"}').strip()
    except AssertionError:
        return ""


def test_page_shows_the_files_and_the_commands() -> None:
    text = (DOCS / "calls.md").read_text()
    shown = {block.code for block in blocks(DOCS / "calls.md") if block.is_excerpt}
    for name in ("contract.py", "inventory.py", "orders.py"):
        assert f"# {name}\n{(FOLDER / name).read_text()}" in shown
    for command in (
        "durable-agent run inventory:bus",
        "python orders.py teapot teapot teapot cup",
        "durable-agent call orders:bus Inventory.left",
    ):
        assert f"\n{command}" in text
