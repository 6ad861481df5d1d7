"""Texts that no command takes, whatever the option: each is refused at the command line, before anything is opened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from durable.cli.app import command_line
from tests.support.command import Agent


class Texts(NamedTuple):
    """A command with a text for each of its arguments and options that take one."""

    path: tuple[str, ...]
    required: tuple[Any, ...]
    asked: Any

    @property
    def name(self) -> str:
        """The option or argument as users know it."""
        return str(self.asked.metavar if self.asked.param_type_name == "argument" else self.asked.opts[0])

    def written(self, text: str) -> list[str]:
        words: list[str] = []
        for each in dict.fromkeys([*self.required, self.asked]):
            given = text if each is self.asked else "1"
            words += [given] if each.param_type_name == "argument" else [f"{each.opts[0]}={given}"]
        return [*self.path, *words]


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def takes_text(parameter: Any) -> bool:
    return parameter.type_descriptor.annotation in (str, Path, list[str])


ALL = [
    Texts(path, tuple(each for each in command.params if each.required), asked)
    for path, command in commands(command_line())
    for asked in command.params
    if takes_text(asked)
]
OF_TEXT = [case for case in ALL if case.asked.type_descriptor.annotation is not Path]
NEVER_EMPTY = [
    case for case in OF_TEXT if case.path != ("run",) and case.asked.opts[0] not in ("--key", "--tenant", "--id-from")
]
"""All but settings, which are as in the environment, and names by applications, which may be white space."""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


def refused(agent: Agent, text: str, said: str, chosen: Sequence[Texts]) -> int:
    """The number of these options, each of which refuses this text."""
    for case in chosen:
        ended = agent.as_given(*case.written(text))
        said_by_typer = "embedded null byte" in ended.err  # of a path that it looks at
        is_told = said.format(name=case.name) in ended.err or said_by_typer
        assert (ended.code, is_told) == (2, True), (case.written(text), ended)
    return len(chosen)


def test_nul_is_refused_by_each_option(agent: Agent) -> None:
    assert refused(agent, "a\0b", "holds a NUL; leave that out", ALL) > 300


def test_empty_text_is_refused_by_each_option(agent: Agent) -> None:
    said = "error: {name}: the text is empty; give one"
    of_postgres = [case for case in NEVER_EMPTY if case.asked.opts[0] == "--grant-to"]
    never_blank = [case for case in NEVER_EMPTY if case not in of_postgres]
    half = len(never_blank) // 2
    assert refused(agent, "", said, never_blank[:half]) + refused(agent, " \t", said, never_blank[half:]) > 200
    assert refused(agent, "", said, of_postgres) == 1


def test_bytes_without_text_are_refused_by_each_option(agent: Agent) -> None:
    assert refused(agent, "\udcff", "is no text in UTF-8", OF_TEXT) > 300
