"""Groups of options, the two forms of output, and groups of commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import pytest
import typer

from durable.cli.app import app
from durable.cli.command import group, taking
from durable.cli.output import emit, is_json


class Place(NamedTuple):
    name: str
    number: int


def read_place(
    name: Annotated[str, typer.Argument(metavar="NAME")], number: Annotated[int, typer.Option("--number")] = 7
) -> Place:
    return Place(name, number)


def read_actor(by: Annotated[str, typer.Option("--by")] = "ada") -> str:
    return by.upper()


def run(command: Any, *arguments: str) -> int:
    single = typer.Typer()
    single.command()(command)
    return int(typer.main.get_command(single).main(args=list(arguments), standalone_mode=False) or 0)


def test_command_receives_the_values_of_its_readers(capsys: pytest.CaptureFixture[str]) -> None:
    @taking(place=read_place, actor=read_actor)
    def show(place: Place, actor: str, *, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
        """Show the values."""
        print(place, actor, loud)

    run(show, "here", "--by", "bob", "--loud")
    assert capsys.readouterr().out == "Place(name='here', number=7) BOB True\n"


def test_taking_adds_options_to_a_command_made_by_taking(capsys: pytest.CaptureFixture[str]) -> None:
    @taking(actor=read_actor)
    @taking(place=read_place)
    def show(place: Place, actor: str) -> None:
        """Show the values."""
        print(place.number, actor, is_json())

    run(show, "here", "--number", "8", "--json")
    assert capsys.readouterr().out == "8 ADA True\n"


def test_emit_prints_json_only_when_the_option_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    @taking()
    def count() -> None:
        """Show a number."""
        emit({"count": 1}, "one")

    run(count, "--json")
    assert capsys.readouterr().out == '{\n  "count": 1\n}\n'
    run(count)
    assert capsys.readouterr().out == "one\n"


def test_group_prints_its_help_and_ends_with_2_when_no_command_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    letters = group("Inspect letters.")
    letters.command("list")(taking()(lambda: None))
    assert typer.main.get_command(letters).main(args=[], standalone_mode=False) == 2
    assert "Inspect letters." in capsys.readouterr().out


def leaves(command: Any, path: str = "durable-agent") -> Iterator[Any]:
    if not hasattr(command, "commands"):
        yield pytest.param(command, id=path)
    for name, each in getattr(command, "commands", {}).items():
        yield from leaves(each, f"{path} {name}")


@pytest.mark.parametrize("command", list(leaves(typer.main.get_command(app))))
def test_every_command_has_the_common_options(command: Any) -> None:
    assert {"json", "debug"} <= {parameter.name for parameter in command.params}
