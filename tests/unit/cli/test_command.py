"""Groups of options, the two forms of output, and groups of commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import pytest
import typer

from durable.cli import output
from durable.cli.app import command_line
from durable.cli.command import group, taking
from durable.cli.output import Table, emit, is_json


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


class Name(str):
    """Text of a library's own class, as SQLAlchemy has for names."""

    __slots__ = ()


def test_texts_of_subclasses_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({Name("columns"): [Name("id")], "place": Place(Name("here"), 7)})
    assert json.loads(capsys.readouterr().out) == {"columns": ["id"], "place": ["here", 7]}
    with pytest.raises(NotImplementedError, match="type complex is unsupported"):
        output.print_json(1j)


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


@pytest.mark.parametrize("command", list(leaves(command_line())))
def test_every_command_has_the_common_options(command: Any) -> None:
    assert {"json", "debug"} <= {parameter.name for parameter in command.params}


# ---------------------------------------------------------------- help and advice


def tree(command: Any) -> Iterator[Any]:
    yield command
    for each in getattr(command, "commands", {}).values():
        yield from tree(each)


def test_paragraphs_of_help_flow_and_flags_name_no_type(capsys: pytest.CaptureFixture[str]) -> None:
    command = command_line()

    for each in tree(command):
        assert not any("\n" in paragraph for paragraph in each.help.split("\n\n"))
        assert not any(line.startswith(" ") for line in each.help.splitlines())
        assert all(option.metavar == "" for option in each.params if getattr(option, "is_flag", False))
    for arguments in ([], ["dead-letters", "replay"], ["run"]):
        command.main(args=[*arguments, "--help"], standalone_mode=False)
    assert "<bool>" not in capsys.readouterr().out


def test_advice_names_the_application_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    advice = "run: durable-agent dead-letters replay APP:BUS 7, for APP:BUS is not given"
    output.begin()
    emit({}, advice)
    output.name_app("shop.stock:bus")
    emit({}, advice, Table("checks", ["advice"], [[advice]]))
    output.begin()
    emit({}, advice)

    named = "run: durable-agent dead-letters replay shop.stock:bus 7, for APP:BUS is not given"
    assert capsys.readouterr().out.splitlines() == [advice, named, "", "checks", "  advice", f"  {named}", advice]
