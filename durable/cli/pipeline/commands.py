"""pipeline: history as data. The commands are in pipeline_*, the options that they share in pipeline_options."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from durable.cli.pipeline import archive as pipeline_archive
from durable.cli.pipeline import audit as pipeline_audit
from durable.cli.pipeline import compact as pipeline_compact
from durable.cli.pipeline import conversations as pipeline_conversations
from durable.cli.pipeline import erase as pipeline_erase
from durable.cli.pipeline import export as pipeline_export
from durable.cli.pipeline import replay as pipeline_replay
from durable.cli.pipeline import report as pipeline_report
from durable.errors import InvalidSetting

app = typer.Typer(help="History as data: archive it into a lake, report on it, audit it, replay it. Needs Spark.")


@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def _in_text(command: Callable[..., None]) -> Callable[..., None]:
    """The command, for options that are text: bytes that are none would break the connection to the JVM."""

    @wraps(command)
    def checked(**options: Any) -> None:
        for name, given in options.items():
            for each in given if isinstance(given, list) else [given]:
                if isinstance(each, str) and not _is_text(each):
                    raise InvalidSetting(f"{name.strip('_')}: {each!r} is no text in UTF-8")
        command(**options)

    return checked


def _is_text(given: str) -> bool:
    """Bytes of the command line that are no UTF-8 arrive as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in given)


for command in (
    pipeline_archive.archive,
    pipeline_archive.verify,
    pipeline_archive.purge,
    pipeline_archive.status,
    pipeline_compact.compact,
    pipeline_compact.vacuum,
    pipeline_erase.erase,
    pipeline_export.export,
    pipeline_report.report,
    pipeline_audit.audit,
    pipeline_conversations.conversations,
    pipeline_replay.replay,
):
    app.command()(_in_text(command))
