"""Unix sockets: `unix:///run/orders.sock`.

The socket is for its user alone (mode 0600), unless `unix_users` or `unix_groups` name others: then everybody can
reach it (0666), and the user of each connection is checked. When its file is there already, it is replaced if nobody
listens on it any more, as after a crash; never when somebody does, nor when it is no socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from durable.errors import InvalidSetting

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

READ_BYTES: Final = 1 << 18
BACKLOG: Final = 100  # connections that wait to be accepted; asyncio's own default
LONGEST_PATH: Final = 107  # bytes in sun_path, less its final NUL
_PROBE_SECONDS: Final = 1.0
_PLAIN: Final = "/!$&'()*+,;=:@~"  # in the path of a URI (RFC 3986)


@dataclass(frozen=True, slots=True)
class Bound:
    """A listening socket, and the URI that reaches it."""

    socket: socket.socket
    uri: str
    socket_file: tuple[str, int] | None = None  # its path and inode

    def release(self) -> None:
        """Remove the socket file if it is still this one."""
        if self.socket_file is None:
            return
        path, inode = self.socket_file
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == inode:
                os.unlink(path)


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: str

    def __str__(self) -> str:
        return f"unix://{quote(self.path, safe=_PLAIN)}"

    async def connect(self, _: ssl.SSLContext | None = None) -> Streams:
        """Connect to the address. Raises OSError."""
        return await asyncio.open_unix_connection(self.path, limit=READ_BYTES)

    def bind(self, mode: int = 0o600) -> Bound:
        """Bind the address. Raises InvalidSetting when it cannot be bound, or is taken."""
        with _alone(os.path.dirname(self.path)):
            listening = self._socket(mode)
            listening.listen(BACKLOG)
            return Bound(listening, str(self), (self.path, os.stat(self.path).st_ino))

    def _socket(self, mode: int) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._remove_stale()
            listening.bind(self.path)
            os.chmod(self.path, mode)  # before it listens: until then nobody can connect
        except OSError as error:
            listening.close()
            raise InvalidSetting(f"{self}: cannot listen here: {error.strerror or error}") from error
        except InvalidSetting:
            listening.close()
            raise
        return listening

    def _remove_stale(self) -> None:
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise InvalidSetting(f"{self}: there is a file that is not a socket; choose another path or move the file")
        if self._is_alive():
            raise InvalidSetting(f"{self}: another process listens here; stop it or choose another path")
        os.unlink(self.path)

    def _is_alive(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_SECONDS)
            # Anything but a refusal may come from a listener: one with a full backlog does not answer either.
            return probe.connect_ex(self.path) != errno.ECONNREFUSED


@contextlib.contextmanager
def _alone(folder: str) -> Iterator[None]:
    """Keep others that bind in this folder away: who finds a file that is left behind must not remove the next one's.

    For a second at most, since anybody may lock a folder.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # what is wrong with the folder is told by the bind
            handle = os.open(folder, os.O_RDONLY)
            held.callback(os.close, handle)
            _patiently(fcntl.flock, handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


_patiently: Final = Retrying(
    retry=retry_if_exception_type(BlockingIOError), wait=wait_fixed(0.01), stop=stop_after_delay(1), reraise=True
)
