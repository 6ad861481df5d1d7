"""Endings of errors: one line with advice, and an exit code.

0 done and healthy · 1 unhealthy or failed · 2 bad usage or configuration · 130 interrupted · 141 nobody reads
"""

from __future__ import annotations

import re
import shlex
from typing import Final, NamedTuple

import typer
from sqlalchemy.exc import DBAPIError

from durable.cli.ways_in import mistake, way_in
from durable.errors import DurableError, StorageUnavailable, UndecodableMessages, WiringError, place_of
from durable.grammar import suggestion
from durable.storage.outages import advice_of, described, is_lack, tells_remedy

NAME: Final = "durable-agent"
FAILED, BAD_USAGE, INTERRUPTED, UNREAD = 1, 2, 130, 141
_NO_ROLE: Final = re.compile(r'role "(.+)" does not exist')


class Ending(NamedTuple):
    code: int
    message: str
    has_lines: bool = False

    @property
    def lines(self) -> list[str]:
        return self.message.splitlines() if self.has_lines else [self.message]


def ending_of(error: BaseException) -> Ending:
    """Choose the message and the exit code of an error."""
    match error:
        case BaseExceptionGroup():
            return ending_of(error.exceptions[0])
        case typer.TyperException():
            return Ending(error.exit_code, usage(error))
        case KeyboardInterrupt():
            return Ending(INTERRUPTED, "interrupted")
        case typer.Abort():
            return Ending(FAILED, "aborted")
        case UndecodableMessages():
            return Ending(BAD_USAGE, str(error), has_lines=True)
        case WiringError():
            return Ending(BAD_USAGE, f"{error}{_at(error)}")
        case StorageUnavailable() if is_lack(error) or tells_remedy(error):
            return Ending(FAILED, str(error))
        case StorageUnavailable() if advice := mistake(error):
            return Ending(BAD_USAGE, f"{error}; {advice}")
        case StorageUnavailable():
            return Ending(FAILED, f"{error}; {way_in(error)}")
        case DBAPIError():
            return Ending(FAILED, _refusal(error))
        case DurableError():
            return Ending(FAILED, str(error))
        case _:
            return Ending(FAILED, f"{type(error).__name__}: {error}; --debug shows the traceback")


def usage(error: typer.TyperException) -> str:
    """Return Typer's message, with the nearest known option or command, or else a pointer to --help."""
    text = error.format_message().partition(" (Possible options")[0].rstrip(".").replace(". Did you", "; did you")
    text = text.replace("Value error, ", "")
    near = _near_option(error)
    context = getattr(error, "ctx", None)
    if near:
        text += near
    elif context is not None and "; did you" not in text:
        text += f"; see {context.command_path} --help"
    return text[:1].lower() + text[1:]


def _near_option(error: typer.TyperException) -> str:
    """Ask for the option that an unknown one may be a misspelling of; the dashes, which all have, make none alike."""
    known = [each[2:] for each in getattr(error, "possibilities", None) or () if each.startswith("--")]
    return suggestion(getattr(error, "option_name", "").lstrip("-"), known, "--{}")


def _at(error: WiringError) -> str:
    """Name the line of the application that made the mistake, if one did."""
    place = place_of(error)
    return "" if place is None else f" ({place})"


def _refusal(error: DBAPIError) -> str:
    refusal = f"refused by the database: {described(error)}"
    if tells_remedy(error):
        return refusal
    if missing := _NO_ROLE.search(refusal):
        return f"{refusal}; create it: createuser {shlex.quote(missing[1])}"
    return f"{refusal}; {advice_of(error) or '--debug shows the statement'}"
