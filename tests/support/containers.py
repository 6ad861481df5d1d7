"""Servers in containers, for machines where a Docker engine answers."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psycopg

from durable.embedded import Broker
from durable.embedded.ports import free_port
from durable.embedded.rabbitmq import accepts_amqp
from durable.errors import WiringError

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer

RABBITMQ = "rabbitmq:3.13"
POSTGRES = "postgres:18"
START_SECONDS = 120.0


@cache
def docker_answers() -> bool:
    """Whether there is a Docker engine, and DURABLE_TEST_DOCKER=0 does not forbid its use."""
    if os.environ.get("DURABLE_TEST_DOCKER") == "0":
        return False
    engine = urlsplit(os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock")
    try:
        if engine.scheme == "unix":
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(engine.path)
        else:
            socket.create_connection((engine.hostname or "localhost", engine.port or 2375), timeout=5).close()
    except OSError:
        return False
    return True


def _container(image: str, command: str | None = None) -> DockerContainer:
    with warnings.catch_warnings(action="ignore"):  # its own deprecations
        from testcontainers.core.container import DockerContainer

        return DockerContainer(image, command=command)


class ContainedBroker(Broker):
    """A broker in a container; it suffers the same faults as a private one."""

    def __init__(self, container: DockerContainer, port: int) -> None:
        self._container = container
        self._docker = container.get_wrapped_container()
        self._host = container.get_container_host_ip()
        self._paused = False
        self._alarmed = False
        self.port = port
        self.url = f"amqp://guest:guest@{self._host}:{port}/"

    @property
    def pid(self) -> int | None:
        self._docker.reload()
        state = self._docker.attrs["State"]
        return state["Pid"] if state["Running"] else None

    def start(self) -> None:
        if self.pid is None:
            self._alarmed = False
            self._docker.start()
        _wait(lambda: accepts_amqp(self._host, self.port), f"{RABBITMQ} did not accept AMQP connections")

    def kill(self) -> None:
        self.resume()
        if self.pid is not None:
            self._docker.kill()
            self._docker.wait()

    def stop(self) -> None:
        self.resume()
        self._docker.stop()

    def pause(self) -> None:
        if not self._paused:
            self._docker.pause()
            self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._docker.unpause()
            self._paused = False

    def control(self, *arguments: str) -> str:
        from testcontainers.core.container import ExecConfig

        done = self._container.exec(ExecConfig(["rabbitmqctl", "--quiet", *arguments], user="rabbitmq"))
        if done.exit_code:
            raise WiringError(f"rabbitmqctl {arguments[0]} failed: {done.output.decode()}")
        return done.output.decode()


@contextmanager
def contained_broker() -> Iterator[Broker]:
    port = free_port()  # a fixed one, which outlives restarts of the container
    with _container(RABBITMQ).with_bind_ports(5672, port) as container:
        broker = ContainedBroker(container, port)
        broker.start()
        yield broker


@contextmanager
def contained_postgres() -> Iterator[str]:
    """The URI of a Postgres in a container."""
    container = _container(POSTGRES, "postgres -c max_connections=200 -c fsync=off")
    with container.with_env("POSTGRES_PASSWORD", "durable").with_exposed_ports(5432):
        uri = f"postgresql://postgres:durable@{container.get_container_host_ip()}:{container.get_exposed_port(5432)}/postgres"
        _wait(lambda: _connects(uri), f"{POSTGRES} did not accept connections")
        yield uri


def _connects(uri: str) -> bool:
    try:
        psycopg.connect(uri, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


def _wait(check: Callable[[], bool], failure: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not check():
        if time.monotonic() > deadline:
            raise WiringError(f"{failure} within {START_SECONDS:g} seconds (DURABLE_TEST_DOCKER=0 leaves Docker out)")
        time.sleep(0.1)
