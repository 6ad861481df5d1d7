"""The target of a command: a bus, written as `app:bus`, or only a database."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Annotated, Any, Final, NamedTuple

import typer
from sqlalchemy import Connection, pool

from durable.bus import Bus
from durable.cli import output
from durable.cli.command import taking
from durable.encryption.ring import KeyRing
from durable.errors import InvalidSetting, WiringError, place_of
from durable.grammar import suggestion
from durable.settings import Settings, load_settings
from durable.storage.connection_names import OF_COMMANDS
from durable.storage.database import sync_url
from durable.storage.engines import Limits, make_engine
from durable.storage.outages import translated
from durable.storage.readiness import check_ready

BusName = Annotated[str, typer.Argument(metavar="APP:BUS", help="module and attribute of the bus, such as app:bus")]
OptionalBusName = Annotated[
    str | None,
    typer.Argument(metavar="[APP:BUS]", help="module and attribute of the bus, such as app:bus", show_default=False),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option("--database", metavar="URL", help="database to use instead of the bus's or DURABLE_DATABASE_URL"),
]
SchemaName = Annotated[
    str | None,
    typer.Option("--schema", metavar="NAME", help="schema to use instead of the bus's or DURABLE_DB_SCHEMA"),
]


class Target(NamedTuple):
    """The bus, if one is named, and the settings that apply."""

    bus: Bus | None
    settings: Settings


def load_bus(app: BusName) -> Bus:
    """Import the bus of this name; its module may lie in the current folder. Raises WiringError."""
    module_name, _, attribute = app.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")) or not attribute.isidentifier():
        advice = _without_suffix(app) or "it like app:bus"
        raise WiringError(f"APP:BUS: {app!r} is not a module and an attribute; write {advice}")
    module = _imported(module_name, app)
    try:
        bus = getattr(module, attribute)
    except AttributeError:
        buses = [key for key, value in vars(module).items() if isinstance(value, Bus)]
        near = suggestion(attribute, buses) or f"; declared there: {', '.join(buses) or 'no bus'}"
        raise WiringError(f"APP:BUS: {module_name} has no attribute {attribute!r}{near}") from None
    if not isinstance(bus, Bus):
        raise WiringError(f"APP:BUS: {app} is of type {type(bus).__name__}; name a durable.Bus")
    output.name_app(app)
    return bus


def load_target(app: OptionalBusName = None, database: DatabaseUrl = None, schema: SchemaName = None) -> Target:
    """Load the bus, if one is named, and its settings; --database and --schema override them."""
    given = {"database_url": database, "db_schema": schema}
    overrides: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    bus = None if app is None else load_bus(app)
    with _naming_options(overrides):
        if bus is None:
            settings = load_settings(**overrides)
        else:
            if overrides:
                bus.configure(**overrides)
            settings = bus.settings
    if bus is None and settings.database_url is None:
        raise InvalidSetting("database_url: not set; give APP:BUS, --database URL or DURABLE_DATABASE_URL")
    return Target(bus, settings)


_OPTIONS: Final = {"database_url": "--database", "db_schema": "--schema"}


@contextmanager
def _naming_options(overrides: Collection[str]) -> Iterator[None]:
    """Tell a fault of a setting that an option has given under the name of the option."""
    try:
        yield
    except InvalidSetting as error:
        name, _, fault = str(error).partition(": ")
        if name not in overrides:
            raise
        raise InvalidSetting(f"{_OPTIONS[name]}: {fault}") from error


def ring_of(target: Target) -> KeyRing:
    """Return the encryption keys of the bus, or of the settings."""
    return target.bus.application.ring if target.bus is not None else KeyRing.of(target.settings)


on_bus = partial(taking, bus=load_bus)
"""Give a command with the parameter `bus` the argument APP:BUS."""
on_target = partial(taking, target=load_target)
"""Give a command with the parameter `target` the argument APP:BUS, --database and --schema."""


@contextmanager
def schema_connection(settings: Settings) -> Iterator[Connection]:
    """Open a connection to a schema of this code's version. Raises StorageUnavailable, SchemaMismatch."""
    with connection(settings) as conn:
        check_ready(conn, settings.db_schema)
        yield conn


@contextmanager
def connection(
    settings: Settings, *, isolation: str = "READ COMMITTED", read_only: bool = False
) -> Iterator[Connection]:
    """Open a connection of its own to durable's tables, committed at the end. Raises StorageUnavailable."""
    engine = make_engine(
        sync_url(settings),
        settings,
        Limits.of(settings.statement_timeout).for_own_statements(),
        poolclass=pool.NullPool,
        name=OF_COMMANDS,
        # A standby refuses any transaction that asks to write, also one that only reads.
        execution_options={"isolation_level": isolation} | ({"postgresql_readonly": True} if read_only else {}),
    )
    with translated(settings.db_schema), engine.begin() as conn:
        yield conn


def _without_suffix(app: str) -> str | None:
    """Write the file of `base.py:bus` as its module; None for what names no file."""
    file, _, attribute = app.partition(":")
    parts = file.removesuffix(".py").split("/")
    if not file.endswith(".py") or not all(part.isidentifier() for part in parts):
        return None
    named = attribute.removesuffix("()")
    return f"{'.'.join(parts)}:{named if named.isidentifier() else 'bus'}"


def _imported(name: str, app: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except WiringError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            if written := _without_suffix(app):
                raise WiringError(f"APP:BUS: {app!r} names a file; write {written}") from error
            raise WiringError(
                f"APP:BUS: no module {error.name!r} in {folder} or installed; "
                "run this in the application's folder, or correct the name"
            ) from error
        raise _import_failed(name, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(name, error) from error


def _import_failed(name: str, error: BaseException) -> WiringError:
    """Name the last line of the application's own code."""
    place = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else place_of(error)
    at = "" if place is None else f" ({place})"
    return WiringError(f"APP:BUS: import of {name} failed: {type(error).__name__}: {error}{at}")
