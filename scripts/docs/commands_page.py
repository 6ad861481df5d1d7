"""The page of the command line, reference/commands.md of the site, made from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from durable.cli.app import command_line

_HEAD = """\
# Command line

`durable-agent COMMAND --help` shows the same. A command takes the bus of an application as `APP:BUS`, such as
`shop:bus`: a module, and the name of the bus in it. `durable` is the same command under a shorter name.
"""


def render() -> str:
    group: Any = command_line()
    return "\n".join([_HEAD, *_described(group, "durable-agent", level=2)])


def _described(group: Any, name: str, level: int) -> Iterator[str]:
    for command_name, command in group.commands.items():
        full = f"{name} {command_name}"
        yield f"{'#' * level} {full}\n"
        yield f"{_text(command.help)}\n"
        if hasattr(command, "commands"):
            yield from _described(command, full, level + 1)
        else:
            yield f"```text\n{full} {' '.join(_usage(command))}\n```\n"
            yield from _options(command)


def _usage(command: Any) -> Iterator[str]:
    if any(_is_option(param) for param in command.params):
        yield "[OPTIONS]"
    for param in command.params:
        if not _is_option(param):
            name = param.metavar or param.name.upper()
            yield name if param.required else f"[{name}]"


def _options(command: Any) -> Iterator[str]:
    shown = [param for param in command.params if not param.hidden and param.help]
    if not shown:
        return
    yield "| | |\n|---|---|"
    for param in shown:
        names = ", ".join(f"`{name}`" for name in (param.opts if _is_option(param) else [param.metavar or param.name]))
        yield f"| {names} | {_text(param.help)}{_default(param)} |"
    yield ""


def _default(param: Any) -> str:
    default = getattr(param.default, "value", param.default)
    has_one = isinstance(default, str | int | float) and not isinstance(default, bool) and default != ""
    return f"; default: `{default}`" if has_one else ""


def _is_option(param: Any) -> bool:
    return bool(param.param_type_name == "option")


def _text(words: str | None) -> str:
    """One paragraph, in which nothing is taken for HTML or for a column."""
    return " ".join((words or "").split()).replace("<", "&lt;").replace("|", "\\|")
