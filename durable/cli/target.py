"""What a command works on: a bus that is named like `app:bus`, or only a database."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Annotated

import typer
from sqlalchemy import Connection, pool

from durable.bus import Bus
from durable.errors import InvalidSetting, WiringError
from durable.settings import Settings, load_settings, suggestion
from durable.storage.database import sync_url
from durable.storage.engines import Limits, make_engine
from durable.storage.outages import translated

BusName = Annotated[str, typer.Argument(metavar="APP:BUS", help="module and attribute of the bus, such as app:bus")]
OptionalBusName = Annotated[
    str | None,
    typer.Argument(metavar="[APP:BUS]", help="module and attribute of the bus, such as app:bus", show_default=False),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option("--database", metavar="URL", help="this database, instead of the bus's or DURABLE_DATABASE_URL"),
]
SchemaName = Annotated[
    str | None,
    typer.Option("--schema", metavar="NAME", help="this schema, instead of the bus's or DURABLE_DB_SCHEMA"),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]


def load_bus(name: str) -> Bus:
    """The bus of this name, from a module that may lie in the current folder. Raises WiringError."""
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")) or not attribute.isidentifier():
        raise WiringError(f"APP:BUS: {name!r} is not a module and an attribute; write it like app:bus")
    module = _imported(module_name)
    try:
        bus = getattr(module, attribute)
    except AttributeError:
        buses = [key for key, value in vars(module).items() if isinstance(value, Bus)]
        near = suggestion(attribute, buses) or (f"; it has: {', '.join(buses)}" if buses else "; it has no bus at all")
        raise WiringError(f"APP:BUS: {module_name} has no attribute {attribute!r}{near}") from None
    if not isinstance(bus, Bus):
        raise WiringError(f"APP:BUS: {name} is of type {type(bus).__name__}; name a durable.Bus")
    return bus


def load_target(
    name: str | None, database: str | None = None, schema: str | None = None
) -> tuple[Bus | None, Settings]:
    """The bus, if one is named, and the settings to use: the bus's, except for what is given here."""
    given = {"database_url": database, "db_schema": schema}
    overrides = {key: value for key, value in given.items() if value is not None}
    if name is None:
        settings = load_settings(**overrides)
        if settings.database_url is None:
            raise InvalidSetting("database_url: not set; give APP:BUS, --database URL or DURABLE_DATABASE_URL")
        return None, settings
    bus = load_bus(name)
    if overrides:
        bus.configure(**overrides)
    return bus, bus.settings


@contextmanager
def connection(
    settings: Settings, *, isolation: str = "READ COMMITTED", read_only: bool = False
) -> Iterator[Connection]:
    """A connection of our own, committed at the end. Raises StorageUnavailable."""
    engine = make_engine(
        sync_url(settings),
        settings,
        Limits.of(settings.statement_timeout),
        poolclass=pool.NullPool,
        connect_args={"application_name": "durable-agent"},
        execution_options={"isolation_level": isolation, "postgresql_readonly": read_only},
    )
    with translated(), engine.begin() as conn:
        yield conn


def _imported(name: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except WiringError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise WiringError(
                f"APP:BUS: there is no module {error.name!r} in {folder} or installed; "
                "run this in the application's folder, or correct the name"
            ) from error
        raise _import_failed(name, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(name, error) from error


def _import_failed(name: str, error: BaseException) -> WiringError:
    """Where the application's own code failed: its last frame, not the import machinery's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 2 else ""
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}:{error.lineno})"
    return WiringError(f"APP:BUS: importing {name} failed: {type(error).__name__}: {error}{place}")
