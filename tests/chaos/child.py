"""Programs of nodes, as children of a run: they log to stderr, and end with the run."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading


def begin() -> None:
    """Be a child."""
    threading.Thread(target=_end_with_the_run, name="watch the run", daemon=True).start()
    logging.basicConfig(
        level=logging.INFO, format="%(created).3f %(process)d %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )


def _end_with_the_run() -> None:
    """The run holds the other end of stdin and never writes: end of file means that it is gone."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
