"""Web services under uvicorn: in this process, or as an operator runs them, `uvicorn app:app --workers 2`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import psutil
import uvicorn
from starlette.types import ASGIApp

from tests.failure.app import SETTINGS
from tests.failure.waiting import eventually

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """Serve this application in this process; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve(sockets=[listening]), name="uvicorn")
            await eventually(lambda: server.started)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            server.should_exit = True


class WebService:
    """A running uvicorn; `url` is where it serves."""

    def __init__(
        self, app: str, folder: Path, port: int, log: Path, workers: int, environment: Mapping[str, str]
    ) -> None:
        self.database = environment["DURABLE_DATABASE_URL"]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._workers = workers
        options = {"app-dir": str(folder), "host": "127.0.0.1", "port": str(port), "workers": str(workers)}
        flags = [word for name, value in options.items() for word in (f"--{name}", value)]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "uvicorn", app, *flags, "--no-access-log"],
                env=environment_of(environment),
                stdout=output,
                stderr=output,
            )

    async def ready(self, within: float = 60.0) -> None:
        """Return when every worker serves, and the bus of one at least runs: each says so when it is asked."""

        async def is_ready() -> bool:
            assert self.process.poll() is None, f"uvicorn has ended\n{self.output()}"
            try:
                return (await client.get("/durable/health/ready")).status_code == 204
            except httpx.TransportError:
                return False

        async with httpx.AsyncClient(base_url=self.url) as client:
            await eventually(is_ready, within=within)
        await eventually(lambda: self.output().count("Application startup complete") >= self._workers, within=within)

    def workers(self) -> list[psutil.Process]:
        """The processes that serve, the oldest first."""
        children = psutil.Process(self.process.pid).children()
        serving = [child for child in children if any("spawn_main" in word for word in _command_line(child))]
        return sorted(serving, key=lambda child: child.create_time())

    def kill_a_worker(self) -> int:
        """By SIGKILL; returns which. uvicorn starts another in its place."""
        worker = self.workers()[0]
        pid: int = worker.pid
        worker.kill()
        return pid

    def stop(self, within: float = 30.0) -> None:
        """As an operator stops it; it must drain and end well."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(within)
        assert status == 0, f"uvicorn ended with {status}\n{self.output()}"

    def kill(self) -> None:
        for process in (*self.workers(), self.process) if self.process.poll() is None else ():
            process.kill()
        self.process.wait()

    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def environment_of(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process of a test, with settings under which nothing takes long."""
    quick = {f"DURABLE_{name}": value for name, value in SETTINGS.items()}
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | quick | dict(own)


@contextmanager
def serving(
    app: str, folder: Path, port: int, log: Path, environment: Mapping[str, str], *, workers: int = 2
) -> Iterator[WebService]:
    """Run `uvicorn APP` in this folder; killed at the end if it still runs."""
    service = WebService(app, folder, port, log, workers, environment)
    try:
        yield service
    finally:
        service.kill()


def _command_line(process: psutil.Process) -> list[str]:
    try:
        words: list[str] = process.cmdline()
        return words
    except psutil.NoSuchProcess:
        return []
