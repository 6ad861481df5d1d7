"""Users behind a Unix socket, as the kernel tells them (SO_PEERCRED).

A listener takes connections of its own user, and of `unix_users` and `unix_groups`; a sender believes a listener that
one of these has started. Neither needs a secret: nobody can show another user's credentials.
"""

from __future__ import annotations

import grp
import os
import pwd
import socket
import struct
from dataclasses import dataclass
from typing import Any, Final

from durable.errors import InvalidSetting
from durable.settings import Settings

_UCRED: Final = struct.Struct("3i")  # process, user, group


@dataclass(frozen=True, slots=True)
class Users:
    """Users and groups whose processes may be the peer."""

    uids: frozenset[int]
    gids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, settings: Settings) -> Users:
        """Look the names up. Raises InvalidSetting for an unknown one, and where the kernel does not tell users."""
        if (settings.unix_users or settings.unix_groups) and not hasattr(socket, "SO_PEERCRED"):
            raise InvalidSetting(
                "unix_users, unix_groups: the user of a Unix socket is unknown on this system; leave them out"
            )
        uids = {_number("unix_users", name, lambda name: pwd.getpwnam(name).pw_uid) for name in settings.unix_users}
        gids = {_number("unix_groups", name, lambda name: grp.getgrnam(name).gr_gid) for name in settings.unix_groups}
        return cls(frozenset({os.geteuid(), *uids}), frozenset(gids))

    @property
    def mode(self) -> int:
        """Mode of the socket file: the own user's, unless others are to connect, whose credentials are then checked."""
        return 0o600 if self.uids == frozenset([os.geteuid()]) and not self.gids else 0o666

    def refusal(self, connection: socket.socket | Any) -> str:
        """Return the reason to refuse the peer of this connection; empty when it may be one."""
        if not hasattr(socket, "SO_PEERCRED"):
            return ""  # the mode of the file is all that there is
        _, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid in self.uids or gid in self.gids or self.gids.intersection(_groups(uid, gid)):
            return ""
        return f"the peer is user {_name(uid)}, who is not in unix_users or unix_groups"


def _groups(uid: int, gid: int) -> list[int]:
    try:
        return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:  # a user of a container, such as 10001, has no name here
        return [gid]


def _name(uid: int) -> str:
    try:
        return f"{uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return str(uid)


def _number(setting: str, name: str, look_up: Any) -> int:
    if name.isdecimal():
        return int(name)
    try:
        found: int = look_up(name)
    except KeyError:
        raise InvalidSetting(f"{setting}: {name!r} is unknown on this machine; write a name or a number") from None
    return found
