"""`durable-agent`, also installed as `durable`: the command line.

    app            all commands
    endings        the ending of each error: one line with advice, and an exit code
    command        groups of options, each read by one function
    target         the bus or database of a command
    output         emit(): one JSON document, tables, or aligned text
    dead_letters/  groups, list, show, replay, edit, discard, debug
    scheduled/     delayed messages and recurring schedules
    pipeline/      history as data: archive, reports, audits, replays; each command is a step of `pipeline run`
    doctor/        checks of settings, database, application; check-deploy
    logs           log lines of `run`

Exit codes: 0 done and healthy; 1 unhealthy or failed; 2 bad usage or configuration; 130 interrupted.
"""

from durable.cli.app import main

__all__ = ["main"]
