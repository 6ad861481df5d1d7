"""run: a process of its own for a bus. Every setting is a flag, generated from Settings, so that none is missing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any, Final, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from durable.cli import logs
from durable.cli.command import Debug, refuse_odd_texts
from durable.cli.target import BusName, load_bus
from durable.errors import WiringError
from durable.settings import Settings

PANELS: Final = {
    "database_url": "Database",
    "batch_size": "Batches and memory",
    "failures_to_latch": "Delivery",
    "call_timeout": "Calls",
    "concurrency": "Handling",
    "drain_timeout": "Start and end",
    "retry_immediate": "Retries",
    "check_pending": "Messages in flight at the start",
    "answer_to": "Addresses",
    "amqp_url": "RabbitMQ",
    "shared_secret": "Peers, HTTP and TLS",
    "encryption_keys": "Encryption",
    "unix_users": "Unix sockets",
    "heartbeat_interval": "Recovery",
    "dedupe_window": "Retention and pipeline",
    "metrics_port": "Metrics and health",
}
"""Panels of the settings in their order, each by its first setting."""


class Level(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LogLevel = Annotated[Level, typer.Option("--log-level", help="lowest level to log")]
JsonLines = Annotated[bool, typer.Option("--json", help="log one JSON object per line")]


def run(
    app: BusName,
    log_level: LogLevel = Level.INFO,
    json: JsonLines = False,
    debug: Debug = False,
    **settings: str | bool | None,
) -> None:
    """Run a bus: its listeners, handlers, sending and recovery agents.

    SIGTERM or Ctrl-C stops it: handlers under way may finish, for drain_timeout. A second signal ends it at once.

    Every setting is a flag, too. A TIME is seconds, or 500ms, 10s, 5m, 1h30m, 7d, PT30S.
    """
    refuse_odd_texts({"app": app, **settings})
    bus = load_bus(app)
    if bus.mode == "send-only":
        raise WiringError(f"APP:BUS: {app} has mode='send-only' and runs no agents; name another bus")
    overrides: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if overrides:
        bus.configure(**overrides)
    logs.set_up(log_level.value, json=json)
    bus.run()


def _setting_flag(name: str, field: FieldInfo, panel: str) -> inspect.Parameter:
    """Make the flag of one setting. Its value is text, read like the same text in the environment."""
    flag, is_switch = name.replace("_", "-"), field.annotation is bool
    default = "" if field.default is None or is_switch else f"; default {_typed(field.default)}"
    option = typer.Option(
        f"--{flag}/--no-{flag}" if is_switch else f"--{flag}",
        help=f"{field.description}{default}",
        metavar=None if is_switch else _metavar(field),
        show_default=False,
        rich_help_panel=panel,
    )
    kind: Any = bool | None if is_switch else str | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _typed(default: object) -> str:
    """Write a default as a user would type it."""
    if isinstance(default, tuple):
        return ",".join(map(_typed, default)) or "none"
    if not isinstance(default, timedelta):
        return str(default)
    return f"{default.total_seconds():g}" if default < timedelta(days=1) else f"P{default.days}D"


def _metavar(field: FieldInfo) -> str:
    kinds = {field.annotation, *get_args(field.annotation)}
    if timedelta in kinds:
        return "TIME"
    if any(get_origin(kind) is tuple for kind in kinds):
        return "LIST"
    return "NUMBER" if int in kinds else "TEXT"


def _with_settings_as_flags() -> inspect.Signature:
    own = [
        parameter
        for parameter in inspect.signature(run, eval_str=True).parameters.values()
        if parameter.kind != parameter.VAR_KEYWORD
    ]
    return inspect.Signature([*own, *_setting_flags()])


def _setting_flags() -> Iterator[inspect.Parameter]:
    panel = ""
    for name, field in Settings.model_fields.items():
        panel = PANELS.get(name, panel)
        yield _setting_flag(name, field, panel)


run.__signature__ = _with_settings_as_flags()  # type: ignore[attr-defined]
