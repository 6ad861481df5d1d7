"""Plan of `pipeline run`: steps with their options, from names or from a TOML file, all checked beforehand.

    lake = "/data/lake"           # of the run: app, lake, service, database, schema, master, remote

    [[step]]
    run = "archive"

    [[step]]
    run = "audit"                 # sender and receiver: the run's lake, unless they are named
    since = "7d"

A step has the options of its command, by their names there. Those of the run go to each step that has them.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import typer

from durable.cli.endings import NAME, usage
from durable.cli.pipeline import archive as pipeline_archive
from durable.cli.pipeline import audit as pipeline_audit
from durable.cli.pipeline import compact as pipeline_compact
from durable.cli.pipeline import conversations as pipeline_conversations
from durable.cli.pipeline import export as pipeline_export
from durable.cli.pipeline import replay as pipeline_replay
from durable.cli.pipeline import report as pipeline_report
from durable.cli.pipeline import status as pipeline_status
from durable.cli.pipeline.options import LakeUrl, Master, Remote, Service
from durable.cli.pipeline.steps import Step, begun, finished
from durable.cli.target import DatabaseUrl, OptionalBusName, SchemaName, load_bus
from durable.errors import InvalidSetting, WiringError
from durable.grammar import suggestion
from durable.settings import load_settings

STEPS: Final[Mapping[str, Callable[..., Step]]] = {
    step.__name__: step
    for step in (
        pipeline_archive.archive,
        pipeline_archive.verify,
        pipeline_archive.purge,
        pipeline_status.status,
        pipeline_compact.compact,
        pipeline_compact.vacuum,
        pipeline_export.export,
        pipeline_report.report,
        pipeline_audit.audit,
        pipeline_conversations.conversations,
        pipeline_replay.replay,
    )
}
"""The steps by name."""


def shared_options(
    app: OptionalBusName = None,
    lake: LakeUrl = None,
    service: Service = None,
    database: DatabaseUrl = None,
    schema: SchemaName = None,
    master: Master = None,
    remote: Remote = None,
) -> dict[str, str]:
    """Return the options of a run that are given; its steps share them."""
    names = {"app": app, "lake": lake, "service": service, "database": database, "schema": schema}
    names |= {"master": master, "remote": remote}
    return {name: value for name, value in names.items() if value is not None}


_SHARED: Final = inspect.signature(shared_options, eval_str=True).parameters
"""A step has one of these options where it names it by the same type."""
_LAKES: Final[Mapping[str, Sequence[str]]] = {"audit": ("sender", "receiver"), "conversations": ("lake",)}
"""Options that name any number of lakes, and are the run's lake where they are not given."""
_OF_THE_RUN: Final = ("master", "remote", "debug")


class Asked(NamedTuple):
    """A step as it was asked for: options by their names on the command line."""

    name: str
    options: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of a run in their order, and what they share."""

    steps: Sequence[Asked]
    shared: Mapping[str, Any] = field(default_factory=dict)


class Checked(NamedTuple):
    """A step that may begin: its options were found to be sound."""

    number: int
    name: str
    work: Step


def named(names: str) -> Plan:
    """Parse names of steps with commas between them. Raises InvalidSetting."""
    steps = [Asked(name.strip()) for name in names.split(",")]
    if not all(step.name for step in steps):
        raise InvalidSetting(
            f"--steps: {names!r} lacks the name of a step; write such as archive,audit,report; there are {_names()}"
        )
    for step in steps:
        _known(step.name, "--steps")
    return Plan(steps)


def read(path: Path) -> Plan:
    """The steps of a TOML file. Raises InvalidSetting, which names the file and the step."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSetting(f"--file {path}: {error.strerror}; name a TOML file of steps") from error
    except UnicodeDecodeError as error:
        raise InvalidSetting(f"--file {path}: is no text in UTF-8; write it in UTF-8") from error
    except ValueError as error:
        raise InvalidSetting(f"--file {path}: is no TOML: {error}") from error
    listed = document.pop("step", None)
    if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
        raise InvalidSetting(f'--file {path}: has no steps; write [[step]], and run = "archive" below it')
    for key, value in document.items():
        if key not in _SHARED:
            near = suggestion(key, _SHARED) or f"; there are {', '.join(_SHARED)}"
            raise InvalidSetting(f"--file {path}: a run has no option {key!r}{near}")
        if not isinstance(value, str):
            raise InvalidSetting(f"--file {path}: {key}: {value!r} is no text")
    return Plan([_asked(path, number, step) for number, step in enumerate(listed, 1)], document)


