"""`durable-agent`, also installed as `durable`: the command line.

    app            all commands
    endings        the ending of each error: one line with advice, and an exit code
    command        groups of options, each read by one function
    streams        standard output and error that are closed, full, or without a reader
    target         the bus or database of a command
    output         emit(): one JSON document, tables, or aligned text
    dead_letters/  groups, list, show, replay, edit, discard, debug
    scheduled/     delayed messages and recurring schedules
    pipeline/      history as data: archive, reports, audits, replays; each command is a step of `pipeline run`
    doctor/        checks of settings, database, application; check-deploy
    logs           log lines of `run`

Exit codes: 0 done and healthy; 1 unhealthy or failed; 2 bad usage or configuration; 130 interrupted; 141 nobody
reads what it prints, as by SIGPIPE.
"""

import sys
from collections.abc import Sequence
from typing import NoReturn

from durable.cli.streams import open_closed

__all__ = ["main"]

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command of `durable-agent` and end the process with its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        open_closed()
        from durable.cli import app  # all commands, and their libraries: a second or more, in which Ctrl-C may come

        code = app.run(given)
    except KeyboardInterrupt:
        code = _INTERRUPTED
        if "--json" in given:
            print(f'{{"error": "interrupted", "exit_code": {code}}}')
    sys.exit(code)
