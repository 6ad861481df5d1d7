"""Commands of the pipeline look at a lake's files, which may take long, when no transaction waits for that.

Transactions that keep a snapshot, copy rows, or change the database and the lake together, last for as long as they
are needed, and have no limits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import psycopg
import pytest
from deltalake import DeltaTable

from durable.cli.pipeline.commands import app
from durable.pipeline import places
from durable.pipeline.table_log import TableLog
from tests.support.command import Agent
from tests.support.history import add_history, add_letters, add_old_day

ERASED: Final = ("--id", str(UUID(int=3)), "--reason", "request 4711")
COMMANDS: Final[Mapping[str, Sequence[Sequence[str]]]] = {
    "archive": [(), ("--new-lake",), ("--end",)],
    "verify": [()],
    "purge": [("--keep", "30")],
    "status": [()],
    "compact": [("--above", "1")],
    "vacuum": [()],
    "export": [()],
    "report": [("--out", "page.html")],
    "audit": [("--sender", "lake", "--receiver", "lake", "--archived-until", "1s ago")],
    "conversations": [()],
    "replay": [("--name", "x", "--all", "--destination", "local")],
    "erase": [
        (*ERASED, "--dry-run"),
        (*ERASED, "--yes"),
        ("--id", str(UUID(int=4)), "--reason", "r", "--yes", "--vacuum"),
        ("--key", "nobody", "--reason", "r", "--yes"),
    ],
    "run": [("--steps", "archive,verify,status")],
}
"""Each command, with options that let it look at the lake in its different ways."""
OF_A_SERVICE: Final = ("archive", "verify", "purge", "erase", "run")
WAITING: Final = """
SELECT application_name, query FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'
    AND (backend_xid IS NULL AND query !~ 'pg_export_snapshot|COPY' OR application_name = 'durable-agent')
"""


def named_commands() -> list[str]:
    return sorted(each.callback.__name__ for each in app.registered_commands if each.callback is not None)


def test_every_command_of_the_pipeline_is_tried() -> None:
    assert named_commands() == sorted(COMMANDS)


@pytest.fixture
def looks(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The transactions that waited at each look at a lake: its log, its files, or whether there is one."""
    found: list[Any] = []

    def watched(where: Any, name: str) -> None:
        original = inspect.getattr_static(where, name)
        function: Callable[..., Any] = getattr(where, name)

        def look(*args: Any, **named: Any) -> Any:
            found.append([name, conn.execute(WAITING).fetchall()])
            return function(*args, **named)

        monkeypatch.setattr(where, name, staticmethod(look) if isinstance(original, staticmethod) else look)

    with psycopg.connect(database_url, autocommit=True) as conn:
        for name, function in inspect.getmembers(places, inspect.isfunction):
            if next(iter(inspect.signature(function).parameters), None) == "table_url":
                watched(places, name)
        for where, name in ((places.ParquetFiles, "_dataset"), (TableLog, "opened"), (TableLog, "numbers")):
            watched(where, name)
        watched(DeltaTable, "is_deltatable")
        yield found


@pytest.fixture
def archived(agent: Agent, conn: psycopg.Connection[Any]) -> Agent:
    """Rows in the lake, of which some are erased, and some that are yet to be archived."""
    add_old_day(conn, 40, 3, first=100)
    add_history(conn, 5, age=timedelta(hours=1))
    add_letters(conn, 2, first=200)
    conn.execute("UPDATE durable.envelope_history SET body = '{}'")
    for command in (["archive"], ["erase", "--id", str(UUID(int=1)), "--reason", "r", "--yes"]):
        assert agent("pipeline", *command, "--service", "shop").code == 0
    add_history(conn, 2, first=50)
    return agent


@pytest.mark.parametrize("words", [(name, *each) for name in COMMANDS for each in COMMANDS[name]], ids=" ".join)
def test_no_transaction_waits_while_a_command_looks_at_the_lake(
    archived: Agent, looks: list[Any], words: Sequence[str], tmp_path: Path
) -> None:
    place = ("--lake", str(tmp_path / "another")) if "--new-lake" in words else ()
    service = ("--service", "shop") if words[0] in OF_A_SERVICE else ()
    ended = archived("pipeline", *words, *service, *place)
    assert (ended.code, bool(looks)) == (0 if "nobody" not in words else 2, "--end" not in words), ended
    assert [look for look in looks if look[1]] == []
