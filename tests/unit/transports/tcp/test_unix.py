"""Sockets of Unix that two processes bind at once."""

from __future__ import annotations

import fcntl
import os
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from durable.errors import InvalidSetting
from durable.transports.tcp import unix
from durable.transports.tcp.unix import Bound, UnixAddress


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UnixAddress:
    """One at which a process has left its socket file behind."""
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as left:
        left.bind("orders.sock")
    return UnixAddress(str(tmp_path / "orders.sock"))


def accepts(bound: Bound) -> bool:
    """Tell whether who connects to the address reaches this one."""
    bound.socket.setblocking(False)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect("orders.sock")
        try:
            bound.socket.accept()[0].close()
        except BlockingIOError:
            return False
    return True


def test_one_of_two_processes_listens_when_both_find_a_file_left_behind(
    address: UnixAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes when the first has seen that nobody listens, and is about to remove the file."""
    came = Event()
    seconds: list[Future[Bound]] = []
    is_alive, flock = UnixAddress._is_alive, fcntl.flock

    def second() -> Bound:
        try:
            return address.bind()
        finally:
            came.set()

    def locked(handle: int, how: int) -> None:
        if seconds:
            came.set()
        flock(handle, how)

    def looked(which: UnixAddress) -> bool:
        found = is_alive(which)
        if not seconds:
            monkeypatch.setattr(fcntl, "flock", locked)
            seconds.append(threads.submit(second))
            assert came.wait(10)
        return found

    with ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(UnixAddress, "_is_alive", looked)
        first = address.bind()
        with pytest.raises(InvalidSetting, match="another process listens here"):
            seconds[0].result(10)
    assert accepts(first)
    first.socket.close()
    first.release()
    assert not os.path.exists("orders.sock")


def test_address_is_bound_when_its_folder_is_locked_by_another_program(
    address: UnixAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError

    monkeypatch.setattr(unix._patiently, "stop", lambda _: True)
    monkeypatch.setattr(fcntl, "flock", refuse)
    bound = address.bind()
    assert accepts(bound)
    bound.socket.close()
    bound.release()
