"""`durable-agent console`, as a process of its own."""

from __future__ import annotations

import html
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import psycopg
import pytest

from durable.embedded.ports import free_port
from tests.support.command import Agent


@pytest.fixture
def agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], database_url: str
) -> Agent:
    monkeypatch.setenv("DURABLE_DATABASE_URL", database_url)
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_console_is_open_to_its_token_until_a_signal(agent: Agent, stop: signal.Signals) -> None:
    with agent.process("console", f"{agent.application()}:bus", "--port", "0") as process:
        assert process.stdout is not None
        url = process.stdout.readline().decode().split(" at ")[1].strip()
        token = process.stdout.readline().decode().removeprefix("token: ").strip()
        assert url.startswith("http://127.0.0.1:")
        assert httpx.get(url, headers={"authorization": "Bearer no"}).status_code == 401
        page = httpx.get(url, headers={"authorization": f"Bearer {token}"})
        assert (page.status_code, "All is well" in page.text) == (200, True)
        process.send_signal(stop)
        assert process.wait(30) in (0, 130, 143, -stop)


def test_token_of_a_file_is_not_printed(agent: Agent) -> None:
    (agent.folder / "token").write_text("a secret of a file 1\n")
    with agent.process("console", f"{agent.application()}:bus", "--port", "0", "--token-file", "token") as process:
        assert process.stdout is not None
        told = process.stdout.readline().decode()
        url = told.split(" at ")[1].strip()
        assert httpx.get(url, headers={"authorization": "Bearer a secret of a file 1"}).status_code == 200
        process.terminate()
        assert b"secret" not in process.communicate(timeout=30)[0]


def test_error_names_the_option_to_correct(agent: Agent) -> None:
    app = f"{agent.application()}:bus"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = agent("console", app, "--port", port)
        assert (ended.code, f"--port {port}: cannot listen here" in ended.err) == (2, True)
    ended = agent("console", app, "--token-file", "none")
    assert (ended.code, "--token-file none: cannot be read" in ended.err) == (2, True)
    (agent.folder / "short").write_text("short")
    ended = agent("console", app, "--token-file", "short")
    assert (ended.code, "give 16 or more" in ended.err) == (2, True)


TOKEN = {"authorization": "Bearer a secret of a file 1"}
UNUSABLE = {
    "no server there": ("", "the database cannot be used"),
    "no such database": ("", "does not exist"),
    "no tables": ("ALTER SCHEMA durable RENAME TO hidden", "has no durable tables"),
    "tables of an earlier version": ("UPDATE durable.alembic_version SET version_num = '0000'", "this code needs"),
}


def served(process: subprocess.Popen[bytes]) -> str:
    """Return the address of a console that is open."""
    assert process.stdout is not None
    return process.stdout.readline().decode().split(" at ")[1].strip()


def change(url: str, statement: str) -> None:
    with psycopg.connect(url) as conn:
        conn.execute(statement.encode())


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("kind", UNUSABLE)
def test_console_is_open_while_a_database_cannot_be_shown(
    agent: Agent,
    kind: str,
    is_alone: bool,
    make_database: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statement, told = UNUSABLE[kind]
    stock = make_database("stock")
    if statement:
        change(stock, statement)
    elif kind == "no such database":
        stock = stock.replace("/stock_", "/nowhere_")
    else:
        stock = f"postgresql://127.0.0.1:{free_port()}/stock"
    (agent.folder / "token").write_text("a secret of a file 1")
    if is_alone:
        monkeypatch.setenv("DURABLE_DATABASE_URL", stock)
    app = agent.application()
    others = [] if is_alone else ["--service", f"stock={stock}"]
    with agent.process("console", f"{app}:bus", *others, "--port", "0", "--token-file", "token") as process:
        url = served(process)
        page = httpx.get(url if is_alone else f"{url}stock/", headers=TOKEN, timeout=30)
        assert (page.status_code, told in html.unescape(page.text)) == (503, True), page.text
        if not is_alone:
            assert httpx.get(f"{url}{app}/", headers=TOKEN).status_code == 200
        process.terminate()
        said = process.communicate(timeout=30)[1].decode()
    assert f"{app if is_alone else 'stock'}: " in said
    assert (told in said, "Traceback" in said) == (True, False), said


def test_page_shows_a_database_when_tables_are_there(agent: Agent, make_database: Callable[[str], str]) -> None:
    stock = make_database("stock")
    change(stock, "ALTER SCHEMA durable RENAME TO hidden")
    (agent.folder / "token").write_text("a secret of a file 1")
    with agent.process("console", "--service", f"stock={stock}", "--port", "0", "--token-file", "token") as process:
        url = served(process)
        assert httpx.get(url, headers=TOKEN).status_code == 503
        change(stock, "ALTER SCHEMA hidden RENAME TO durable")
        assert httpx.get(url, headers=TOKEN).status_code == 200
        process.terminate()


MISTAKES = {
    "no such module": (("nowhere:bus",), "nowhere"),
    "malformed URL": (("--service", "stock=postgresql://[bad/stock"), "--service stock: "),
    "other URL": (("--service", "stock=mysql://127.0.0.1/stock"), "--service stock: "),
    "no URL": (("--service", "stock"), "--service: give NAME=URL"),
    "odd name": (("--service", "a b=postgresql://127.0.0.1/stock"), "--service a b: "),
}


@pytest.mark.parametrize(("given", "told"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_of_the_command_ends_the_console_at_once(agent: Agent, given: tuple[str, ...], told: str) -> None:
    ended = agent("console", *given, "--port", "0")
    assert (ended.code, told in ended.err) == (2, True), ended.err


def test_console_without_a_database_ends_at_once(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DURABLE_DATABASE_URL")
    with agent.process("console", f"{agent.application()}:bus", "--port", "0") as process:
        said = process.communicate(timeout=30)[1].decode()
        assert (process.returncode, "database_url: not set" in said) == (2, True), said
