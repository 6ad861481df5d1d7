"""Help texts as terminals show them: paragraphs flow, and flags name no type."""

from __future__ import annotations

import inspect
from typing import Any

import typer


def readable(command: Any) -> Any:
    """The command, or group, with its help for reading, and so with all commands below it."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    command.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    for option in [*command.params, command.get_help_option(typer.Context(command))]:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for each in getattr(command, "commands", {}).values():
        readable(each)
    return command
