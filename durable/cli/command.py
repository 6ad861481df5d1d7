"""Commands as functions of their targets and selections: one function reads each group of options.

    @on_target()                       target: Target        APP:BUS --database --schema
    @over_letters(work=work_options)   chosen: Chosen        letters and filters; work: Work     --all --limit --by

Every command that `taking` makes also has --json, which `emit` obeys, and --debug, which `main` reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from durable.cli.output import print_as_json

Command = Callable[..., None]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]


def taking(**readers: Callable[..., object]) -> Callable[[Command], Command]:
    """Replace parameters of a command by the options of the functions that compute their values."""

    def decorate(command: Command) -> Command:
        options = {name: _parameters(reader) for name, reader in readers.items()}
        own = [parameter for parameter in _parameters(command) if parameter.name not in readers]
        names = {parameter.name for parameter in own}
        common = [parameter for parameter in _parameters(_common) if parameter.name not in names]

        def run(**given: Any) -> None:
            print_as_json(given["json"])
            values = {
                name: reader(**{option.name: given[option.name] for option in options[name]})
                for name, reader in readers.items()
            }
            command(**values, **{name: given[name] for name in names})

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        parameters = [*(option for group in options.values() for option in group), *own, *common]
        keywords = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in parameters]
        run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return run

    return decorate


def group(help: str) -> typer.Typer:
    """Make a group of commands that prints its help, and ends with 2, when no command is given."""
    app = typer.Typer(help=help)

    @app.callback(invoke_without_command=True)
    def print_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help())
            raise typer.Exit(2)

    return app


def _common(json: Json = False, debug: Debug = False) -> None:
    """Declare the options of every command."""


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    return list(inspect.signature(function, eval_str=True).parameters.values())
