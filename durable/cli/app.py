"""The command line: all commands, and the ending of each error in one line with advice and an exit code.

0 done and healthy · 1 unhealthy or failed · 2 bad usage or configuration · 130 interrupted
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NamedTuple, NoReturn

import typer
from sqlalchemy.exc import DBAPIError

from durable.cli import demo, inspect, migrate, pauses, run, send, topology
from durable.cli.dead_letters import commands as dead_letters
from durable.cli.dead_letters.debug import debug_letter
from durable.cli.doctor import commands as doctor
from durable.cli.doctor.deploy import check_deploy
from durable.cli.output import one_line
from durable.cli.pipeline import commands as pipeline
from durable.cli.scheduled import commands as scheduled
from durable.errors import DurableError, StorageUnavailable, UndecodableMessages, WiringError
from durable.version import __version__

_NAME = "durable-agent"
_FAILED, _BAD_USAGE = 1, 2
_NO_PERMISSION = "42501"

app = typer.Typer(name=_NAME, add_completion=False, pretty_exceptions_enable=False)
app.command()(run.typer_command())
for command in (
    migrate.migrate,
    inspect.status,
    inspect.nodes,
    inspect.circuits,
    pauses.pause,
    pauses.resume,
    topology.topology,
    send.send,
    doctor.doctor,
    check_deploy,
    demo.demo,
):
    app.command()(command)
dead_letters.app.command("debug")(debug_letter)
app.add_typer(dead_letters.app, name="dead-letters")
app.add_typer(scheduled.app, name="scheduled")
app.add_typer(pipeline.app, name="pipeline")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")]


@app.callback(invoke_without_command=True)
def durable_agent(context: typer.Context, version: Version = False) -> None:
    """Operate store-and-forward messaging on the application's own Postgres.

    Ends with 0 on success, 1 when something is unhealthy or failed, 2 for bad usage or configuration.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(_BAD_USAGE)


class Ending(NamedTuple):
    code: int
    message: str
    has_lines: bool = False

    @property
    def lines(self) -> list[str]:
        return self.message.splitlines() if self.has_lines else [self.message]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command of `durable-agent` and end the process with its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_run(given))


def _run(arguments: list[str]) -> int:
    try:
        code = typer.main.get_command(app).main(args=arguments, prog_name=_NAME, standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except BrokenPipeError:
        _forget_output()
        return _FAILED
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        ending = _ending(error)
        for line in ending.lines:
            print(f"error: {one_line(line)}", file=sys.stderr)
        return ending.code


def _ending(error: BaseException) -> Ending:
    """Choose the message and the exit code of an error."""
    match error:
        case BaseExceptionGroup():
            return _ending(error.exceptions[0])
        case typer.TyperException():
            return Ending(error.exit_code, _usage(error))
        case typer.Abort():
            return Ending(_FAILED, "aborted")
        case UndecodableMessages():
            return Ending(_BAD_USAGE, str(error), has_lines=True)
        case WiringError():
            return Ending(_BAD_USAGE, str(error))
        case StorageUnavailable():
            return Ending(_FAILED, f"{error}; check that Postgres runs, and the setting database_url")
        case DBAPIError():
            return Ending(_FAILED, _refusal(error))
        case DurableError():
            return Ending(_FAILED, str(error))
        case _:
            return Ending(_FAILED, f"{type(error).__name__}: {error}; --debug shows the traceback")


def _usage(error: typer.TyperException) -> str:
    """Return Typer's message, with the nearest known option or command, or else a pointer to --help."""
    text = error.format_message().partition(" (Possible options")[0].rstrip(".").replace(". Did you", "; did you")
    near = getattr(error, "possibilities", None)
    context = getattr(error, "ctx", None)
    if near:
        text += f"; did you mean {near[0]!r}?"
    elif context is not None and "; did you" not in text:
        text += f"; see {context.command_path} --help"
    return text[:1].lower() + text[1:]


def _refusal(error: DBAPIError) -> str:
    if getattr(error.orig, "sqlstate", None) == _NO_PERMISSION:
        return (
            f"refused by the database: {error.orig}; use the role that owns the schema, "
            f"or grant the rights with that role: {_NAME} migrate --grant-to ROLE"
        )
    return f"refused by the database: {error.orig}"


def _forget_output() -> None:
    """Discard output whose reader has ended, so that flushing the buffer does not fail again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
