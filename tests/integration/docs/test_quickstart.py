"""The quickstart, as its page says: the file is copied into an empty folder, and its commands are run there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tests.failure.waiting import eventually
from tests.support.pages import DOCS, EXAMPLES, ROOT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(EXAMPLES / "quickstart" / "shop.py", tmp_path)
    return tmp_path


class Shell:
    """Runs the commands of a page in one folder, with the environment that it exports."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}

    def run(self, *command: str) -> str:
        done = subprocess.run(
            [*program(command[0]), *command[1:]],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, *command: str) -> Running:
        return Running(self, command)


class Running:
    """A command that runs until it is interrupted, and what it says."""

    def __init__(self, shell: Shell, command: tuple[str, ...]) -> None:
        self._log = shell.folder / f"{command[-1].replace(':', '-').replace('/', '-')}.log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*program(command[0]), *command[1:]], cwd=shell.folder, env=shell.environment, stdout=log, stderr=log
            )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        return self._log.read_text()

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)


def program(name: str) -> list[str]:
    return {"python": [sys.executable], "durable-agent": [sys.executable, "-m", "durable.cli"]}[name]


def shipped(url: str) -> list[tuple[str, bool]]:
    with psycopg.connect(url) as conn:
        if conn.execute("SELECT to_regclass('orders')").fetchone() == (None,):
            return []
        return [
            (item, is_shipped) for item, is_shipped in conn.execute("SELECT item, is_shipped FROM orders ORDER BY id")
        ]


@pytest.fixture
def url(make_database: Callable[[str], str]) -> str:
    """A database without durable's tables: the page migrates it."""
    url = make_database("shop")
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("DROP SCHEMA durable CASCADE")
    return url


async def test_quickstart_behaves_as_its_page_says(folder: Path, url: str) -> None:
    shell = Shell(folder, DURABLE_DATABASE_URL=url)
    assert "upgraded from nothing" in shell.run("durable-agent", "migrate", "shop:bus")
    with shell.start("python", "shop.py") as shop:
        await eventually(lambda: shipped(url) == [("teapot", True)], within=60)
        assert shop.interrupt() == 0
        assert "order 1: teapot, shipped" in shop.said()

    shell.run("python", "-c", 'import asyncio, shop; asyncio.run(shop.place("kettle"))')
    assert shipped(url) == [("teapot", True), ("kettle", False)]
    assert "shop.order-placed" in shell.run("durable-agent", "status", "shop:bus")

    with shell.start("durable-agent", "run", "shop:bus") as killed:
        await eventually(lambda: shipped(url)[1] == ("kettle", True), within=60)
        killed.process.kill()
    assert "order 2: kettle, shipped" in killed.said()


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "quickstart.md"], ids=lambda page: page.name)
def test_page_shows_the_file_and_its_commands(page: Path) -> None:
    text = page.read_text()
    assert (EXAMPLES / "quickstart" / "shop.py").read_text() in text
    for command in ("pip install 'durable-bus[binary]'", "durable-agent migrate shop:bus", "python shop.py"):
        assert f"\n{command}" in text


def test_embedded_server_prints_commands_ready_to_paste(folder: Path) -> None:
    command = [sys.executable, "-m", "durable.embedded", "data", "shop"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            script = f"{line}{sys.executable} -m durable.cli migrate shop:bus"
            done = subprocess.run(
                ["/bin/sh", "-c", script], cwd=folder, capture_output=True, text=True, timeout=60, check=False
            )
            assert "upgraded from nothing" in done.stdout, line + done.stderr
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0


def test_embedded_server_tells_its_usage() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "durable.embedded"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (2, "usage: python -m durable.embedded FOLDER DATABASE...\n")
