"""A lake lies wherever its operator wants it, whatever characters the path has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from durable.errors import InvalidSetting
from durable.pipeline.lake import Lake
from tests.support.archiving import Archiver
from tests.support.command import Agent
from tests.support.history import add_history, add_letters

NAMES = ["with space", "été", "a [1] b", "{x,y}", "50% *?", "a+b&c=d#e", "quo'te"]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_reads_and_writes_the_lake(
    archiver: Archiver,
    conn: psycopg.Connection[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    add_history(conn, 3)
    add_history(conn, 3, first=1, side="outgoing", outcome="sent")
    add_letters(conn, 2)
    place = str(tmp_path / name / "lake")
    agent = Agent(tmp_path, monkeypatch, capsys)
    monkeypatch.setenv("DURABLE_DATABASE_URL", archiver.origin.url)
    monkeypatch.setattr("durable.cli.pipeline.options.spark_session", lambda **_: archiver.spark)
    service = ("--service", "shop", "--lake", place)
    for command in (
        ("archive", *service),
        ("status", "--lake", place),
        ("verify", *service),
        ("compact", "--lake", place, "--above", "1"),
        ("verify", *service),
        ("report", "--lake", place, "--out", str(tmp_path / name / "report.html")),
        ("audit", "--sender", place, "--receiver", place),
        ("conversations", "--lake", place),
        ("purge", *service),
        ("vacuum", "--lake", place),
    ):
        ended = agent("pipeline", *command)
        if "[" in name and command[0] == "report":
            assert (ended.code, "path with brackets; move the lake" in ended.err) == (2, True)
        else:
            assert (command[0], ended.code, ended.err) == (command[0], 0, "")


def test_path_with_encoded_characters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="a path with per cent signs is read as another one"):
        Lake(str(tmp_path / "50%25"))
