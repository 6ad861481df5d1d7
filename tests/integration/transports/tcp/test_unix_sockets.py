"""The file of a Unix socket: for its user alone, replaced when it is stale, and never taken from anybody."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from durable.errors import InvalidSetting
from durable.outcomes import STORED
from durable.settings import load_settings
from durable.transports.tcp.transport import TcpListener, TcpTransport
from tests.support.receivers import MemoryReceiver, envelopes

TRANSPORT = TcpTransport(load_settings(), "billing", 2)


@pytest.fixture
def path() -> Iterator[Path]:
    """In a short folder: the paths of sockets are short, and pytest's are not."""
    folder = tempfile.mkdtemp(dir="/tmp")
    yield Path(folder) / "in.sock"
    shutil.rmtree(folder)


def listener(path: Path) -> TcpListener:
    return TRANSPORT.listener(f"unix://{path}", "billing-in")


def mode(path: Path) -> int:
    """Of the file itself, not of what it points at; 0 when there is none."""
    return path.lstat().st_mode if path.exists() or path.is_symlink() else 0


def abandoned_by_a_dead_process(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()


async def test_socket_is_open_only_to_its_user_under_any_umask(path: Path) -> None:
    before = os.umask(0)
    try:
        serving = listener(path)
        await serving.serve(MemoryReceiver())
    finally:
        os.umask(before)
    assert stat.filemode(mode(path)) == "srw-------"
    await serving.close()


async def test_socket_is_removed_when_its_listener_is_closed(path: Path) -> None:
    serving = listener(path)
    await serving.serve(MemoryReceiver())
    assert stat.S_ISSOCK(mode(path))
    await serving.close()
    assert mode(path) == 0


async def test_socket_of_a_dead_process_is_replaced(path: Path) -> None:
    abandoned_by_a_dead_process(path)
    serving = listener(path)
    await serving.serve(MemoryReceiver())
    async with TRANSPORT.sender(serving.address) as sender:
        assert await sender.send(envelopes(1)) == [STORED]
    await serving.close()


async def test_socket_of_a_live_listener_is_left_unchanged(path: Path) -> None:
    first = listener(path)
    await first.serve(MemoryReceiver())
    with pytest.raises(InvalidSetting, match="another process listens here"):
        await listener(path).serve(MemoryReceiver())
    async with TRANSPORT.sender(first.address) as sender:
        assert await sender.send(envelopes(1)) == [STORED]
    await first.close()


async def test_socket_of_a_listener_too_busy_to_accept_is_left_unchanged(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(path))
        busy.listen(0)
        waiting.connect(str(path))
        with pytest.raises(InvalidSetting, match="another process listens here"):
            await listener(path).serve(MemoryReceiver())


async def test_file_other_than_a_socket_is_left_unchanged(path: Path) -> None:
    os.mknod(path)
    with pytest.raises(InvalidSetting, match="not a socket"):
        await listener(path).serve(MemoryReceiver())
    assert stat.S_ISREG(mode(path))


async def test_symbolic_link_to_a_socket_is_left_unchanged(path: Path) -> None:
    abandoned_by_a_dead_process(path.with_name("elsewhere"))
    os.symlink(path.with_name("elsewhere"), path)
    with pytest.raises(InvalidSetting, match="not a socket"):
        await listener(path).serve(MemoryReceiver())
    assert stat.S_ISLNK(mode(path))


async def test_a_successor_keeps_its_file_when_the_predecessor_closes(path: Path) -> None:
    first, second = listener(path), listener(path)
    await first.serve(MemoryReceiver())
    os.unlink(path)
    await second.serve(MemoryReceiver())
    await first.close()
    async with TRANSPORT.sender(second.address) as sender:
        assert await sender.send(envelopes(1)) == [STORED]
    await second.close()


async def test_missing_folder_is_an_invalid_setting(path: Path) -> None:
    with pytest.raises(InvalidSetting, match="cannot listen here: No such file"):
        await listener(path.parent / "missing" / "in.sock").serve(MemoryReceiver())
