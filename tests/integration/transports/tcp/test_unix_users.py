"""The users behind a Unix socket: strangers are refused by listeners, and impostors by senders."""

from __future__ import annotations

import os
import pwd
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from durable.errors import ConnectionFailed, InvalidSetting, TransportError
from durable.outcomes import STORED
from durable.settings import load_settings
from durable.testing import eventually
from durable.testing.transports import MemoryReceiver, envelopes
from durable.transports.tcp import credentials
from durable.transports.tcp.transport import TcpListener, TcpTransport
from tests.contract.links import socket_folder

SOMEBODY_ELSE = 54_321
HERE = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture
def folder() -> Iterator[Path]:
    with socket_folder() as folder:
        folder.chmod(0o755)
        yield folder


def transport(**own: Any) -> TcpTransport:
    return TcpTransport(load_settings(**own), "billing", 2)


@asynccontextmanager
async def serving(folder: Path, receiver: MemoryReceiver, **own: Any) -> AsyncIterator[TcpListener]:
    listener = transport(**own).listener(f"unix://{folder}/in.sock", "in")
    await listener.serve(receiver)
    try:
        yield listener
    finally:
        await listener.close()


class Elsewhere:
    """Stands for the module os in a process of another user."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def geteuid(self) -> int:
        return SOMEBODY_ELSE


async def test_the_own_user_is_a_peer(folder: Path) -> None:
    receiver = MemoryReceiver()
    async with serving(folder, receiver) as listener, transport().sender(listener.address) as sender:
        assert await sender.send(envelopes(1)) == [STORED]


async def test_another_user_is_refused_by_the_listener(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receiver, ours = MemoryReceiver(), transport()
    sender = ours.sender(f"unix://{folder}/in.sock")
    monkeypatch.setattr(credentials, "os", Elsewhere())
    async with serving(folder, receiver) as listener, sender:
        with pytest.raises(TransportError):
            await sender.send(envelopes(1))
        await eventually(lambda: listener.statistics()["dropped"])
    assert not receiver.stored
    assert "who is not in unix_users or unix_groups" in caplog.text


async def test_an_impostor_of_another_user_is_not_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = MemoryReceiver()
    async with serving(folder, receiver) as listener:
        monkeypatch.setattr(credentials, "os", Elsewhere())
        async with transport().sender(listener.address) as sender:
            with pytest.raises(ConnectionFailed, match=r"the peer is user .* not in unix_users"):
                await sender.send(envelopes(1))
    assert not receiver.stored


@pytest.mark.parametrize("name", [HERE, str(os.geteuid())])
async def test_a_listed_user_is_a_peer(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    await may_talk(folder, monkeypatch, unix_users=(name,))


@pytest.mark.parametrize("gid", sorted({os.getegid(), *os.getgrouplist(HERE, os.getegid())}))
async def test_a_user_of_a_listed_group_is_a_peer(folder: Path, monkeypatch: pytest.MonkeyPatch, gid: int) -> None:
    await may_talk(folder, monkeypatch, unix_groups=(str(gid),))


async def may_talk(folder: Path, monkeypatch: pytest.MonkeyPatch, **own: Any) -> None:
    monkeypatch.setattr(credentials, "os", Elsewhere())
    async with (
        serving(folder, MemoryReceiver(), **own) as listener,
        transport(**own).sender(listener.address) as sender,
    ):
        assert await sender.send(envelopes(1)) == [STORED]


async def test_the_file_is_open_to_others_only_where_others_are_listed(folder: Path) -> None:
    for own, mode in (({}, "srw-------"), ({"unix_users": ("54321",)}, "srw-rw-rw-")):
        async with serving(folder, MemoryReceiver(), **own):
            assert stat.filemode((folder / "in.sock").stat().st_mode) == mode


@pytest.mark.parametrize("own", [{"unix_users": ("no such user",)}, {"unix_groups": ("no such group",)}], ids=str)
def test_an_unknown_name_is_refused(own: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=r"unix_(users|groups): 'no such .*' is unknown on this machine"):
        transport(**own).listener("unix:///run/in.sock", "in")


async def test_a_connection_of_another_user_is_refused_by_the_listener(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As root it really is of another user; otherwise it is our own, which says nothing and is dropped for that."""
    own: dict[str, Any] = {"unix_users": ("54321",), "connect_timeout": 1}
    async with serving(folder, MemoryReceiver(), **own) as listener:
        with socket.socket(socket.AF_UNIX) as knocking:
            with as_nobody():
                knocking.connect(str(folder / "in.sock"))
            await eventually(lambda: listener.statistics()["dropped"])
    assert ("the peer is user 65534" in caplog.text) == (os.geteuid() == 0)


@contextmanager
def as_nobody() -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(0)
