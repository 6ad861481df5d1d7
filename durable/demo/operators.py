"""The console of both services, in a process of its own: one watches nodes die and their work move."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from durable.demo.stage import Stage
from durable.embedded.ports import free_port
from durable.errors import DurableError

_START_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Shown:
    """A console that is served."""

    url: str
    token: str
    process: subprocess.Popen[bytes]

    def wait(self) -> None:
        """Wait until the console ends."""
        self.process.wait()


@contextmanager
def console(stage: Stage) -> Iterator[Shown]:
    """Serve the console of the demo's services for a block. Raises DurableError when it does not start."""
    token_file, port = stage.folder / "console-token", free_port()
    token_file.touch(mode=0o600)
    token_file.write_text(secrets.token_urlsafe(24))
    services = [option for name, url in stage.urls.items() for option in ("--service", f"{name}={url}")]
    command = [sys.executable, "-m", "durable.cli", "console", *services, "--port", str(port)]
    with (stage.logs / "console.log").open("wb") as log:
        process = subprocess.Popen([*command, "--token-file", str(token_file)], stdout=log, stderr=log)
    shown = Shown(f"http://127.0.0.1:{port}/", token_file.read_text(), process)
    try:
        _wait_for(shown)
        yield shown
    finally:
        process.terminate()
        process.wait()


def _wait_for(shown: Shown) -> None:
    try:
        _ask(shown.url)
    except httpx.TransportError as error:
        raise DurableError(
            f"console: no answer within {_START_SECONDS} s; read console.log in the folder logs"
        ) from error


@retry(
    retry=retry_if_exception_type(httpx.TransportError),
    stop=stop_after_delay(_START_SECONDS),
    wait=wait_fixed(0.1),
    reraise=True,
)
def _ask(url: str) -> None:
    httpx.get(url)
