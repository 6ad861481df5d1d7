"""describe: what the application sends, handles, offers and calls; and whether others notice what changed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit, urlunsplit

import msgspec
import typer

from durable.bus import Bus
from durable.cli import topology
from durable.cli.output import Block, Table, emit, print_json
from durable.cli.target import on_bus
from durable.description.asyncapi import asyncapi
from durable.description.changes import Change, changes
from durable.description.document import Description, read
from durable.description.survey import describe as survey
from durable.errors import InvalidSetting, needs, text_of
from durable.messages.schemas import placed
from durable.transports import peers
from durable.transports.rabbitmq.address import broker_url

AsyncApi = Annotated[bool, typer.Option("--asyncapi", help="print an AsyncAPI 3.0 document")]
OpenApi = Annotated[bool, typer.Option("--openapi", help="print an OpenAPI 3.1 document of the HTTP endpoints")]
Check = Annotated[
    Path | None,
    typer.Option("--check", metavar="FILE", help="compare with a description that --json has printed before"),
]

_MOST_BYTES = 64 << 20
_SCHEMAS = "#/components/schemas/"


@on_bus()
def describe(bus: Bus, asyncapi: AsyncApi = False, openapi: OpenApi = False, check: Check = None) -> None:
    """Describe everything that the application sends, handles, offers and calls.

    With --check it ends with 1 when services that are deployed already would notice a change.
    """
    if asyncapi + openapi + (check is not None) > 1:
        raise InvalidSetting("--asyncapi, --openapi, --check: give one of them")
    found = survey(bus.application, topology.needed(bus))
    if asyncapi:
        print_json(_asyncapi(bus, found))
    elif openapi:
        print_json(_openapi(bus, found))
    elif check is not None:
        _compare(_changes(check, found))
    else:
        emit(msgspec.to_builtins(found), *_tables(found, bus.application.mounted))


def _changes(path: Path, new: Description) -> list[Change]:
    old = read(_content(path), str(path))
    try:
        return changes(old, new)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise InvalidSetting(
            f"--check: {path}: is no description: its schemas cannot be read: {text_of(error)}"
        ) from error


def _compare(found: list[Change]) -> None:
    bad = [each for each in found if not each.is_compatible]
    good = [each for each in found if each.is_compatible]
    document = {
        "compatible": not bad,
        "incompatible_changes": [_document(each) for each in bad],
        "compatible_changes": [_document(each) for each in good],
    }
    lines = [f"incompatible: {each.subject}: {each.what}; {each.advice}" for each in bad]
    lines += [f"compatible: {each.subject}: {each.what}" for each in good]
    emit(document, *(lines or ["nothing that others see has changed"]))
    if bad:
        raise typer.Exit(1)


def _document(change: Change) -> dict[str, str]:
    return {name: value for name, value in change._asdict().items() if value}


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InvalidSetting(f"--check: {path}: cannot be read: {error.strerror or error}") from error
    if len(content) > _MOST_BYTES:
        raise InvalidSetting(f"--check: {path}: is larger than {_MOST_BYTES >> 20} MiB; give a description")
    return content


def _asyncapi(bus: Bus, description: Description) -> dict[str, Any]:
    brokers = {queue.broker for queue in description.queues} | {
        urlsplit(uri).netloc for each in description.messages for uri in each.destinations if uri.startswith("rabbitmq")
    }
    return asyncapi(description, {name: _public(broker_url(bus.settings, name)) for name in brokers})


def _public(url: str) -> str:
    """The URL without user, password and options."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _openapi(bus: Bus, description: Description) -> dict[str, Any]:
    with needs("--openapi", extra="http"):
        from durable.transports.http.openapi import describe as describe_http
    document = describe_http(bus.service, bus.application.handled_classes(), secured=peers.has_secrets(bus.settings))
    served = [each.address for each in description.listeners if each.address.startswith("http")]
    if served:
        document["servers"] = [{"url": address} for address in served]
    schemas = document["components"]["schemas"]
    for service in description.services:
        if service.role == "offers":
            for method in service.methods:
                for part, schema in (("arguments", method.arguments), ("result", method.result)):
                    name = f"{service.name}.{method.name}.{part}"
                    schemas[name] = placed(schema, name, _SCHEMAS, schemas)
    return document


def _tables(found: Description, mounted: Iterable[str]) -> list[Block]:
    apps = [{"address": "bus.asgi(), mounted", "name": each.removeprefix("asgi:")} for each in sorted(mounted)]
    listeners = Table.of("receives at", [*found.listeners, *apps], {"address": "address", "name": "name"})
    services = Table.of(
        "services",
        [(service, method) for service in found.services for method in service.methods],
        {
            "service": lambda row: row[0].name,
            "version": lambda row: row[0].version,
            "the application": lambda row: f"{row[0].role} it",
            "method": lambda row: row[1].signature,
            "digest": lambda row: row[1].digest[:12],
        },
    )
    messages = Table.of(
        "messages",
        found.messages,
        {
            "message": "name",
            "version": "version",
            "handled by": "handler",
            "sent to": lambda each: ", ".join(each.destinations),
            "encoding": "content_type",
        },
    )
    queues = Table.of(
        "queues",
        found.queues,
        {
            "queue": "name",
            "broker": "broker",
            "declared by": lambda each: "this service" if each.declared else "others",
            "bindings": lambda each: ", ".join(each.bindings),
        },
    )
    tables = [table for table in (listeners, services, messages, queues) if table.rows]
    return [*tables] or [f"{found.application} declares nothing"]
