"""`durable-agent`, also installed as `durable`: the command line.

    app            the commands put together; how each error ends
    target         which bus, or which database
    output         one JSON document, tables, or aligned text
    dead_letters/  groups, list, show, replay, edit, discard, debug
    scheduled/     messages that wait for their time, and recurring schedules
    pipeline/      history as data: into a lake, reports, audits, replays
    doctor/        checks of settings, database, application; check-deploy
    logs           log lines of `run`

Exit codes: 0 done and healthy; 1 unhealthy or failed; 2 bad usage or configuration; 130 interrupted.
"""

from durable.cli.app import main

__all__ = ["main"]
