"""Providers that die, stop and come back, each a process of its own."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from durable.calls.caller import RemoteService
from durable.calls.contract import contract_of
from durable.calls.links import Links
from durable.calls.places import Elsewhere
from durable.errors import CallTimeout, NoProvider, ProviderGone
from durable.settings import load_settings
from durable.transports.tcp.transport import TcpTransport
from tests.support.calling import SOON, Inventory, Reservation


@contextmanager
def provider(uri: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that offers the inventory, and its address."""
    command = [sys.executable, "-m", "tests.support.calling", uri]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def caller(links: Links, at: str, **options: Any) -> Any:
    place = Elsewhere(at, lambda: links)
    return RemoteService(contract_of(Inventory), place, timeout=SOON, options=options, on_error=None).stub()


@pytest.fixture
def links() -> Links:
    return Links(lambda _: TcpTransport(load_settings(), "orders", 2))


@pytest.fixture(params=["tcp", "unix"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"unix://{tmp_path}/stock"


async def test_caller_learns_at_once_of_a_killed_provider(uri: str, links: Links) -> None:
    with provider(uri) as (process, at):
        inventory = caller(links, at)
        assert await inventory.reserve("A-1") == Reservation("A-1", 1)
        waiting = [asyncio.create_task(inventory.slow(str(number))) for number in range(50)]
        await asyncio.sleep(0.2)
        process.kill()
        async with asyncio.timeout(1):
            gone = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(each) for each in gone} == {ProviderGone}
        with pytest.raises(NoProvider):
            await inventory.reserve("A-1")
    await links.close()


async def test_caller_of_a_frozen_provider_waits_until_its_timeout(uri: str, links: Links) -> None:
    with provider(uri) as (process, at):
        inventory = caller(links, at, echo={"timeout": 0.5})
        assert await inventory.reserve("A-1") == Reservation("A-1", 1)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(CallTimeout):
            await inventory.echo(b"hello")
        process.send_signal(signal.SIGCONT)
        assert await inventory.reserve("A-2") == Reservation("A-2", 1)
    await links.close()


async def test_caller_finds_a_provider_again_after_its_restart(tmp_path: Path, links: Links) -> None:
    uri = f"unix://{tmp_path}/stock"
    inventory = caller(links, uri)
    for _ in range(2):
        with provider(uri):
            assert await inventory.reserve("A-1") == Reservation("A-1", 1)
        with pytest.raises((NoProvider, ProviderGone)):
            await inventory.reserve("A-1")
    await links.close()
