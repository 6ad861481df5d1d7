"""console: serves the console of a service, or of several, on this machine."""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from itertools import starmap
from pathlib import Path
from typing import Annotated, Final

import typer

from durable.bus import Bus
from durable.cli.arguments import parse_pairs
from durable.cli.command import taking
from durable.cli.output import emit, safe
from durable.cli.runs import actor_name
from durable.cli.target import OptionalBusName, load_bus
from durable.errors import InvalidSetting, StorageUnavailable, WiringError, needs
from durable.storage.database import async_url

Port = Annotated[int, typer.Option("--port", help="port on 127.0.0.1", min=0, max=65_535)]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="file with the admin's token (default: a new one, printed)"),
]
Services = Annotated[
    list[str] | None,
    typer.Option("--service", metavar="NAME=URL", help="another service and its database; may be repeated"),
]


_SUCH_AS: Final = "NAME=URL, such as stock=postgresql://localhost/stock"
_LONGEST_END: Final = 2  # seconds


@taking()
def console(
    app: OptionalBusName = None, service: Services = None, port: Port = 8089, token_file: TokenFile = None
) -> None:
    """Show the console of a service in a browser, at 127.0.0.1; of several with --service.

    It needs no running node. To other machines, mount console_app(bus) behind the TLS of a web application.
    """
    services = parse_pairs(service or (), option="--service", such_as=_SUCH_AS)
    buses = [*([] if app is None else [load_bus(app)]), *starmap(_bus, services.items())]
    if not buses:
        raise InvalidSetting("APP:BUS: no service is given; name a bus, such as app:bus, or give --service NAME=URL")
    token = secrets.token_urlsafe(24) if token_file is None else _read(token_file)
    asyncio.run(_serve(buses, app, port, token, is_new=token_file is None))


def _bus(name: str, url: str) -> Bus:
    if not url:
        raise InvalidSetting(f"--service: give {_SUCH_AS}")
    try:
        return Bus(name, url)
    except InvalidSetting as error:
        raise InvalidSetting(f"--service {name}: {error}") from error


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"--token-file {file}: cannot be read: {error}") from error


async def _serve(buses: Sequence[Bus], app: str | None, port: int, token: str, *, is_new: bool) -> None:
    with needs("console", extra="console"):
        import uvicorn

        from durable.console import Person, Role, console_app
    person = Person(re.sub(r"[^A-Za-z0-9._@+-]", "-", actor_name())[:100], Role.ADMIN)
    asgi = console_app(*buses, tokens={token: person}, app=app)
    config = uvicorn.Config(
        asgi,
        log_config=None,
        log_level="warning",
        server_header=False,
        proxy_headers=False,  # anybody may write them, and the login counts failures by address
        date_header=False,
        lifespan="off",
        timeout_graceful_shutdown=_LONGEST_END,  # pages that are open follow what happens
    )
    looks: list[asyncio.Task[None]] = []
    with _listening(port) as listening:
        try:
            for bus in buses:
                bus.runtime.check_wiring()
                async_url(bus.settings)
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
            names = ", ".join(bus.service for bus in buses)
            told = f"console of {names} at {url}" + (f"\ntoken: {token}" if is_new else "")
            emit({"url": url} | ({"token": token} if is_new else {}), told)
            looks = [asyncio.create_task(_tell_trouble(bus)) for bus in buses]
            with suppress(KeyboardInterrupt):  # uvicorn has ended in good order, and raises the signal again
                await uvicorn.Server(config).serve([listening])
        finally:
            for look in looks:
                look.cancel()
            await asyncio.gather(*looks, return_exceptions=True)
            for bus in buses:
                await bus.runtime.stop()


async def _tell_trouble(bus: Bus) -> None:
    """Tell which database cannot be shown now. Its pages say so as well, and look again."""
    try:
        await bus.runtime.check()
    except (StorageUnavailable, WiringError) as error:
        typer.echo(safe(f"{bus.service}: {error}; its pages look again"), err=True)


def _listening(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise InvalidSetting(f"--port {port}: cannot listen here: {error.strerror or error}; give another") from error
