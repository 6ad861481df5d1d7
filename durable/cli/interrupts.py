"""A Ctrl-C that reaches the command, wherever it comes.

Python can raise nothing in the callback of a weak reference, or while an object is deleted: a KeyboardInterrupt that is
raised there is only told of, as ignored. So it is raised once more, a moment later. And a library that logs whatever
ends its call would log the interrupt with a page of its own code.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_LATER: Final = 0.05  # seconds


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Lose no interrupt in the block, and log none."""
    tell, root = sys.unraisablehook, logging.getLogger()

    def hear(ignored: Any) -> None:
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            again = threading.Timer(_LATER, _interrupt)  # here it would be ignored once more
            again.daemon = True
            again.start()
        else:
            tell(ignored)

    sys.unraisablehook = hear
    root.addFilter(_is_no_interrupt)
    try:
        yield
    finally:
        sys.unraisablehook = tell
        root.removeFilter(_is_no_interrupt)


def _interrupt() -> None:
    """Send a signal, which ends what the main thread waits for."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt))
