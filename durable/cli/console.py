"""console: serves the console of one service on this machine."""

from __future__ import annotations

import asyncio
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from durable.bus import Bus
from durable.cli.output import emit
from durable.cli.target import on_bus
from durable.errors import InvalidSetting

Port = Annotated[int, typer.Option("--port", help="port on 127.0.0.1", min=0, max=65_535)]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="file with the operator's token (default: a new one, printed)"),
]


@on_bus()
def console(bus: Bus, port: Port = 8089, token_file: TokenFile = None) -> None:
    """Show the console of this service in a browser, at 127.0.0.1.

    It needs no running node. To other machines, mount console_app(bus) behind the TLS of a web application.
    """
    token = secrets.token_urlsafe(24) if token_file is None else _read(token_file)
    asyncio.run(_serve(bus, port, token, is_new=token_file is None))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"--token-file {file}: cannot be read: {error}") from error


async def _serve(bus: Bus, port: int, token: str, *, is_new: bool) -> None:
    try:
        import uvicorn

        from durable.console import Person, Role, console_app
    except ImportError as error:
        raise InvalidSetting(f"console needs {error.name}; run: pip install 'durable-bus[console]'") from error
    app = console_app(bus, tokens={token: Person("operator", Role.OPERATOR)})
    config = uvicorn.Config(app, log_level="warning", server_header=False, date_header=False, lifespan="off")
    with _listening(port) as listening:
        try:
            await bus.runtime.check()
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
            told = f"console of {bus.service} at {url}" + (f"\ntoken: {token}" if is_new else "")
            emit({"url": url} | ({"token": token} if is_new else {}), told)
            with suppress(KeyboardInterrupt):  # uvicorn has ended in good order, and raises the signal again
                await uvicorn.Server(config).serve([listening])
        finally:
            await bus.runtime.stop()


def _listening(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise InvalidSetting(f"--port {port}: cannot listen here: {error.strerror or error}; give another") from error
