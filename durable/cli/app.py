"""The command line: all commands. The ending of each error is in `durable.cli.endings`."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from typing import Annotated, Any, Final

import typer

from durable.cli import output
from durable.cli.endings import BAD_USAGE, FAILED, INTERRUPTED, NAME, UNREAD, ending_of
from durable.cli.help import readable
from durable.cli.interrupts import interrupts_kept
from durable.cli.output import one_line
from durable.cli.streams import NoReader, written
from durable.redaction import has_password, redacted
from durable.settings import secret_names
from durable.version import __version__

_COMMANDS: Final = {
    "run": "run:run",
    "migrate": "migrate:migrate",
    "status": "inspect:status",
    "nodes": "inspect:nodes",
    "circuits": "inspect:circuits",
    "actions": "actions:actions",
    "pause": "pauses:pause",
    "resume": "pauses:resume",
    "topology": "topology:topology",
    "services": "calls:services",
    "call": "calls:call",
    "describe": "describe:describe",
    "console": "console:console",
    "send": "send:send",
    "doctor": "doctor.commands:doctor",
    "check-deploy": "doctor.deploy:check_deploy",
    "demo": "demo:demo",
    "dead-letters": "dead_letters.commands:app",
    "scheduled": "scheduled.commands:app",
    "keys": "keys.commands:app",
    "pipeline": "pipeline.commands:app",
}
"""Commands and groups of commands, each with its module in durable.cli and its name there."""

_URLS: Final = {"--database-url", "--lock-database-url", "--amqp-url"}  # they may hold no password

_SPELLINGS: Final = {"database-url": "database", "db-schema": "schema"}
"""Options by the names of their settings, which `run` shows, and by the short names of the other commands."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")]


def durable_agent(context: typer.Context, version: Version = False) -> None:
    """Operate store-and-forward messaging on the application's own Postgres.

    Ends with 0 on success, 1 when something is unhealthy or failed, 2 for bad usage or configuration, 130 when it is
    interrupted, 141 when nobody reads what it prints.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(BAD_USAGE)


def command_line(*names: str) -> Any:
    """Return these commands of `durable-agent`, or all of them.

    A command is imported with the libraries that it needs: those of all commands take a second.
    """
    app = typer.Typer(
        name=NAME,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"token_normalize_func": lambda token: _SPELLINGS.get(token, token)},
    )
    app.callback(invoke_without_command=True)(durable_agent)
    for name in names or _COMMANDS:
        module, _, attribute = _COMMANDS[name].partition(":")
        command = getattr(import_module(f"durable.cli.{module}"), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return readable(typer.main.get_command(app))


def run(arguments: list[str]) -> int:
    """Run one command of `durable-agent`, and return its exit code."""
    with written() as (out, err):
        try:
            code = _run(arguments)
            out.end()
        except NoReader:
            out.forget()
            code = UNREAD
        if out.fault is not None:
            rest = "done its work" if code == 0 else f"ended with {code} all the same"
            print(f"error: output: cannot be written: {out.fault.strerror}; the command has {rest}", file=err)
            code = code or FAILED
        err.end()
    return code


def _run(arguments: list[str]) -> int:
    output.begin()
    _warn_of_secrets(arguments)
    try:
        named = next((each for each in arguments if not each.startswith("-")), None)
        names = [named] if named in _COMMANDS else []
        with interrupts_kept():
            code = command_line(*names).main(args=arguments, prog_name=NAME, standalone_mode=False)
        return int(code or 0)
    except NoReader:
        raise
    except KeyboardInterrupt as error:
        if "--json" in arguments:
            output.print_error(ending_of(error).message, INTERRUPTED)
        return INTERRUPTED
    except Exception as error:
        if "--debug" in arguments:
            print(redacted(traceback.format_exc()), end="", file=sys.stderr)
        ending = ending_of(error)
        lines = [output.with_app(one_line(redacted(line))) for line in ending.lines]
        if "--json" in arguments:
            output.print_error("\n".join(lines), ending.code)
        for line in lines:
            print(f"error: {line}", file=sys.stderr)
        return ending.code


def _warn_of_secrets(arguments: list[str]) -> None:
    """Every user of the machine reads the arguments of every process, and shells keep them."""
    given = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    of_settings = given & {f"--{name.replace('_', '-')}" for name in secret_names()} - _URLS
    if of_settings or any(map(has_password, arguments)):
        print(
            "warning: a password or secret in the command line is readable by every user of this machine; "
            "set it in the environment, as DURABLE_DATABASE_URL",
            file=sys.stderr,
        )
