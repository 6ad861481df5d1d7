"""Commands as functions of their targets and selections: one function reads each group of options.

    @on_target()                       target: Target        APP:BUS --database --schema
    @over_letters(work=work_options)   chosen: Chosen        letters and filters; work: Work     --all --limit --by

A reader may itself be made of readers, by `reading`. Every command that `taking` makes also has --json, which `emit`
obeys, and --debug, which `main` reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from typer.models import ParameterInfo

from durable.cli.output import print_as_json, print_debug
from durable.errors import InvalidSetting

T = TypeVar("T")

Command = Callable[..., None]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]

_OF_ANY_TEXT: Final = ("--key", "--tenant", "--id-from")
"""Options with names by applications, which may be white space; files of a lake have empty keys, too."""
_MAY_BE_BLANK: Final = ("--grant-to",)
"""Options with names by Postgres, which are never empty."""


def reading(**readers: Callable[..., object]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Replace parameters of a function by the options of the functions that compute their values."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        options = {name: _parameters(reader) for name, reader in readers.items()}
        own = [parameter for parameter in _parameters(function) if parameter.name not in readers]
        parameters = [*(option for group in options.values() for option in group), *own]

        @wraps(function)
        def read(**given: Any) -> T:
            refuse_odd_texts(given)
            for parameter in parameters:
                _refuse_empty_text(parameter, given[parameter.name])
            values = {
                name: reader(**{option.name: given[option.name] for option in options[name]})
                for name, reader in readers.items()
            }
            return function(**values, **{parameter.name: given[parameter.name] for parameter in own})

        return _with_parameters(read, parameters)

    return decorate


def taking(**readers: Callable[..., object]) -> Callable[[Command], Command]:
    """Make a command of a function whose parameters these functions read."""

    def decorate(function: Command) -> Command:
        command = reading(**readers)(function)
        names = {parameter.name for parameter in _parameters(command)}
        common = [parameter for parameter in _parameters(_common) if parameter.name not in names]

        @wraps(command)
        def run(**given: Any) -> None:
            print_as_json(given["json"])
            print_debug(given["debug"])
            command(**{name: given[name] for name in names})

        return _with_parameters(run, [*_parameters(command), *common])

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


def _with_parameters(function: Callable[..., T], parameters: list[inspect.Parameter]) -> Callable[..., T]:
    keywords = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in parameters]
    function.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    function.__annotations__ = {}
    return function


def _refuse_empty_text(parameter: inspect.Parameter, given: Any) -> None:
    """Refuse a text without any character, as of a variable that a script has not set: it would select everything, or
    stand for a default.
    """
    texts = [each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)]
    if all(map(str.strip, texts)):
        return
    name = _written(parameter)
    if name not in _OF_ANY_TEXT and not (name in _MAY_BE_BLANK and all(texts)):
        advice = "give one" if parameter.default is inspect.Parameter.empty else "give one, or leave it out"
        raise InvalidSetting(f"{name}: the text is empty; {advice}")


def _written(parameter: inspect.Parameter) -> str:
    """Return a parameter as users know it: `--text`, or `APP:BUS`."""
    (declared,) = (each for each in parameter.annotation.__metadata__ if isinstance(each, ParameterInfo))
    words = (declared.default, *(declared.param_decls or ()))  # the first word is the default, until Typer moves it
    flags = [each for each in words if isinstance(each, str) and each.startswith("--")]
    return str(flags[0] if flags else declared.metavar or parameter.name)


def refuse_odd_texts(options: Mapping[str, Any]) -> None:
    """Refuse bytes of the command line that are no UTF-8: as lone surrogates they would break a connection later. And a
    NUL, which a file of steps may hold: no text of Postgres has one, and no path.
    """
    for name, given in options.items():
        for each in given if isinstance(given, list) else [given]:
            if isinstance(each, str) and any("\ud800" <= character <= "\udfff" for character in each):
                raise InvalidSetting(f"{name.strip('_')}: {each!r} is no text in UTF-8; write it in UTF-8")
            if isinstance(each, str | Path) and "\0" in str(each):
                raise InvalidSetting(f"{name.strip('_')}: {str(each)!r} holds a NUL; leave that out")
