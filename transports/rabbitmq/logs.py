"""Logs of aiormq and aio-pika: nothing from INFO on about durable's own connections.

The libraries log each lost connection and each failed try, several times and with tracebacks. durable logs the same in
one line where it decides what follows: a listener is down, a batch failed, a destination is latched. The lines of the
libraries go to durable's own log at DEBUG. Connections that an application opens by itself are not changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from durable.telemetry import log

_LIBRARIES: Final = ("aiormq", "aio_pika")
_FAULTS_OF_OURS: Final = "callback"  # in the messages that tell of an error in what durable has them call

_is_ours: ContextVar[bool] = ContextVar("is_ours", default=False)


@contextmanager
def ours() -> Iterator[None]:
    """Mark this block, and every task that begins in it, as work of durable."""
    _listen()
    token = _is_ours.set(True)
    try:
        yield
    finally:
        _is_ours.reset(token)


def _listen() -> None:
    """Filter the loggers of the libraries one by one: a filter holds only for the logger that it was added to. Adding
    one again changes nothing.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in _LIBRARIES:
            logging.getLogger(name).addFilter(_passes)


def _passes(record: logging.LogRecord) -> bool:
    if not _is_ours.get() or _FAULTS_OF_OURS in str(record.msg):
        return True
    log.debug("broker library: %s: %s", record.name, record.getMessage())
    return False
