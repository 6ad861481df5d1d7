"""`durable-agent`, the command line of durable.

    app        the commands put together
    endings    how each error ends
    target     which bus, or which database
    output     one JSON document, tables, or aligned text
    run · migrate · status · inspect · send · doctor · demo      a command each, or a few that belong together
    dead_letters · replay_local · letter_*      what failed for good: chosen, shown, resolved, run again here
    pipeline · pipeline_*                    history as data: into a lake, reports, audits, replays (Spark)
        pipeline_steps · _plan · _run        each command as a step; several of them as one run
    health     whether a schema is healthy, and which node is alive
    checks_*   what doctor looks at
    logs       how `run` logs

Exit codes: 0 done and healthy; 1 unhealthy or failed; 2 bad usage or configuration; 130 interrupted.
"""

from durable.cli.app import main

__all__ = ["main"]
