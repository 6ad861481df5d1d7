"""Commands whose connection ends before any of their statements: each tells an outage, with advice, and runs again."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event

from tests.support.command import Agent
from tests.support.history import add_history, add_old_day
from tests.support.root import ROOT

CHOSEN: Final = ("--id", str(UUID(int=3)), "--reason", "request 4711")
COMMANDS: Mapping[str, Sequence[str]] = {
    "status": ("status",),
    "archive": ("archive", "--service", "shop"),
    "end of the archive": ("archive", "--service", "shop", "--end"),
    "verify": ("verify", "--service", "shop"),
    "purge": ("purge", "--service", "shop", "--keep", "30"),
    "rehearsed erasure": ("erase", "--service", "shop", *CHOSEN, "--dry-run"),
    "erasure": ("erase", "--service", "shop", *CHOSEN, "--yes", "--vacuum"),
    "erasure of nothing": ("erase", "--service", "shop", "--key", "nobody", "--reason", "r", "--yes"),
}
MOST: Final = 120


class Ends:
    """Terminates the connection before its n-th statement, counted over all connections of the process."""

    def __init__(self, url: str, number: int) -> None:
        self._url, self.left = url, number

    def __call__(self, conn: Connection, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            raw: Any = conn.connection.dbapi_connection
            with psycopg.connect(self._url, autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s, 5000)", (raw.info.backend_pid,))

    @contextmanager
    def at_work(self) -> Iterator[None]:
        event.listen(Engine, "before_cursor_execute", self)
        try:
            yield
        finally:
            event.remove(Engine, "before_cursor_execute", self)


@pytest.fixture
def agent(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Agent:
    """Few rows need no Spark."""
    monkeypatch.setenv("DURABLE_DATABASE_URL", database_url)
    monkeypatch.setenv("DURABLE_LAKE", str(tmp_path / "lake"))
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_tells_an_outage_with_advice_at_each_statement(agent: Agent, database_url: str, name: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as conn:
        add_old_day(conn, 40, 2, first=100)
        add_history(conn, 5)
    if name != "archive":
        assert agent("pipeline", "archive", "--service", "shop").code == 0
    for number in range(1, MOST):
        ends = Ends(database_url, number)
        with ends.at_work():
            ended = agent("pipeline", *COMMANDS[name])
        if ends.left > 0:
            assert (ended.code, number > 3) == (2 if name == "erasure of nothing" else 0, True), ended
            return
        if ended.code == 0:  # an answer that the command can do without
            continue
        assert ended.code == 1, (number, ended)
        assert "the database cannot be used" in ended.err, (number, ended)
        assert ended.err.endswith("; check that Postgres runs, and the setting database_url\n"), (number, ended)
    raise AssertionError("the command has no end")


def opened_bare(tree: ast.Module) -> list[int]:
    """The lines of `with` statements that open a connection of an engine, and stand in none that translates errors."""
    found: list[int] = []

    def look(node: ast.AST, *, is_translated: bool) -> None:
        if isinstance(node, ast.With):
            texts = [ast.unparse(item.context_expr) for item in node.items]
            is_translated = is_translated or any(text.startswith(("translated(", "locked(")) for text in texts)
            opens = any(text.startswith("engine.") for text in texts)
            found.extend([node.lineno] if opens and not is_translated else [])
        for child in ast.iter_child_nodes(node):
            look(child, is_translated=is_translated)

    look(tree, is_translated=False)
    return found


WITHIN_LOCKED: Final = {"durable/pipeline/beginning.py"}
"""Whose functions are given the connection, and the engine, of an archiver that is at work."""


def test_connections_of_the_pipeline_are_opened_where_errors_are_translated() -> None:
    folders = (ROOT / "durable" / "pipeline", ROOT / "durable" / "cli" / "pipeline")
    bare = {
        str(file.relative_to(ROOT)): lines
        for folder in folders
        for file in sorted(folder.glob("*.py"))
        if (lines := opened_bare(ast.parse(file.read_text())))
    }
    assert bare.keys() == WITHIN_LOCKED
