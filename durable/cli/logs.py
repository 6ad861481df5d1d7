"""The log of `run`: lines on standard output, as text or, with --json, as JSON.

The log goes to standard output, because `run` prints nothing else; standard error is left to the one line of an error
at the start. Logging that the application has set up is kept, unless --json is given.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec

from durable.cli.streams import NoReader

_PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """Log records as JSON, one object per line; `event` is the constant part of the message, to search by."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": str(record.msg),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = record.exc_text or self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class _StandardOutput(logging.StreamHandler):  # type: ignore[type-arg]  # it is generic for type checkers only
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the end of the process that reads the log: messages are still delivered."""
        if not isinstance(sys.exc_info()[1], BrokenPipeError | NoReader):
            super().handleError(record)


def set_up(level: str, *, json: bool) -> None:
    """Log records of this level and above."""
    root = logging.getLogger()
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger("durable").setLevel(number)
    if root.handlers and not json:
        return
    handler = _StandardOutput(sys.stdout)
    handler.setFormatter(JsonFormatter() if json else logging.Formatter(_PLAIN))
    root.handlers = [handler]
    root.setLevel(number)