def checked(plan: Plan, begin: int) -> list[Checked]:
    """The steps from this number on, each with all of its options found to be sound. Raises InvalidSetting."""
    if not 1 <= begin <= len(plan.steps):
        raise InvalidSetting(f"--from: {begin} is the number of no step; there are {len(plan.steps)}")
    shared = {**plan.shared, "lake": _lake(plan.shared)}
    each = list(enumerate(plan.steps, 1))[begin - 1 :]
    return [Checked(number, step.name, _begun(number, step, shared)) for number, step in each]


def prepared(name: str, arguments: Sequence[str]) -> Step:
    """A step whose options, as a shell would write them, were found to be sound. Raises what its command raises."""
    command = _commands()[name]
    with command.make_context(f"{NAME} pipeline {name}", list(arguments)) as context:
        work: Step = command.invoke(context)
    return work


def run_step(name: str, arguments: Sequence[str]) -> Mapping[str, Any]:
    """Run a step by itself and return its document. Raises what its command raises."""
    return finished(prepared(name, arguments)).document


def _asked(path: Path, number: int, step: dict[str, Any]) -> Asked:
    name = step.pop("run", None)
    if not isinstance(name, str):
        raise InvalidSetting(f'--file {path}: step {number} has no name; write such as run = "archive"')
    _known(name, f"--file {path}: step {number}")
    return Asked(name, step)


def _known(name: str, where: str) -> None:
    if name not in STEPS:
        raise InvalidSetting(f"{where}: {name!r} is no step{suggestion(name, STEPS)}; there are {_names()}")


def _names() -> str:
    return ", ".join(STEPS)


def _lake(shared: Mapping[str, Any]) -> str | None:
    """The lake of the whole run: as named for it, or else by the settings of the application."""
    if shared.get("lake"):
        return str(shared["lake"])
    return (load_bus(shared["app"]).settings if shared.get("app") else load_settings()).lake


def _begun(number: int, step: Asked, shared: Mapping[str, Any]) -> Step:
    try:
        return prepared(step.name, _arguments(_commands()[step.name], _with_shared(step, shared)))
    except typer.TyperException as error:
        raise InvalidSetting(f"step {number}, {step.name}: {usage(error)}") from error
    except WiringError as error:
        raise InvalidSetting(f"step {number}, {step.name}: {error}") from error


@cache
def _commands() -> Mapping[str, Any]:
    """The parser of each step: a call checks the options, and returns the step that may begin."""
    app = typer.Typer(add_completion=False)
    for step in STEPS.values():
        app.command()(begun(step))
    return typer.main.get_group(app).commands


def _with_shared(step: Asked, shared: Mapping[str, Any]) -> dict[str, Any]:
    """A step's own options before those of the run."""
    known = inspect.signature(STEPS[step.name], eval_str=True).parameters
    passed = {
        name: shared[name]
        for name, option in _SHARED.items()
        if shared.get(name) is not None and name in known and known[name].annotation is option.annotation
    }
    lakes = {name: [shared["lake"]] for name in _LAKES.get(step.name, ()) if shared["lake"]}
    return {**passed, **lakes, **_own(step)}


def _own(step: Asked) -> Mapping[str, Any]:
    for name in _OF_THE_RUN:
        if name in step.options:
            raise InvalidSetting(f"{name}: belongs to the whole run, whose steps share one session")
    return step.options


def _arguments(command: Any, options: Mapping[str, Any]) -> list[str]:
    """Write options as arguments of a shell."""
    known = {name.removeprefix("--"): each for each in command.params for name in each.opts}
    written: list[str] = []
    for name, value in options.items():
        if name not in known:
            near = suggestion(name, known) or f"; there are {', '.join(known)}"
            raise InvalidSetting(f"{name}: no such option{near}")
        written += _written(name, known[name], value)
    return written


def _written(name: str, parameter: Any, value: object) -> list[str]:
    if getattr(parameter, "is_flag", False):
        if not isinstance(value, bool):
            raise InvalidSetting(f"{name}: {value!r} is neither true nor false")
        return [f"--{name}"] if value else []
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not getattr(parameter, "multiple", False):
        raise InvalidSetting(f"{name}: takes one value, not a list")
    texts = [_text(name, each) for each in values]
    return texts if parameter.param_type_name == "argument" else [f"--{name}={text}" for text in texts]


def _text(name: str, value: object) -> str:
    match value:
        case datetime() | date():
            return value.isoformat()
        case bool() | dict() | list():
            raise InvalidSetting(f"{name}: {value!r} is no value of this option")
        case _:
            return str(value)
